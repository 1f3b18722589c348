"""Trainer: what a checkpoint holds, and how a run resumes from one.

Functions that TrainerRun has as methods, and what these share. Each checkpoint is one
transaction around the hooks that write its files: it is written to a temporary folder,
RUN/.ctrainer-saving-X/checkpoint-N, whichever hooks are overridden: while a save is
open _get_output_dir() answers the folder above it, so that overrides which work out
the path themselves write there, too. All of it then appears at once, or nothing does.

On several ranks args.should_save says which write. Each rank has a file of its
generators' states and one of its sums of losses and its position, and of a sharded
model its shards. Where one rank writes, the others that see the folder join its save:
each writes its own files in the background, and the folder appears when all have.
Ranks that do not see it pass their files to those that write, when the save ends.
Every step is taken by all ranks, or by none.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import os
import shutil
from collections.abc import Callable
from os.path import realpath
from typing import TYPE_CHECKING, Any

from ctrainer.arguments.accelerator import config_of
from ctrainer.checkpoint import (
    PREFIX,
    CheckpointWriter,
    Sink,
    find_checkpoints,
    last_whole_checkpoint,
    read_own_state,
    to_json,
)
from ctrainer.checkpoint.disk import replacing
from ctrainer.checkpoint.files import is_there, naming
from ctrainer.comm.run import timeout_seconds
from ctrainer.runtime import messages
from ctrainer.runtime.fork import temporary_folder
from ctrainer.trainer import best
from ctrainer.trainer_state import TrainerState, is_exportable
from ctrainer.trainer_utils import has_length

if TYPE_CHECKING:
    from ctrainer.trainer.run import TrainerRun

logger = logging.getLogger("ctrainer.trainer")

STATE = "trainer_state.json"
OWN_STATE = "ctrainer_state.json"
SCALER = "scaler.pt"
AVERAGE = "weight_average.pt"
GENERATORS = "rng_state.pth"
_SAVING = "saving a checkpoint"
_WORTH_RESERVING = 16 << 20  # bytes; less is faulted in within milliseconds


def writer_of(trainer: TrainerRun) -> CheckpointWriter:
    """The trainer's writer, made at its first save."""
    if trainer._checkpoint_writer is None:
        trainer._checkpoint_writer = CheckpointWriter()
    # No copy where training waits in any case, nor of what is kept in files.
    plan = trainer._sharding
    in_files = plan is not None and (plan.offload_folder or plan.shard_folder)
    trainer._checkpoint_writer.snapshots = saves_later(trainer) and not in_files
    return trainer._checkpoint_writer


def saves_later(trainer: TrainerRun) -> bool:
    """Does training continue while a checkpoint is written?"""
    return bool(getattr(trainer.args, "async_save", True))


def save_atomically(
    trainer: TrainerRun, trial: Any, save: Callable[[], object]
) -> None:
    """Make of what save() writes one checkpoint, or nothing; inside of an open save it
    becomes part of that. Collective."""
    trainer._await_update()
    if trainer._staged_folder is not None:
        save()
        return

    def written() -> bytes:
        join_save(trainer)
        save()
        files, trainer._rank_files = trainer._rank_files, {}
        return json.dumps({"files": files, "joined": has_joined(trainer)}).encode()

    trainer._writes_checkpoint = bool(trainer.args.should_save)
    try:
        open_save(trainer, trial)
        reports = trainer._together(_SAVING, written)
        trainer._together(_SAVING, lambda: commit(trainer, reports))
    except BaseException:
        if trainer._checkpoint_writer is not None:
            with contextlib.suppress(
                Exception
            ):  # the first failure is the one to raise
                trainer._checkpoint_writer.abort()
                if not trainer._writes_checkpoint:
                    trainer._checkpoint_writer.wait()
        raise
    finally:
        trainer._staged_folder = None
    if getattr(trainer.args, "push_to_hub", False):
        trainer._wait_for_save()  # what is uploaded is in its place
        folder = step_folder(trainer, run_dir(trainer, trial))
        trainer._push_from_checkpoint(folder)


