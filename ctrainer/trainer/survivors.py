"""Trainer: how the ranks that are left continue when others have died.

They form a new group, which takes the state of the rank that is furthest: in a run
whose ranks all have the whole model it saves a checkpoint of the last whole update.
Shards of the ranks that died are lost, so that a sharded run goes back to its last
checkpoint, with its model made anew.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from typing import TYPE_CHECKING, Any

from ctrainer import _C
from ctrainer.comm import run as ranks
from ctrainer.runtime.errors import RankFailure
from ctrainer.trainer import checkpoint

if TYPE_CHECKING:
    from ctrainer.trainer.run import TrainerRun

logger = logging.getLogger("ctrainer.trainer")


def least(trainer: TrainerRun) -> int | None:
    """How many ranks have to be left for a run to continue; None: it ends."""
    return getattr(trainer.args, "min_world_size", None)


def stand_by(trainer: TrainerRun) -> None:
    """Let the others find this rank while train() runs. Collective."""
    if least(trainer) is None or trainer._communicator.world_size == 1:
        return
    if "torch" in sys.modules:  # now, rather than after a failure
        from ctrainer.runtime.torch_process import import_compiler

        import_compiler()
    ranks.stand_by()


def resume_after(
    trainer: TrainerRun, error: BaseException, resume: str | bool | None
) -> str | bool | None:
    """After a train() that has failed: form the group of the ranks that are left, and
    return what train() resumes from: what it was to resume from, where it had not begun
    yet. Raises `error` where they do not continue."""
    lost = least(trainer) is not None and isinstance(error, RankFailure)
    lost &= ranks.stands_by()
    run, where = trainer._run, None
    if lost and run is not None and run.start_time is not None:
        where = place_before(trainer, run)
    before = trainer.args.world_size
    with contextlib.suppress(BaseException):
        trainer._leave_run()
    while lost:
        try:
            regroup(trainer, error)
            return resume if where is None else state_of(trainer, where, before, resume)
        except RankFailure as another:
            lost, error = another is not error, another
            trainer._leave_ranks()
    ranks.end_standby()
    raise error


def regroup(trainer: TrainerRun, error: BaseException) -> None:
    """Take a place among the ranks that are left; raises `error` for too few."""
    before, began, enough = trainer.args.world_size, time.monotonic(), least(trainer)
    if trainer._shard_group is not None:
        from ctrainer.fsdp import trained_model

        trained_model.close_groups(trainer.model)
    joined = leave_torch()
    lost = ranks.regroup(trainer.state.global_step)
    n = trainer.args.world_size
    assert enough is not None
    if n < enough:
        error.add_note(f"{n} ranks are left, and min_world_size is {enough}")
        raise error
    if joined:
        trainer.args.join_torch()
    logger.warning(
        "%s. Continuing without rank %s, with %d of %d ranks, found in %.2g seconds.",
        error, ", ".join(map(str, lost)), n, before, time.monotonic() - began,
    )  # fmt: skip


def state_of(
    trainer: TrainerRun, where: dict[str, Any], before: int, resume: str | bool | None
) -> str | bool | None:
    """What the run resumes from."""
    if trainer._shard_group is not None:
        return last_shards(trainer)
    if trainer.state.global_step == 0:
        return resume
    return save_state(trainer, where, before)


def leave_torch() -> bool:
    """Leave torch.distributed's group, whose ranks are the old ones; was there one?"""
    from ctrainer.comm import processes

    if not processes.is_initialized():
        return False
    processes.leave()
    return True


def place_before(trainer: TrainerRun, run: _C.Run) -> dict[str, Any]:
    """Put back what the update that failed has counted, and return the place in the
    data before it, as checkpoint.where() does."""
    if run.before is not None:
        (
            run.micro_step, trainer._window_loss, trainer._window_bad,
            trainer._counted_tokens, trainer._device_loss,
        ) = run.before  # fmt: skip
    for part in (trainer.model, trainer.optimizer):
        if callable(getattr(part, "zero_grad", None)):
            part.zero_grad()
    where = checkpoint.where(trainer)
    data = where.get("data")
    if data is not None:
        data["place"] = run.micro_step
        for name in ("last", "states"):  # of batches that are prefetched
            data.pop(name, None)
    return where


def save_state(trainer: TrainerRun, where: dict[str, Any], saved_by: int) -> str:
    """Save what the ranks have; all take that of the first, the furthest."""
    trial = trainer._trial
    trainer._resume_state, trainer._ranks_of_state = where, saved_by
    try:
        trainer._save_atomically(trainer.model_wrapped, trial)
        trainer._together("saving a checkpoint", trainer._wait_for_save)
    finally:
        trainer._ranks_of_state = 0
    folder = checkpoint.step_folder(trainer, checkpoint.run_dir(trainer, trial))
    (first, *_) = trainer._together("finding its folder", folder.encode)
    return first.decode()


def last_shards(trainer: TrainerRun) -> str:
    """The last checkpoint, and the model as it was before it was sharded."""
    found = checkpoint.last_checkpoint(trainer) or trainer.state.resumed_from
    if not found:
        raise RuntimeError(
            "shards of the model are lost with the ranks that died, and there is no "
            "checkpoint yet from which the others could resume"
        )
    trainer.optimizer = trainer.lr_scheduler = trainer._shard_group = None
    if trainer.model_init is None:
        trainer.model = trainer.model_wrapped = trainer._before_shards
    return found


def keep_unsharded(trainer: TrainerRun) -> None:
    """Keep the model as it is before it is sharded, without the values of its
    parameters, for last_shards()."""
    if least(trainer) is None or trainer.model_init is not None:
        return
    from ctrainer.fsdp import trained_model

    trainer._before_shards = trained_model.without_values(trainer.model)
