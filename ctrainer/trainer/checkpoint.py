"""Trainer: what a checkpoint holds, and how a run resumes from one."""

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


class CheckpointFiles:
    """Checkpoints: each is one transaction around the hooks that write its files.

    A checkpoint is written to a temporary folder, RUN/.ctrainer-saving-X/checkpoint-N,
    whichever hooks are overridden: while a save is open _get_output_dir() answers the
    folder above it, so that overrides which work out the path themselves write there,
    too. All of it then appears at once, or nothing does.

    On several ranks args.should_save says which write. Each rank has a file of its
    generators' states and one of its sums of losses and its position; ranks that do not
    write and do not see the folder pass their files to those that do, when the save
    ends. Every step is taken by all ranks, or by none.
    """

    def writer(self, trainer: TrainerRun) -> CheckpointWriter:
        """The trainer's writer, made at its first save."""
        if trainer._checkpoint_writer is None:
            trainer._checkpoint_writer = CheckpointWriter()
        return trainer._checkpoint_writer

    def save_atomically(self, trainer: TrainerRun, trial: Any, save: _Save) -> None:
        """Make of what save() writes one checkpoint, or nothing. Collective."""
        self.open_save(trainer, trial)

        def written() -> bytes:
            save()
            return self.take_rank_files(trainer)

        try:
            files = trainer._together(_SAVING, written)
        except BaseException:
            self.drop_save(trainer)
            raise
        trainer._together(_SAVING, lambda: self.commit(trainer, files))

    def open_save(self, trainer: TrainerRun, trial: Any) -> None:
        """Open a save on the ranks that write; the others get its folder's path."""
        trainer._writes_checkpoint = bool(trainer.args.should_save)

        def begin() -> bytes | None:
            if not trainer._writes_checkpoint:
                return None
            path = step_folder(trainer, self.run_dir(trainer, trial))
            return os.fsencode(self.writer(trainer).begin(path))

        try:
            folders = trainer._together(_SAVING, begin)
            if not any(folders):
                raise ValueError(
                    "args.should_save is False on every rank: nobody would write the "
                    "checkpoint"
                )
        except BaseException:
            self.drop_save(trainer)
            raise
        trainer._staged_folder = os.fsdecode(next(filter(None, folders)))

    def commit(self, trainer: TrainerRun, files: list[bytes]) -> None:
        """Commit the open save; without args.async_save wait for the disk."""
        if not trainer._writes_checkpoint:
            trainer._staged_folder = None
            return
        writer = self.writer(trainer)
        try:
            self.add_rank_files(trainer, files)
            self.check_save(trainer)
            writer.commit()
        except BaseException:
            self.drop_save(trainer)
            raise
        trainer._staged_folder = None
        if not trainer.args.async_save:
            writer.wait()

    def drop_save(self, trainer: TrainerRun) -> None:
        """Drop the open save, if this rank has one, under the exception that is set."""
        trainer._staged_folder = None
        if trainer._writes_checkpoint:
            with contextlib.suppress(Exception):
                self.writer(trainer).abort()

    def write(self, trainer: TrainerRun, trial: Any) -> None:
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
            self.write_parts(trainer, folder, trial)
        finally:
            if training:
                call_if_there(trainer.optimizer, "train")
        if trainer._writes_checkpoint and is_overridden(trainer, "_save_checkpoint"):
            self.writer(trainer).show()  # checkpoint-N, for what follows super()

    def write_parts(self, trainer: TrainerRun, folder: str, trial: Any) -> None:
        call_adapted(trainer.save_model, folder, _internal_call=True)
        self.note_best(trainer, trial)
        if not trainer.args.save_only_model:
            trainer._save_optimizer_and_scheduler(folder)
            trainer._save_scaler(folder)
            trainer._save_weight_average(folder)
            trainer._save_blocks(folder)
            trainer._save_rng_state(folder)
        self.save_trainer_state(trainer, folder)
        if trainer._writes_checkpoint:
            trainer._rotate_checkpoints()

    def save_model(self, trainer: TrainerRun, folder: str, internal: bool) -> None:
        """Save the weights: the model's, or those that all ranks put together."""
        weights = self.share_weights(
            trainer, folder, in_checkpoint=trainer._staged_folder is not None
        )
        if not trainer.args.should_save:
            return
        if weights is None:
            trainer._save(folder)
        else:
            self.save_shared(trainer, folder, weights)
        if not internal:
            self.push_saved_model(trainer)

    def sink(self, trainer: TrainerRun, folder: str) -> Sink:
        return Sink(folder, self.writer(trainer))

    def flush_for_override(self, trainer: TrainerRun, sink: Sink, *names: str) -> None:
        """An override finds on the disk what super() has saved."""
        if sink.writer is not None and any(
            is_overridden(trainer, name) for name in names
        ):
            sink.writer.flush()

    def reserve_snapshot(self, trainer: TrainerRun) -> None:
        """Ready the memory of the first save while the first steps run."""
        if trainer.args.save_strategy == "no" or not trainer.args.should_save:
            return
        nbytes = trainer._adapter.checkpoints.snapshot_bytes(
            trainer.model, trainer.optimizer
        )
        if nbytes >= _WORTH_RESERVING:
            slack = nbytes // 64 + (1 << 20)  # headers, alignment
            self.writer(trainer).reserve(nbytes + slack)

    def save(
        self,
        trainer: TrainerRun,
        output_dir: str | None = None,
        state_dict: dict[str, Any] | None = None,
    ) -> None:
        folder = trainer.args.output_dir if output_dir is None else output_dir
        os.makedirs(folder, exist_ok=True)
        sink = self.sink(trainer, folder)
        self.save_weights(trainer, sink, state_dict)
        tokenizer = getattr(trainer.data_collator, "tokenizer", None)
        processor: Any = trainer.processing_class or tokenizer
        if callable(getattr(processor, "save_pretrained", None)):
            processor.save_pretrained(folder)
        trainer._adapter.checkpoints.save_arguments(sink, trainer.args)
        self.flush_for_override(trainer, sink, "_save", "save_model")

    def save_weights(
        self, trainer: TrainerRun, sink: Sink, state_dict: dict[str, Any] | None
    ) -> None:
        """Save the model's weights, or these, and its configuration."""
        trainer._adapter.checkpoints.save_model(sink, trainer.model, state_dict)

    def share_weights(
        self, trainer: TrainerRun, folder: str, in_checkpoint: bool
    ) -> Any:
        """What of the weights is to be written into the folder, where they are not the
        model's own; called by all ranks."""
        return None

    def save_shared(
        self, trainer: TrainerRun, folder: str, weights: dict[str, Any]
    ) -> Any:
        """Save what share_weights() returned."""
        return trainer._save(folder, weights)

    def save_optimizer_and_scheduler(
        self, trainer: TrainerRun, output_dir: str
    ) -> None:
        if not trainer.args.should_save:
            return
        sink, save = (
            self.sink(trainer, output_dir),
            trainer._adapter.checkpoints.save_object,
        )
        save(sink, "optimizer.pt", trainer.optimizer.state_dict())
        self.save_scheduler(trainer, sink)
        self.flush_for_override(trainer, sink, "_save_optimizer_and_scheduler")

    def save_scheduler(self, trainer: TrainerRun, sink: Sink) -> None:
        state = trainer.lr_scheduler.state_dict()
        trainer._adapter.checkpoints.save_object(sink, "scheduler.pt", state)

    def save_scaler(self, trainer: TrainerRun, output_dir: str) -> None:
        if trainer._loss_scaler is not None and trainer.args.should_save:
            sink, state = (
                self.sink(trainer, output_dir),
                trainer._loss_scaler.state_dict(),
            )
            trainer._adapter.checkpoints.save_object(sink, SCALER, state)
            self.flush_for_override(trainer, sink, "_save_scaler")

    def save_weight_average(self, trainer: TrainerRun, output_dir: str) -> None:
        if trainer.weight_average is not None and trainer.args.should_save:
            state = trainer.weight_average.state_dict()
            trainer._adapter.checkpoints.save_object(
                self.sink(trainer, output_dir), self.average_file(trainer), state
            )

    def average_file(self, trainer: TrainerRun) -> str:
        return "weight_average.pt"

    def save_rng_state(self, trainer: TrainerRun, output_dir: str) -> None:
        sink = self.write_rng_state(trainer, output_dir)
        if sink is not None:
            self.flush_for_override(trainer, sink, "_save_rng_state")

    def save_trainer_state(self, trainer: TrainerRun, output_dir: str) -> None:
        """Save trainer_state.json, and in a file of ours what it has no place for."""
        callbacks = [*trainer.callback_handler.callbacks, trainer.control]
        stateful = [c for c in callbacks if is_exportable(c)]
        trainer.state.stateful_callbacks = TrainerState(
            stateful_callbacks=stateful
        ).stateful_callbacks
        if trainer.args.should_save:
            trainer.state.save_to_json(os.path.join(output_dir, STATE))
        self.write_own_state(trainer, output_dir)
        trainer._saved_step = trainer.state.global_step

    def save_state(self, trainer: TrainerRun) -> None:
        if trainer.is_world_process_zero():
            with replacing(os.path.join(trainer.args.output_dir, STATE)) as beside:
                trainer.state.save_to_json(beside)

    def push_saved_model(self, trainer: TrainerRun) -> None:
        if (
            getattr(trainer.args, "push_to_hub", False)
            and trainer.is_world_process_zero()
        ):
            push: Any = getattr(trainer, "push_to_hub")  # noqa: B009
            push(commit_message="Model save")

    def run_dir(self, trainer: TrainerRun, trial: Any = None) -> str:
        """Where the checkpoints of this run, or of this trial of a search, end up."""
        folder = str(os.fspath(trainer.args.output_dir))
        if trial is None or getattr(trainer, "hp_search_backend", None) is None:
            return folder
        name = getattr(trainer, "hp_name", None)
        return os.path.join(folder, name(trial) if name else f"run-{trial.number}")

    def note_best(self, trainer: TrainerRun, trial: Any = None) -> None:
        """Let the state say where the best checkpoint is, or will be in a moment."""
        best = trainer.state.best_global_step
        if best and trainer.args.save_strategy != "no":
            path = os.path.join(self.run_dir(trainer, trial), f"{PREFIX}-{best}")
            if best == trainer.state.global_step or os.path.isdir(path):
                trainer.state.best_model_checkpoint = path

    def check_save(self, trainer: TrainerRun) -> None:
        """Replace paths that an override took from the temporary folder by the final
        ones, before the save is committed."""
        staged = self.writer(trainer).folder
        if not is_overridden(trainer, "_save_checkpoint") or staged is None:
            return
        temporary, final = (
            os.path.dirname(staged),
            self.run_dir(trainer, getattr(trainer, "_trial", None)),
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
        self,
        trainer: TrainerRun,
        output_dir: str | None = None,
        checkpoint_prefix: str = PREFIX,
        use_mtime: bool = False,
    ) -> list[str]:
        folder = self.run_dir(trainer) if output_dir is None else output_dir
        found = find_checkpoints(folder, checkpoint_prefix)
        kept = {
            _real(p) for p in (trainer.state.best_model_checkpoint, *found[-1:]) if p
        }
        return sorted(found, key=lambda path: _real(path) in kept)

    def rotate_checkpoints(
        self,
        trainer: TrainerRun,
        use_mtime: bool = False,
        output_dir: str | None = None,
    ) -> None:
        limit = trainer.args.save_total_limit
        if limit is None or limit <= 0:
            return
        writer = self.writer(trainer)
        run, new = self.run_dir(trainer, getattr(trainer, "_trial", None)), None
        if writer.folder is not None:
            new = os.path.join(run, os.path.basename(writer.folder))
        doomed = self.beyond_limit(
            trainer, limit, run if output_dir is None else output_dir, new
        )
        for folder in doomed:
            if new is None:
                shutil.rmtree(folder)
            else:
                writer.remove_after(folder)

    def beyond_limit(
        self, trainer: TrainerRun, limit: int, run: str, new: str | None
    ) -> list[str]:
        found = find_checkpoints(run) if os.path.isdir(run) else []
        every = [p for p in found if new is None or _real(p) != _real(new)]
        kept = {_real(p) for p in (trainer.state.best_model_checkpoint, new) if p}
        if new is None and every:
            kept.add(_real(every[-1]))
        extra = len(every) + (new is not None) - max(limit, len(kept))
        return [p for p in every if _real(p) not in kept][: max(extra, 0)]

    def determine_best_metric(
        self, trainer: TrainerRun, metrics: dict[str, float], trial: Any = None
    ) -> bool:
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

    def last_checkpoint(self, trainer: TrainerRun) -> str | None:
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

    def load_from_checkpoint(
        self, trainer: TrainerRun, resume_from_checkpoint: str, model: Any = None
    ) -> None:
        target = trainer.model if model is None else model
        trainer._adapter.checkpoints.load_model(
            target, os.fspath(resume_from_checkpoint)
        )

    def load_optimizer_and_scheduler(
        self, trainer: TrainerRun, checkpoint: str | None
    ) -> None:
        if checkpoint is None:
            return
        load = trainer._adapter.checkpoints.load_object
        optimizer = load(checkpoint, "optimizer.pt")
        scheduler = load(checkpoint, "scheduler.pt")
        self.take_optimizer_and_scheduler(trainer, checkpoint, optimizer, scheduler)

    def take_optimizer_and_scheduler(
        self, trainer: TrainerRun, checkpoint: str, optimizer: Any, scheduler: Any
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

    def load_scaler(self, trainer: TrainerRun, checkpoint: str | None) -> None:
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

    def load_weight_average(self, trainer: TrainerRun, checkpoint: str | None) -> None:
        if checkpoint is None or trainer.weight_average is None:
            return
        name = self.average_file(trainer)
        state = trainer._adapter.checkpoints.load_object(checkpoint, name)
        if state is None:
            logger.warning(
                "%s has no %s: the average starts from its weights", checkpoint, name
            )
            return
        with naming(os.path.join(checkpoint, name)):
            trainer.weight_average.load_state_dict(state)

    def load_trainer_state(self, trainer: TrainerRun, checkpoint: str) -> None:
        """Take over the state of the run, its callbacks' and our own."""
        path = os.path.join(checkpoint, STATE)
        fresh = trainer.state
        trainer.state = TrainerState.load_from_json(path)
        for name in ("logging_steps", "eval_steps", "save_steps", "train_batch_size"):
            setattr(trainer.state, name, getattr(fresh, name))
        with naming(path):
            trainer._load_callback_state()
        self.load_own_state(trainer, checkpoint)

    def load_callback_state(self, trainer: TrainerRun) -> None:
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

    def load_best_model(self, trainer: TrainerRun) -> None:
        best = trainer.state.best_model_checkpoint
        assert best is not None
        logger.info(
            "Loading the best model from %s (%s).", best, trainer.state.best_metric
        )
        self.load_best_weights(trainer, best)
        if not trainer.args.save_only_model:
            trainer._load_weight_average(best)

    def load_best_weights(self, trainer: TrainerRun, folder: str) -> None:
        trainer._adapter.checkpoints.load_model(trainer.model, folder)

    def add_file(
        self, trainer: TrainerRun, folder: str, write: Callable[[Sink], None]
    ) -> Sink | None:
        """Let write(sink) put a file of this rank's into the checkpoint; return where
        it went, None on its way to another rank."""
        if trainer.args.should_save:
            sink = Sink(folder, self.writer(trainer))
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

    def take_rank_files(self, trainer: TrainerRun) -> bytes:
        """The files that this rank passes on: a line of JSON with their sizes in bytes
        by their names, then one after the other."""
        files, trainer._rank_files = trainer._rank_files, {}
        sizes = {name: len(content) for name, content in files.items()}
        return b"".join([json.dumps(sizes).encode(), b"\n", *files.values()])

    def add_rank_files(self, trainer: TrainerRun, parcels: list[bytes]) -> None:
        """Put the files of all ranks into the open save."""
        folder = self.writer(trainer).folder
        assert folder is not None
        for parcel in map(io.BytesIO, parcels):
            for name, size in json.loads(parcel.readline()).items():
                with open(os.path.join(folder, name), "wb") as file:
                    file.write(parcel.read(size))

    def rng_file(self, trainer: TrainerRun) -> str:
        """rng_state.pth, or rng_state_RANK.pth of a rank of several."""
        if trainer.args.world_size == 1:
            return "rng_state.pth"
        return f"rng_state_{trainer.args.process_index}.pth"

    def write_rng_state(self, trainer: TrainerRun, output_dir: str) -> Sink | None:
        state, save = (
            trainer._adapter.rng_state(),
            trainer._adapter.checkpoints.save_object,
        )
        return self.add_file(
            trainer, output_dir, lambda sink: save(sink, self.rng_file(trainer), state)
        )

    def load_rng_state(self, trainer: TrainerRun, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        name = self.rng_file(trainer)
        state = trainer._adapter.checkpoints.load_object(checkpoint, name)
        if state is None:
            logger.warning(
                "%s has no %s: random numbers will differ from those of a run that was "
                "not interrupted%s", checkpoint, name, _ranks_of(checkpoint),
            )  # fmt: skip
            return
        with naming(os.path.join(checkpoint, name)):
            trainer._adapter.set_rng_state(state)

    def own_state_file(self, trainer: TrainerRun) -> str:
        rank = trainer.args.process_index
        return OWN_STATE if rank == 0 else f"ctrainer_state_{rank}.json"

    def write_own_state(self, trainer: TrainerRun, output_dir: str) -> None:
        content = {
            "version": 1,
            "world_size": trainer.args.world_size,
            "loss": trainer._loss_state(),
            "resume": to_json(self.where(trainer)),
        }
        name = self.own_state_file(trainer)
        self.add_file(trainer, output_dir, lambda sink: sink.json(name, content))

    def where(self, trainer: TrainerRun) -> dict[str, Any]:
        """The generators at the beginning of the epoch, and the place in its data."""
        reader = trainer._reader
        if reader is None:
            return trainer._resume_state
        loader = reader.loader
        length = len(loader) if has_length(loader) else None
        data = {**reader.state(), "length": length, "rows": self.step_rows(trainer)}
        return {**trainer._resume_state, "data": data}

    def load_own_state(self, trainer: TrainerRun, checkpoint: str) -> None:
        """Take over the sums and the position of this rank; of a checkpoint that
        another number of ranks has saved the sums alone, for a new rank those of the
        first."""
        path = os.path.join(checkpoint, self.own_state_file(trainer))
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
        trainer._resume_state = self.for_other_ranks(trainer, content, checkpoint)
        logger.warning(
            "%s was saved by %d rank(s) and %d resume from it: the epoch continues "
            "with the following rows, distributed anew, and with other random numbers",
            checkpoint, saved_by, trainer.args.world_size,
        )  # fmt: skip

    def for_other_ranks(
        self, trainer: TrainerRun, content: dict[str, Any], checkpoint: str
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
        rows = self.step_rows(trainer)
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

    def step_rows(self, trainer: TrainerRun) -> int:
        """Rows that all ranks take in one step of an epoch."""
        whole = config_of(
            getattr(trainer.args, "accelerator_config", None)
        ).split_batches
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
