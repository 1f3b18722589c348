"""Trainer: what a checkpoint holds, and how a run resumes from one.

Functions that TrainerRun has as methods, and what these share. Each checkpoint is one
transaction around the hooks that write its files: it is written to a temporary folder,
RUN/.ctrainer-saving-X/checkpoint-N, whichever hooks are overridden: while a save is
open _get_output_dir() answers the folder above it, so that overrides which work out
the path themselves write there, too. All of it then appears at once, or nothing does.

On several ranks args.should_save says which write. Each rank has a file of its
generators' states and one of its sums of losses and its position; ranks that do not
write and do not see the folder pass their files to those that do, when the save
ends. Every step is taken by all ranks, or by none.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import shutil
from collections.abc import Callable
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
from ctrainer.runtime.fork import temporary_folder
from ctrainer.runtime.hooks import call_adapted
from ctrainer.trainer_state import TrainerState, is_exportable
from ctrainer.trainer_utils import has_length

if TYPE_CHECKING:
    from ctrainer.trainer.run import TrainerRun

logger = logging.getLogger("ctrainer.trainer")

STATE = "trainer_state.json"
OWN_STATE = "ctrainer_state.json"
SCALER = "scaler.pt"
_SAVING = "saving a checkpoint"
_Save = Callable[[], Any]
_WORTH_RESERVING = 16 << 20  # bytes; less is faulted in within milliseconds


def writer_of(trainer: TrainerRun) -> CheckpointWriter:
    """The trainer's writer, made at its first save."""
    if trainer._checkpoint_writer is None:
        trainer._checkpoint_writer = CheckpointWriter()
    return trainer._checkpoint_writer


def save_atomically(trainer: TrainerRun, trial: Any, save: _Save) -> None:
    """Make of what save() writes one checkpoint, or nothing. Collective."""
    open_save(trainer, trial)

    def written() -> bytes:
        save()
        return take_rank_files(trainer)

    try:
        files = trainer._together(_SAVING, written)
    except BaseException:
        drop_save(trainer)
        raise
    trainer._together(_SAVING, lambda: commit(trainer, files))


def save_checkpoint(
    trainer: TrainerRun, model: Any, trial: Any = None, metrics: Any = None
) -> None:
    """Save the model, optimizer, schedule, generators and state as checkpoint-N.

    Hook; called inside a save that makes the folder appear whole. An override may
    call super() and add files to _get_output_dir(trial)/checkpoint-N. Called by the
    user, it returns when the folder is in place.
    """
    if trainer._staged_folder is not None:
        write(trainer, trial)
        return
    save_atomically(trainer, trial, lambda: write(trainer, trial))
    trainer._wait_for_save()


def open_save(trainer: TrainerRun, trial: Any) -> None:
    """Open a save on the ranks that write; the others get its folder's path."""
    trainer._writes_checkpoint = bool(trainer.args.should_save)

    def begin() -> bytes | None:
        if not trainer._writes_checkpoint:
            return None
        path = step_folder(trainer, run_dir(trainer, trial))
        return os.fsencode(writer_of(trainer).begin(path))

    try:
        folders = trainer._together(_SAVING, begin)
        if not any(folders):
            raise ValueError(
                "args.should_save is False on every rank: nobody would write the "
                "checkpoint"
            )
    except BaseException:
        drop_save(trainer)
        raise
    trainer._staged_folder = os.fsdecode(next(filter(None, folders)))


def commit(trainer: TrainerRun, files: list[bytes]) -> None:
    """Commit the open save; without args.async_save wait for the disk."""
    if not trainer._writes_checkpoint:
        trainer._staged_folder = None
        return
    writer = writer_of(trainer)
    try:
        add_rank_files(trainer, files)
        check_save(trainer)
        writer.commit()
    except BaseException:
        drop_save(trainer)
        raise
    trainer._staged_folder = None
    if not trainer.args.async_save:
        writer.wait()


def drop_save(trainer: TrainerRun) -> None:
    """Drop the open save, if this rank has one, under the exception that is set."""
    trainer._staged_folder = None
    if trainer._writes_checkpoint:
        with contextlib.suppress(Exception):
            writer_of(trainer).abort()


