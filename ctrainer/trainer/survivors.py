"""Trainer: how the ranks that are left continue when others have died.

They form a new group and save a checkpoint of the last whole update, from which it
resumes: the furthest rank does, or with hybrid sharding those of a replica of which no
shard is lost. Else a sharded run goes back to its last checkpoint. Its model is made
anew.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from ctrainer import _C
from ctrainer.comm import run as ranks
from ctrainer.runtime.errors import RankFailure
from ctrainer.runtime.stop import end_by
from ctrainer.trainer import checkpoint
from ctrainer.trainer.step import drop_gradients

if TYPE_CHECKING:
    from ctrainer.trainer.run import TrainerRun

logger = logging.getLogger("ctrainer.trainer")


def least(trainer: TrainerRun) -> int | None:
    """How many ranks have to be left for a run to continue; None: it ends."""
    return getattr(trainer.args, "min_world_size", None)


def stand_by(trainer: TrainerRun) -> None:
    """Let the others find this rank while train() runs. Collective."""
    trainer._half_updated = trainer._updates_together = False
    trainer._least_ranks = trainer._stop_signal = 0
    enough = least(trainer)
    if enough is None or trainer._communicator.world_size == 1:
        return
    trainer._least_ranks = enough
    if "torch" in sys.modules:  # now, rather than after a failure
        from ctrainer.runtime.torch_process import import_compiler

        import_compiler()
    ranks.stand_by()


def resume_after(
    trainer: TrainerRun, error: BaseException, resume: str | bool | None
) -> str | bool | None:
    """After a train() that has failed: form the group of the ranks that are left, and
    return what train() resumes from: what it was to resume from, where it had not begun
    yet. Raises `error` where they do not continue, and ends this rank by the signal
    that has asked it to stop."""
    lost = least(trainer) is not None and isinstance(error, RankFailure)
    lost &= ranks.stands_by()
    run, where = trainer._run, None
    found: str | bool | None
    if lost and run is not None and run.start_time is not None:
        where = place_before(trainer, run)
    before, place = trainer.args.world_size, trainer.args.process_index
    joins, number = lost and in_torch(), trainer._stop_signal
    with contextlib.suppress(BaseException):
        trainer._leave_run()
    while lost and not number:
        try:
            found, number = trainer._call_loop(
                functools.partial(
                    _regrouped, trainer, error, where, before, resume, joins
                )
            )
            if not number:
                return found
        except RankFailure as another:
            lost, error = another is not error, another
            number = trainer._stop_signal
        trainer._leave_ranks()
    ranks.end_standby()
    if number and trainer._least_ranks:
        end_by(number, logger, f"rank {place} leaves: {error}")
    raise error


def leave_wrapper(trainer: TrainerRun) -> None:
    """Let the parameters forget the wrapper that averages their gradients over ranks
    whose group is closed; the error's frames may hold it."""
    reducer = getattr(trainer.model_wrapped, "reducer", None)
    if isinstance(reducer, _C.GradReducer):
        reducer.close()


def _regrouped(
    trainer: TrainerRun,
    error: BaseException,
    where: dict[str, Any] | None,
    before: int,
    resume: str | bool | None,
    joins: bool,
) -> str | bool | None:
    """Form the group and return what train() resumes from."""
    part, parts = 0, 1
    if trainer._shard_group is not None:
        part, parts = take_shards(trainer, where is not None)
    if trainer._half_updated:
        part = -1
    left = regroup(trainer, error, joins, part, parts)
    trainer._run = None  # another failure is one of the run that begins now
    plain = resume if isinstance(resume, bool | None) else os.fspath(resume)
    said = json.dumps([where is not None, plain]).encode()
    texts = trainer._together("finding where to resume", lambda: said)
    for had_begun, theirs in map(json.loads, texts):
        if not had_begun:  # nor has any rank made an update
            where, resume = None, theirs
            break
    return state_of(trainer, left, where, before, resume)


def regroup(
    trainer: TrainerRun, error: BaseException, joins: bool, part: int, parts: int
) -> ranks.Regrouped:
    """Take a place among the ranks that are left, in torch.distributed's group too if
    the rank joins that; raises `error` for too few."""
    before, began, enough = trainer.args.world_size, time.monotonic(), least(trainer)
    leave_torch()
    left = ranks.regroup(trainer.state.global_step, part, parts)
    n = trainer.args.world_size
    assert enough is not None
    if n < enough:
        error.add_note(f"{n} ranks are left, and min_world_size is {enough}")
        raise error
    if joins:
        trainer.args.join_torch()
    logger.warning(
        "%s. Continuing without rank %s, with %d of %d ranks, found in %.2g seconds.",
        error, ", ".join(map(str, left.lost)), n, before, time.monotonic() - began,
    )  # fmt: skip
    return left


