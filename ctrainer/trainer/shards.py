"""Trainer: a model that is sharded over the ranks, by ctrainer.fsdp, and its files.

Functions that TrainerRun has as methods, and what these share. `model` is the plain one
up to the first train() or evaluation, and then the outermost unit; its norm of
gradients is that of all ranks' shards, in C.
"""

from __future__ import annotations

import glob
import logging
import os
from typing import TYPE_CHECKING, Any

from ctrainer import integrations
from ctrainer.arguments import deepspeed
from ctrainer.arguments.fsdp import sharding_of
from ctrainer.arguments.optimizers import RECIPES
from ctrainer.checkpoint import Sink
from ctrainer.checkpoint.files import naming
from ctrainer.comm.run import is_open
from ctrainer.runtime import messages
from ctrainer.trainer import checkpoint as files
from ctrainer.trainer import survivors
from ctrainer.trainer.checkpoint import (
    add_file,
    add_object,
    is_overridden,
    saved_object,
)

if TYPE_CHECKING:
    from ctrainer.arguments.fsdp import Sharding
    from ctrainer.trainer.run import TrainerRun

logger = logging.getLogger("ctrainer.trainer")

_EXCLUDED = {
    "use_bmuf": "BMUF needs the whole model on every rank",
    "use_diloco": "DiLoCo needs the whole model on every rank",
    "crash_record": "a rank has only a part of the weights",
    "chunked_cross_entropy": "a loss reads the weight of the output embeddings after "
    "the forward pass for which it is gathered",
    "torch_compile": "the hooks that gather parameters cannot be compiled",
    "fp16_full_eval": "shards are float32; set fp16, in which the model then computes",
    "bf16_full_eval": "shards are float32; set bf16, in which the model then computes",
}

_MAKE_OPTIMIZERS = (
    "create_optimizer",
    "create_optimizer_and_scheduler",
    "get_optimizer_cls_and_kwargs",
)


def plan_shards(trainer: TrainerRun) -> None:
    """Read how the model is to be sharded; what does not go with it is rejected."""
    check_is_whole(trainer.model)
    trainer._sharding = plan_of(trainer.args)
    integrations.show_sharding(trainer)
    if trainer._sharding is None:
        check_has_values(trainer, trainer.model)
        return
    trainer.is_fsdp_enabled = True
    if trainer.args.gradient_checkpointing and trainer._sharding.recomputes:
        raise ValueError(
            "fsdp: activation_checkpointing in fsdp_config and gradient_checkpointing "
            "are the same; set one"
        )
    if trainer.args.save_only_model and not trainer._sharding.saves_full:
        raise ValueError(
            "save_only_model would save nothing: state_dict_type SHARDED_STATE_DICT in "
            "fsdp_config keeps weights with the optimizer's state; set FULL_STATE_DICT"
        )
    for name, why in _EXCLUDED.items():
        value = getattr(trainer.args, name, None)
        if value:
            raise ValueError(f"{name}={value!r} does not go with fsdp: {why}")
    if trainer.optimizer is not None:
        raise ValueError(
            "fsdp: the optimizer that was passed has the parameters of the whole "
            "model; pass optimizer_cls_and_kwargs, or override create_optimizer, "
            "which is called with the sharded model"
        )


def check_is_whole(model: Any) -> None:
    """Raise ValueError for a model of transformers whose tensors are cut over ranks."""
    ranks = getattr(model, "tp_size", None)
    if isinstance(ranks, int) and ranks > 1:
        raise ValueError(
            f"the model's tensors are cut over {ranks} ranks (tensor parallelism), and "
            "here each rank computes with whole ones on batches of its own: load the "
            "model without tp_plan, and set fsdp where it is too large for a rank"
        )


def check_has_values(trainer: TrainerRun, model: Any) -> None:
    """Raise ValueError for a model that cannot be run as it is."""
    if is_on_meta(model):
        raise ValueError(
            "the model is on the meta device and has no values. fsdp gives it "
            "some; else make it on the CPU"
        )


def check_group(trainer: TrainerRun) -> None:
    """Raise RuntimeError for shards of a run that has failed, whose group is closed."""
    if trainer._shard_group is not None and not is_open(trainer._shard_group):
        raise RuntimeError(
            "the model's shards are those of a run that has failed, whose ranks have "
            "left their group: resume in a new Trainer with a new model, or pass "
            "model_init, which makes the model anew in each train()"
        )


def plan_of(args: Any) -> Sharding | None:
    """How the model is to be sharded, which then moves it to its device: no GPU needs
    to have room for the whole. None: not at all."""
    plan = sharding_of(args)
    return None if plan is None or plan.replicates else plan