def save_checkpoint(
    trainer: TrainerRun, model: Any, trial: Any = None, metrics: Any = None
) -> None:
    """Save the model, optimizer, schedule, generators and state as checkpoint-N.

    Hook; called inside a save that makes the folder appear whole. An override may
    call super() and add files to _get_output_dir(trial)/checkpoint-N. Called by the
    user, it returns when the folder is in place.
    """
    save_atomically(trainer, trial, lambda: write(trainer, trial))
    trainer._wait_for_save()


def open_save(trainer: TrainerRun, trial: Any) -> None:
    """Open a save on the ranks that write; the others get its folder's path."""

    def begin() -> bytes | None:
        if not trainer._writes_checkpoint:
            if trainer._checkpoint_writer is not None:
                trainer._checkpoint_writer.wait()  # its files of the last save
            return None
        path = step_folder(trainer, run_dir(trainer, trial))
        return os.fsencode(writer_of(trainer).begin(path))

    folders = trainer._together(_SAVING, begin)
    if not any(folders):
        raise ValueError(
            "args.should_save is False on every rank: nobody would write the checkpoint"
        )
    trainer._staged_folder = os.fsdecode(next(filter(None, folders)))


def join_save(trainer: TrainerRun) -> None:
    """Take part in the save of the rank that writes, if this one sees its folder."""
    folder = trainer._staged_folder
    alone = trainer._writes_checkpoint or trainer.args.save_on_each_node
    if not alone and folder is not None and os.path.isdir(folder):
        writer_of(trainer).join(folder, trainer.args.process_index)


def has_joined(trainer: TrainerRun) -> bool:
    """Has this rank joined the save that another has opened?"""
    writer = trainer._checkpoint_writer
    return not trainer._writes_checkpoint and bool(writer and writer.folder)


def how_to_resume(trainer: TrainerRun, trial: Any) -> str:
    """What a run that was stopped has saved, and how to continue it."""
    step = trainer.state.global_step
    at = f"stopped at step {step} of {trainer.state.max_steps}"
    if trainer._saved_step != step or step == 0:
        return f"{at}; nothing was saved there"
    folder = step_folder(trainer, run_dir(trainer, trial))
    return f"{at}; to continue from {folder}: train(resume_from_checkpoint=True)"


def commit(trainer: TrainerRun, reports: list[bytes]) -> None:
    """Commit the open save with the files of all ranks; without args.async_save wait
    for the disk."""
    writer, waits = writer_of(trainer), not saves_later(trainer)
    if has_joined(trainer):
        writer.commit(wait=waits)
    if not trainer._writes_checkpoint:
        return
    assert writer.folder is not None
    each = [json.loads(text) for text in reports]
    for of_rank in each:
        for name, content in of_rank["files"].items():
            with open(os.path.join(writer.folder, name), "wb") as file:
                file.write(base64.b64decode(content))
    check_save(trainer)
    parts = [rank for rank, of_rank in enumerate(each) if of_rank["joined"]]
    writer.commit(wait=waits, parts=parts, timeout=timeout_seconds())


def write(trainer: TrainerRun, trial: Any) -> None:
    """Write all files into the folder of the open save.

    A schedule-free optimizer's average is what is worth keeping: the weights are
    written in its eval mode, and a training that is under way continues in train
    mode, as one that is resumed from the checkpoint does.
    """
    if trial is None:
        trainer.store_flos()
    folder = step_folder(trainer, trainer._get_output_dir(trial=trial))
    training = trainer.is_in_train
    set_mode("eval", trainer.optimizer)
    try:
        trainer._call_hook("save_model", folder, _internal_call=True)
        best.note_best(trainer, run_dir(trainer, trial))
        if not trainer.args.save_only_model:
            trainer._save_optimizer_and_scheduler(folder)
            trainer._save_scaler(folder)
            trainer._save_weight_average(folder)
            trainer._save_blocks(folder)
            trainer._save_rng_state(folder)
        save_trainer_state(trainer, folder)
        if trainer._writes_checkpoint:
            trainer._rotate_checkpoints()
    finally:
        if training:
            set_mode("train", trainer.optimizer)
    if is_overridden(trainer, "_save_checkpoint"):
        writer_of(trainer).show()  # checkpoint-N, for what follows super()