def take_shards(trainer: TrainerRun, trained: bool) -> tuple[int, int]:
    """Leave the groups of the units, and of a model that has replicas and is trained
    keep what a checkpoint would have of this rank's shards; which part of how many
    that is, or -1."""
    from ctrainer.fsdp import trained_model

    model = trainer.model
    if trainer._own_shards is None and trained and model.replicas is not None:
        checkpoint.set_mode("eval", trainer.optimizer)  # as checkpoint.write() does
        trainer._own_shards = trained_model.Shards.of(model, trainer.optimizer)
    trained_model.close_groups(model)
    own = trainer._own_shards
    return (-1, model.world_size) if own is None else (own.rank, own.world_size)


def state_of(
    trainer: TrainerRun,
    left: ranks.Regrouped,
    where: dict[str, Any] | None,
    before: int,
    resume: str | bool | None,
) -> str | bool | None:
    """What the run resumes from. where: its place; None: training had not begun."""
    sharded, at_begin = trainer._sharding is not None, trainer.state.global_step == 0
    found: str | bool | None
    if where is None:
        found = resume or (last_checkpoint(trainer) if sharded else resume)
    elif at_begin and not sharded and left.progress is not None:
        found = resume
    elif left.progress is None or (sharded and trainer.args.save_only_model):
        found = last_checkpoint(trainer)
    else:
        found = save_state(trainer, left, where, before)
    if sharded:
        make_anew(trainer)
    return found


def in_torch() -> bool:
    """Whether this process is in torch.distributed's group."""
    if "torch" not in sys.modules:
        return False
    from ctrainer.comm import processes

    return processes.is_initialized()


def leave_torch() -> None:
    """Leave that group, whose ranks are the old ones, if this process is in it."""
    if in_torch():
        from ctrainer.comm import processes

        processes.leave()


def place_before(trainer: TrainerRun, run: _C.Run) -> dict[str, Any]:
    """Put back what the update that failed has counted, and return the place in the
    data before it, as checkpoint.where() does."""
    if run.before is not None:
        (
            run.micro_step, trainer._window_loss, trainer._window_bad,
            trainer._counted_tokens, trainer._device_loss,
        ) = run.before  # fmt: skip
    drop_gradients(trainer)
    where = checkpoint.where(trainer)
    data = where.get("data")
    if data is not None:
        data["place"] = run.micro_step
        for name in ("last", "states"):  # of batches that are prefetched
            data.pop(name, None)
    return where


def save_state(
    trainer: TrainerRun, left: ranks.Regrouped, where: dict[str, Any], saved_by: int
) -> str:
    """Save what the ranks have; all take that of the first, or of those that save their
    shards."""
    trial = trainer._trial
    trainer._resume_state, trainer._ranks_of_state = where, saved_by
    if trainer._own_shards is not None:
        trainer._own_shards.is_wanted = left.saves
    try:
        trainer._save_atomically(trainer.model_wrapped, trial)
        trainer._together("saving a checkpoint", trainer._wait_for_save)
    finally:
        trainer._ranks_of_state = 0
    folder = checkpoint.step_folder(trainer, checkpoint.run_dir(trainer, trial))
    (first, *_) = trainer._together("finding its folder", folder.encode)
    return first.decode()


def last_checkpoint(trainer: TrainerRun) -> str:
    found = checkpoint.last_checkpoint(trainer) or trainer.state.resumed_from
    if not found:
        raise RuntimeError(
            "parts of the training's state are lost with the ranks that died, and "
            "there is no checkpoint yet from which the others could resume"
        )
    return found


def make_anew(trainer: TrainerRun) -> None:
    """Put the model in its place as it was before it was sharded."""
    trainer.optimizer = trainer.lr_scheduler = None
    trainer._shard_group = trainer._replica_group = trainer._own_shards = None
    if trainer.model_init is None and trainer._before_shards is not None:
        trainer.model = trainer.model_wrapped = trainer._before_shards


def update_together(trainer: TrainerRun) -> None:
    """Let each replica of the shards make an update on all of its ranks, or on none."""
    trainer._updates_together = (
        least(trainer) is not None and trainer.model.replicas is not None
    )


def keep_unsharded(trainer: TrainerRun) -> None:
    """Keep the model as it is before it is sharded, without the values of its
    parameters, for make_anew()."""
    if least(trainer) is None or trainer.model_init is not None:
        return
    from ctrainer.fsdp import trained_model

    trainer._before_shards = trained_model.without_values(trainer.model)
