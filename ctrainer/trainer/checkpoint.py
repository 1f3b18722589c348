"""Trainer: what a checkpoint holds, and how a run goes on from one."""

from __future__ import annotations

import json
import logging
import os
import shutil
from typing import Any

from ctrainer.checkpoint import (
    PREFIX,
    Sink,
    find_checkpoints,
    last_whole_checkpoint,
)
from ctrainer.checkpoint.disk import replacing
from ctrainer.checkpoint.files import naming
from ctrainer.trainer.base import TrainerBase
from ctrainer.trainer.rank_files import RankFilesMixin
from ctrainer.trainer_state import TrainerState, is_exportable

logger = logging.getLogger("ctrainer.trainer")

STATE = "trainer_state.json"
SCALER = "scaler.pt"
_WORTH_RESERVING = 16 << 20  # bytes; less is faulted in within milliseconds


class CheckpointMixin(RankFilesMixin):
    """Files of a checkpoint. When they are written, and that all of them appear at once
    or not at all, is decided in C (_save_checkpoint, _get_output_dir, save_model)."""

    def _sink(self, folder: str) -> Sink:
        return Sink(folder, self._checkpoint_writer())

    def _flush_for_override(self, sink: Sink, *names: str) -> None:
        """An override finds on the disk what super() has saved."""
        if sink.writer is not None and any(is_overridden(self, name) for name in names):
            sink.writer.flush()

    # Saving

    def _reserve_snapshot(self) -> None:
        """Ready the memory of the first save while the first steps run."""
        if self.args.save_strategy == "no" or not self.args.should_save:
            return
        nbytes = self._adapter.checkpoints.snapshot_bytes(self.model, self.optimizer)
        if nbytes >= _WORTH_RESERVING:
            slack = nbytes // 64 + (1 << 20)  # headers, alignment
            self._checkpoint_writer().reserve(nbytes + slack)

    def _save(
        self,
        output_dir: str | None = None,
        state_dict: dict[str, Any] | None = None,
    ) -> None:
        """Save weights, configuration, processing class and arguments. Hook."""
        folder = self.args.output_dir if output_dir is None else output_dir
        os.makedirs(folder, exist_ok=True)
        sink = self._sink(folder)
        self._save_weights(sink, state_dict)
        tokenizer = getattr(self.data_collator, "tokenizer", None)
        processor: Any = self.processing_class or tokenizer
        if callable(getattr(processor, "save_pretrained", None)):
            processor.save_pretrained(folder)
        self._adapter.checkpoints.save_arguments(sink, self.args)
        self._flush_for_override(sink, "_save", "save_model")

    def _save_weights(self, sink: Sink, state_dict: dict[str, Any] | None) -> None:
        """Save the model's weights, or these, and its configuration."""
        self._adapter.checkpoints.save_model(sink, self.model, state_dict)

    def _share_weights(self, folder: str, in_checkpoint: bool) -> Any:
        """What of the weights is to be written into the folder, where they are not the
        model's own; called by all ranks."""
        return None

    def _save_shared(self, folder: str, weights: dict[str, Any]) -> Any:
        """Save what _share_weights gave."""
        return self._save(folder, weights)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save optimizer.pt and scheduler.pt. Hook."""
        if not self.args.should_save:
            return
        sink, save = self._sink(output_dir), self._adapter.checkpoints.save_object
        save(sink, "optimizer.pt", self.optimizer.state_dict())
        self._save_scheduler(sink)
        self._flush_for_override(sink, "_save_optimizer_and_scheduler")

    def _save_scheduler(self, sink: Sink) -> None:
        state = self.lr_scheduler.state_dict()
        self._adapter.checkpoints.save_object(sink, "scheduler.pt", state)

    def _save_scaler(self, output_dir: str) -> None:
        """Save scaler.pt, the state of the loss scale, if there is one. Hook."""
        if self._loss_scaler is not None and self.args.should_save:
            sink, state = self._sink(output_dir), self._loss_scaler.state_dict()
            self._adapter.checkpoints.save_object(sink, SCALER, state)
            self._flush_for_override(sink, "_save_scaler")

    def _save_weight_average(self, output_dir: str) -> None:
        """Save weight_average.pt, the averaged weights, if there are any. Hook."""
        if self.weight_average is not None and self.args.should_save:
            state = self.weight_average.state_dict()
            self._adapter.checkpoints.save_object(
                self._sink(output_dir), self._average_file(), state
            )

    def _average_file(self) -> str:
        return "weight_average.pt"

    def _save_rng_state(self, output_dir: str) -> None:
        """Save rng_state.pth, the states of all generators; of several ranks each its
        rng_state_RANK.pth. Hook."""
        sink = self._write_rng_state(output_dir)
        if sink is not None:
            self._flush_for_override(sink, "_save_rng_state")

    def _save_trainer_state(self, output_dir: str) -> None:
        """Save trainer_state.json, and in a file of ours what it has no place for."""
        callbacks = [*self.callback_handler.callbacks, self.control]
        stateful = [c for c in callbacks if is_exportable(c)]
        self.state.stateful_callbacks = TrainerState(
            stateful_callbacks=stateful
        ).stateful_callbacks
        if self.args.should_save:
            self.state.save_to_json(os.path.join(output_dir, STATE))
        self._write_own_state(output_dir)
        self._saved_step = self.state.global_step

    def save_state(self) -> None:
        """Save the state as trainer_state.json in args.output_dir, on rank 0."""
        if self.is_world_process_zero():
            with replacing(os.path.join(self.args.output_dir, STATE)) as beside:
                self.state.save_to_json(beside)

    def _push_saved_model(self) -> None:
        if getattr(self.args, "push_to_hub", False) and self.is_world_process_zero():
            push: Any = getattr(self, "push_to_hub")  # noqa: B009
            push(commit_message="Model save")

    # Folders

    def _run_dir(self, trial: Any = None) -> str:
        """Where the checkpoints of this run, or of this trial of a search, end up."""
        folder = str(os.fspath(self.args.output_dir))
        if trial is None or getattr(self, "hp_search_backend", None) is None:
            return folder
        name = getattr(self, "hp_name", None)
        return os.path.join(folder, name(trial) if name else f"run-{trial.number}")

    def _note_best(self, trial: Any = None) -> None:
        """Tell the state where the best checkpoint is, or will be in a moment."""
        best = self.state.best_global_step
        if best and self.args.save_strategy != "no":
            path = os.path.join(self._run_dir(trial), f"{PREFIX}-{best}")
            if best == self.state.global_step or os.path.isdir(path):
                self.state.best_model_checkpoint = path

    def _check_save(self) -> None:
        """Give paths that an override took from the temporary folder their final form,
        before the save is committed."""
        staged = self._checkpoint_writer().folder
        if not is_overridden(self, "_save_checkpoint") or staged is None:
            return
        temporary, final = (
            os.path.dirname(staged),
            self._run_dir(getattr(self, "_trial", None)),
        )
        best = self.state.best_model_checkpoint
        if best is not None and best.startswith(temporary):
            self.state.best_model_checkpoint = final + best[len(temporary) :]
        path = os.path.join(staged, STATE)
        if os.path.isfile(path):
            with open(path, encoding="utf-8") as file:
                text = file.read()
            fixed = text.replace(json.dumps(temporary)[1:-1], json.dumps(final)[1:-1])
            if fixed != text:
                with open(path, "w", encoding="utf-8") as file:
                    file.write(fixed)

    def _sorted_checkpoints(
        self,
        output_dir: str | None = None,
        checkpoint_prefix: str = PREFIX,
        use_mtime: bool = False,
    ) -> list[str]:
        """Checkpoints by rising step, those that rotation must keep at the end.

        use_mtime is for callers of transformers 4 and changes nothing: a file written
        into an old folder must not make it the newest.
        """
        folder = self._run_dir() if output_dir is None else output_dir
        found = find_checkpoints(folder, checkpoint_prefix)
        kept = {_real(p) for p in (self.state.best_model_checkpoint, *found[-1:]) if p}
        return sorted(found, key=lambda path: _real(path) in kept)

    def _rotate_checkpoints(
        self, use_mtime: bool = False, output_dir: str | None = None
    ) -> None:
        """Remove the oldest checkpoints, by step, beyond args.save_total_limit, never
        the best or the last; while one is being made, as soon as that is in place."""
        limit = self.args.save_total_limit
        if limit is None or limit <= 0:
            return
        writer = self._checkpoint_writer()
        run, new = self._run_dir(getattr(self, "_trial", None)), None
        if writer.folder is not None:
            new = os.path.join(run, os.path.basename(writer.folder))
        doomed = self._beyond_limit(
            limit, run if output_dir is None else output_dir, new
        )
        for folder in doomed:
            if new is None:
                shutil.rmtree(folder)
            else:
                writer.remove_after(folder)

    def _beyond_limit(self, limit: int, run: str, new: str | None) -> list[str]:
        found = find_checkpoints(run) if os.path.isdir(run) else []
        every = [p for p in found if new is None or _real(p) != _real(new)]
        kept = {_real(p) for p in (self.state.best_model_checkpoint, new) if p}
        if new is None and every:
            kept.add(_real(every[-1]))
        extra = len(every) + (new is not None) - max(limit, len(kept))
        return [p for p in every if _real(p) not in kept][: max(extra, 0)]

    # Judging an evaluation

    def _determine_best_metric(
        self, metrics: dict[str, float], trial: Any = None
    ) -> bool:
        """Is this evaluation the best so far? Notes it in the state if so. Hook.

        Raises KeyError when metric_for_best_model is not among the metrics.
        """
        name = self.args.metric_for_best_model
        if name is None:
            return False
        name = name if name.startswith("eval_") else f"eval_{name}"
        if name not in metrics:
            raise KeyError(
                f"metric_for_best_model={name!r} is not among the metrics of the "
                f"evaluation, which are {sorted(metrics)}"
            )
        value, best = metrics[name], self.state.best_metric
        greater = bool(self.args.greater_is_better)
        if best is None:
            best = float("-inf") if greater else float("inf")
        if not (value > best if greater else value < best):
            return False
        self.state.best_metric = value
        if self.args.save_strategy != "no":
            self.state.best_global_step = self.state.global_step
        return True

    # Loading

    def _last_checkpoint(self) -> str | None:
        """The newest whole checkpoint in args.output_dir, the same on all ranks."""
        found = last_whole_checkpoint(self.args.output_dir)
        name = os.path.basename(found or "").encode()
        names = self._together("looking for a checkpoint", lambda: name)
        if len(set(names)) > 1:
            seen = ", ".join(f"rank {r}: {n.decode()!r}" for r, n in enumerate(names))
            raise ValueError(
                f"the ranks find different checkpoints in {self.args.output_dir} "
                f"({seen}); name one that all of them have"
            )
        return found

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: Any = None
    ) -> None:
        """Load a checkpoint's weights into the model. Hook."""
        target = self.model if model is None else model
        self._adapter.checkpoints.load_model(target, os.fspath(resume_from_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load optimizer.pt and scheduler.pt, if both are there. Hook."""
        if checkpoint is None:
            return
        load = self._adapter.checkpoints.load_object
        optimizer = load(checkpoint, "optimizer.pt")
        scheduler = load(checkpoint, "scheduler.pt")
        self._take_optimizer_and_scheduler(checkpoint, optimizer, scheduler)

    def _take_optimizer_and_scheduler(
        self, checkpoint: str, optimizer: Any, scheduler: Any
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
            self.optimizer.load_state_dict(optimizer)
        with naming(paths[1]):
            self.lr_scheduler.load_state_dict(scheduler)

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Load scaler.pt, the state of the loss scale, if there is one. Hook."""
        if checkpoint is None or self._loss_scaler is None:
            return
        state = self._adapter.checkpoints.load_object(checkpoint, SCALER)
        if state is None:
            logger.warning("%s has no loss scale: it starts anew", checkpoint)
            return
        try:
            self._loss_scaler.load_state_dict(state)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{os.path.join(checkpoint, SCALER)}: {error}; set loss_scaler to what "
                "saved it, or remove the file to start the scale anew"
            ) from error

    def _load_weight_average(self, checkpoint: str | None) -> None:
        """Load weight_average.pt; without it the average starts from the weights.
        Hook."""
        if checkpoint is None or self.weight_average is None:
            return
        name = self._average_file()
        state = self._adapter.checkpoints.load_object(checkpoint, name)
        if state is None:
            logger.warning(
                "%s has no %s: the average starts from its weights", checkpoint, name
            )
            return
        with naming(os.path.join(checkpoint, name)):
            self.weight_average.load_state_dict(state)

    def _load_trainer_state(self, checkpoint: str) -> None:
        """Take over the state of the run, its callbacks' and our own."""
        path = os.path.join(checkpoint, STATE)
        fresh = self.state
        self.state = TrainerState.load_from_json(path)
        for name in ("logging_steps", "eval_steps", "save_steps", "train_batch_size"):
            setattr(self.state, name, getattr(fresh, name))
        with naming(path):
            self._load_callback_state()
        self._load_own_state(checkpoint)

    def _load_callback_state(self) -> None:
        """Give callbacks that export a state what they had; with
        args.restore_callback_states_from_checkpoint their arguments too."""
        full = bool(self.args.restore_callback_states_from_checkpoint)
        left = {
            name: list(states) if isinstance(states, list) else [states]
            for name, states in (self.state.stateful_callbacks or {}).items()
        }
        candidates = [
            *self.callback_handler.callbacks,
            *([self.control] if full else []),
        ]
        for callback in candidates:
            states = left.get(type(callback).__name__)
            if states and is_exportable(callback):
                _restore(callback, states.pop(0), full)

    def _load_best_model(self) -> None:
        """Load the weights of the best checkpoint. Hook."""
        best = self.state.best_model_checkpoint
        assert best is not None
        logger.info(
            "Loading the best model from %s (%s).", best, self.state.best_metric
        )
        self._load_best_weights(best)
        if not self.args.save_only_model:
            self._load_weight_average(best)

    def _load_best_weights(self, folder: str) -> None:
        self._adapter.checkpoints.load_model(self.model, folder)


def is_overridden(trainer: TrainerBase, name: str) -> bool:
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
