"""Which files faults are drawn in, and which tests have to see them.

Of each file the nearest tests come first: core/ is C's, cuda/ of .cpp that of the
kernels on the CPU, the rest is pytest's. Then come the other tests of its area.
"""

from __future__ import annotations

from dataclasses import dataclass

from mutants.faults import Fault


@dataclass(frozen=True)
class Area:
    nearest: dict[str, str]  # tests by file or files, separated by spaces
    others: str

    def tests(self) -> dict[str, list[str]]:
        return {
            file: tests.split()
            for files, tests in self.nearest.items()
            for file in files.split()
        }


def core(*names: str) -> str:
    return " ".join(f"csrc/core/ct_{name}.c" for name in names)


def binding(*names: str) -> str:
    return " ".join(f"csrc/binding/{name}.c" for name in names)


AREAS = {
    "optimizers": Area(
        {
            core("optim", "optim_kind"):
                "core/test_optim.c binding/test_optimizer.py",
            core("optim_run"):
                "core/test_optim.c core/test_optim_parts.c binding/test_optimizer.py",
            core("hyper"): "core/test_hyper.c",
            core("clip"): "core/test_clip.c",
            core("factored") + " csrc/cpu/factor.c": "core/test_factor.c",
            core("step", "grads", "probe"): "core/test_step.c",
            core("noise"): "core/test_noise.c",
            core("average"): "core/test_average.c",
            "csrc/cpu/update.c": "core/test_kernels.c core/test_half.c",
            "csrc/cpu/norm.c": "core/test_norm.c",
            "csrc/cpu/quant.c": "core/test_quant.c",
            binding("optimizer", "optimizer_groups", "optimizer_state",
                    "optimizer_plan", "optimizer_values", "grads"):
                "binding/test_optimizer.py",
            binding("weight_average", "optimizer_average"):
                "binding/test_weight_average.py python/test_trainer_average.py",
            "ctrainer/optim/_face.py": "binding/test_optimizer.py",
            "ctrainer/optim/_eight_bit.py": "binding/test_eight_bit.py",
            "ctrainer/average.py":
                "binding/test_weight_average.py python/test_trainer_average.py",
        },
        "binding/test_optimizer_rules.py binding/test_layerwise.py "
        "binding/test_matrix_optimizers.py binding/test_clipping.py "
        "python/test_optimizer_in_trainer.py",
    ),
    "schedules": Area(
        {
            core("schedule", "schedule_transformers"):
                "core/test_schedule.c binding/test_scheduler.py",
            core("schedule_fairseq"):
                "core/test_schedule.c python/test_fairseq_schedules.py",
            core("schedule_deepspeed"):
                "core/test_schedule.c python/test_deepspeed_schedules.py",
            core("plateau", "greedy"):
                "core/test_plateau.c binding/test_schedulers_on_metric.py",
            binding("schedule", "scheduler", "scheduler_state"):
                "binding/test_scheduler.py",
            binding("scheduler_groups"):
                "binding/test_scheduler.py binding/test_schedulers_on_metric.py",
            binding("scheduler_metric", "scheduler_plateau", "scheduler_greedy",
                    "scheduler_greedy_state"):
                "binding/test_schedulers_on_metric.py",
            "ctrainer/deepspeed_schedules.py": "python/test_deepspeed_schedules.py",
        },
        "parity/test_schedules.py python/test_fairseq_schedules.py",
    ),
    "scaler": Area(
        {
            core("scaler"): "core/test_scaler.c binding/test_loss_scaler.py",
            binding("loss_scaler", "loss_scaler_state"): "binding/test_loss_scaler.py",
        },
        "python/test_fp16_training.py python/test_fairseq_precision.py",
    ),
    "callbacks": Area(
        {
            binding("callbacks"):
                "python/test_callbacks.py binding/test_callback_handler.py",
            binding("callback_notify"):
                "python/test_callbacks.py binding/test_callback_handler.py "
                "binding/test_trainer_hooks.py",
            binding("flow"):
                "python/test_callbacks.py binding/test_gradient_metrics.py",
            "ctrainer/callbacks.py": "python/test_callbacks.py",
            "ctrainer/progress.py ctrainer/progress_text.py": "python/test_progress.py",
            "ctrainer/trainer_state.py": "python/test_trainer_state.py",
        },
        "binding/test_trainer_hooks.py",
    ),
    "bmuf": Area(
        {
            core("bmuf", "bmuf_batch", "bmuf_codes", "bmuf_config", "bmuf_flight",
                 "bmuf_join", "bmuf_meet", "bmuf_pass"):
                "core/test_bmuf.c python/test_bmuf_ranks.py",
            binding("bmuf", "bmuf_sync", "bmuf_flight", "bmuf_tensors") +
            " ctrainer/bmuf.py":
                "python/test_bmuf.py python/test_bmuf_ranks.py",
            binding("bmuf_state"): "python/test_bmuf_ranks.py",
        },
        "python/test_ranks_blocks.py",
    ),
    "trainer": Area(
        {
            binding("trainer_loop", "trainer_step", "trainer_batch"):
                "binding/test_trainer_hooks.py binding/test_trainer_failures.py "
                "parity/test_training.py",
            binding("trainer_micro"):
                "binding/test_trainer_hooks.py binding/test_trainer_failures.py "
                "parity/test_training.py python/test_ranks_training.py",
            binding("trainer_clip"): "binding/test_clipping.py",
            binding("trainer_update"):
                "binding/test_trainer_failures.py parity/test_training.py "
                "python/test_trainer_average.py",
            binding("trainer_log", "trainer_loss_state", "trainer_state"):
                "binding/test_trainer_hooks.py parity/test_loss_arithmetic.py",
            binding("trainer_metrics", "trainer_noise"):
                "binding/test_gradient_metrics.py",
        },
        "binding/test_trainer_eval.py binding/test_trainer_failures.py "
        "parity/test_loss_arithmetic.py binding/test_precision.py "
        "python/test_trainer_precision.py python/test_trainer_checkpoints.py",
    ),
    "evaluation": Area(
        {
            core("rows"): "core/test_rows.c binding/test_arrays.py",
            binding("arrays", "array_tree", "row_buffer"): "binding/test_arrays.py",
            binding("trainer_eval", "trainer_eval_batch", "trainer_eval_loop",
                    "trainer_eval_metrics", "trainer_eval_step", "trainer_eval_store",
                    "trainer_eval_train"):
                "binding/test_trainer_eval.py parity/test_evaluation.py",
            binding("trainer_eval_ranks", "gather", "gather_pack"):
                "python/test_ranks_evaluation.py",
            "ctrainer/trainer_pt_utils.py": "python/test_trainer_pt_utils.py",
            "ctrainer/trainer_utils.py": "python/test_trainer_utils.py",
        },
        "python/test_full_eval.py python/test_numpy_evaluation.py "
        "binding/test_trainer_eval.py",
    ),
    "fairseq": Area(
        {
            binding("fairseq_step", "fairseq_micro", "fairseq_stats", "fairseq_valid",
                    "fairseq_counters"):
                "binding/test_fairseq_step.py python/test_fairseq_trainer.py",
            binding("fairseq_update"):
                "binding/test_fairseq_step.py python/test_fairseq_precision.py",
            binding("fairseq_sync"): "binding/test_fairseq_sync.py",
            binding("fairseq_optimizer", "fairseq_optimizer_step"):
                "python/test_fairseq_optimizers.py",
            binding("average_meter", "meters_dict"): "binding/test_meters.py",
            core("batches"): "core/test_batches.c binding/test_batches.py",
            core("blocks"): "core/test_blocks.c binding/test_blocks.py",
            core("pad"): "core/test_pad.c binding/test_collate.py",
            "ctrainer/fairseq/meters.py": "python/test_fairseq_meters.py",
            "ctrainer/fairseq/metrics.py": "python/test_fairseq_metrics.py",
            "ctrainer/fairseq/data_utils.py ctrainer/fairseq/data/dictionary.py":
                "python/test_fairseq_data.py python/test_fairseq_text.py",
            "ctrainer/fairseq/_epoch_iterators.py "
            "ctrainer/fairseq/_counting_iterators.py "
            "ctrainer/fairseq/_buffered_iterator.py":
                "python/test_fairseq_iterators.py python/test_fairseq_epochs.py",
        },
        "python/test_fairseq_trainer.py python/test_fairseq_loop.py "
        "python/test_fairseq_precision.py",
    ),
    "checkpoints": Area(
        {
            core("staging", "io"): "core/test_staging.c core/test_writer.c",
            core("writer", "fileset"): "core/test_writer.c",
            core("zip", "zip_read"): "core/test_zip.c",
            core("safetensors", "safetensors_read"): "core/test_safetensors.c",
            core("plan", "plan_publish", "manifest"):
                "core/test_plan.c binding/test_checkpoint.py",
            binding("checkpoint", "ckpt_files"): "binding/test_checkpoint.py",
            "ctrainer/_trainer_ckpt.py": "python/test_trainer_checkpoints.py",
            "ctrainer/checkpoint.py":
                "binding/test_checkpoint.py python/test_trainer_checkpoints.py",
        },
        "binding/test_checkpoint.py python/test_trainer_checkpoints.py",
    ),
    "ranks": Area(
        {
            core("comm", "comm_local", "comm_split"): "core/test_comm.c",
            core("comm_shm", "exchange", "exchange_slots", "crew", "shm_queue"):
                "core/test_comm_shm.c core/test_comm_shm_memory.c "
                "core/test_comm_shm_faults.c",
            core("comm_levels", "levels_reduce"): "core/test_comm_levels.c",
            core("history"): "core/test_history.c python/test_ranks_differ.py",
            core("pool"): "core/test_pool.c",
            core("reducer", "bucket"): "core/test_reducer.c",
            core("shard"): "core/test_shard.c python/test_batch_shard.py",
        },
        "binding/test_communicator.py python/test_ranks_of_one_machine.py",
    ),
    "fsdp": Area(
        {
            core("fsdp", "fsdp_prefetch"): "core/test_fsdp.c",
            core("fsdp_codes"): "core/test_fsdp_codes.c",
            binding("fsdp_forward", "fsdp_backward", "fsdp_memory", "fsdp_clip"):
                "python/test_fsdp.py python/test_fsdp_views.py",
            "ctrainer/fsdp/memory_plan.py":
                "python/test_fsdp_memory.py python/test_fsdp_traffic.py",
        },
        "python/test_fsdp_prefetch.py python/test_fsdp_exceptions.py "
        "python/test_fsdp_any_tree.py",
    ),
    "cuda": Area(
        {
            "cuda/norm.cu": "cuda/test_launch.cpp cuda/test_norm.cpp",
            "cuda/update.cu cuda/average.cu cuda/copy.cu cuda/scale.cu":
                "cuda/test_launch.cpp cuda/test_elementwise.cpp cuda/test_step.cpp",
            "cuda/measure.cu": "cuda/test_measure.cpp",
            "cuda/codes.cu": "cuda/test_codes.cpp",
            "cuda/mapping.c": "cuda/test_mapping.cpp",
            "cuda/comm_nccl.c cuda/nccl_wait.c cuda/nccl_staging.c":
                "cuda/test_nccl.cpp",
        },
        "cuda/test_step.cpp cuda/test_quant.cpp",
    ),
}  # fmt: skip