def flush_for_override(trainer: TrainerRun, sink: Sink, *names: str) -> None:
    """An override finds on the disk what super() has saved."""
    if sink.writer is not None and any(is_overridden(trainer, name) for name in names):
        sink.writer.flush()


def _copies_much(trainer: TrainerRun) -> bool:
    """Does this rank copy weights and state, or shards of them, at a save?"""
    copies = trainer.args.should_save
    if trainer._shard_group is not None:
        from ctrainer.fsdp import trained_model

        first = trained_model.is_first_replica(trainer.model, trainer._communicator)
        copies = first and (copies or not trainer.args.save_on_each_node)
    return copies and writer_of(trainer).snapshots


def reserve_snapshot(trainer: TrainerRun) -> None:
    """Ready the memory of the first save while the first steps run."""
    if trainer.args.save_strategy == "no" or not _copies_much(trainer):
        return
    nbytes, like = trainer._adapter.checkpoints.snapshot_bytes(
        trainer.model, trainer.optimizer
    )
    if nbytes >= _WORTH_RESERVING:
        slack = nbytes // 64 + (1 << 20)  # headers, alignment
        writer_of(trainer).reserve(nbytes + slack, like)


def save(
    trainer: TrainerRun,
    output_dir: str | None = None,
    state_dict: dict[str, Any] | None = None,
) -> None:
    """Save weights, configuration, processing class and arguments. Hook."""
    folder = trainer.args.output_dir if output_dir is None else output_dir
    os.makedirs(folder, exist_ok=True)
    sink = Sink(folder, writer_of(trainer))
    save_weights(trainer, sink, state_dict)
    tokenizer = getattr(trainer.data_collator, "tokenizer", None)
    processor: Any = trainer.processing_class or tokenizer
    if callable(getattr(processor, "save_pretrained", None)):
        processor.save_pretrained(folder)
    trainer._adapter.checkpoints.save_arguments(sink, trainer.args)
    flush_for_override(trainer, sink, "_save", "save_model")


def save_weights(
    trainer: TrainerRun, sink: Sink, state_dict: dict[str, Any] | None
) -> None:
    """Save the model's weights, or these, and its configuration."""
    files, model = trainer._adapter.checkpoints, trainer.model
    if trainer._shard_group is None or state_dict is None:
        files.save_model(sink, model, state_dict)
    elif state_dict:  # of which the writer needs no copy
        files.save_model(sink, model, state_dict)
    else:
        files.save_configuration(sink, model)


def save_scaler(trainer: TrainerRun, output_dir: str) -> None:
    """Save scaler.pt, the state of the loss scale, if there is one. Hook."""
    scaler = trainer._loss_scaler
    if scaler is not None and trainer.args.should_save:
        add_object(trainer, output_dir, SCALER, scaler.state_dict(), "_save_scaler")


def save_rng_state(trainer: TrainerRun, output_dir: str) -> None:
    """Save rng_state.pth, the states of all generators; of several ranks each its
    rng_state_RANK.pth. Hook."""
    name = of_rank(trainer, GENERATORS, trainer.args.world_size > 1)
    state = trainer._adapter.rng_state()
    add_object(trainer, output_dir, name, state, "_save_rng_state")


def save_trainer_state(trainer: TrainerRun, output_dir: str) -> None:
    """Save trainer_state.json, and in a file of ours what it has no place for."""
    if trainer.args.should_save:
        trainer.state.stateful_callbacks = new_state(trainer).stateful_callbacks
        trainer.state.save_to_json(os.path.join(output_dir, STATE))
    content = {
        "version": 1,
        "world_size": trainer._ranks_of_state or trainer.args.world_size,
        "loss": trainer._loss_state(),
        "resume": to_json(where(trainer)),
    }
    if trainer._evaluated:
        evaluated = trainer._evaluated.items()
        content["evaluated"] = [{"step": step, **values} for step, values in evaluated]
    name = own_state_file(trainer)
    add_file(trainer, output_dir, lambda sink: sink.json(name, content))
    trainer._saved_step = trainer.state.global_step