def shard_model(trainer: TrainerRun, checkpoint: str | None) -> None:
    """Shard the model, where it is to be and is not yet, and load the checkpoint's
    shards, or its weights where the model had no values to replace by them."""
    if trainer._sharding is None:
        return
    from ctrainer.fsdp import trained_model

    check_group(trainer)
    anew = False
    if not isinstance(trainer.model, trained_model.TrainedModel):
        zero = deepspeed.config_of(trainer.args)
        if zero is not None:
            zero.fill_hidden_sizes(trainer.model)
        trainer._sharding = sharding_of(trainer.args) or trainer._sharding
        trainer._set_signature_columns_if_needed()
        trainer._flos_per_token = trainer._adapter.flos_per_token(trainer.model)
        group = trainer._communicator
        refilled = trainer.model is trainer._before_shards
        survivors.keep_unsharded(trainer)
        anew = trained_model.begins_anew(trainer.model, trainer._sharding, group)
        trainer.model = trained_model.shard(
            trainer.model,
            trainer._sharding,
            trainer.args,
            group,
            refilled,
            _block_size(trainer, checkpoint),
            trainer.args.device if trainer.place_model_on_device else None,
        )
        trainer.model_wrapped = trainer.callback_handler.model = trainer.model
        trainer._shard_group = trainer.model.communicator
        trainer._replica_group = trainer.model.replicas
    survivors.update_together(trainer)
    if checkpoint is not None and (anew or _has_shards(checkpoint)):
        load_sharded(trainer, checkpoint)


def _block_size(trainer: TrainerRun, checkpoint: str | None) -> int | None:
    """Of how many elements a scale is in the optimizer's state, so that ranks cut
    parameters between blocks; None where there are no scales.

    The optimizer is made of the cut parameters: where an override or a function makes
    it, blocks are those of 8-bit state, which hold whole groups of compact state. A
    resumed run keeps the cuts of its checkpoint: 8-bit state that was cut elsewhere
    fits no others.
    """
    if checkpoint is not None and _has_shards(checkpoint):
        from ctrainer.fsdp import trained_model

        return trained_model.block_size(checkpoint)
    from ctrainer import optim

    name = str(getattr(trainer.args.optim, "value", trainer.args.optim))
    cls: Any = getattr(optim, RECIPES[name].cls) if name in RECIPES else object
    if trainer.optimizer_cls_and_kwargs is not None:
        cls, _ = trainer.optimizer_cls_and_kwargs
    made = any(is_overridden(trainer, hook) for hook in _MAKE_OPTIMIZERS)
    if made or not isinstance(cls, type):
        cls = optim.AdamW8bit
    return getattr(cls, "state_block", None)


def check_optimizer(trainer: TrainerRun) -> None:
    """Raise ValueError for an optimizer that needs whole parameters, or has others than
    the model's."""
    if trainer._shard_group is not None:
        from ctrainer.fsdp import trained_model

        trained_model.check_optimizer(trainer.optimizer)
        own = {id(p) for p in trainer.model.parameters()}
        for group in trainer.optimizer.param_groups:
            for p in group["params"]:
                if id(p) not in own:
                    raise ValueError(
                        "fsdp: the optimizer has a parameter that is not the model's, "
                        f"of shape {tuple(p.shape)}, such as a loss's; its gradients "
                        "would differ between ranks. Make it a parameter of the model"
                    )


def offload_state(trainer: TrainerRun) -> None:
    """Keep the optimizer's state in a file where the arguments name a folder.

    Raises ValueError for an optimizer that cannot.
    """
    sharding = trainer._sharding
    if sharding is None or sharding.offload_folder is None:
        return
    if not hasattr(trainer.optimizer, "offload_state"):
        cls = type(trainer.optimizer)
        raise ValueError(
            f"the optimizer's state is to be in a file in {sharding.offload_folder!r}, "
            f"and {cls.__module__}.{cls.__name__} cannot keep it there; choose an "
            "optimizer of ctrainer.optim, such as AdamW"
        )
    trainer.optimizer.offload_state(
        sharding.offload_folder, buffers=sharding.offload_buffers
    )