def write(trainer: TrainerRun, trial: Any) -> None:
    """Write all files into the folder of the open save.

    A schedule-free optimizer's average is what is worth keeping: the weights are
    written in its eval mode, and a training that is under way continues in train
    mode, as one that is resumed from the checkpoint does.
    """
    if trial is None:
        trainer.store_flos()
    folder = step_folder(trainer, trainer._get_output_dir(trial))
    training = trainer.is_in_train
    call_if_there(trainer.optimizer, "eval")
    try:
        write_parts(trainer, folder, trial)
    finally:
        if training:
            call_if_there(trainer.optimizer, "train")
    if trainer._writes_checkpoint and is_overridden(trainer, "_save_checkpoint"):
        writer_of(trainer).show()  # checkpoint-N, for what follows super()


def write_parts(trainer: TrainerRun, folder: str, trial: Any) -> None:
    call_adapted(trainer.save_model, folder, _internal_call=True)
    note_best(trainer, trial)
    if not trainer.args.save_only_model:
        trainer._save_optimizer_and_scheduler(folder)
        trainer._save_scaler(folder)
        trainer._save_weight_average(folder)
        trainer._save_blocks(folder)
        trainer._save_rng_state(folder)
    save_trainer_state(trainer, folder)
    if trainer._writes_checkpoint:
        trainer._rotate_checkpoints()


def sink_of(trainer: TrainerRun, folder: str) -> Sink:
    return Sink(folder, writer_of(trainer))


def flush_for_override(trainer: TrainerRun, sink: Sink, *names: str) -> None:
    """An override finds on the disk what super() has saved."""
    if sink.writer is not None and any(is_overridden(trainer, name) for name in names):
        sink.writer.flush()


def reserve_snapshot(trainer: TrainerRun) -> None:
    """Ready the memory of the first save while the first steps run."""
    if trainer.args.save_strategy == "no" or not trainer.args.should_save:
        return
    nbytes = trainer._adapter.checkpoints.snapshot_bytes(
        trainer.model, trainer.optimizer
    )
    if nbytes >= _WORTH_RESERVING:
        slack = nbytes // 64 + (1 << 20)  # headers, alignment
        writer_of(trainer).reserve(nbytes + slack)


def save(
    trainer: TrainerRun,
    output_dir: str | None = None,
    state_dict: dict[str, Any] | None = None,
) -> None:
    """Save weights, configuration, processing class and arguments. Hook."""
    folder = trainer.args.output_dir if output_dir is None else output_dir
    os.makedirs(folder, exist_ok=True)
    sink = sink_of(trainer, folder)
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
    elif state_dict:  # straight to the disk: a copy would be of the whole model
        files.save_model(Sink(sink.folder, None), model, state_dict)
    else:
        files.save_configuration(sink, model)


def save_object(
    trainer: TrainerRun, folder: str, name: str, state: Any, hook: str
) -> None:
    """Save an object as a file of the folder, by the ranks that write."""
    if trainer.args.should_save:
        sink = sink_of(trainer, folder)
        trainer._adapter.checkpoints.save_object(sink, name, state)
        flush_for_override(trainer, sink, hook)


def save_scaler(trainer: TrainerRun, output_dir: str) -> None:
    """Save scaler.pt, the state of the loss scale, if there is one. Hook."""
    scaler = trainer._loss_scaler
    if scaler is not None:
        save_object(trainer, output_dir, SCALER, scaler.state_dict(), "_save_scaler")


def save_weight_average(trainer: TrainerRun, output_dir: str) -> None:
    """Save weight_average.pt, the averaged weights, if there are any; of a sharded
    model each rank its part. Hook."""
    average, name = trainer.weight_average, average_file(trainer)
    if average is None:
        return
    if trainer._shard_group is None:
        hook = "_save_weight_average"
        save_object(trainer, output_dir, name, average.state_dict(), hook)
    else:
        add_object(trainer, output_dir, name, average.state_dict())


def average_file(trainer: TrainerRun) -> str:
    if trainer._shard_group is None:
        return "weight_average.pt"
    return f"weight_average_{trainer.args.process_index}.pt"


def save_rng_state(trainer: TrainerRun, output_dir: str) -> None:
    """Save rng_state.pth, the states of all generators; of several ranks each its
    rng_state_RANK.pth. Hook."""
    state = trainer._adapter.rng_state()
    sink = add_object(trainer, output_dir, rng_file(trainer), state)
    if sink is not None:
        flush_for_override(trainer, sink, "_save_rng_state")


