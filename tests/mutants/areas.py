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


def core(*names: str) -> str:
    return " ".join(f"csrc/core/ct_{name}.c" for name in names)


def binding(*names: str) -> str:
    return " ".join(f"csrc/binding/{name}.c" for name in names)


def math(*names: str) -> str:
    return " ".join(f"csrc/math/ct_{name}.h" for name in names)


def python(folder: str, *names: str) -> str:
    return " ".join(f"ctrainer/{folder}/{name}.py" for name in names)


AREAS = {
    "optimizers": Area(
        {
            core("optim", "optim_kind"):
                "core/test_optim.c binding/test_optimizer.py",
            core("optim_run", "optim_parts", "optim_kind_whole"):
                "core/test_optim.c core/test_optim_parts.c binding/test_optimizer.py",
            core("optim_muon", "optim_muon_parts", "orthogonal", "muon", "lamb",
                 "lars", "adafactor") +
            " " + math("adafactor_math", "lamb_formula", "lamb_math", "lars_math",
                       "muon_formula", "muon_math"):
                "core/test_optim_parts.c binding/test_layerwise.py "
                "binding/test_matrix_optimizers.py",
            core("adadelta", "adagrad", "adamax", "adamw", "ademamix", "lion",
                 "nadam", "nag", "rmsprop", "schedule_free", "sgd", "update") +
            " " + math("adamw_formula", "lion_formula", "nag_formula",
                       "parts_formula", "parts_math", "rmsprop_formula",
                       "schedule_free_formula"):
                "core/test_adamw.c core/test_sgd.c core/test_hyper.c "
                "core/test_kernels.c binding/test_optimizer_rules.py",
            core("hyper"): "core/test_hyper.c",
            core("clip"): "core/test_clip.c",
            core("factored") + " csrc/cpu/factor.c": "core/test_factor.c",
            core("step", "grads", "probe"): "core/test_step.c",
            core("noise"): "core/test_noise.c",
            core("average"): "core/test_average.c",
            "csrc/cpu/update.c": "core/test_kernels.c core/test_half.c",
            "csrc/cpu/norm.c": "core/test_norm.c",
            "csrc/cpu/quant.c": "core/test_quant.c",
            "csrc/cpu/quant_gather.c csrc/cpu/body/quant.h " + math("quant_math"):
                "core/test_quant.c binding/test_eight_bit.py",
            "csrc/cpu/body/factor.h": "core/test_factor.c",
            "csrc/cpu/body/norm.h " + math("norm_math"): "core/test_norm.c",
            binding("optimizer", "optimizer_groups", "optimizer_state",
                    "optimizer_values", "grads"):
                "binding/test_optimizer.py",
            binding("optimizer_plan"):
                "binding/test_optimizer.py python/optim/test_trainer_average.py",
            binding("weight_average", "optimizer_average"):
                "binding/test_weight_average.py python/optim/test_trainer_average.py",
            binding("optimizer_codes"): "binding/test_eight_bit.py",
            binding("optimizer_options"):
                "binding/test_optimizer.py binding/test_clipping.py",
            "csrc/binding/optim/state.h": "binding/test_optimizer.py",
            binding("optimizer_parts"):
                "binding/test_parts.py python/fsdp/test_fsdp_optimizers.py",
            binding("optimizer_shape"): "binding/test_matrix_optimizers.py",
            "ctrainer/optim/_face.py": "binding/test_optimizer.py",
            "ctrainer/optim/_eight_bit.py": "binding/test_eight_bit.py",
            python("optim", "_adafactor", "_composite", "_muon"):
                "binding/test_matrix_optimizers.py",
            python("optim", "_layerwise"): "binding/test_layerwise.py",
            python("optim", "_adam", "_adaptive", "_fairseq", "_lion",
                   "_schedule_free", "_sgd"):
                "binding/test_optimizer_rules.py binding/test_optimizer.py",
            python("optim", "_precision"): "binding/test_precision.py",
            python("adapters", "_torch_average"):
                "python/optim/test_trainer_average.py",
            "ctrainer/arguments/optimizers.py":
                "python/arguments/test_optimizer_names.py",
            "ctrainer/trainer/optim.py":
                "python/optim/test_optimizer_in_trainer.py parity/test_schedules.py",
            "ctrainer/average.py":
                "binding/test_weight_average.py python/optim/test_trainer_average.py",
        },
        "binding/test_optimizer_rules.py binding/test_layerwise.py "
        "binding/test_matrix_optimizers.py binding/test_clipping.py "
        "python/optim/test_optimizer_in_trainer.py",
    ),
    "schedules": Area(
        {
            core("schedule", "schedule_transformers"):
                "core/test_schedule.c binding/test_scheduler.py",
            core("schedule_fairseq"):
                "core/test_schedule.c python/fairseq/test_fairseq_schedules.py",
            core("schedule_deepspeed"):
                "core/test_schedule.c python/compat/test_deepspeed_schedules.py",
            binding("schedule", "scheduler", "scheduler_groups", "scheduler_state"):
                "binding/test_scheduler.py",
            "ctrainer/schedules.py": "binding/test_scheduler.py",
            "csrc/core/schedule/family.h": "core/test_schedule.c",
            "ctrainer/deepspeed_schedules.py":
                "python/compat/test_deepspeed_schedules.py",
        },
        "parity/test_schedules.py python/fairseq/test_fairseq_schedules.py",
    ),
    "scaler": Area(
        {
            core("scaler"): "core/test_scaler.c binding/test_loss_scaler.py",
            binding("loss_scaler", "loss_scaler_state"): "binding/test_loss_scaler.py",
            "ctrainer/arguments/loss_scaler.py": "python/trainer/test_fp16_training.py",
        },
        "python/trainer/test_fp16_training.py python/fairseq/test_fairseq_precision.py",
    ),
    "callbacks": Area(
        {
            binding("callbacks"):
                "python/callbacks/test_callbacks.py binding/test_callback_handler.py",
            binding("callback_notify"):
                "python/callbacks/test_callbacks.py binding/test_callback_handler.py "
                "binding/test_trainer_hooks.py",
            binding("flow"):
                "python/callbacks/test_callbacks.py binding/test_gradient_metrics.py",
            "ctrainer/runtime/events.py": "python/callbacks/test_callbacks.py",
            python("display", "html", "plotting", "progress", "text"):
                "python/display/test_progress.py",
            "ctrainer/memory_tracker.py": "python/callbacks/test_memory_tracker.py",
            "ctrainer/integrations/__init__.py":
                "python/callbacks/test_integrations.py",
            "ctrainer/callbacks.py": "python/callbacks/test_callbacks.py",
            "ctrainer/trainer_state.py": "python/trainer/test_trainer_state.py",
        },
        "binding/test_trainer_hooks.py",
    ),
    "bmuf": Area(
        {
            core("bmuf", "bmuf_batch", "bmuf_codes", "bmuf_config", "bmuf_flight",
                 "bmuf_join", "bmuf_meet", "bmuf_pass"):
                "core/test_bmuf.c python/bmuf/test_bmuf_ranks.py",
            binding("bmuf", "bmuf_sync", "bmuf_flight", "bmuf_tensors") +
            " ctrainer/bmuf.py":
                "python/bmuf/test_bmuf.py python/bmuf/test_bmuf_ranks.py",
            binding("bmuf_state"): "python/bmuf/test_bmuf_ranks.py",
            math("block_formula", "block_math"):
                "core/test_bmuf.c core/test_kernels.c",
            "ctrainer/arguments/bmuf.py ctrainer/trainer/blocks.py "
            "ctrainer/adapters/blocks.py":
                "python/bmuf/test_ranks_blocks.py",
        },
        "python/bmuf/test_ranks_blocks.py",
    ),
    "trainer": Area(
        {
            binding("trainer_loop", "trainer_step"):
                "binding/test_trainer_hooks.py binding/test_trainer_failures.py "
                "parity/test_training.py",
            binding("trainer_batch"):
                "binding/test_trainer_hooks.py binding/test_trainer_failures.py "
                "parity/test_loss_arithmetic.py parity/test_training.py",
            binding("trainer_micro"):
                "binding/test_trainer_hooks.py binding/test_trainer_failures.py "
                "parity/test_training.py python/trainer/test_ranks_training.py",
            binding("trainer_clip"): "binding/test_clipping.py",
            binding("trainer_update"):
                "binding/test_trainer_failures.py parity/test_training.py "
                "python/optim/test_trainer_average.py",
            binding("trainer_log", "trainer_loss_state", "trainer_state"):
                "binding/test_trainer_hooks.py parity/test_loss_arithmetic.py",
            binding("trainer_metrics", "trainer_noise"):
                "binding/test_gradient_metrics.py",
            binding("adapt", "attr", "context", "trainer_mode"):
                "binding/test_trainer_hooks.py",
            binding("errors", "module", "process") + " csrc/binding/runtime/ctpy.h":
                "binding/test_process.py binding/test_optimizer.py",
            binding("copies", "trainer_copy"): "python/trainer/test_copies.py",
            binding("buffer", "buffer_numpy", "buffer_torch"):
                "binding/test_buffer.py",
            binding("signals"):
                "binding/test_trainer_failures.py binding/test_trainer_eval.py",
            binding("trainer", "trainer_context"):
                "binding/test_trainer_hooks.py python/evaluate/test_full_eval.py",
            binding("trainer_account", "trainer_agree"):
                "python/trainer/test_ranks_training.py "
                "python/comm/test_ranks_differ.py",
            binding("trainer_ranks"):
                "python/trainer/test_ranks_training.py "
                "python/evaluate/test_ranks_evaluation.py",
            "ctrainer/trainer/run.py ctrainer/trainer/__init__.py":
                "binding/test_trainer_hooks.py "
                "python/arguments/test_arguments_in_runs.py "
                "python/checkpoint/test_trainer_checkpoints.py "
                "parity/test_training.py",
            "ctrainer/trainer/extra.py ctrainer/introspect.py "
            "ctrainer/runtime/hooks.py":
                "binding/test_trainer_hooks.py "
                "python/optim/test_optimizer_in_trainer.py parity/test_clients.py",
            "ctrainer/trainer/search.py": "python/trainer/test_search.py",
            "ctrainer/hf.py": "python/trainer/test_hf.py python/fsdp/test_fsdp_meta.py",
            python("adapters", "_torch_optim"):
                "parity/test_training.py python/arguments/test_optimizer_names.py",
            python("adapters", "_torch_precision"):
                "python/evaluate/test_full_eval.py "
                "python/trainer/test_trainer_precision.py",
            python("adapters", "__init__", "torch", "torch_process"):
                "parity/test_training.py python/trainer/test_trainer_utils.py",
            python("adapters", "_numpy_model", "_numpy_optim", "numpy"):
                "python/trainer/test_numpy_adapter.py "
                "python/trainer/test_numpy_training.py",
        },
        "binding/test_trainer_eval.py binding/test_trainer_failures.py "
        "parity/test_loss_arithmetic.py binding/test_precision.py "
        "python/trainer/test_trainer_precision.py "
        "python/checkpoint/test_trainer_checkpoints.py",
    ),
    "evaluation": Area(
        {
            core("rows"): "core/test_rows.c binding/test_arrays.py",
            binding("arrays", "array_tree", "row_buffer"): "binding/test_arrays.py",
            core("buf", "region"): "core/test_rows.c core/test_safetensors.c",
            binding("array_leaf"): "binding/test_arrays.py",
            binding("nested", "nested_functions"):
                "python/trainer/test_trainer_pt_utils.py binding/test_trainer_eval.py",
            binding("trainer_eval_lend", "trainer_gather"):
                "python/evaluate/test_ranks_evaluation.py",
            binding("trainer_eval_model"):
                "binding/test_trainer_eval.py python/evaluate/test_full_eval.py",
            python("adapters", "_torch_rank_eval"):
                "python/evaluate/test_ranks_evaluation.py",
            "ctrainer/seq2seq.py ctrainer/integrations/generation.py":
                "python/evaluate/test_seq2seq.py parity/test_generation.py",
            binding("trainer_eval_batch"):
                "binding/test_trainer_eval.py python/trainer/test_any_batch.py "
                "parity/test_evaluation.py",
            binding("trainer_eval", "trainer_eval_loop",
                    "trainer_eval_metrics", "trainer_eval_step", "trainer_eval_store",
                    "trainer_eval_train"):
                "binding/test_trainer_eval.py parity/test_evaluation.py",
            binding("trainer_eval_ranks", "gather", "gather_pack"):
                "python/evaluate/test_ranks_evaluation.py",
            "ctrainer/trainer_pt_utils.py": "python/trainer/test_trainer_pt_utils.py",
            "ctrainer/trainer_utils.py": "python/trainer/test_trainer_utils.py",
        },
        "python/evaluate/test_full_eval.py python/evaluate/test_numpy_evaluation.py "
        "binding/test_trainer_eval.py",
    ),
    "fairseq": Area(
        {
            binding("fairseq_step", "fairseq_micro", "fairseq_stats", "fairseq_valid",
                    "fairseq_counters"):
                "binding/test_fairseq_step.py python/fairseq/test_fairseq_trainer.py",
            binding("fairseq_update"):
                "binding/test_fairseq_step.py python/fairseq/test_fairseq_precision.py",
            binding("fairseq_sync"): "binding/test_fairseq_sync.py",
            binding("fairseq_optimizer", "fairseq_optimizer_step"):
                "python/fairseq/test_fairseq_optimizers.py",
            binding("fairseq_calls", "fairseq_sample", "fairseq_settings",
                    "fairseq_trainer"):
                "binding/test_fairseq_step.py python/fairseq/test_fairseq_facts.py",
            binding("fairseq_ranks"):
                "binding/test_fairseq_sync.py "
                "python/fairseq/test_fairseq_ranks_differ.py",
            binding("batches"): "binding/test_batches.py",
            binding("blocks"): "binding/test_blocks.py",
            binding("collate"): "binding/test_collate.py",
            core("batches"): "core/test_batches.c binding/test_batches.py",
            core("blocks"): "core/test_blocks.c binding/test_blocks.py",
            core("pad"): "core/test_pad.c binding/test_collate.py",
            "ctrainer/fairseq/meters.py": "python/fairseq/test_fairseq_meters.py",
            "ctrainer/fairseq/metrics.py": "python/fairseq/test_fairseq_metrics.py",
            "ctrainer/fairseq/data_utils.py ctrainer/fairseq/data/dictionary.py":
                "python/fairseq/test_fairseq_data.py "
                "python/fairseq/test_fairseq_text.py",
            "ctrainer/fairseq/_epoch_iterators.py "
            "ctrainer/fairseq/_counting_iterators.py "
            "ctrainer/fairseq/_buffered_iterator.py":
                "python/fairseq/test_fairseq_iterators.py "
                "python/fairseq/test_fairseq_epochs.py",
        },
        "python/fairseq/test_fairseq_trainer.py python/fairseq/test_fairseq_loop.py "
        "python/fairseq/test_fairseq_precision.py",
    ),
    "checkpoints": Area(
        {
            core("staging", "io"):
                "core/test_staging.c core/test_files.c core/test_writer.c",
            core("writer", "fileset"): "core/test_writer.c",
            core("arena"): "core/test_writer.c core/test_plan.c",
            core("crc32", "crc32c", "crc_table"): "core/test_crc.c",
            core("source", "walk"): "core/test_files.c core/test_zip.c",
            core("zip", "zip_read"): "core/test_zip.c",
            core("safetensors", "safetensors_read", "safetensors_data", "json"):
                "core/test_safetensors.c",
            core("plan", "plan_publish", "manifest"):
                "core/test_plan.c binding/test_checkpoint.py",
            binding("checkpoint", "ckpt_files"): "binding/test_checkpoint.py",
            binding("checkpoint_add", "ckpt_excerpts", "ckpt_read", "ckpt_tensors",
                    "ckpt_write"):
                "binding/test_checkpoint.py",
            binding("trainer_ckpt", "trainer_ckpt_folder"):
                "python/checkpoint/test_trainer_checkpoints.py "
                "python/checkpoint/test_ranks_checkpoints.py",
            "ctrainer/checkpoint/files.py ctrainer/checkpoint/schema.py":
                "python/checkpoint/test_damaged_checkpoints.py "
                "python/checkpoint/test_trainer_checkpoints.py",
            "ctrainer/checkpoint/disk.py":
                "python/checkpoint/test_durable_files.py "
                "python/fsdp/test_fsdp_files_together.py",
            "ctrainer/trainer/rank_files.py":
                "python/checkpoint/test_ranks_checkpoints.py",
            python("adapters", "_saved_names"):
                "python/checkpoint/test_loading_weights.py "
                "parity/test_saved_weights.py",
            python("adapters", "_torch_checkpoint", "_torch_files"):
                "python/checkpoint/test_damaged_checkpoints.py "
                "python/checkpoint/test_loading_weights.py "
                "parity/test_checkpoint_exchange.py",
            python("adapters", "_numpy_checkpoint"):
                "python/trainer/test_numpy_adapter.py "
                "python/trainer/test_numpy_training.py",
            "ctrainer/trainer/checkpoint.py":
                "python/checkpoint/test_trainer_checkpoints.py",
            "ctrainer/checkpoint/__init__.py":
                "binding/test_checkpoint.py "
                "python/checkpoint/test_trainer_checkpoints.py "
                "parity/test_checkpoint_exchange.py",
        },
        "binding/test_checkpoint.py python/checkpoint/test_trainer_checkpoints.py",
    ),
    "ranks": Area(
        {
            core("comm", "comm_bytes", "comm_self", "comm_split"):
                "core/test_comm.c",
            core("comm_padded", "count"): "core/test_comm_padded.c core/test_count.c",
            core("comm_sync"): "core/test_reducer.c binding/test_communicator.py",
            core("packet"): "core/test_packet.c",
            core("copy_far"): "core/test_copy_far.c",
            core("reduce") + " csrc/core/comm/reduce_body.h": "core/test_reduce.c",
            core("codec_half"):
                "core/test_codecs.c",
            core("comm_shm", "exchange", "exchange_slots", "crew", "shm_queue",
                 "deadline", "interrupt", "lanes", "pages", "segment",
                 "segment_hold"):
                "core/test_comm_shm.c core/test_comm_shm_memory.c "
                "core/test_comm_shm_faults.c",
            core("comm_levels", "levels", "levels_reduce"):
                "core/test_comm_levels.c",
            core("history"): "core/test_history.c python/comm/test_ranks_differ.py",
            core("pool"): "core/test_pool.c",
            core("reducer", "bucket"): "core/test_reducer.c",
            core("shard"): "core/test_shard.c python/data/test_batch_shard.py",
            binding("communicator", "communicator_bytes", "communicator_collect",
                    "communicator_padded", "communicator_split",
                    "communicator_work", "comm_sync"):
                "binding/test_communicator.py python/comm/test_ranks_of_one_machine.py",
            binding("communicator_memory", "communicator_shm"):
                "python/comm/test_ranks_of_one_machine.py",
            binding("communicator_levels") + " " + python("comm", "machines"):
                "python/comm/test_groups_over_machines.py",
            binding("comm_python") + " " + python("comm", "process_group"):
                "binding/test_communicator.py python/comm/test_process_groups.py",
            binding("communicator_plugin") + " " + python("comm", "nccl"):
                "cuda/test_nccl_groups.py",
            python("comm", "environment"):
                "python/comm/test_ranks_of_one_machine.py python/comm/test_world.py",
            python("comm", "processes", "run") + " ctrainer/runtime/fork.py":
                "python/comm/test_world.py python/comm/test_process_group_exit.py "
                "python/comm/test_forked_children.py",
            python("comm", "mpi"): "python/comm/test_groups_over_mpi.py",
            python("comm", "cost"): "python/comm/test_cost.py",
        },
        "binding/test_communicator.py python/comm/test_ranks_of_one_machine.py",
    ),
    "fsdp": Area(
        {
            core("fsdp"): "core/test_fsdp.c python/fsdp/test_fsdp_codes.py",
            core("fsdp_offload", "fsdp_prefetch"): "core/test_fsdp.c",
            core("fsdp_codes"): "core/test_fsdp_codes.c",
            core("fsdp_presence"): "core/test_fsdp.c core/test_fsdp_codes.c "
                "python/fsdp/test_fsdp_missing_gradients.py",
            binding("fsdp", "fsdp_attributes", "fsdp_forward", "fsdp_backward",
                    "fsdp_clip", "fsdp_tensors", "trainer_shards"):
                "python/fsdp/test_fsdp.py python/fsdp/test_fsdp_views.py",
            binding("fsdp_memory"):
                "python/fsdp/test_fsdp.py python/fsdp/test_fsdp_missing_gradients.py",
            binding("fsdp_device"): "python/fsdp/test_fsdp.py cuda/test_fsdp_device.py",
            binding("fsdp_order"): "python/fsdp/test_fsdp_order.py",
            binding("fsdp_prefetch"): "python/fsdp/test_fsdp_prefetch.py",
            binding("fsdp_replicas"): "python/fsdp/test_fsdp_hybrid.py",
            core("mapping"): "core/test_mapping.c",
            binding("mapped_memory", "mapped_memory_dlpack"):
                "python/trainer/test_copies.py cuda/test_fsdp_device.py",
            "ctrainer/arguments/fsdp.py":
                "python/fsdp/test_fsdp_options.py python/fsdp/test_fsdp_errors.py",
            python("fsdp", "full_params", "module", "sharded"):
                "python/fsdp/test_fsdp.py python/fsdp/test_fsdp_views.py "
                "python/fsdp/test_fsdp_copies.py",
            python("fsdp", "layout"):
                "python/fsdp/test_fsdp.py python/fsdp/test_fsdp_views.py "
                "python/fsdp/test_fsdp_freezing.py",
            python("fsdp", "flatten"):
                "python/fsdp/test_fsdp_errors.py python/fsdp/test_fsdp.py",
            python("fsdp", "options"):
                "python/fsdp/test_fsdp_options.py python/fsdp/test_fsdp_errors.py "
                "python/fsdp/test_fsdp_hybrid.py cuda/test_fsdp_device.py",
            python("fsdp", "initial_values"): "python/fsdp/test_fsdp_values.py",
            python("fsdp", "optim_state"):
                "python/fsdp/test_fsdp.py python/fsdp/test_fsdp_world_sizes.py "
                "python/fsdp/test_fsdp_checkpoints.py",
            "ctrainer/trainer/shards.py " + python("fsdp", "trained_model"):
                "python/fsdp/test_fsdp_trainer.py python/fsdp/test_fsdp_meta.py "
                "parity/test_fine_tuning.py",
            python("fsdp", "consolidate", "shard_files", "stored"):
                "python/fsdp/test_fsdp_checkpoints.py "
                "python/fsdp/test_fsdp_shard_faults.py "
                "python/fsdp/test_fsdp_files_together.py",
            python("fsdp", "shard_metadata"):
                "python/fsdp/test_fsdp_checkpoints.py python/comm/test_ranks_differ.py",
            "ctrainer/fsdp/memory_plan.py":
                "python/fsdp/test_fsdp_memory.py python/fsdp/test_fsdp_traffic.py",
        },
        "python/fsdp/test_fsdp_prefetch.py python/fsdp/test_fsdp_exceptions.py "
        "python/fsdp/test_fsdp_any_tree.py",
    ),
    "data parallel": Area(
        {
            binding("grad_hook", "grad_reducer", "grad_reducer_codec",
                    "grad_reducer_forward", "grad_reducer_give",
                    "grad_reducer_join", "grad_reducer_pass",
                    "grad_reducer_setup"):
                "python/ddp/test_data_parallel.py",
            binding("grad_reducer_owners"): "python/compat/test_fairscale.py",
            python("comm", "data_parallel") + " ctrainer/adapters/parallel.py":
                "python/ddp/test_data_parallel.py",
            python("comm", "wrappers"):
                "python/fairseq/test_fairseq_ranks.py python/ddp/test_data_parallel.py",
            python("compat/fairscale", "_batch_norm", "_checkpoint", "_fsdp",
                   "_groups", "_optim_state", "_oss", "_scaler", "_sharded_ddp",
                   "_wrap"):
                "python/compat/test_fairscale.py",
        },
        "python/trainer/test_ranks_training.py parity/test_fairscale_parity.py",
    ),
    "data": Area(
        {
            binding("batch_digest"): "binding/test_batch_digest.py",
            binding("batch_shard"): "python/data/test_batch_shard.py",
            binding("object_watch"): "binding/test_object_watch.py",
            "ctrainer/arguments/accelerator.py":
                "python/data/test_dispatched_batches.py "
                "python/arguments/test_settings.py",
            "ctrainer/trainer/data.py":
                "python/trainer/test_any_batch.py "
                "python/arguments/test_arguments_in_runs.py "
                "python/data/test_data_resume.py",
            python("adapters", "_numpy_batches"):
                "python/data/test_batch_shard.py python/trainer/test_numpy_adapter.py",
            python("adapters", "_torch_batches"):
                "python/data/test_data_orders.py python/data/test_data_resume.py",
            python("adapters", "_torch_ranks"):
                "python/data/test_data_orders.py "
                "python/data/test_dispatched_batches.py "
                "python/data/test_data_resume_ranks.py",
            python("adapters", "_torch_data", "_torch_reading", "generators",
                   "reading"):
                "python/data/test_data_resume.py",
        },
        "python/data/test_data_resume_ranks.py python/data/test_dispatched_batches.py "
        "python/data/test_data_resume_evaluation.py "
        "python/trainer/test_numpy_training.py",
    ),
    "settings": Area(
        {
            "ctrainer/arguments/settings.py ctrainer/arguments/checks.py":
                "python/arguments/test_settings.py "
                "python/arguments/test_training_args.py",
            "ctrainer/arguments/setters.py ctrainer/arguments/table.py "
            "ctrainer/arguments/older_fields.py":
                "python/arguments/test_training_args.py",
            "ctrainer/training_args.py":
                "python/arguments/test_training_args.py python/comm/test_world.py",
        },
        "python/arguments/test_arguments_in_runs.py python/fsdp/test_fsdp_options.py",
    ),
    "fairseq's settings": Area(
        {
            python("fairseq/config", "base", "build", "components", "files", "flat",
                   "references", "trees", "values"):
                "python/fairseq/test_fairseq_config.py "
                "python/fairseq/test_fairseq_config_values.py",
            python("fairseq/config", "command_line"):
                "python/fairseq/test_fairseq_command_line.py",
            python("fairseq/config", "distributed", "status"):
                "python/fairseq/test_fairseq_config.py "
                "python/fairseq/test_fairseq_distributed.py",
            python("fairseq", "_trainer_checks"):
                "python/fairseq/test_fairseq_config_ranges.py "
                "python/fairseq/test_fairseq_facts.py",
            python("fairseq", "distributed"):
                "python/fairseq/test_fairseq_distributed.py",
            python("fairseq", "registry"): "python/fairseq/test_fairseq_user_dir.py",
            python("fairseq", "aliases"): "python/fairseq/test_fairseq_aliases.py",
            python("fairseq", "_cures", "_guest", "_install", "_patches", "original"):
                "python/fairseq/test_fairseq_install.py",
        },
        "python/fairseq/test_fairseq_command_line.py "
        "python/fairseq/test_fairseq_user_dir.py "
        "python/fairseq/test_fairseq_config_ranges.py",
    ),
    "fairseq's runs": Area(
        {
            python("fairseq", "train", "_background_saves"):
                "python/fairseq/test_fairseq_loop.py "
                "python/fairseq/test_fairseq_save_async.py "
                "python/fairseq/test_fairseq_program.py",
            python("fairseq", "_trainer_core", "trainer", "_trainer_data"):
                "python/fairseq/test_fairseq_facts.py "
                "python/fairseq/test_fairseq_trainer.py",
            python("fairseq", "_trainer_failures", "replay"):
                "python/fairseq/test_fairseq_checkpoints.py "
                "python/fairseq/test_fairseq_replay.py",
            python("adapters", "torch_fairseq", "nan_detector"):
                "python/fairseq/test_fairseq_trainer.py "
                "python/fairseq/test_fairseq_precision.py "
                "python/fairseq/test_fairseq_checkpoints.py",
            python("fairseq", "_composite", "_optim_options", "_optimizers",
                   "optim"):
                "python/fairseq/test_fairseq_optimizers.py "
                "python/fairseq/test_fairseq_precision.py "
                "python/fairseq/test_fairseq_checkpoints.py",
            python("fairseq", "_lr_base", "_lr_by_epoch", "_lr_by_update",
                   "lr_scheduler"):
                "python/fairseq/test_fairseq_schedules.py",
            python("fairseq", "ema", "_sharded_ema", "_sharding", "_zero",
                   "_code_feedback", "_worker_states"):
                "python/fairseq/test_fairseq_sharding.py "
                "python/fairseq/test_fairseq_trainer.py "
                "python/fairseq/test_fairseq_ranks.py",
            python("fairseq", "_bars", "progress_bar", "trackers"):
                "python/fairseq/test_fairseq_progress.py",
            python("fairseq", "_tensors"): "python/fairseq/test_fairseq_metrics.py",
            python("fairseq", "utils"):
                "python/fairseq/test_fairseq_user_dir.py "
                "python/fairseq/test_fairseq_trainer.py",
        },
        "python/fairseq/test_fairseq_loop.py python/fairseq/test_fairseq_ranks.py "
        "python/fairseq/test_fairseq_checkpoints.py",
    ),
    "fairseq's files": Area(
        {
            python("fairseq", "_trainer_ckpt"):
                "python/fairseq/test_fairseq_checkpoints.py "
                "python/fairseq/test_fairseq_layouts.py",
            python("fairseq", "checkpoint_utils"):
                "python/fairseq/test_fairseq_checkpoint_policies.py "
                "python/fairseq/test_fairseq_checkpoints.py "
                "python/checkpoint/test_durable_files.py",
            python("fairseq", "_checkpoint_upgrade"):
                "python/fairseq/test_fairseq_old_checkpoints.py",
            python("adapters", "fairseq_parameters"):
                "python/fairseq/test_fairseq_layouts.py "
                "python/fairseq/test_fairseq_old_checkpoints.py",
        },
        "python/fairseq/test_fairseq_layouts.py "
        "python/fairseq/test_fairseq_old_checkpoints.py "
        "python/fairseq/test_fairseq_save_async.py",
    ),
    "fairseq's models and data": Area(
        {
            python("fairseq/models", "__init__", "fairseq_decoder",
                   "fairseq_encoder",
                   "fairseq_model"):
                "python/fairseq/test_fairseq_models.py "
                "python/fairseq/test_fairseq_user_dir.py",
            python("fairseq/models/transformer", "transformer_config",
                   "transformer_decoder", "transformer_encoder",
                   "transformer_model") +
            " " + python("fairseq/models", "transformer_lm") +
            " " + python("fairseq/modules", "multihead_attention",
                         "positional_embedding", "small", "transformer_layer"):
                "python/fairseq/test_fairseq_models.py",
            python("fairseq/criterions", "cross_entropy", "fairseq_criterion",
                   "label_smoothed_cross_entropy"):
                "python/fairseq/test_fairseq_criterions.py "
                "python/fairseq/test_fairseq_translation.py",
            python("fairseq/data", "base_wrapper_dataset", "edge_datasets",
                   "language_pair_dataset", "monolingual_dataset", "text_chunks",
                   "token_block_dataset"):
                "python/fairseq/test_fairseq_data.py "
                "python/fairseq/test_fairseq_text.py "
                "python/fairseq/test_fairseq_translation.py",
            python("fairseq", "_file_pair", "_mmap_dataset",
                   "indexed_dataset"):
                "python/fairseq/test_fairseq_indexed.py "
                "python/checkpoint/test_durable_files.py",
            python("fairseq", "concat_dataset", "fairseq_dataset"):
                "python/fairseq/test_fairseq_data.py",
            python("fairseq", "_epoch_iterating"):
                "python/fairseq/test_fairseq_epochs.py",
            python("fairseq", "binarizer", "preprocess"):
                "python/fairseq/test_fairseq_text.py",
            python("fairseq/tasks", "fairseq_task", "language_modeling",
                   "translation"):
                "python/fairseq/test_fairseq_translation.py "
                "python/fairseq/test_fairseq_program.py",
        },
        "python/fairseq/test_fairseq_program.py "
        "python/fairseq/test_fairseq_translation.py "
        "python/fairseq/test_fairseq_text.py",
    ),
    "kernels": Area(
        {
            core("alloc", "malloc"): "core/test_alloc.c",
            core("status") + " csrc/core/base/check.h " + math("half_math"):
                "core/test_dtype.c core/test_half.c core/test_copy.c",
            core("index"): "core/test_index.c",
            "csrc/cpu/add.c csrc/cpu/average.c csrc/cpu/body/average.h "
            "csrc/cpu/copy.c csrc/cpu/body/dither.h csrc/cpu/scale.c "
            "csrc/cpu/body/scale.h csrc/cpu/stretch.c csrc/cpu/tile.c "
            "csrc/cpu/body/tile.h csrc/cpu/zero.c csrc/cpu/device.c " +
            math("ema_math", "philox_math", "scale_formula"):
                "core/test_kernels.c core/test_copy.c core/test_half.c",
            "csrc/cpu/codes.c csrc/cpu/body/codes.h " + math("codes_math"):
                "core/test_codes.c",
            "csrc/cpu/cuts.c": "core/test_cuts.c",
            "csrc/cpu/isa.c": "core/test_isa.c",
            "csrc/cpu/measure.c": "core/test_measure.c",
            "csrc/cpu/blas.c csrc/cpu/gemm.c csrc/cpu/body/gemm.h":
                "core/test_gemm.c",
        },
        "core/test_optim.c core/test_step.c core/test_codecs.c",
    ),
    "cuda": Area(
        {
            "cuda/add.cu cuda/zero.cu cuda/element.cuh cuda/update.cuh "
            "cuda/average.cuh":
                "cuda/test_elementwise.cpp cuda/test_launch.cpp",
            "cuda/quant.cuh": "cuda/test_quant.cpp",
            "cuda/reduce.cuh": "cuda/test_norm.cpp cuda/test_measure.cpp",
            "cuda/factor.cu": "cuda/test_measure.cpp",
            "cuda/gemm.cu cuda/cublas.c": "cuda/test_gemm.cpp cuda/test_dynlib.cpp",
            "cuda/dynlib.c": "cuda/test_dynlib.cpp",
            "cuda/device.cu cuda/launch.cuh":
                "cuda/test_launch.cpp cuda/test_mapping.cpp",
            "cuda/status.h":
                "cuda/test_launch.cpp cuda/test_mapping.cpp cuda/test_nccl.cpp",
            "cuda/driver.c": "cuda/test_mapping.cpp",
            "cuda/nccl.c cuda/nccl_join.c": "cuda/test_nccl.cpp cuda/test_fsdp.cpp",
            "cuda/module.c": "cuda/test_nccl_groups.py cuda/test_fsdp_device.py",
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

NOT_DRAWN = {
    "ctrainer/__init__.py ctrainer/fairseq/__init__.py ctrainer/fsdp/__init__.py":
        "names that are imported when they are asked for",
    "csrc/core/base/dtype.c": "the table of dtypes",
    "ctrainer/__main__.py": "the table of commands",
    "ctrainer/arguments/fields.py": "a table of fields and their defaults",
}  # fmt: skip


def nearest() -> dict[str, tuple[str, list[str]]]:
    """The area and the nearest tests of every named file."""
    return {
        file: (name, tests)
        for name, area in AREAS.items()
        for file, tests in area.tests().items()
    }