def save_model(
    trainer: TrainerRun, output_dir: str | None = None, _internal_call: bool = False
) -> None:
    """Save the model, and the processing class, for from_pretrained() to load. Hook.

    Args:
        output_dir (str | None, default None): The folder; None: args.output_dir.
        _internal_call (bool, default False): The trainer calls it, and not a user:
            nothing is pushed to the Hub.
    """
    folder = trainer.args.output_dir if output_dir is None else output_dir
    weights = share_weights(trainer, folder)
    if not trainer.args.should_save:
        return
    if not weights:
        trainer._save(*(folder,) if weights is None else (folder, weights))
    else:
        from ctrainer.fsdp import trained_model

        sharded = trainer.model
        with trained_model.whole(sharded, weights) as trainer.model:
            try:
                trainer._save(folder, weights)
            finally:
                trainer.model = sharded
    pushes = getattr(trainer.args, "push_to_hub", False) and not _internal_call
    if pushes and trainer.is_world_process_zero():
        trainer.push_to_hub(commit_message="Model save")


def share_weights(trainer: TrainerRun, folder: str) -> dict[str, Any] | None:
    """What of the weights is to be written into the folder, where they are not the
    model's own; called by all ranks."""
    if trainer._shard_group is None:
        return None
    assert trainer._sharding is not None
    staged = trainer._staged_folder
    wanted = trainer._sharding.saves_full or is_overridden(trainer, "_save")
    if staged is not None and (not wanted or trainer._own_shards is not None):
        return {}
    from ctrainer.fsdp import trained_model

    keep, writer = trainer.args.should_save, None
    if staged is not None and keep and files.writer_of(trainer).snapshots:
        # Beside what is saved: on a network file system an open file may get a name.
        folder, writer = os.path.dirname(staged), files.writer_of(trainer)
    return trained_model.gather(trainer.model, folder, keep, writer)


def save_optimizer_and_scheduler(trainer: TrainerRun, output_dir: str) -> None:
    """Save optimizer.pt, or this rank's shards of it, and scheduler.pt. Hook."""
    hook = "_save_optimizer_and_scheduler"
    if trainer._shard_group is not None:
        save_shards(trainer, output_dir, hook)
        name = residual_file(trainer)
        if name is not None and trainer._own_shards is None:
            state = trainer.model.feedback_state_dict()
            add_object(trainer, output_dir, name, state, hook)
    if trainer.args.should_save:
        if trainer._shard_group is None:
            state = trainer.optimizer.state_dict()
            add_object(trainer, output_dir, "optimizer.pt", state, hook)
        state = trainer.lr_scheduler.state_dict()
        add_object(trainer, output_dir, "scheduler.pt", state, hook)


def save_shards(trainer: TrainerRun, folder: str, hook: str) -> None:
    from ctrainer.fsdp import trained_model

    if _saved_part(trainer) is None:
        return
    own = trainer._own_shards
    if own is None:
        own = trained_model.Shards.of(trainer.model, trainer.optimizer)

    def write(sink: Sink) -> None:
        own.save(sink)
        files.flush_for_override(trainer, sink, hook)

    add_file(trainer, folder, write)


def _saved_part(trainer: TrainerRun) -> int | None:
    """The number of this rank's shards, if it saves them for all that have the same."""
    from ctrainer.fsdp import trained_model

    own = trainer._own_shards
    if own is not None:  # of a group that is left
        return own.rank if own.is_wanted else None
    first = trained_model.is_first_replica(trainer.model, trainer._communicator)
    return trainer.model.rank if first else None


def save_weight_average(trainer: TrainerRun, output_dir: str) -> None:
    """Save weight_average.pt, the averaged weights, if there are any; of a sharded
    model each part. Hook."""
    average, name = trainer.weight_average, files.AVERAGE
    if average is None:
        return
    if trainer._shard_group is None:
        wanted = trainer.args.should_save
    else:
        part = _saved_part(trainer)
        wanted, name = part is not None, f"weight_average_{part}.pt"
    if wanted:
        hook = "_save_weight_average"
        add_object(trainer, output_dir, name, average.state_dict(), hook)


def residual_file(trainer: TrainerRun) -> str | None:
    """The file of this rank's residuals; None without error feedback."""
    plan = trainer._sharding
    if plan is None or not plan.reduce_bits or not plan.error_feedback:
        return None
    rank, ranks = trainer.args.process_index, trainer.args.world_size
    return f"residual_{rank:05d}-of-{ranks:05d}.pt"


def load_from_checkpoint(
    trainer: TrainerRun, resume_from_checkpoint: str, model: Any = None
) -> None:
    """Load a checkpoint's weights into the model. Hook."""
    folder = os.fspath(resume_from_checkpoint)
    target = trainer.model if model is None else model
    sharded = trainer._shard_group is not None and target is trainer.model_wrapped
    if model is None and _has_shards(folder):
        awaits = trainer._sharding is not None and trainer._shard_group is None
        if not awaits and not sharded:  # else shard_model() loads
            from ctrainer.fsdp import trained_model

            trained_model.load_into_whole(target, folder)
    elif sharded:
        load_sharded(trainer, folder)
    elif not is_on_meta(target):
        trainer._adapter.checkpoints.load_model(target, folder)