def new_state(trainer: TrainerRun) -> TrainerState:
    """A state of no step, with those of the callbacks that export one."""
    callbacks = [*trainer.callback_handler.callbacks, trainer.control]
    return TrainerState(stateful_callbacks=[c for c in callbacks if is_exportable(c)])


def save_state(trainer: TrainerRun) -> None:
    """Save the state as trainer_state.json in args.output_dir, on rank 0."""
    if trainer.is_world_process_zero():
        with replacing(os.path.join(trainer.args.output_dir, STATE)) as beside:
            trainer.state.save_to_json(beside)


def run_dir(trainer: TrainerRun, trial: Any = None) -> str:
    """Where the checkpoints of this run, or of this trial of a search, end up."""
    folder = str(os.fspath(trainer.args.output_dir))
    if trial is None or trainer.hp_search_backend is None:
        return folder
    return os.path.join(folder, trainer._run_name(trial))


def check_save(trainer: TrainerRun) -> None:
    """Replace paths that an override took from the temporary folder by the final
    ones, before the save is committed."""
    staged = writer_of(trainer).folder
    if not is_overridden(trainer, "_save_checkpoint") or staged is None:
        return
    temporary, final = os.path.dirname(staged), run_dir(trainer, trainer._trial)
    best = trainer.state.best_model_checkpoint
    if best is not None and best.startswith(temporary):
        trainer.state.best_model_checkpoint = final + best[len(temporary) :]
    path = os.path.join(staged, STATE)
    if os.path.isfile(path):
        with open(path, encoding="utf-8") as file:
            text = file.read()
        fixed = text.replace(json.dumps(temporary)[1:-1], json.dumps(final)[1:-1])
        if fixed != text:
            with open(path, "w", encoding="utf-8") as file:
                file.write(fixed)


def sorted_checkpoints(
    trainer: TrainerRun,
    output_dir: str | None = None,
    checkpoint_prefix: str = PREFIX,
    use_mtime: bool = False,
) -> list[str]:
    """Checkpoints by rising step, those that rotation must keep at the end.

    use_mtime is for callers of transformers 4 and changes nothing: a file written
    into an old folder must not make it the newest.
    """
    folder = run_dir(trainer) if output_dir is None else output_dir
    found = find_checkpoints(folder, checkpoint_prefix)
    kept = best.best_checkpoints(trainer, found) | set(map(realpath, found[-1:]))
    return sorted(found, key=lambda path: realpath(path) in kept)


def rotate_checkpoints(
    trainer: TrainerRun, use_mtime: bool = False, output_dir: str | None = None
) -> None:
    """Remove the oldest checkpoints, by step, beyond args.save_total_limit, never
    the best or the last; while one is being made, as soon as that is in place. With
    args.save_best_limit remove all but so many newest and the best."""
    limit = trainer.args.save_total_limit or 0
    if limit <= 0 and getattr(trainer.args, "save_best_limit", None) is None:
        return
    writer = writer_of(trainer)
    run, new = run_dir(trainer, trainer._trial), None
    if writer.folder is not None:
        new = os.path.join(run, os.path.basename(writer.folder))
    remove = shutil.rmtree if new is None else writer.remove_after
    searched = run if output_dir is None else output_dir
    for folder in beyond_limit(trainer, limit, searched, new):
        remove(folder)


def leave_best(trainer: TrainerRun, trial: Any) -> None:
    """At the end of a run with save_total_limit=1, remove all checkpoints but the best,
    those of save_best_limit among them."""
    one, args = trainer.state.best_model_checkpoint, trainer.args
    if one is None or args.save_total_limit != 1 or not args.should_save:
        return
    found = find_checkpoints(run_dir(trainer, trial))
    if realpath(one) in map(realpath, found):
        kept = best.best_checkpoints(trainer, found)
        for folder in found:
            if realpath(folder) not in kept:
                messages.deleting(folder)
                shutil.rmtree(folder, ignore_errors=True)