def nearest() -> dict[str, tuple[str, list[str]]]:
    """The area and the nearest tests of every named file."""
    return {
        file: (name, tests)
        for name, area in AREAS.items()
        for file, tests in area.tests().items()
    }


@dataclass(frozen=True)
class Fixed:
    """A fault that is always among those tried: text that is there once, and what it
    is replaced by."""

    path: str
    operator: str
    before: str
    after: str
    why: str
    nearest: str

    def fault(self, text: str) -> Fault:
        lines = text.split("\n")
        found = [i for i, line in enumerate(lines) if self.before in line]
        assert len(found) == 1, f"{self.path} has {self.before!r} {len(found)} times"
        line = lines[found[0]]
        changed = line.replace(self.before, self.after)
        return Fault(self.path, found[0] + 1, self.operator, line, changed)


FIXED = (
    Fixed(
        "csrc/core/ct_staging.c",
        "drop a synchronisation",
        "ct_sync_folder(staging->parent, err)",
        "CT_OK",
        "the parent is not synced after the rename",
        "core/test_staging.c",
    ),
    Fixed(
        "csrc/core/ct_bmuf.c",
        "skip a check",
        "b->alike && flat != &b->global",
        "b->alike",
        "a global model that was loaded counts as agreed",
        "core/test_bmuf.c",
    ),
    Fixed(
        "ctrainer/_trainer_ckpt.py",
        "skip a check",
        "if new is None and every:",
        "if False and new is None and every:",
        "_rotate_checkpoints called by hand removes the last checkpoint",
        "python/test_trainer_checkpoints.py",
    ),
    Fixed(
        "csrc/binding/trainer_eval_ranks.c",
        "delete a call",
        "*n = PyLong_AsSsize_t(length);",
        ";",
        "rows that accelerate's loaders repeat stay in metrics",
        "python/test_ranks_evaluation.py",
    ),
    Fixed(
        "csrc/binding/trainer_update.c",
        "negate a condition",
        "u->average_due ? u->average : NULL",
        "u->average",
        "an average is attached when none is due",
        "python/test_trainer_average.py",
    ),
)