def save_trainer_state(trainer: TrainerRun, output_dir: str) -> None:
    """Save trainer_state.json, and in a file of ours what it has no place for."""
    callbacks = [*trainer.callback_handler.callbacks, trainer.control]
    stateful = [c for c in callbacks if is_exportable(c)]
    trainer.state.stateful_callbacks = TrainerState(
        stateful_callbacks=stateful
    ).stateful_callbacks
    if trainer.args.should_save:
        trainer.state.save_to_json(os.path.join(output_dir, STATE))
    write_own_state(trainer, output_dir)
    trainer._saved_step = trainer.state.global_step


def save_state(trainer: TrainerRun) -> None:
    """Save the state as trainer_state.json in args.output_dir, on rank 0."""
    if trainer.is_world_process_zero():
        with replacing(os.path.join(trainer.args.output_dir, STATE)) as beside:
            trainer.state.save_to_json(beside)


def push_saved_model(trainer: TrainerRun) -> None:
    if getattr(trainer.args, "push_to_hub", False) and trainer.is_world_process_zero():
        push: Any = getattr(trainer, "push_to_hub")  # noqa: B009
        push(commit_message="Model save")


def run_dir(trainer: TrainerRun, trial: Any = None) -> str:
    """Where the checkpoints of this run, or of this trial of a search, end up."""
    folder = str(os.fspath(trainer.args.output_dir))
    if trial is None or getattr(trainer, "hp_search_backend", None) is None:
        return folder
    name = getattr(trainer, "hp_name", None)
    return os.path.join(folder, name(trial) if name else f"run-{trial.number}")


def note_best(trainer: TrainerRun, trial: Any = None) -> None:
    """Let the state say where the best checkpoint is, or will be in a moment."""
    best = trainer.state.best_global_step
    if best and trainer.args.save_strategy != "no":
        path = os.path.join(run_dir(trainer, trial), f"{PREFIX}-{best}")
        if best == trainer.state.global_step or os.path.isdir(path):
            trainer.state.best_model_checkpoint = path


def check_save(trainer: TrainerRun) -> None:
    """Replace paths that an override took from the temporary folder by the final
    ones, before the save is committed."""
    staged = writer_of(trainer).folder
    if not is_overridden(trainer, "_save_checkpoint") or staged is None:
        return
    temporary, final = (
        os.path.dirname(staged),
        run_dir(trainer, getattr(trainer, "_trial", None)),
    )
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
    kept = {_real(p) for p in (trainer.state.best_model_checkpoint, *found[-1:]) if p}
    return sorted(found, key=lambda path: _real(path) in kept)


def rotate_checkpoints(
    trainer: TrainerRun, use_mtime: bool = False, output_dir: str | None = None
) -> None:
    """Remove the oldest checkpoints, by step, beyond args.save_total_limit, never
    the best or the last; while one is being made, as soon as that is in place."""
    limit = trainer.args.save_total_limit
    if limit is None or limit <= 0:
        return
    writer = writer_of(trainer)
    run, new = run_dir(trainer, getattr(trainer, "_trial", None)), None
    if writer.folder is not None:
        new = os.path.join(run, os.path.basename(writer.folder))
    doomed = beyond_limit(
        trainer, limit, run if output_dir is None else output_dir, new
    )
    for folder in doomed:
        if new is None:
            shutil.rmtree(folder)
        else:
            writer.remove_after(folder)


def beyond_limit(
    trainer: TrainerRun, limit: int, run: str, new: str | None
) -> list[str]:
    found = find_checkpoints(run) if os.path.isdir(run) else []
    every = [p for p in found if new is None or _real(p) != _real(new)]
    kept = {_real(p) for p in (trainer.state.best_model_checkpoint, new) if p}
    if new is None and every:
        kept.add(_real(every[-1]))
    extra = len(every) + (new is not None) - max(limit, len(kept))
    return [p for p in every if _real(p) not in kept][: max(extra, 0)]