def beyond_limit(
    trainer: TrainerRun, limit: int, run: str, new: str | None
) -> list[str]:
    found = find_checkpoints(run) if os.path.isdir(run) else []
    every = [p for p in found if new is None or realpath(p) != realpath(new)]
    known = [*every, *([] if new is None else [new])]
    kept = best.best_checkpoints(trainer, known) | set(map(realpath, known[-1:]))
    if getattr(trainer.args, "save_best_limit", None) is not None:
        kept |= set(map(realpath, known[-max(limit, 1) :]))
        limit = 0
    extra = len(known) - max(limit, len(kept))
    return [p for p in every if realpath(p) not in kept][: max(extra, 0)]


def last_checkpoint(trainer: TrainerRun) -> str | None:
    """The newest whole checkpoint in args.output_dir, the same on all ranks."""
    found = last_whole_checkpoint(trainer.args.output_dir)
    name = os.path.basename(found or "").encode()
    names = trainer._together("looking for a checkpoint", lambda: name)
    if len(set(names)) > 1:
        seen = ", ".join(f"rank {r}: {n.decode()!r}" for r, n in enumerate(names))
        raise ValueError(
            f"the ranks find different checkpoints in {trainer.args.output_dir} "
            f"({seen}); name one that all of them have"
        )
    return found


def take_optimizer_and_scheduler(
    trainer: TrainerRun, checkpoint: str, optimizer: Any, scheduler: Any
) -> None:
    """Load both states, unless both are missing."""
    if optimizer is None and scheduler is None:
        logger.warning(
            "%s has no state of optimizer and schedule (save_only_model?): both "
            "start anew", checkpoint,
        )  # fmt: skip
        return
    parts = (
        (os.path.join(checkpoint, "optimizer.pt"), trainer.optimizer, optimizer),
        (os.path.join(checkpoint, "scheduler.pt"), trainer.lr_scheduler, scheduler),
    )
    for path, _, state in parts:
        if state is None:
            raise ValueError(
                f"{path}: is missing, and the other one is there: restore it, or "
                "remove both to start optimizer and schedule anew"
            )
    for path, part, state in parts:
        with naming(path):
            part.load_state_dict(state)


def load_scaler(trainer: TrainerRun, checkpoint: str | None) -> None:
    """Load scaler.pt, the state of the loss scale, if there is one. Hook."""
    if checkpoint is None or trainer._loss_scaler is None:
        return
    state = trainer._adapter.checkpoints.load_object(checkpoint, SCALER)
    if state is None:
        logger.warning("%s has no loss scale: it starts anew", checkpoint)
        return
    try:
        trainer._loss_scaler.load_state_dict(state)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{os.path.join(checkpoint, SCALER)}: {error}; set loss_scaler to what "
            "saved it, or remove the file to start the scale anew"
        ) from error


def load_trainer_state(trainer: TrainerRun, checkpoint: str) -> None:
    """Take over the state of the run, its callbacks' and our own."""
    path = os.path.join(checkpoint, STATE)
    fresh = trainer.state
    trainer.state = TrainerState.load_from_json(path)
    best = trainer.state.best_model_checkpoint
    if best is not None and not os.path.isdir(best):
        messages.no_best(best)
        trainer.state.best_model_checkpoint = None
    trainer.compare_trainer_and_checkpoint_args(trainer.args, trainer.state)
    for name in ("logging_steps", "eval_steps", "save_steps", "train_batch_size"):
        setattr(trainer.state, name, getattr(fresh, name))
    with naming(path):
        trainer._load_callback_state()
    load_own_state(trainer, checkpoint)


def load_callback_state(trainer: TrainerRun) -> None:
    """Give callbacks that export a state what they had; with
    args.restore_callback_states_from_checkpoint their arguments too."""
    full = bool(trainer.args.restore_callback_states_from_checkpoint)
    left = {
        name: list(states) if isinstance(states, list) else [states]
        for name, states in (trainer.state.stateful_callbacks or {}).items()
    }
    controls = [trainer.control] if full else []
    for callback in [*trainer.callback_handler.callbacks, *controls]:
        states = left.get(type(callback).__name__)
        if states and is_exportable(callback):
            state = states.pop(0)
            values = state.get("args", {}) if full else {}
            for name, value in {**values, **state.get("attributes", {})}.items():
                setattr(callback, name, value)
    everyone = [*trainer.callback_handler.callbacks, trainer.control]
    there = {type(callback).__name__ for callback in everyone}
    messages.missing_callbacks(name for name in left if name not in there)


