"""Trainer: a model that is sharded over the ranks."""

from __future__ import annotations

import glob
import logging
import os
from typing import TYPE_CHECKING, Any

from ctrainer.arguments.fsdp import Sharding, sharding_of
from ctrainer.checkpoint import Sink
from ctrainer.trainer.checkpoint import CheckpointFiles, is_overridden

if TYPE_CHECKING:
    from ctrainer.trainer.run import TrainerRun

logger = logging.getLogger("ctrainer.trainer")

# Of other packages, whose update of an element depends on others, which may be on
# another rank. Those of ctrainer.optim have these names, too, and ask the ranks.
_NOT_ELEMENTWISE = frozenset(
    "Adafactor Adalomo APOLLOAdamW Composite GaLoreAdafactor GaLoreAdamW "
    "GaLoreAdamW8bit LAMB LARS Lomo Muon StableAdamW".split()
)


class ShardedFiles(CheckpointFiles):
    """A model that is sharded over the ranks, by ctrainer.fsdp, and its files.

    `model` is the plain one up to the first train(), and then the outermost unit; its
    norm of gradients is that of all ranks' shards, in C.
    """

    def plan_shards(self, trainer: TrainerRun) -> None:
        """Read how the model is to be sharded; what does not go with it is rejected."""
        plan = sharding_of(trainer.args)
        trainer._sharding = None if plan is None or plan.replicates else plan
        if trainer._sharding is None:
            self.check_has_values(trainer, trainer.model)
            return
        trainer.is_fsdp_enabled = True
        _check(trainer.args, trainer._sharding)
        if trainer.optimizer is not None:
            raise ValueError(
                "fsdp: the optimizer that was passed has the parameters of the whole "
                "model; pass optimizer_cls_and_kwargs, or override create_optimizer, "
                "which is called with the sharded model"
            )

    def check_has_values(self, trainer: TrainerRun, model: Any) -> None:
        """Raise ValueError for a model that cannot be run as it is."""
        if is_on_meta(model):
            raise ValueError(
                "the model is on the meta device and has no values. fsdp gives it some "
                "when train() begins; else make it on the CPU"
            )

    def shard_model(self, trainer: TrainerRun, checkpoint: str | None) -> None:
        """Shard the model, where it is to be and is not yet, and load the checkpoint's
        shards, or its weights where the model had no values to replace by them."""
        if trainer._sharding is None:
            return
        from ctrainer.fsdp import trained_model

        if not isinstance(trainer.model, trained_model.TrainedModel):
            trainer._set_signature_columns_if_needed()
            trainer._flos_per_token = trainer._adapter.flos_per_token(trainer.model)
            group = trainer._communicator
            anew = trained_model.begins_anew(trainer.model, trainer._sharding, group)
            trainer.model = trained_model.shard(
                trainer.model, trainer._sharding, trainer.args, group
            )
            trainer.model_wrapped = trainer.model
            trainer._shard_group = trainer.model.communicator
            if anew and checkpoint is not None and not _has_shards(checkpoint):
                trained_model.load_weights(trainer.model, checkpoint)
        if checkpoint is not None and _has_shards(checkpoint):
            trained_model.load_model(trainer.model, checkpoint)

    def check_optimizer(self, trainer: TrainerRun) -> None:
        """Raise ValueError for an optimizer that needs whole parameters."""
        if trainer._shard_group is None or hasattr(trainer.optimizer, "_engine"):
            return
        for cls in type(trainer.optimizer).__mro__:
            if cls.__name__ in _NOT_ELEMENTWISE:
                raise ValueError(
                    f"fsdp: {cls.__name__} updates elements of a parameter by what the "
                    "others are, and each rank has only a part of it; choose an "
                    "optimizer such as AdamW, which does not"
                )

    def share_weights(
        self, trainer: TrainerRun, folder: str, in_checkpoint: bool
    ) -> Any:
        if trainer._shard_group is None:
            return None
        assert trainer._sharding is not None
        own_saving = is_overridden(trainer, "_save")
        if in_checkpoint and not trainer._sharding.saves_full and not own_saving:
            return {}
        from ctrainer.fsdp import trained_model

        return trained_model.gather(trainer.model, folder, trainer.args.should_save)

    def save_shared(
        self, trainer: TrainerRun, folder: str, weights: dict[str, Any]
    ) -> Any:
        if not weights:
            return trainer._save(folder, weights)
        from ctrainer.fsdp import trained_model

        sharded = trainer.model
        with trained_model.whole(sharded, weights) as trainer.model:
            try:
                return trainer._save(folder, weights)
            finally:
                trainer.model = sharded

    def save_weights(
        self, trainer: TrainerRun, sink: Sink, state_dict: dict[str, Any] | None
    ) -> None:
        if trainer._shard_group is None or state_dict is None:
            super().save_weights(trainer, sink, state_dict)
        elif state_dict:  # straight to the disk: a copy would be of the whole model
            super().save_weights(trainer, Sink(sink.folder, None), state_dict)
        else:
            trainer._adapter.checkpoints.save_configuration(sink, trainer.model)

    def save_optimizer_and_scheduler(
        self, trainer: TrainerRun, output_dir: str
    ) -> None:
        if trainer._shard_group is None:
            super().save_optimizer_and_scheduler(trainer, output_dir)
            return
        self.save_shards(trainer, output_dir)
        self.save_feedback(trainer, output_dir)
        if trainer.args.should_save:
            self.save_scheduler(trainer, self.sink(trainer, output_dir))

    def save_shards(self, trainer: TrainerRun, folder: str) -> None:
        """Into the folder, where this rank sees it, and else by those that write."""
        from ctrainer.fsdp import trained_model

        def save(to: str) -> None:
            trained_model.save(to, trainer.model, trainer.optimizer)

        if not trained_model.is_first_replica(trainer.model, trainer._communicator):
            return
        if os.path.isdir(folder) and not trainer.args.save_on_each_node:
            save(folder)
        else:
            self.add_file(trainer, folder, lambda sink: save(sink.folder))

    def save_feedback(self, trainer: TrainerRun, folder: str) -> None:
        """Save this rank's error-feedback residuals."""
        if self.has_feedback(trainer):
            name, state = (
                self.feedback_file(trainer),
                trainer.model.feedback_state_dict(),
            )
            save = trainer._adapter.checkpoints.save_object
            self.add_file(trainer, folder, lambda sink: save(sink, name, state))

    def has_feedback(self, trainer: TrainerRun) -> bool:
        plan = trainer._sharding
        return plan is not None and bool(plan.reduce_bits) and plan.error_feedback

    def feedback_file(self, trainer: TrainerRun) -> str:
        rank, ranks = trainer.args.process_index, trainer.args.world_size
        return f"residual_{rank:05d}-of-{ranks:05d}.pt"

    def save_weight_average(self, trainer: TrainerRun, output_dir: str) -> None:
        average, save = trainer.weight_average, trainer._adapter.checkpoints.save_object
        if trainer._shard_group is None or average is None:
            super().save_weight_average(trainer, output_dir)
            return
        name, state = self.average_file(trainer), average.state_dict()
        self.add_file(trainer, output_dir, lambda sink: save(sink, name, state))

    def average_file(self, trainer: TrainerRun) -> str:
        if trainer._shard_group is None:
            return super().average_file(trainer)
        return f"weight_average_{trainer.args.process_index}.pt"

    def load_from_checkpoint(
        self, trainer: TrainerRun, resume_from_checkpoint: str, model: Any = None
    ) -> None:
        folder = os.fspath(resume_from_checkpoint)
        if not _has_shards(folder) or model is not None:
            if not is_on_meta(trainer.model if model is None else model):
                super().load_from_checkpoint(trainer, folder, model)
        elif trainer._sharding is None:
            from ctrainer.fsdp import trained_model

            trained_model.load_into_whole(trainer.model, folder)

    def load_optimizer_and_scheduler(
        self, trainer: TrainerRun, checkpoint: str | None
    ) -> None:
        whole = trainer._shard_group is None
        if checkpoint is None or (whole and not _has_shards(checkpoint)):
            super().load_optimizer_and_scheduler(trainer, checkpoint)
            return
        from ctrainer.fsdp import trained_model

        load = trainer._adapter.checkpoints.load_object
        scheduler = load(checkpoint, "scheduler.pt")
        if _has_shards(checkpoint):
            state = trained_model.optimizer_state(
                None if whole else trainer.model, trainer.optimizer, checkpoint
            )
        else:
            found = load(checkpoint, "optimizer.pt")
            state = trained_model.part_of_whole(trainer.model, trainer.optimizer, found)
        self.take_optimizer_and_scheduler(trainer, checkpoint, state, scheduler)
        self.load_feedback(trainer, checkpoint)

    def load_feedback(self, trainer: TrainerRun, checkpoint: str) -> None:
        if trainer._shard_group is None or not self.has_feedback(trainer):
            return
        load, name = (
            trainer._adapter.checkpoints.load_object,
            self.feedback_file(trainer),
        )
        state = load(checkpoint, name)
        if state is None:  # the file's name in older checkpoints
            state = load(checkpoint, name.replace("residual", "code_feedback"))
        if state is None:
            logger.warning(
                "%s has no %s: error feedback begins without residuals, as with "
                "another number of ranks",
                checkpoint,
                name,
            )
            return
        trainer.model.load_feedback_state_dict(state)

    def load_weight_average(self, trainer: TrainerRun, checkpoint: str | None) -> None:
        if trainer.weight_average is None or checkpoint is None:
            return
        from ctrainer.fsdp import trained_model

        sharded = _has_shards(checkpoint)
        model = None if trainer._shard_group is None else trainer.model
        if model is None:
            own = not sharded
        else:
            own = sharded and trained_model.same_layout(model, checkpoint)
        load = trainer._adapter.checkpoints.load_object
        average = trainer.weight_average
        state = (
            None
            if own
            else trained_model.average_state(model, average, checkpoint, load)
        )
        if state is None:
            super().load_weight_average(trainer, checkpoint)
        else:
            trainer.weight_average.load_state_dict(state)

    def load_best_weights(self, trainer: TrainerRun, folder: str) -> None:
        if trainer._shard_group is None:
            super().load_best_weights(trainer, folder)
            return
        from ctrainer.fsdp import trained_model

        if _has_shards(folder):
            trained_model.load_model(trainer.model, folder)
        else:
            trained_model.load_weights(trainer.model, folder)


