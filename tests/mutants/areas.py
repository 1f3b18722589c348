"""Which files faults are drawn in, and which tests have to see them.

Of each file the nearest tests come first: core/ is C's, cuda/ of .cpp that of the
kernels on the CPU, the rest is pytest's. Then come the other tests of its area.
"""

from __future__ import annotations

from dataclasses import dataclass


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


def files(folder: str, suffix: str, *names: str) -> str:
    return " ".join(f"{folder}/{name}{suffix}" for name in names)


def core(*names: str) -> str:
    return files("csrc/core", ".c", *names)


def binding(*names: str) -> str:
    return files("csrc/binding", ".c", *names)


def math(*names: str) -> str:
    return files("csrc/math", ".h", *names)


def python(folder: str, *names: str) -> str:
    return files(f"ctrainer/{folder}", ".py", *names)


AREAS = {
    "optimizers": Area(
        {
            core("optim/optim"):
                "core/optim/test_optim.c binding/optim/test_optimizer.py",
            core("optim/kinds"):
                "core/optim/test_kinds.c core/optim/test_optim.c "
                "binding/optim/test_optimizer.py binding/optim/test_optimizer_rules.py "
                "core/optim/test_optim_parts.c",
            core("optim/run"):
                "core/optim/test_optim.c core/optim/test_optim_parts.c "
                "binding/optim/test_optimizer.py binding/optim/test_layerwise.py "
                "binding/optim/test_matrix_optimizers.py",
            core("optim/disk", "base/disk_memory", "base/thread"):
                "core/optim/test_disk.c python/optim/test_offloaded_state.py",
            binding("optim/disk_memory") + " ctrainer/optim/_disk.py":
                "python/optim/test_offloaded_state.py",
            core("optim/muon") + " " +
            math("formula/adafactor", "formula/lamb", "formula/lars", "formula/muon"):
                "core/optim/test_optim_parts.c binding/optim/test_layerwise.py "
                "binding/optim/test_matrix_optimizers.py",
            core("device/update") + " " +
            math("formula/adamw", "formula/lion", "formula/nag", "formula/parts",
                 "parts", "formula/rmsprop", "formula/schedule_free"):
                "core/optim/test_adamw.c core/optim/test_sgd.c core/optim/test_kinds.c "
                "core/cpu/test_kernels.c binding/optim/test_optimizer_rules.py",
            "csrc/cpu/factor.c csrc/cpu/body/factor.h":
                "core/cpu/test_factor.c",
            core("engine/step") + " " +
            math("clip"):
                "core/engine/test_step.c core/engine/test_clip.c",
            core("engine/average"):
                "core/engine/test_average.c",
            "csrc/cpu/update.c":
                "core/cpu/test_kernels.c core/cpu/test_half.c core/cpu/test_quant.c "
                "core/cpu/test_measure.c core/cpu/test_compact.c",
            "csrc/cpu/norm.c csrc/cpu/body/norm.h" + " " +
            math("norm"):
                "core/cpu/test_norm.c",
            "csrc/cpu/quant_search.h csrc/cpu/body/quant.h" + " " +
            math("quant"):
                "core/cpu/test_quant.c binding/optim/test_eight_bit.py",
            "csrc/cpu/body/compact.h ctrainer/optim/_compact.py" + " " +
            math("compact"):
                "core/cpu/test_compact.c binding/optim/test_compact.py",
            binding("optim/engine", "optim/parts", "optim/update"):
                "binding/optim/test_optimizer.py python/optim/test_trainer_average.py "
                "binding/optim/test_weight_average.py binding/engine/test_clipping.py "
                "binding/optim/test_parts.py device/test_optimizers_device.py "
                "device/test_enqueued_updates_device.py",
            binding("optim/groups") + " csrc/binding/optim/engine.h "
            "ctrainer/optim/_wrapper.py":
                "binding/optim/test_optimizer.py",
            binding("optim/step"):
                "binding/optim/test_update_parameters.py "
                "binding/engine/test_clipping.py "
                "python/compat/test_deepspeed_engine.py",
            binding("optim/state"):
                "binding/optim/test_optimizer.py binding/optim/test_eight_bit.py "
                "binding/optim/test_compact.py "
                "binding/optim/test_parts.py python/fsdp/test_fsdp_optimizers.py "
                "binding/optim/test_matrix_optimizers.py",
            binding("optim/weight_average") + " " +
            "ctrainer/average.py":
                "binding/optim/test_weight_average.py "
                "python/optim/test_trainer_average.py",
            "ctrainer/optim/_eight_bit.py":
                "binding/optim/test_eight_bit.py",
            binding("optim/torch_blas") + " "
            "ctrainer/optim/_adafactor.py ctrainer/optim/_composite.py "
            "ctrainer/optim/_muon.py":
                "binding/optim/test_matrix_optimizers.py",
            "ctrainer/optim/_layerwise.py":
                "binding/optim/test_layerwise.py",
            "ctrainer/optim/__init__.py "
            "ctrainer/optim/_adam.py ctrainer/optim/_adaptive.py "
            "ctrainer/optim/_fairseq.py "
            "ctrainer/optim/_schedule_free.py ctrainer/optim/_sgd.py":
                "binding/optim/test_optimizer_rules.py binding/optim/test_optimizer.py",
            "ctrainer/optim/_precision.py":
                "binding/optim/test_precision.py",
            "ctrainer/adapters/_torch_average.py":
                "python/optim/test_trainer_average.py",
            "ctrainer/arguments/optimizers.py":
                "python/arguments/test_optimizer_names.py",
            "ctrainer/trainer/run.py":
                "python/optim/test_optimizer_in_trainer.py parity/test_schedules.py "
                "binding/trainer/test_trainer_hooks.py "
                "binding/trainer/test_trainer_failures.py "
                "python/arguments/test_arguments_in_runs.py "
                "python/checkpoint/test_trainer_checkpoints.py "
                "parity/test_training.py python/comm/test_ranks_differ.py "
                "python/trainer/test_any_batch.py",
        },
        "binding/optim/test_optimizer_rules.py binding/optim/test_layerwise.py "
        "binding/optim/test_matrix_optimizers.py binding/engine/test_clipping.py "
        "python/optim/test_optimizer_in_trainer.py",
    ),
    "schedules": Area(
        {
            core("schedule/schedule"):
                "core/schedule/test_schedule.c binding/schedule/test_scheduler.py",
            core("schedule/fairseq"):
                "core/schedule/test_schedule.c "
                "python/fairseq/test_fairseq_schedules.py",
            core("schedule/deepspeed"):
                "core/schedule/test_schedule.c "
                "python/compat/test_deepspeed_schedules.py",
            binding("schedule/scheduler") + " " +
            "ctrainer/schedules.py":
                "binding/schedule/test_scheduler.py",
            "csrc/core/schedule/family.h":
                "core/schedule/test_schedule.c",
            "ctrainer/deepspeed_schedules.py":
                "python/compat/test_deepspeed_schedules.py",
        },
        "parity/test_schedules.py python/fairseq/test_fairseq_schedules.py",
    ),
    "scaler": Area(
        {
            core("engine/scaler"):
                "core/engine/test_scaler.c binding/engine/test_loss_scaler.py",
            binding("engine/loss_scaler"):
                "binding/engine/test_loss_scaler.py",
            "ctrainer/arguments/loss_scaler.py":
                "python/trainer/test_fp16_training.py",
        },
        "python/trainer/test_fp16_training.py "
        "python/fairseq/test_fairseq_precision.py",
    ),
    "callbacks": Area(
        {
            binding("callbacks/handler"):
                "python/callbacks/test_callbacks.py "
                "binding/callbacks/test_callback_handler.py "
                "binding/trainer/test_trainer_hooks.py",
            "ctrainer/runtime/events.py ctrainer/callbacks.py":
                "python/callbacks/test_callbacks.py",
            "ctrainer/display/html.py ctrainer/display/plotting.py "
            "ctrainer/display/progress.py ctrainer/display/terminal.py "
            "ctrainer/display/text.py":
                "python/display/test_progress.py "
                "python/display/test_terminal_runs.py",
            "ctrainer/throughput.py ctrainer/adapters/peak.py":
                "python/display/test_terminal_runs.py "
                "python/trainer/test_throughput.py",
            "ctrainer/adapters/profiler.py":
                "python/callbacks/test_profiler.py",
            "ctrainer/memory_tracker.py":
                "python/callbacks/test_memory_tracker.py",
            "ctrainer/integrations/__init__.py":
                "python/callbacks/test_integrations.py",
            "ctrainer/integrations/accelerator.py":
                "python/trainer/test_accelerator.py",
            "ctrainer/trainer_state.py":
                "python/trainer/test_trainer_state.py",
        },
        "binding/trainer/test_trainer_hooks.py",
    ),
    "bmuf": Area(
        {
            core("bmuf/bmuf") + " csrc/core/bmuf/bmuf.h":
                "core/bmuf/test_bmuf.c python/bmuf/test_bmuf_ranks.py",
            binding("bmuf/bmuf") + " " +
            "ctrainer/bmuf.py":
                "python/bmuf/test_bmuf.py python/bmuf/test_bmuf_ranks.py",
            math("formula/block", "block"):
                "core/bmuf/test_bmuf.c core/cpu/test_kernels.c",
            "ctrainer/arguments/bmuf.py ctrainer/trainer/blocks.py "
            "ctrainer/adapters/blocks.py":
                "python/bmuf/test_ranks_blocks.py",
        },
        "python/bmuf/test_ranks_blocks.py",
    ),
    "trainer": Area(
        {
            binding("trainer/loop"):
                "binding/trainer/test_trainer_hooks.py "
                "binding/trainer/test_trainer_failures.py "
                "parity/test_training.py parity/test_loss_arithmetic.py "
                "python/trainer/test_ranks_training.py",
            "ctrainer/trainer/step.py":
                "binding/trainer/test_trainer_hooks.py "
                "binding/trainer/test_trainer_failures.py "
                "parity/test_training.py parity/test_loss_arithmetic.py",
            binding("trainer/update"):
                "binding/engine/test_clipping.py binding/trainer/test_spikes.py "
                "binding/trainer/test_trainer_failures.py "
                "parity/test_training.py python/optim/test_trainer_average.py "
                "binding/engine/test_gradient_metrics.py python/fsdp/test_fsdp.py "
                "python/fsdp/test_fsdp_views.py "
                "device/test_enqueued_updates_device.py",
            binding("engine/run"):
                "binding/trainer/test_trainer_hooks.py "
                "python/evaluate/test_full_eval.py "
                "parity/test_loss_arithmetic.py python/comm/test_ranks_differ.py "
                "python/trainer/test_ranks_training.py "
                "python/evaluate/test_ranks_evaluation.py",
            binding("runtime/ctpy"):
                "binding/trainer/test_trainer_hooks.py binding/runtime/test_process.py "
                "binding/optim/test_optimizer.py python/trainer/test_copies.py "
                "binding/trainer/test_trainer_failures.py "
                "binding/evaluate/test_trainer_eval.py "
                "binding/runtime/test_object_watch.py",
            binding("module") + " " +
            "csrc/binding/runtime/ctpy.h":
                "binding/runtime/test_process.py binding/optim/test_optimizer.py",
            binding("trainer/trainer"):
                "python/trainer/test_copies.py binding/trainer/test_trainer_hooks.py "
                "python/evaluate/test_full_eval.py",
            binding("runtime/buffer") + " csrc/binding/runtime/buffer.h":
                "binding/runtime/test_buffer.py device/test_optimizers_device.py "
                "python/trainer/test_trainer_pt_utils.py "
                "binding/evaluate/test_trainer_eval.py",
            "ctrainer/trainer/__init__.py":
                "binding/trainer/test_trainer_hooks.py "
                "python/trainer/test_any_batch.py python/trainer/test_copies.py "
                "python/arguments/test_arguments_in_runs.py "
                "python/checkpoint/test_trainer_checkpoints.py "
                "parity/test_training.py python/optim/test_optimizer_in_trainer.py "
                "parity/test_clients.py",
            "ctrainer/introspect.py ctrainer/runtime/hooks.py":
                "binding/trainer/test_trainer_hooks.py "
                "python/optim/test_optimizer_in_trainer.py parity/test_clients.py",
            "ctrainer/runtime/notes.py":
                "python/runtime/test_notes.py",
            "ctrainer/runtime/stop.py":
                "python/runtime/test_stop.py python/display/test_terminal_runs.py",
            "ctrainer/_cuda.py":
                "test_release.py",
            "ctrainer/trainer/base.py":
                "binding/engine/test_gradient_metrics.py "
                "python/trainer/test_copies.py python/trainer/test_logged_means.py "
                "binding/trainer/test_trainer_hooks.py "
                "python/optim/test_trainer_average.py parity/test_training.py",
            "ctrainer/trainer/memory.py ctrainer/adapters/_torch_memory.py "
            "ctrainer/runtime/parts.py " + binding("engine/parts"):
                "python/trainer/test_out_of_memory.py "
                "python/trainer/test_out_of_memory_with_features.py "
                "python/trainer/test_evaluation_out_of_memory.py "
                "python/fsdp/test_fsdp_out_of_memory.py",
            "ctrainer/fairseq/_split.py":
                "python/fairseq/test_fairseq_out_of_memory.py",
            "ctrainer/trainer/crash.py ctrainer/commands/replay.py":
                "python/trainer/test_crash_record.py",
            "ctrainer/trainer/hub.py":
                "python/trainer/test_hub.py",
            "ctrainer/runtime/messages.py":
                "python/trainer/test_overridden_hooks.py",
            "ctrainer/trainer/search.py":
                "python/trainer/test_search.py",
            "ctrainer/hf.py":
                "python/trainer/test_hf.py python/fsdp/test_fsdp_meta.py",
            "ctrainer/adapters/_torch_optim.py":
                "parity/test_training.py python/arguments/test_optimizer_names.py",
            "ctrainer/adapters/_torch_packing.py":
                "python/data/test_packing.py",
            "ctrainer/adapters/_torch_precision.py":
                "python/evaluate/test_full_eval.py "
                "python/trainer/test_trainer_precision.py",
            "ctrainer/adapters/__init__.py ctrainer/adapters/torch.py "
            "ctrainer/runtime/torch_process.py":
                "parity/test_training.py python/trainer/test_trainer_utils.py",
            "ctrainer/adapters/_numpy_model.py ctrainer/adapters/_numpy_optim.py "
            "ctrainer/adapters/numpy.py ctrainer/adapters/parameters.py":
                "python/trainer/test_numpy_adapter.py "
                "python/trainer/test_numpy_training.py",
        },
        "binding/evaluate/test_trainer_eval.py "
        "binding/trainer/test_trainer_failures.py "
        "parity/test_loss_arithmetic.py binding/optim/test_precision.py "
        "python/trainer/test_trainer_precision.py "
        "python/checkpoint/test_trainer_checkpoints.py",
    ),
    "evaluation": Area(
        {
            core("data/rows"):
                "core/data/test_rows.c binding/data/test_arrays.py "
                "core/data/test_pad.c "
                "binding/data/test_collate.py",
            binding("data/accumulator"):
                "binding/data/test_arrays.py",
            core("base/buf", "base/region"):
                "core/data/test_rows.c core/checkpoint/test_safetensors.c",
            "ctrainer/trainer/evaluation.py":
                "binding/evaluate/test_trainer_eval.py "
                "python/evaluate/test_full_eval.py "
                "python/evaluate/test_ranks_evaluation.py parity/test_evaluation.py",
            "ctrainer/adapters/_torch_rank_eval.py" + " " +
            binding("data/gather"):
                "python/evaluate/test_ranks_evaluation.py",
            "ctrainer/seq2seq.py ctrainer/integrations/generation.py":
                "python/evaluate/test_seq2seq.py parity/test_generation.py",
            binding("evaluate/loop"):
                "binding/evaluate/test_trainer_eval.py "
                "python/trainer/test_any_batch.py "
                "parity/test_evaluation.py",
            "ctrainer/trainer_pt_utils.py":
                "python/trainer/test_trainer_pt_utils.py",
            "ctrainer/trainer_utils.py":
                "python/trainer/test_trainer_utils.py",
        },
        "python/evaluate/test_full_eval.py "
        "python/evaluate/test_numpy_evaluation.py "
        "binding/evaluate/test_trainer_eval.py",
    ),
    "fairseq": Area(
        {
            binding("fairseq/trainer"):
                "binding/fairseq/test_fairseq_step.py "
                "python/fairseq/test_fairseq_trainer.py "
                "python/fairseq/test_fairseq_facts.py",
            "ctrainer/fairseq/_trainer_step.py":
                "binding/fairseq/test_fairseq_step.py "
                "binding/fairseq/test_fairseq_sync.py "
                "python/fairseq/test_fairseq_trainer.py "
                "python/fairseq/test_fairseq_precision.py "
                "python/fairseq/test_fairseq_ranks_differ.py",
            binding("fairseq/optimizer"):
                "binding/fairseq/test_fairseq_step.py "
                "python/fairseq/test_fairseq_optimizers.py "
                "python/fairseq/test_fairseq_precision.py",
            binding("data/batches"):
                "binding/data/test_batches.py binding/data/test_batch_digest.py "
                "binding/data/test_blocks.py binding/data/test_order.py "
                "binding/data/test_collate.py",
            core("data/order"):
                "core/data/test_order.c binding/data/test_order.py",
            "ctrainer/adapters/lengths.py":
                "python/data/test_lengths.py binding/data/test_order.py",
            core("data/batches"):
                "core/data/test_batches.c binding/data/test_batches.py "
                "core/data/test_blocks.c core/data/test_index.c "
                "binding/data/test_blocks.py",
            "ctrainer/fairseq/_lazy.py":
                "python/fairseq/test_fairseq_lazy.py",
            "ctrainer/fairseq/meters.py":
                "python/fairseq/test_fairseq_meters.py "
                "python/fairseq/test_fairseq_metrics.py",
            "ctrainer/fairseq/metrics.py":
                "python/fairseq/test_fairseq_metrics.py",
            "ctrainer/fairseq/data_utils.py ctrainer/fairseq/data/dictionary.py":
                "python/fairseq/test_fairseq_data.py "
                "python/fairseq/test_fairseq_text.py",
            "ctrainer/fairseq/iterators.py":
                "python/fairseq/test_fairseq_iterators.py "
                "python/fairseq/test_fairseq_epochs.py",
        },
        "python/fairseq/test_fairseq_trainer.py "
        "python/fairseq/test_fairseq_loop.py "
        "python/fairseq/test_fairseq_precision.py",
    ),
    "checkpoints": Area(
        {
            core("base/io"):
                "core/checkpoint/test_staging.c core/checkpoint/test_files.c "
                "core/checkpoint/test_writer.c "
                "core/checkpoint/test_zip.c",
            core("checkpoint/staging"):
                "core/checkpoint/test_staging.c core/checkpoint/test_writer.c "
                "core/checkpoint/test_files.c core/checkpoint/test_parts.c",
            core("checkpoint/parts"):
                "core/checkpoint/test_parts.c",
            core("checkpoint/snapshot"):
                "core/checkpoint/test_writer.c core/checkpoint/test_parts.c "
                "binding/checkpoint/test_checkpoint.py",
            core("checkpoint/writer"):
                "core/checkpoint/test_writer.c core/checkpoint/test_parts.c "
                "core/checkpoint/test_staging.c "
                "core/checkpoint/test_files.c core/checkpoint/test_plan.c",
            core("checkpoint/plan"):
                "core/checkpoint/test_writer.c core/checkpoint/test_plan.c "
                "binding/checkpoint/test_checkpoint.py",
            core("base/crc"):
                "core/base/test_crc.c",
            core("checkpoint/source"):
                "core/checkpoint/test_files.c core/checkpoint/test_zip.c",
            core("checkpoint/zip"):
                "core/checkpoint/test_zip.c",
            core("checkpoint/safetensors", "base/json"):
                "core/checkpoint/test_safetensors.c",
            core("checkpoint/manifest"):
                "core/checkpoint/test_plan.c binding/checkpoint/test_checkpoint.py",
            binding("checkpoint/writer", "checkpoint/files", "checkpoint/tensors"):
                "binding/checkpoint/test_checkpoint.py",
            "ctrainer/checkpoint/files.py ctrainer/checkpoint/schema.py":
                "python/checkpoint/test_damaged_checkpoints.py "
                "python/checkpoint/test_trainer_checkpoints.py",
            "ctrainer/checkpoint/disk.py":
                "python/checkpoint/test_durable_files.py "
                "python/fsdp/test_fsdp_files_together.py",
            "ctrainer/arguments/best.py ctrainer/trainer/best.py":
                "python/checkpoint/test_best_checkpoints.py",
            "ctrainer/trainer/checkpoint.py":
                "python/checkpoint/test_ranks_checkpoints.py "
                "python/checkpoint/test_trainer_checkpoints.py",
            "ctrainer/adapters/_saved_names.py":
                "python/checkpoint/test_loading_weights.py "
                "parity/test_saved_weights.py",
            "ctrainer/adapters/_torch_checkpoint.py "
            "ctrainer/checkpoint/torch_files.py":
                "python/checkpoint/test_damaged_checkpoints.py "
                "python/checkpoint/test_loading_weights.py "
                "parity/test_checkpoint_exchange.py",
            "ctrainer/adapters/_numpy_checkpoint.py":
                "python/trainer/test_numpy_adapter.py "
                "python/trainer/test_numpy_training.py",
            "ctrainer/checkpoint/__init__.py":
                "binding/checkpoint/test_checkpoint.py "
                "python/checkpoint/test_trainer_checkpoints.py "
                "parity/test_checkpoint_exchange.py",
        },
        "binding/checkpoint/test_checkpoint.py "
        "python/checkpoint/test_trainer_checkpoints.py",
    ),
    "ranks": Area(
        {
            core("comm/comm") + " csrc/core/comm/comm.h":
                "core/comm/test_comm.c",
            core("comm/collectives"):
                "core/comm/test_comm.c core/comm/test_comm_padded.c "
                "core/comm/test_history.c core/ddp/test_reducer.c "
                "binding/comm/test_communicator.py python/comm/test_ranks_differ.py",
            core("data/targets"):
                "core/data/test_count.c",
            core("base/copy_far"):
                "core/base/test_copy_far.c",
            core("comm/reduce") + " " +
            "csrc/core/comm/reduce_body.h":
                "core/comm/test_reduce.c",
            core("comm/shm", "comm/exchange", "base/wait", "base/pages",
                 "base/segment"):
                "core/comm/test_comm_shm.c core/comm/test_comm_shm_memory.c "
                "core/comm/test_comm_shm_faults.c",
            core("comm/staged"):
                "core/comm/test_staged.c",
            core("comm/hierarchical"):
                "core/comm/test_hierarchical.c",
            core("base/pool"):
                "core/base/test_pool.c",
            core("ddp/reducer") + " csrc/core/ddp/reducer.h":
                "core/ddp/test_reducer.c core/ddp/test_codecs.c",
            binding("comm/communicator"):
                "binding/comm/test_communicator.py "
                "python/comm/test_ranks_of_one_machine.py",
            binding("comm/alike"):
                "python/ddp/test_data_parallel.py python/fsdp/test_fsdp_values.py",
            binding("comm/memory"):
                "python/comm/test_ranks_of_one_machine.py "
                "python/trainer/test_copies.py cuda/test_fsdp_device.py",
            binding("comm/group"):
                "python/comm/test_ranks_of_one_machine.py "
                "python/comm/test_groups_over_machines.py "
                "binding/comm/test_communicator.py python/comm/test_process_groups.py "
                "cuda/test_nccl_groups.py device/test_sharding_device.py",
            "ctrainer/comm/machines.py":
                "python/comm/test_groups_over_machines.py",
            "ctrainer/comm/process_group.py":
                "binding/comm/test_communicator.py python/comm/test_process_groups.py",
            "ctrainer/comm/calls.py":
                "python/comm/test_ranks_differ.py",
            "ctrainer/comm/nccl.py":
                "cuda/test_nccl_groups.py",
            "ctrainer/comm/environment.py":
                "python/comm/test_ranks_of_one_machine.py "
                "python/comm/test_world.py",
            "ctrainer/comm/processes.py ctrainer/comm/run.py "
            "ctrainer/runtime/fork.py":
                "python/comm/test_world.py python/comm/test_process_group_exit.py "
                "python/comm/test_forked_children.py",
            "ctrainer/comm/survivors.py":
                "python/comm/test_ranks_outlive_others.py",
            "ctrainer/comm/mpi.py":
                "python/comm/test_groups_over_mpi.py",
        },
        "binding/comm/test_communicator.py python/comm/test_ranks_of_one_machine.py",
    ),
    "fsdp": Area(
        {
            core("fsdp/shard_file"):
                "core/fsdp/test_fsdp_shard_file.c python/fsdp/test_shards_in_files.py",
            core("fsdp/unit", "fsdp/reduce", "fsdp/quantized") + " "
            "csrc/core/fsdp/internal.h":
                "core/fsdp/test_fsdp.c python/fsdp/test_fsdp_quantized.py "
                "core/fsdp/test_fsdp_quantized.c "
                "python/fsdp/test_fsdp_missing_gradients.py",
            binding("fsdp/unit", "fsdp/passes"):
                "python/fsdp/test_fsdp.py python/fsdp/test_fsdp_views.py",
            binding("fsdp/params") + " ctrainer/fsdp/changes.py":
                "python/fsdp/test_fsdp_freezing.py python/fsdp/test_fsdp_changes.py",
            "ctrainer/fsdp/torch_guards.py": "python/fsdp/test_fsdp_torch_guards.py",
            binding("fsdp/collectives"):
                "python/fsdp/test_fsdp.py "
                "python/fsdp/test_fsdp_missing_gradients.py "
                "cuda/test_fsdp_device.py python/fsdp/test_fsdp_order.py "
                "python/fsdp/test_fsdp_prefetch.py "
                "python/fsdp/test_fsdp_hybrid.py",
            core("base/mapping"):
                "core/base/test_mapping.c core/base/test_alloc.c",
            core("base/arena"):
                "core/base/test_arena.c core/base/test_mapping.c "
                "python/fsdp/test_fsdp.py",
            core("base/imports"):
                "python/fsdp/test_fsdp.py core/base/test_arena.c",
            "ctrainer/arguments/fsdp.py":
                "python/fsdp/test_fsdp_options.py python/fsdp/test_fsdp_errors.py",
            "ctrainer/arguments/deepspeed.py ctrainer/arguments/deepspeed_keys.py":
                "python/compat/test_deepspeed_config.py "
                "python/fsdp/test_deepspeed_training.py",
            "ctrainer/compat/deepspeed/_config.py":
                "python/compat/test_deepspeed_config_classes.py",
            "ctrainer/compat/deepspeed/_engine.py ctrainer/compat/deepspeed/zero.py":
                "python/compat/test_deepspeed_engine.py "
                "device/test_deepspeed_enqueued_device.py",
            "ctrainer/compat/deepspeed/_files.py ctrainer/compat/deepspeed/_saving.py "
            "ctrainer/compat/deepspeed/ds_to_universal.py "
            "ctrainer/compat/deepspeed/zero_to_fp32.py":
                "python/compat/test_deepspeed_checkpoints.py",
            "ctrainer/fsdp/full_params.py ctrainer/fsdp/module.py "
            "ctrainer/fsdp/sharded.py":
                "python/fsdp/test_fsdp.py python/fsdp/test_fsdp_views.py "
                "python/fsdp/test_fsdp_copies.py",
            "ctrainer/fsdp/layout.py":
                "python/fsdp/test_fsdp.py python/fsdp/test_fsdp_views.py "
                "python/fsdp/test_fsdp_freezing.py",
            "ctrainer/fsdp/flatten.py":
                "python/fsdp/test_fsdp_errors.py python/fsdp/test_fsdp.py",
            "ctrainer/fsdp/options.py":
                "python/fsdp/test_fsdp_options.py python/fsdp/test_fsdp_errors.py "
                "python/fsdp/test_fsdp_hybrid.py cuda/test_fsdp_device.py",
            "ctrainer/fsdp/initial_values.py":
                "python/fsdp/test_fsdp_values.py",
            "ctrainer/fsdp/optim_state.py":
                "python/fsdp/test_fsdp.py python/fsdp/test_fsdp_world_sizes.py "
                "python/fsdp/test_fsdp_checkpoints.py",
            "ctrainer/trainer/survivors.py":
                "python/trainer/test_ranks_outlived.py",
            "ctrainer/trainer/shards.py ctrainer/fsdp/trained_model.py":
                "python/fsdp/test_fsdp_trainer.py python/fsdp/test_fsdp_meta.py "
                "parity/test_fine_tuning.py",
            "ctrainer/fsdp/consolidate.py ctrainer/fsdp/shard_files.py "
            "ctrainer/fsdp/stored.py":
                "python/fsdp/test_fsdp_checkpoints.py "
                "python/fsdp/test_fsdp_shard_faults.py "
                "python/fsdp/test_fsdp_files_together.py",
            "ctrainer/fsdp/shard_metadata.py":
                "python/fsdp/test_fsdp_checkpoints.py "
                "python/comm/test_ranks_differ.py",
            "ctrainer/fsdp/memory_plan.py":
                "python/fsdp/test_fsdp_memory.py python/fsdp/test_fsdp_traffic.py",
        },
        "python/fsdp/test_fsdp_prefetch.py python/fsdp/test_fsdp_exceptions.py "
        "python/fsdp/test_fsdp_any_tree.py",
    ),
    "data parallel": Area(
        {
            binding("ddp/pass"):
                "python/ddp/test_data_parallel.py python/compat/test_fairscale.py",
            binding("ddp/reducer") + " " +
            "ctrainer/comm/data_parallel.py ctrainer/comm/parallel.py":
                "python/ddp/test_data_parallel.py",
            "ctrainer/fairseq/wrappers.py":
                "python/fairseq/test_fairseq_ranks.py "
                "python/ddp/test_data_parallel.py",
            "ctrainer/compat/fairscale/_batch_norm.py "
            "ctrainer/fsdp/recompute.py "
            "ctrainer/compat/fairscale/_fsdp.py "
            "ctrainer/compat/fairscale/_groups.py "
            "ctrainer/compat/fairscale/_local_state.py "
            "ctrainer/compat/fairscale/_optim_state.py "
            "ctrainer/compat/fairscale/_oss.py "
            "ctrainer/compat/fairscale/_scaler.py "
            "ctrainer/compat/fairscale/_sharded_ddp.py "
            "ctrainer/compat/fairscale/_wrap.py":
                "python/compat/test_fairscale.py",
        },
        "python/trainer/test_ranks_training.py parity/test_fairscale_parity.py",
    ),
    "data": Area(
        {
            "ctrainer/adapters/batch_shard.py":
                "python/data/test_batch_shard.py",
            "ctrainer/arguments/accelerator.py":
                "python/data/test_dispatched_batches.py "
                "python/arguments/test_settings.py",
            "ctrainer/trainer/data.py":
                "python/trainer/test_any_batch.py "
                "python/arguments/test_arguments_in_runs.py "
                "python/data/test_data_resume.py "
                "python/data/test_data_resume_ranks.py",
            "ctrainer/adapters/_numpy_batches.py":
                "python/data/test_batch_shard.py "
                "python/trainer/test_numpy_adapter.py",
            "ctrainer/adapters/_torch_batches.py":
                "python/data/test_data_orders.py python/data/test_data_resume.py",
            "ctrainer/adapters/_torch_ranks.py":
                "python/data/test_data_orders.py "
                "python/data/test_dispatched_batches.py "
                "python/data/test_data_resume_ranks.py",
            "ctrainer/adapters/_torch_data.py ctrainer/adapters/_torch_reading.py "
            "ctrainer/adapters/generators.py ctrainer/adapters/reading.py":
                "python/data/test_data_resume.py",
        },
        "python/data/test_data_resume_ranks.py "
        "python/data/test_dispatched_batches.py "
        "python/data/test_data_resume_evaluation.py "
        "python/trainer/test_numpy_training.py",
    ),
    "settings": Area(
        {
            "ctrainer/arguments/docstrings.py ctrainer/fairseq/config/__init__.py":
                "python/docs/test_docstrings.py",
            "ctrainer/arguments/settings.py ctrainer/arguments/checks.py":
                "python/arguments/test_settings.py "
                "python/arguments/test_training_args.py",
            "ctrainer/arguments/setters.py ctrainer/arguments/table.py "
            "ctrainer/arguments/older_fields.py":
                "python/arguments/test_training_args.py",
            "ctrainer/training_args.py":
                "python/arguments/test_training_args.py python/comm/test_world.py",
        },
        "python/arguments/test_arguments_in_runs.py "
        "python/fsdp/test_fsdp_options.py",
    ),
    "fairseq's settings": Area(
        {
            "ctrainer/fairseq/config/base.py ctrainer/fairseq/config/build.py "
            "ctrainer/fairseq/config/components.py "
            "ctrainer/fairseq/config/trees.py ctrainer/fairseq/config/values.py":
                "python/fairseq/test_fairseq_config.py "
                "python/fairseq/test_fairseq_config_values.py",
            "ctrainer/fairseq/config/command_line.py":
                "python/fairseq/test_fairseq_command_line.py",
            "ctrainer/fairseq/config/distributed.py":
                "python/fairseq/test_fairseq_config.py "
                "python/fairseq/test_fairseq_distributed.py",
            "ctrainer/fairseq/distributed.py":
                "python/fairseq/test_fairseq_distributed.py",
            "ctrainer/fairseq/registry.py":
                "python/fairseq/test_fairseq_user_dir.py",
            "ctrainer/fairseq/aliases.py":
                "python/fairseq/test_fairseq_aliases.py",
            "ctrainer/fairseq/_guest.py ctrainer/fairseq/original.py":
                "python/fairseq/test_fairseq_install.py",
            "ctrainer/fairseq/_install.py":
                "python/fairseq/test_fairseq_install.py",
        },
        "python/fairseq/test_fairseq_command_line.py "
        "python/fairseq/test_fairseq_user_dir.py "
        "python/fairseq/test_fairseq_config_ranges.py",
    ),
    "fairseq's runs": Area(
        {
            "ctrainer/fairseq/train.py":
                "python/fairseq/test_fairseq_loop.py "
                "python/fairseq/test_fairseq_save_async.py "
                "python/fairseq/test_fairseq_program.py",
            "ctrainer/fairseq/checkpoint_utils.py":
                "python/fairseq/test_fairseq_loop.py "
                "python/fairseq/test_fairseq_save_async.py "
                "python/fairseq/test_fairseq_program.py "
                "python/fairseq/test_fairseq_checkpoint_policies.py "
                "python/fairseq/test_fairseq_checkpoints.py "
                "python/checkpoint/test_durable_files.py "
                "python/fairseq/test_fairseq_old_checkpoints.py",
            "ctrainer/fairseq/trainer.py":
                "python/fairseq/test_fairseq_config_ranges.py "
                "python/fairseq/test_fairseq_facts.py "
                "python/fairseq/test_fairseq_trainer.py",
            "ctrainer/fairseq/replay.py":
                "python/fairseq/test_fairseq_checkpoints.py "
                "python/fairseq/test_fairseq_replay.py",
            "ctrainer/fairseq/_trainer_checkpoint.py":
                "python/fairseq/test_fairseq_checkpoints.py "
                "python/fairseq/test_fairseq_save_async.py "
                "python/fairseq/test_fairseq_replay.py "
                "python/fairseq/test_fairseq_sharding.py "
                "python/fairseq/test_fairseq_trainer.py "
                "python/fairseq/test_fairseq_ranks.py "
                "python/fairseq/test_fairseq_layouts.py",
            "ctrainer/adapters/torch_fairseq.py ctrainer/adapters/nan_detector.py":
                "python/fairseq/test_fairseq_trainer.py "
                "python/fairseq/test_fairseq_precision.py "
                "python/fairseq/test_fairseq_checkpoints.py",
            "ctrainer/adapters/fairseq_optimizer.py ctrainer/fairseq/optim.py":
                "python/fairseq/test_fairseq_optimizers.py "
                "python/fairseq/test_fairseq_precision.py "
                "python/fairseq/test_fairseq_checkpoints.py",
            "ctrainer/fairseq/lr_scheduler.py":
                "python/fairseq/test_fairseq_schedules.py",
            "ctrainer/fairseq/ema.py":
                "python/fairseq/test_fairseq_sharding.py "
                "python/fairseq/test_fairseq_trainer.py "
                "python/fairseq/test_fairseq_ranks.py",
            "ctrainer/fairseq/_sharding.py":
                "python/fairseq/test_fairseq_sharding.py "
                "python/fairseq/test_fairseq_trainer.py "
                "python/fairseq/test_fairseq_ranks.py",
            "ctrainer/fairseq/progress_bar.py":
                "python/fairseq/test_fairseq_progress.py",
            "ctrainer/fairseq/utils.py":
                "python/fairseq/test_fairseq_user_dir.py "
                "python/fairseq/test_fairseq_trainer.py",
        },
        "python/fairseq/test_fairseq_loop.py python/fairseq/test_fairseq_ranks.py "
        "python/fairseq/test_fairseq_checkpoints.py",
    ),
    "fairseq's files": Area(
        {
            "ctrainer/adapters/fairseq_parameters.py":
                "python/fairseq/test_fairseq_layouts.py "
                "python/fairseq/test_fairseq_old_checkpoints.py",
        },
        "python/fairseq/test_fairseq_layouts.py "
        "python/fairseq/test_fairseq_old_checkpoints.py "
        "python/fairseq/test_fairseq_save_async.py",
    ),
    "fairseq's models and data": Area(
        {
            "ctrainer/fairseq/models/__init__.py "
            "ctrainer/fairseq/models/fairseq_encoder.py "
            "ctrainer/fairseq/models/fairseq_model.py":
                "python/fairseq/test_fairseq_models.py "
                "python/fairseq/test_fairseq_user_dir.py",
            "ctrainer/fairseq/models/transformer/transformer_config.py "
            "ctrainer/fairseq/models/transformer/transformer_decoder.py "
            "ctrainer/fairseq/models/transformer/transformer_encoder.py "
            "ctrainer/fairseq/models/transformer/transformer_model.py "
            "ctrainer/fairseq/models/transformer_lm.py "
            "ctrainer/fairseq/modules/multihead_attention.py "
            "ctrainer/fairseq/modules/positional_embedding.py "
            "ctrainer/fairseq/modules/small.py "
            "ctrainer/fairseq/modules/transformer_layer.py":
                "python/fairseq/test_fairseq_models.py",
            "ctrainer/fairseq/criterions/cross_entropy.py "
            "ctrainer/fairseq/criterions/fairseq_criterion.py "
            "ctrainer/fairseq/criterions/label_smoothed_cross_entropy.py":
                "python/fairseq/test_fairseq_criterions.py "
                "python/fairseq/test_fairseq_translation.py",
            "ctrainer/fairseq/data/base_wrapper_dataset.py "
            "ctrainer/fairseq/data/edge_datasets.py "
            "ctrainer/fairseq/data/language_pair_dataset.py "
            "ctrainer/fairseq/data/monolingual_dataset.py "
            "ctrainer/fairseq/data/text_chunks.py "
            "ctrainer/fairseq/data/token_block_dataset.py":
                "python/fairseq/test_fairseq_data.py "
                "python/fairseq/test_fairseq_text.py "
                "python/fairseq/test_fairseq_translation.py",
            "ctrainer/fairseq/indexed_dataset.py":
                "python/fairseq/test_fairseq_indexed.py "
                "python/checkpoint/test_durable_files.py",
            "ctrainer/fairseq/concat_dataset.py":
                "python/fairseq/test_fairseq_data.py",
            "ctrainer/fairseq/binarizer.py ctrainer/fairseq/preprocess.py":
                "python/fairseq/test_fairseq_text.py",
            "ctrainer/fairseq/tasks/fairseq_task.py "
            "ctrainer/fairseq/tasks/language_modeling.py "
            "ctrainer/fairseq/tasks/translation.py":
                "python/fairseq/test_fairseq_text.py "
                "python/fairseq/test_fairseq_translation.py "
                "python/fairseq/test_fairseq_program.py",
        },
        "python/fairseq/test_fairseq_program.py "
        "python/fairseq/test_fairseq_translation.py "
        "python/fairseq/test_fairseq_text.py",
    ),
    "kernels": Area(
        {
            core("base/alloc"):
                "core/base/test_alloc.c",
            core("base/status") + " " +
            "csrc/core/base/check.h" + " " +
            math("half"):
                "core/base/test_dtype.c core/cpu/test_half.c core/cpu/test_copy.c",
            "csrc/cpu/elementwise.c csrc/cpu/body/average.h csrc/cpu/body/dither.h "
            "csrc/cpu/body/scale.h csrc/cpu/body/tile.h" + " " +
            math("ema", "philox", "formula/scale"):
                "core/cpu/test_kernels.c core/cpu/test_copy.c core/cpu/test_half.c",
            "csrc/cpu/quantized.c csrc/cpu/body/quantized.h" + " " +
            math("quantized"):
                "core/cpu/test_quantized.c",
            "csrc/cpu/kernels.c":
                "core/cpu/test_partition.c core/cpu/test_isa.c core/cpu/test_kernels.c",
            "csrc/cpu/gemm.c csrc/cpu/body/gemm.h":
                "core/cpu/test_gemm.c",
            "csrc/cpu/cross_entropy.c csrc/cpu/body/cross_entropy.h" + " " +
            math("softmax", "formula/softmax"):
                "core/cpu/test_cross_entropy.c",
            binding("engine/cross_entropy") + " " +
            "ctrainer/adapters/cross_entropy.py":
                "binding/engine/test_cross_entropy.py",
            "ctrainer/adapters/deferred.py":
                "python/trainer/test_chunked_cross_entropy.py",
        },
        "core/optim/test_optim.c core/engine/test_step.c core/ddp/test_codecs.c",
    ),
    "cuda": Area(
        {
            "cuda/element.cuh cuda/update.cuh cuda/vector.cuh":
                "cuda/test_elementwise.cpp cuda/test_launch.cpp",
            "cuda/quant.cuh":
                "cuda/test_quant.cpp",
            "cuda/compact.cuh":
                "cuda/test_compact.cpp",
            "cuda/reduce.cuh":
                "cuda/test_norm.cpp cuda/test_measure.cpp",
            "cuda/factor.cu csrc/core/device/update.h":
                "cuda/test_measure.cpp",
            "cuda/cross_entropy.cu":
                "cuda/test_cross_entropy.cpp",
            "cuda/gemm.cu cuda/cublas.c":
                "cuda/test_gemm.cpp cuda/test_dynlib.cpp",
            "cuda/dynlib.c":
                "cuda/test_dynlib.cpp",
            "cuda/device.cu cuda/launch.cuh":
                "cuda/test_launch.cpp cuda/test_mapping.cpp",
            "cuda/status.h":
                "cuda/test_launch.cpp cuda/test_mapping.cpp cuda/test_nccl.cpp",
            "cuda/driver.c cuda/mapping.c":
                "cuda/test_mapping.cpp",
            "cuda/nccl.c cuda/comm_nccl.c":
                "cuda/test_nccl.cpp cuda/test_fsdp.cpp",
            "cuda/module.c":
                "cuda/test_nccl_groups.py cuda/test_fsdp_device.py",
            "cuda/norm.cu":
                "cuda/test_launch.cpp cuda/test_norm.cpp",
            "cuda/elementwise.cu":
                "cuda/test_launch.cpp cuda/test_elementwise.cpp "
                "cuda/test_step.cpp",
            "cuda/update.cu":
                "cuda/test_launch.cpp cuda/test_elementwise.cpp "
                "cuda/test_measure.cpp cuda/test_step.cpp",
            "cuda/quantized.cu":
                "cuda/test_quantized.cpp",
        },
        "cuda/test_step.cpp cuda/test_quant.cpp",
    ),
}  # fmt: skip

NOT_DRAWN = {
    "ctrainer/__init__.py ctrainer/fairseq/__init__.py ctrainer/fsdp/__init__.py "
    "ctrainer/runtime/lazy.py":
        "names that are imported when they are asked for",
    "ctrainer/__main__.py": "the table of commands",
    "ctrainer/commands/demo.py ctrainer/commands/environment.py "
    "ctrainer/runtime/command_line.py":
        "what commands print; tests/python/commands/test_commands.py reads it",
    "csrc/cpu/device.c": "the table of the CPU's kernels",
    "ctrainer/arguments/fields.py": "a table of fields and their defaults",
}  # fmt: skip


def nearest() -> dict[str, tuple[str, list[str]]]:
    """The area and the nearest tests of every named file."""
    return {
        file: (name, tests)
        for name, area in AREAS.items()
        for file, tests in area.tests().items()
    }