def load_optimizer_and_scheduler(trainer: TrainerRun, checkpoint: str | None) -> None:
    """Load optimizer.pt and scheduler.pt, if both are there. Hook."""
    if checkpoint is None:
        return
    load = trainer._adapter.checkpoints.load_object
    model = None if trainer._shard_group is None else trainer.model
    scheduler = load(checkpoint, "scheduler.pt")
    if _has_shards(checkpoint):
        from ctrainer.fsdp import trained_model

        state = trained_model.optimizer_state(model, trainer.optimizer, checkpoint)
    else:
        state = load(checkpoint, "optimizer.pt")
        if model is not None:
            from ctrainer.fsdp import trained_model

            state = trained_model.part_of_whole(model, trainer.optimizer, state)
    files.take_optimizer_and_scheduler(trainer, checkpoint, state, scheduler)
    load_residual(trainer, checkpoint)


def load_residual(trainer: TrainerRun, checkpoint: str) -> None:
    name = residual_file(trainer)
    if trainer._shard_group is None or name is None:
        return
    former = name.replace("residual", "code_feedback")  # in older checkpoints
    state = trainer._adapter.checkpoints.load_object(checkpoint, former)
    if state is None:
        without = (
            "error feedback begins without residuals, as with another number of ranks"
        )
        state = saved_object(trainer, checkpoint, name, without)
    if state is not None:
        trainer.model.load_feedback_state_dict(state)


def load_weight_average(trainer: TrainerRun, checkpoint: str | None) -> None:
    """Load weight_average.pt; without it the average starts from the weights.
    Hook."""
    average = trainer.weight_average
    if average is None or checkpoint is None:
        return
    from ctrainer.fsdp import trained_model

    sharded = _has_shards(checkpoint)
    model = None if trainer._shard_group is None else trainer.model
    if model is None:
        own = not sharded
    else:
        own = sharded and trained_model.same_layout(model, checkpoint)
    load = trainer._adapter.checkpoints.load_object
    state = (
        None if own else trained_model.average_state(model, average, checkpoint, load)
    )
    if state is not None:
        average.load_state_dict(state)
        return
    name = files.AVERAGE if model is None else f"weight_average_{model.rank}.pt"
    without = "the average starts from its weights"
    state = saved_object(trainer, checkpoint, name, without)
    if state is not None:
        with naming(os.path.join(checkpoint, name)):
            average.load_state_dict(state)


def load_by(trainer: TrainerRun, hook: str, *args: Any) -> None:
    """Call a hook that loads weights; an override finds the model whole, as self.model,
    also where it is sharded."""
    load = getattr(trainer, hook)
    if trainer._shard_group is None or not is_overridden(trainer, hook):
        load(*args)
        return
    from ctrainer.fsdp import trained_model

    sharded = trainer.model
    with trained_model.rewritten(sharded) as trainer.model:
        try:
            load(*args)
        finally:
            trainer.model = sharded


def load_best_model(trainer: TrainerRun) -> None:
    """Load the weights of the best checkpoint. Hook."""
    best = trainer.state.best_model_checkpoint
    assert best is not None
    messages.loading_best(best, trainer.state.best_metric)
    if trainer._shard_group is None:
        trainer._adapter.checkpoints.load_model(trainer.model, best)
    elif trainer.model is trainer.model_wrapped:
        load_sharded(trainer, best)
    else:
        load_from_checkpoint(trainer, best)
    if not trainer.args.save_only_model:
        trainer._load_weight_average(best)


def load_sharded(trainer: TrainerRun, folder: str) -> None:
    """Load this rank's part of a checkpoint's shards, or of its whole weights."""
    from ctrainer.fsdp import trained_model

    shards = _has_shards(folder)
    load = trained_model.load_model if shards else trained_model.load_weights
    load(trainer.model, folder)


def is_on_meta(model: Any) -> bool:
    """Has a parameter no values? Only torch's can be so."""
    return any(getattr(p, "is_meta", False) for p in model.parameters())


def _has_shards(folder: str) -> bool:
    """Is it the folder of a checkpoint with shards?"""
    return bool(glob.glob(os.path.join(glob.escape(folder), "shard-[0-9]*-of-*")))
