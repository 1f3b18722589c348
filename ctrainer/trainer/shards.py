"""Trainer: a model that is sharded over the ranks."""

from __future__ import annotations

import glob
import logging
import os
from typing import Any

from ctrainer import _C
from ctrainer.arguments.fsdp import Sharding, sharding_of
from ctrainer.checkpoint import Sink
from ctrainer.trainer.checkpoint import CheckpointMixin, is_overridden

logger = logging.getLogger("ctrainer.trainer")

# Of other packages, whose update of an element depends on others, which may be on
# another rank. Those of ctrainer.optim have these names, too, and ask the ranks.
_NOT_ELEMENTWISE = frozenset(
    "Adafactor Adalomo APOLLOAdamW Composite GaLoreAdafactor GaLoreAdamW "
    "GaLoreAdamW8bit LAMB LARS Lomo Muon StableAdamW".split()
)


class ShardsMixin(CheckpointMixin):
    """Hooks around ctrainer.fsdp. `model` is the plain one up to the first train(), and
    then the outermost unit; its norm of gradients is that of all ranks' shards, in C.
    """

    _sharding: Sharding | None
    _shard_group: _C.Communicator | None  # of ranks that have a shard each

    def _plan_shards(self) -> None:
        """Read how the model is to be sharded; what does not go with it is rejected."""
        plan = sharding_of(self.args)
        self._sharding = None if plan is None or plan.replicates else plan
        if self._sharding is None:
            self._check_has_values(self.model)
            return
        self.is_fsdp_enabled = True
        _check(self.args, self._sharding)
        if self.optimizer is not None:
            raise ValueError(
                "fsdp: the optimizer that was passed has the parameters of the whole "
                "model; pass optimizer_cls_and_kwargs, or override create_optimizer, "
                "which is called with the sharded model"
            )

    def _check_has_values(self, model: Any) -> None:
        """Raise ValueError for a model that cannot be run as it is."""
        if is_on_meta(model):
            raise ValueError(
                "the model is on the meta device and has no values. fsdp gives it some "
                "when train() begins; else make it on the CPU"
            )

    def _shard_model(self, checkpoint: str | None) -> None:
        """Shard the model, where it is to be and is not yet, and load the checkpoint's
        shards, or its weights where the model had no values to replace by them."""
        if self._sharding is None:
            return
        from ctrainer.fsdp import trained_model

        if not isinstance(self.model, trained_model.TrainedModel):
            self._set_signature_columns_if_needed()  # type: ignore[attr-defined]
            self._flos_per_token = self._adapter.flos_per_token(self.model)
            group = self._communicator
            anew = trained_model.begins_anew(self.model, self._sharding, group)
            self.model = trained_model.shard(
                self.model, self._sharding, self.args, group
            )
            self.model_wrapped = self.model
            self._shard_group = self.model.communicator
            if anew and checkpoint is not None and not _has_shards(checkpoint):
                trained_model.load_weights(self.model, checkpoint)
        if checkpoint is not None and _has_shards(checkpoint):
            trained_model.load_model(self.model, checkpoint)

    def _check_optimizer(self) -> None:
        """Raise ValueError for an optimizer that needs whole parameters."""
        if self._shard_group is None or hasattr(self.optimizer, "_engine"):
            return
        for cls in type(self.optimizer).__mro__:
            if cls.__name__ in _NOT_ELEMENTWISE:
                raise ValueError(
                    f"fsdp: {cls.__name__} updates elements of a parameter by what the "
                    "others are, and each rank has only a part of it; choose an "
                    "optimizer such as AdamW, which does not"
                )

    def get_num_trainable_parameters(self) -> int:
        """Number of elements of the parameters that train, on all ranks together."""
        sizes = (
            getattr(p, "_orig_size", p.shape)
            for p in self.model.parameters()
            if p.requires_grad
        )
        return sum(size.numel() for size in sizes)

    # Saving

    def _share_weights(self, folder: str, in_checkpoint: bool) -> Any:
        """The whole weights, brought together into a file without a name in the folder;
        {} where a checkpoint has only shards."""
        if self._shard_group is None:
            return None
        assert self._sharding is not None
        own_saving = is_overridden(self, "_save")
        if in_checkpoint and not self._sharding.saves_full and not own_saving:
            return {}
        from ctrainer.fsdp import trained_model

        return trained_model.gather(self.model, folder, self.args.should_save)

    def _save_shared(self, folder: str, weights: dict[str, Any]) -> Any:
        """_save() of a model that looks as it did before it was sharded."""
        if not weights:
            return self._save(folder, weights)
        from ctrainer.fsdp import trained_model

        sharded = self.model
        with trained_model.whole(sharded, weights) as self.model:
            try:
                return self._save(folder, weights)
            finally:
                self.model = sharded

    def _save_weights(self, sink: Sink, state_dict: dict[str, Any] | None) -> None:
        if self._shard_group is None or state_dict is None:
            super()._save_weights(sink, state_dict)
        elif state_dict:  # straight to the disk: a copy would be of the whole model
            super()._save_weights(Sink(sink.folder, None), state_dict)
        else:
            self._adapter.checkpoints.save_configuration(sink, self.model)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save this rank's part of the model and of the optimizer's state as
        shard-RANK-of-RANKS.safetensors, and scheduler.pt. Hook."""
        if self._shard_group is None:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        self._save_shards(output_dir)
        self._save_feedback(output_dir)
        if self.args.should_save:
            self._save_scheduler(self._sink(output_dir))

    def _save_shards(self, folder: str) -> None:
        """Into the folder, where this rank sees it, and else by those that write."""
        from ctrainer.fsdp import trained_model

        def save(to: str) -> None:
            trained_model.save(to, self.model, self.optimizer)

        if not trained_model.is_first_replica(self.model, self._communicator):
            return
        if os.path.isdir(folder) and not self.args.save_on_each_node:
            save(folder)
        else:
            self._add_file(folder, lambda sink: save(sink.folder))

    def _save_feedback(self, folder: str) -> None:
        """Save what codes have missed of this rank's gradients."""
        save, name = self._adapter.checkpoints.save_object, self._feedback_file()
        if self._has_feedback:
            state = self.model.feedback_state_dict()
            self._add_file(folder, lambda sink: save(sink, name, state))

    @property
    def _has_feedback(self) -> bool:
        plan = self._sharding
        return plan is not None and bool(plan.reduce_bits) and plan.error_feedback

    def _feedback_file(self) -> str:
        rank, ranks = self.args.process_index, self.args.world_size
        return f"code_feedback_{rank:05d}-of-{ranks:05d}.pt"

    def _save_weight_average(self, output_dir: str) -> None:
        """Save weight_average.pt, of sharded weights this rank's part as
        weight_average_RANK.pt. Hook."""
        average, save = self.weight_average, self._adapter.checkpoints.save_object
        if self._shard_group is None or average is None:
            super()._save_weight_average(output_dir)
            return
        state = average.state_dict()
        self._add_file(output_dir, lambda sink: save(sink, self._average_file(), state))

    def _average_file(self) -> str:
        alone = self._shard_group is None
        return (
            super()._average_file()
            if alone
            else f"weight_average_{self.args.process_index}.pt"
        )

    # Loading

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: Any = None
    ) -> None:
        folder = os.fspath(resume_from_checkpoint)
        if not _has_shards(folder) or model is not None:
            if not is_on_meta(self.model if model is None else model):
                super()._load_from_checkpoint(folder, model)
        elif self._sharding is None:
            from ctrainer.fsdp import trained_model

            trained_model.load_into_whole(self.model, folder)
        # A sharded model loads its shards when it is one, in _shard_model; one without
        # values its weights, too.

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        whole = self._shard_group is None
        if checkpoint is None or (whole and not _has_shards(checkpoint)):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        from ctrainer.fsdp import trained_model

        load = self._adapter.checkpoints.load_object
        scheduler = load(checkpoint, "scheduler.pt")
        if _has_shards(checkpoint):
            state = trained_model.optimizer_state(
                None if whole else self.model, self.optimizer, checkpoint
            )
        else:
            found = load(checkpoint, "optimizer.pt")
            state = trained_model.part_of_whole(self.model, self.optimizer, found)
        self._take_optimizer_and_scheduler(checkpoint, state, scheduler)
        self._load_feedback(checkpoint)

    def _load_feedback(self, checkpoint: str) -> None:
        if self._shard_group is None or not self._has_feedback:
            return
        name = self._feedback_file()
        state = self._adapter.checkpoints.load_object(checkpoint, name)
        if state is None:
            logger.warning(
                "%s has no %s: what codes have missed begins with nothing, "
                "as with another number of ranks",
                checkpoint,
                name,
            )
            return
        self.model.load_feedback_state_dict(state)

    def _load_weight_average(self, checkpoint: str | None) -> None:
        sharded = checkpoint is not None and _has_shards(checkpoint)
        if self.weight_average is None or checkpoint is None:
            return
        from ctrainer.fsdp import trained_model

        alone = self._shard_group is None
        if (alone and not sharded) or (
            sharded and not alone and trained_model.same_layout(self.model, checkpoint)
        ):
            super()._load_weight_average(checkpoint)
            return
        state = trained_model.average_state(
            None if alone else self.model,
            self.weight_average,
            checkpoint,
            self._adapter.checkpoints.load_object,
        )
        if state is None:
            super()._load_weight_average(checkpoint)
        else:
            self.weight_average.load_state_dict(state)

    def _load_best_weights(self, folder: str) -> None:
        if self._shard_group is None:
            super()._load_best_weights(folder)
            return
        from ctrainer.fsdp import trained_model

        if _has_shards(folder):
            trained_model.load_model(self.model, folder)
        else:
            trained_model.load_weights(self.model, folder)


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