def add_file(trainer: TrainerRun, folder: str, write: Callable[[Sink], None]) -> None:
    """Let write(sink) put a file of this rank's into the checkpoint, through a rank
    that writes where this one does not see the folder."""
    if trainer.args.should_save or has_joined(trainer):
        write(Sink(folder, writer_of(trainer)))
    else:
        with temporary_folder() as own:
            write(Sink(own, None))
            for entry in os.scandir(own):
                with open(entry.path, "rb") as file:
                    content = base64.b64encode(file.read()).decode()
                trainer._rank_files[entry.name] = content


def add_object(
    trainer: TrainerRun, folder: str, name: str, state: Any, hook: str
) -> None:
    """add_file() of an object, which overrides of the hook find there."""

    def write(sink: Sink) -> None:
        trainer._adapter.checkpoints.save_object(sink, name, state)
        flush_for_override(trainer, sink, hook)

    add_file(trainer, folder, write)


def saved_object(trainer: TrainerRun, checkpoint: str, name: str, without: str) -> Any:
    """An object that add_object() has saved; None, with a warning of what happens
    without it, where there is none."""
    state = trainer._adapter.checkpoints.load_object(checkpoint, name)
    if state is None:
        logger.warning("%s has no %s: %s", checkpoint, name, without)
    return state


def of_rank(trainer: TrainerRun, name: str, own: bool) -> str:
    """A file's name, with the rank's number in it where each has its own."""
    stem, extension = os.path.splitext(name)
    return f"{stem}_{trainer.args.process_index}{extension}" if own else name


def load_rng_state(trainer: TrainerRun, checkpoint: str | None) -> None:
    """Set all generators as they were when the checkpoint was saved. Hook."""
    if checkpoint is None:
        return
    name = of_rank(trainer, GENERATORS, trainer.args.world_size > 1)
    state = trainer._adapter.checkpoints.load_object(checkpoint, name)
    if state is None:
        logger.warning(
            "%s has no %s: random numbers will differ from those of a run that was "
            "not interrupted%s", checkpoint, name, _ranks_of(checkpoint),
        )  # fmt: skip
        return
    with naming(os.path.join(checkpoint, name)):
        trainer._adapter.set_rng_state(state)


def own_state_file(trainer: TrainerRun) -> str:
    return of_rank(trainer, OWN_STATE, trainer.args.process_index > 0)


def where(trainer: TrainerRun) -> dict[str, Any]:
    """The generators at the beginning of the epoch, and the place in its data."""
    reader = trainer._reader
    if reader is None:
        return trainer._resume_state
    loader = reader.loader
    length = len(loader) if has_length(loader) else None
    data = {**reader.state(), "length": length, "rows": step_rows(trainer)}
    done = trainer._epoch_done
    return {**trainer._resume_state, "data": data, "epoch_done": done}


def load_own_state(trainer: TrainerRun, checkpoint: str) -> None:
    """Take over the sums and the position of this rank; of a checkpoint that
    another number of ranks has saved the sums alone, as means over those ranks."""
    with naming(os.path.join(checkpoint, STATE)):
        best.recall(trainer, trainer.state.log_history)
    path = os.path.join(checkpoint, own_state_file(trainer))
    if not is_there(path):
        path = os.path.join(checkpoint, OWN_STATE)
    if not is_there(path):
        trainer._set_loss_state(**_loss_of_history(trainer.state))
        return
    content = read_own_state(path)
    saved_by, resume = content.get("world_size", 1), content["resume"]
    trainer._resumes_ranks = saved_by == trainer.args.world_size
    sums = content["loss"]
    if not trainer._resumes_ranks:
        sums = _of_each_rank(checkpoint, saved_by, trainer.state.global_step)
    with naming(path):
        best.recall(trainer, content.get("evaluated", ()))
        trainer._set_loss_state(**sums)
    rows = (resume.get("data") or {}).get("rows", step_rows(trainer))
    trainer._resume_state = resume
    if trainer._resumes_ranks and rows == step_rows(trainer):
        return
    if not trainer._resumes_ranks:
        changed = f"by {saved_by} rank(s) and {trainer.args.world_size} resume from it"
    else:
        changed = f"with {rows} rows a micro-batch and resumes with "
        changed += f"{step_rows(trainer)}"
    trainer._resume_state, again = for_other_batches(trainer, resume)
    logger.warning(
        "%s was saved %s: the epoch continues with the following rows, distributed "
        "anew, and with other random numbers%s", checkpoint, changed,
        f"; the last {again} rows before them are trained on again, where the update "
        "that has them begins" if again else "",
    )  # fmt: skip