def is_on_meta(model: Any) -> bool:
    """Has a parameter no values? Only torch's can be so."""
    return any(getattr(p, "is_meta", False) for p in model.parameters())


def _has_shards(folder: str) -> bool:
    """Is it the folder of a checkpoint with shards?"""
    return bool(glob.glob(os.path.join(glob.escape(folder), "shard-[0-9]*-of-*")))


def _check(args: Any, sharding: Sharding) -> None:
    """Raise ValueError for what does not go with sharding, naming it."""
    if args.gradient_checkpointing and sharding.recomputes:
        raise ValueError(
            "fsdp: activation_checkpointing in fsdp_config and gradient_checkpointing "
            "are the same; set one"
        )
    if args.save_only_model and not sharding.saves_full:
        raise ValueError(
            "save_only_model would save nothing: state_dict_type SHARDED_STATE_DICT in "
            "fsdp_config keeps weights with the optimizer's state; set FULL_STATE_DICT"
        )
    for name, why in _EXCLUDED.items():
        value = getattr(args, name, None)
        if value:
            raise ValueError(f"{name}={value!r} does not go with fsdp: {why}")


_EXCLUDED = {
    "use_bmuf": "BMUF needs the whole model on every rank",
    "use_diloco": "DiLoCo needs the whole model on every rank",
    "torch_compile": "the hooks that gather parameters cannot be compiled",
    "fp16_full_eval": "shards are float32; set fp16, in which the model then computes",
    "bf16_full_eval": "shards are float32; set bf16, in which the model then computes",
}