def determine_best_metric(
    trainer: TrainerRun, metrics: dict[str, float], trial: Any = None
) -> bool:
    """Is this evaluation the best so far? Notes it in the state if so. Hook.

    Raises KeyError when metric_for_best_model is not among the metrics.
    """
    name = trainer.args.metric_for_best_model
    if name is None:
        return False
    name = name if name.startswith("eval_") else f"eval_{name}"
    if name not in metrics:
        raise KeyError(
            f"metric_for_best_model={name!r} is not among the metrics of the "
            f"evaluation, which are {sorted(metrics)}"
        )
    value, best = metrics[name], trainer.state.best_metric
    greater = bool(trainer.args.greater_is_better)
    if best is None:
        best = float("-inf") if greater else float("inf")
    if not (value > best if greater else value < best):
        return False
    trainer.state.best_metric = value
    if trainer.args.save_strategy != "no":
        trainer.state.best_global_step = trainer.state.global_step
    return True


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
    paths = [os.path.join(checkpoint, n) for n in ("optimizer.pt", "scheduler.pt")]
    if optimizer is None and scheduler is None:
        logger.warning(
            "%s has no state of optimizer and schedule (save_only_model?): both "
            "start anew", checkpoint,
        )  # fmt: skip
        return
    for path, state in zip(paths, (optimizer, scheduler), strict=True):
        if state is None:
            raise ValueError(
                f"{path}: is missing, and the other one is there: restore it, or "
                "remove both to start optimizer and schedule anew"
            )
    with naming(paths[0]):
        trainer.optimizer.load_state_dict(optimizer)
    with naming(paths[1]):
        trainer.lr_scheduler.load_state_dict(scheduler)


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


def load_weight_average(trainer: TrainerRun, checkpoint: str | None) -> None:
    if checkpoint is None or trainer.weight_average is None:
        return
    name = average_file(trainer)
    state = trainer._adapter.checkpoints.load_object(checkpoint, name)
    if state is None:
        logger.warning(
            "%s has no %s: the average starts from its weights", checkpoint, name
        )
        return
    with naming(os.path.join(checkpoint, name)):
        trainer.weight_average.load_state_dict(state)


def load_trainer_state(trainer: TrainerRun, checkpoint: str) -> None:
    """Take over the state of the run, its callbacks' and our own."""
    path = os.path.join(checkpoint, STATE)
    fresh = trainer.state
    trainer.state = TrainerState.load_from_json(path)
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
    candidates = [
        *trainer.callback_handler.callbacks,
        *([trainer.control] if full else []),
    ]
    for callback in candidates:
        states = left.get(type(callback).__name__)
        if states and is_exportable(callback):
            _restore(callback, states.pop(0), full)


def add_file(
    trainer: TrainerRun, folder: str, write: Callable[[Sink], None]
) -> Sink | None:
    """Let write(sink) put a file of this rank's into the checkpoint; return where
    it went, None on its way to another rank."""
    if trainer.args.should_save:
        sink = sink_of(trainer, folder)
        write(sink)
        return sink
    if os.path.isdir(folder) and not trainer.args.save_on_each_node:
        write(Sink(folder, None))  # of no other save: its name is not used again
        return None
    with temporary_folder() as own:
        write(Sink(own, None))
        for entry in os.scandir(own):
            with open(entry.path, "rb") as file:
                trainer._rank_files[entry.name] = file.read()
    return None


def add_object(trainer: TrainerRun, folder: str, name: str, state: Any) -> Sink | None:
    """add_file() of an object."""
    save = trainer._adapter.checkpoints.save_object
    return add_file(trainer, folder, lambda sink: save(sink, name, state))


def take_rank_files(trainer: TrainerRun) -> bytes:
    """The files that this rank passes on: a line of JSON with their sizes in bytes
    by their names, then one after the other."""
    files, trainer._rank_files = trainer._rank_files, {}
    sizes = {name: len(content) for name, content in files.items()}
    return b"".join([json.dumps(sizes).encode(), b"\n", *files.values()])


def add_rank_files(trainer: TrainerRun, parcels: list[bytes]) -> None:
    """Put the files of all ranks into the open save."""
    folder = writer_of(trainer).folder
    assert folder is not None
    for parcel in map(io.BytesIO, parcels):
        for name, size in json.loads(parcel.readline()).items():
            with open(os.path.join(folder, name), "wb") as file:
                file.write(parcel.read(size))


def rng_file(trainer: TrainerRun) -> str:
    """rng_state.pth, or rng_state_RANK.pth of a rank of several."""
    if trainer.args.world_size == 1:
        return "rng_state.pth"
    return f"rng_state_{trainer.args.process_index}.pth"


def load_rng_state(trainer: TrainerRun, checkpoint: str | None) -> None:
    """Set all generators as they were when the checkpoint was saved. Hook."""
    if checkpoint is None:
        return
    name = rng_file(trainer)
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
    rank = trainer.args.process_index
    return OWN_STATE if rank == 0 else f"ctrainer_state_{rank}.json"