def _of_each_rank(checkpoint: str, saved_by: int, step: int) -> dict[str, Any]:
    """The sums for any rank where so many ranks have saved theirs: with the mean loss
    of them all."""
    stem, extension = os.path.splitext(OWN_STATE)
    names = [OWN_STATE, *(f"{stem}_{rank}{extension}" for rank in range(1, saved_by))]
    paths = (os.path.join(checkpoint, name) for name in names)
    found = [read_own_state(path)["loss"] for path in paths if is_there(path)]
    sums = dict(found[0])
    start = sums.get("window_start", step)
    for kind, updates in (("window", step - start), ("total", start)):
        loss, bad = (
            sum(of_rank.get(f"{kind}_{name}", 0) for of_rank in found)
            for name in ("loss", "bad")
        )
        count = len(found) * updates - bad
        sums[f"{kind}_bad"] = skipped = bad // len(found)
        sums[f"{kind}_loss"] = loss / count * (updates - skipped) if count > 0 else 0.0
    return sums


def for_other_batches(
    trainer: TrainerRun, resume: dict[str, Any]
) -> tuple[dict[str, Any], int]:
    """Where this run's ranks and batches are in the data when those that saved the
    checkpoint have seen their rows, and how many of these are seen again, since an
    update has begun before them."""
    data = resume.get("data")
    if data is None or trainer.args.ignore_data_skip:
        return {}, 0
    seen = data["place"] * data["rows"]
    if 0 < (data["length"] or 0) <= data["place"]:
        return resume | {"epoch_done": True}, 0  # at the end of an epoch
    rows = step_rows(trainer)
    again = seen % (rows * trainer.args.gradient_accumulation_steps)
    for known in ("last", "states") if trainer._resumes_ranks or again else ("last",):
        data.pop(known, None)
    data["place"], data["length"] = (seen - again) // rows, None
    return resume, again


def step_rows(trainer: TrainerRun) -> int:
    """Rows that all ranks take in one step of an epoch."""
    whole = config_of(getattr(trainer.args, "accelerator_config", None)).split_batches
    return trainer._train_batch_size * (1 if whole else trainer.args.world_size)


def step_folder(trainer: TrainerRun, run: str) -> str:
    """The checkpoint's folder, checkpoint-N, in that of the run."""
    return f"{run}/{PREFIX}-{trainer.state.global_step}"


def set_mode(mode: str, *parts: Any) -> None:
    """Call .eval() or .train() of models and optimizers that have modes."""
    for part in parts:
        change = getattr(part, mode, None)
        if callable(change):
            change()


def is_overridden(trainer: TrainerRun, name: str) -> bool:
    """Has a subclass, or the instance, a method of its own under this name?"""
    from ctrainer.trainer import Trainer

    return name in vars(trainer) or getattr(type(trainer), name) is not getattr(
        Trainer, name
    )


def _ranks_of(checkpoint: str) -> str:
    """What to add where the generators' states are those of other ranks."""
    names = [name for name in os.listdir(checkpoint) if name.startswith("rng_state")]
    found = ", ".join(sorted(names))
    return f"; it has {found}, saved by another number of ranks" if names else ""


def _loss_of_history(state: TrainerState) -> dict[str, Any]:
    """The sums of a run that transformers saved, as far as its logs show: each has the
    mean loss of the steps since the one before."""
    total, last = 0.0, 0
    for entry in state.log_history:
        if "loss" in entry and "step" in entry:
            total += entry["loss"] * (entry["step"] - last)
            last = entry["step"]
    at = state.global_step
    return {"total_loss": total, "total_bad": at - last, "window_start": at}