# Faults that change nothing that anybody can see, or that `make asan` alone sees: path,
# the line without its indent, what takes its place, and the reason.
EQUIVALENT = (
    (
        "csrc/binding/scheduler_groups.c",
        "if (old == NULL ? PyErr_Occurred() != NULL : PyFloat_CheckExact(old)) {",
        "if (0 && (old == NULL ? PyErr_Occurred() != NULL : "
        "PyFloat_CheckExact(old))) {",
        "the short way for a float, which has no fill_: the long one ends alike",
    ),
    (
        "csrc/binding/optimizer_average.c",
        "const Py_ssize_t hint = k == 0 ? 0 : self->slots[k - 1].average + 1;",
        "const Py_ssize_t hint = k == 0 ? 0 : self->slots[k - 1].average;",
        "hint is where the search begins, which goes over all places whatever it is",
    ),
    (
        "csrc/core/ct_io.c",
        "int used = advance(v, n, done < 0 ? 0 : (size_t)done);",
        "int used = advance(v, n, done <= 0 ? 0 : (size_t)done);",
        "where done is 0, it is 0 that is passed on either way",
    ),
    (
        "csrc/core/ct_pool.c",
        "(void)work_off();",
        ";",
        "the caller of a batch works on it beside the pool's threads: the results are "
        "the same without, only later",
    ),
    (
        "csrc/core/ct_pool.c",
        "futex_wait(&pool.done, done);",
        ";",
        "who waits for a batch asks again and again instead of sleeping",
    ),
    (
        "csrc/core/ct_pool.c",
        "atomic_fetch_sub(&pool.sleepers, 1);",
        ";",
        "sleepers says whether a wake-up can be spared: one too many changes no result",
    ),
    (
        "csrc/core/ct_batches.c",
        "if (rule->max_tokens > 0 && longest > 0 && "
        "rule->max_tokens / longest < room) {",
        "if (rule->max_tokens > 0 && longest > 0 && "
        "rule->max_tokens / longest <= room) {",
        "room becomes the smaller of two numbers; where they are equal, itself",
    ),
    (
        "csrc/core/ct_rows.c",
        "return b != 0 && a > SIZE_MAX / b ? SIZE_MAX : a * b;",
        "return b != 0 && a >= SIZE_MAX / b ? SIZE_MAX : a * b;",
        "where a is SIZE_MAX / b, a * b is above SIZE_MAX / 2: no region holds so much",
    ),
    (
        "csrc/core/ct_schedule.c",
        "if (n > 0 && (size_t)n < room) {",
        "if (n >= 0 && (size_t)n < room) {",
        "where nothing was written, nothing is added to the length either way",
    ),
    (
        "csrc/core/ct_scaler.c",
        "const int64_t steps = scaler->iter - scaler->last_overflow;",
        "const int64_t steps = scaler->last_overflow - scaler->iter;",
        "what is asked is whether an interval divides it, whatever the sign",
    ),
    (
        "csrc/core/ct_bmuf_codes.c",
        "for (int rank = 0; status == CT_OK && rank < ranks; rank++) {",
        "for (int rank = 0; status == CT_OK && rank <= ranks; rank++) {",
        "the part behind the last rank's is empty: nothing is coded or decoded",
    ),
    (
        "csrc/core/ct_exchange_slots.c",
        "return (x < y ? y - x : x - y) < bytes;",
        "return (x < y ? y - x : y - x) < bytes;",
        "a collective's operands are equal or apart: the difference wraps to no less "
        "than bytes",
    ),
    (
        "csrc/core/ct_comm_local.c",
        "const bool leads = m->n > 1 && m->index == 0;",
        "const bool leads = m->n >= 1 && m->index == 0;",
        "the group of one that is made is given to nobody: a leak that make asan sees",
    ),
    (
        "csrc/binding/callbacks.c",
        "for (size_t i = 0; i < n; i++) {",
        "for (size_t i = 0; i <= n; i++) {",
        "a value too many is read and written, which nobody uses: make asan sees it",
    ),
    (
        "csrc/binding/trainer_eval_ranks.c",
        "return batch->rows > 0 && result == 0 ? "
        "ctpy_pack(packet, batch->whole, names)",
        "return batch->rows >= 0 && result == 0 ? "
        "ctpy_pack(packet, batch->whole, names)",
        "of a message without rows, nobody reads more than its head",
    ),
    (
        "csrc/core/ct_reducer.c",
        "while (status == CT_OK && r->has_owners && r->settled + 1 < r->started &&",
        "while (status == CT_OK && r->has_owners && r->settled + 1 <= r->started &&",
        "the bucket that was started last is waited for sooner: results are the same",
    ),
    (
        "csrc/binding/trainer_eval_ranks.c",
        "kept[r] = kept[r] > ranks->left ? ranks->left : kept[r];",
        "kept[r] = kept[r] >= ranks->left ? ranks->left : kept[r];",
        "the smaller of two numbers; where they are equal, either",
    ),
    (
        "csrc/binding/trainer_eval_batch.c",
        "if (going > 0 && going < comm->world_size) { "
        "/* some have nothing to run at all */",
        "if (going > 0 && going < (comm->world_size + 1)) { "
        "/* some have nothing to run at all */",
        "a batch is lent where each rank has its own, which it runs instead",
    ),
)