def write_own_state(trainer: TrainerRun, output_dir: str) -> None:
    content = {
        "version": 1,
        "world_size": trainer.args.world_size,
        "loss": trainer._loss_state(),
        "resume": to_json(where(trainer)),
    }
    name = own_state_file(trainer)
    add_file(trainer, output_dir, lambda sink: sink.json(name, content))


def where(trainer: TrainerRun) -> dict[str, Any]:
    """The generators at the beginning of the epoch, and the place in its data."""
    reader = trainer._reader
    if reader is None:
        return trainer._resume_state
    loader = reader.loader
    length = len(loader) if has_length(loader) else None
    data = {**reader.state(), "length": length, "rows": step_rows(trainer)}
    return {**trainer._resume_state, "data": data}


def load_own_state(trainer: TrainerRun, checkpoint: str) -> None:
    """Take over the sums and the position of this rank; of a checkpoint that
    another number of ranks has saved the sums alone, for a new rank those of the
    first."""
    path = os.path.join(checkpoint, own_state_file(trainer))
    if not is_there(path):
        path = os.path.join(checkpoint, OWN_STATE)
    if not is_there(path):
        trainer._set_loss_state(**_loss_of_history(trainer.state))
        return
    content = read_own_state(path)
    with naming(path):
        trainer._set_loss_state(**content["loss"])
    saved_by = content.get("world_size", 1)
    trainer._resumes_ranks = saved_by == trainer.args.world_size
    if trainer._resumes_ranks:
        trainer._resume_state = content["resume"]
        return
    trainer._resume_state = for_other_ranks(trainer, content, checkpoint)
    logger.warning(
        "%s was saved by %d rank(s) and %d resume from it: the epoch continues "
        "with the following rows, distributed anew, and with other random numbers",
        checkpoint, saved_by, trainer.args.world_size,
    )  # fmt: skip


def for_other_ranks(
    trainer: TrainerRun, content: dict[str, Any], checkpoint: str
) -> dict[str, Any]:
    """Where this number of ranks is in the data when the ranks that saved it have
    seen their rows. Raises ValueError where that is within an update."""
    resume: dict[str, Any] = content["resume"]
    data = resume.get("data")
    if data is None or trainer.args.ignore_data_skip:
        return {}
    seen = data["place"] * data["rows"]
    if 0 < (data["length"] or 0) <= data["place"]:
        return resume  # at the end of an epoch
    rows = step_rows(trainer)
    update = rows * trainer.args.gradient_accumulation_steps
    if seen % update:
        raise ValueError(
            f"{checkpoint} was saved by {content['world_size']} rank(s) after "
            f"{seen} rows of the epoch, and the updates of this run, of "
            f"{update} rows, begin at none "
            "of their multiples: choose per_device_train_batch_size and "
            "gradient_accumulation_steps so that an update has as many rows as "
            "before, or begin the epoch's data anew with ignore_data_skip=True"
        )
    data.pop("last", None)
    data["place"], data["length"] = seen // rows, None
    return resume


def step_rows(trainer: TrainerRun) -> int:
    """Rows that all ranks take in one step of an epoch."""
    whole = config_of(getattr(trainer.args, "accelerator_config", None)).split_batches
    return trainer._train_batch_size * (1 if whole else trainer.args.world_size)


def step_folder(trainer: TrainerRun, run: str) -> str:
    """The checkpoint's folder, checkpoint-N, in that of the run."""
    return f"{run}/{PREFIX}-{trainer.state.global_step}"


def call_if_there(part: Any, mode: str) -> None:
    """part.train() or part.eval(), where it has modes."""
    method = getattr(part, mode, None)
    if callable(method):
        method()


def is_overridden(trainer: TrainerRun, name: str) -> bool:
    """Has a subclass, or the instance, a method of its own under this name?"""
    from ctrainer.trainer import Trainer

    return name in vars(trainer) or getattr(type(trainer), name) is not getattr(
        Trainer, name
    )


def _real(path: str) -> str:
    return os.path.realpath(path)


def _restore(callback: Any, state: dict[str, Any], full: bool) -> None:
    parts = ("args", "attributes") if full else ("attributes",)
    for part in parts:
        for name, value in state.get(part, {}).items():
            setattr(callback, name, value)


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
    unknown = state.global_step - last
    return {
        "total_loss": total,
        "total_bad": unknown,
        "window_start": state.global_step,
    }
