"""Trainer: the files of a checkpoint that each rank has its own of."""

from __future__ import annotations

import io
import json
import logging
import os
from collections.abc import Callable
from typing import Any

from ctrainer.arguments.accelerator import config_of
from ctrainer.checkpoint import Sink, read_own_state, to_json
from ctrainer.checkpoint.files import is_there, naming
from ctrainer.runtime.fork import temporary_folder
from ctrainer.trainer.base import TrainerBase
from ctrainer.trainer_state import TrainerState
from ctrainer.trainer_utils import has_length

logger = logging.getLogger("ctrainer.trainer")

OWN_STATE = "ctrainer_state.json"


class RankFilesMixin(TrainerBase):
    """Generators, sums of losses and position of each rank. Ranks that do not write the
    checkpoint and do not see its folder hand their files over to those that do, when
    the save ends (in C)."""

    def _add_file(self, folder: str, write: Callable[[Sink], None]) -> Sink | None:
        """Let write(sink) put a file of this rank's into the checkpoint; return where
        it went, None on its way to another rank."""
        if self.args.should_save:
            sink = Sink(folder, self._checkpoint_writer())
            write(sink)
            return sink
        if os.path.isdir(folder) and not self.args.save_on_each_node:
            write(Sink(folder, None))  # of no other save: its name is not used again
            return None
        with temporary_folder() as own:
            write(Sink(own, None))
            for entry in os.scandir(own):
                with open(entry.path, "rb") as file:
                    self._rank_files[entry.name] = file.read()
        return None

    def _take_rank_files(self) -> bytes:
        """The files that this rank hands over: a line of JSON with their sizes in
        bytes by their names, then one after the other."""
        files, self._rank_files = self._rank_files, {}
        sizes = {name: len(content) for name, content in files.items()}
        return b"".join([json.dumps(sizes).encode(), b"\n", *files.values()])

    def _add_rank_files(self, parcels: list[bytes]) -> None:
        """Put the files of all ranks into the open save."""
        folder = self._checkpoint_writer().folder
        assert folder is not None
        for parcel in map(io.BytesIO, parcels):
            for name, size in json.loads(parcel.readline()).items():
                with open(os.path.join(folder, name), "wb") as file:
                    file.write(parcel.read(size))

    # Generators

    def _rng_file(self) -> str:
        """rng_state.pth, or rng_state_RANK.pth of a rank of several."""
        if self.args.world_size == 1:
            return "rng_state.pth"
        return f"rng_state_{self.args.process_index}.pth"

    def _write_rng_state(self, output_dir: str) -> Sink | None:
        state, save = self._adapter.rng_state(), self._adapter.checkpoints.save_object
        return self._add_file(
            output_dir, lambda sink: save(sink, self._rng_file(), state)
        )

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Set all generators as they were when the checkpoint was saved. Hook."""
        if checkpoint is None:
            return
        name = self._rng_file()
        state = self._adapter.checkpoints.load_object(checkpoint, name)
        if state is None:
            logger.warning(
                "%s has no %s: random numbers will differ from those of a run that was "
                "not interrupted%s", checkpoint, name, _ranks_of(checkpoint),
            )  # fmt: skip
            return
        with naming(os.path.join(checkpoint, name)):
            self._adapter.set_rng_state(state)

    # Sums of losses, position

    _resumes_ranks = False  # does the run go on with the ranks that it was saved by?

    def _own_state_file(self) -> str:
        rank = self.args.process_index
        return OWN_STATE if rank == 0 else f"ctrainer_state_{rank}.json"

    def _write_own_state(self, output_dir: str) -> None:
        content = {
            "version": 1,
            "world_size": self.args.world_size,
            "loss": self._loss_state(),
            "resume": to_json(self._where()),
        }
        name = self._own_state_file()
        self._add_file(output_dir, lambda sink: sink.json(name, content))

    def _where(self) -> dict[str, Any]:
        """The generators at the beginning of the epoch, and the place in its data."""
        reader = self._reader
        if reader is None:
            return self._resume_state
        loader = reader.loader
        length = len(loader) if has_length(loader) else None
        data = {**reader.state(), "length": length, "rows": self._step_rows()}
        return {**self._resume_state, "data": data}

    def _load_own_state(self, checkpoint: str) -> None:
        """Take over the sums and the position of this rank; of a checkpoint that
        another number of ranks has saved the sums alone, for a new rank those of the
        first."""
        path = os.path.join(checkpoint, self._own_state_file())
        if not is_there(path):
            path = os.path.join(checkpoint, OWN_STATE)
        if not is_there(path):
            self._set_loss_state(**_loss_of_history(self.state))
            return
        content = read_own_state(path)
        with naming(path):
            self._set_loss_state(**content["loss"])
        saved_by = content.get("world_size", 1)
        self._resumes_ranks = saved_by == self.args.world_size
        if self._resumes_ranks:
            self._resume_state = content["resume"]
            return
        self._resume_state = self._for_other_ranks(content, checkpoint)
        logger.warning(
            "%s was saved by %d rank(s) and %d resume from it: the epoch goes on with "
            "the rows that come next, dealt out anew, and with other random numbers",
            checkpoint, saved_by, self.args.world_size,
        )  # fmt: skip

    def _for_other_ranks(
        self, content: dict[str, Any], checkpoint: str
    ) -> dict[str, Any]:
        """Where this number of ranks is in the data when the ranks that saved it have
        seen their rows. Raises ValueError where that is within an update."""
        resume: dict[str, Any] = content["resume"]
        data = resume.get("data")
        if data is None or self.args.ignore_data_skip:
            return {}
        seen = data["place"] * data["rows"]
        if 0 < (data["length"] or 0) <= data["place"]:
            return resume  # at the end of an epoch
        rows = self._step_rows()
        if seen % (rows * self.args.gradient_accumulation_steps):
            raise ValueError(
                f"{checkpoint} was saved by {content['world_size']} rank(s) after "
                f"{seen} rows of the epoch, and the updates of this run, of "
                f"{rows * self.args.gradient_accumulation_steps} rows, begin at none "
                "of their multiples: choose per_device_train_batch_size and "
                "gradient_accumulation_steps so that an update has as many rows as "
                "before, or begin the epoch's data anew with ignore_data_skip=True"
            )
        data.pop("last", None)
        data["place"], data["length"] = seen // rows, None
        return resume

    def _step_rows(self) -> int:
        """Rows that all ranks take in one step of an epoch."""
        whole = config_of(getattr(self.args, "accelerator_config", None)).split_batches
        return self._train_batch_size * (1 if whole else self.args.world_size)


def _ranks_of(checkpoint: str) -> str:
    """What to add where the generators' states are those of other ranks."""
    names = [name for name in os.listdir(checkpoint) if name.startswith("rng_state")]
    found = ", ".join(sorted(names))
    return f"; it has {found}, saved by another number of ranks" if names else ""


def _loss_of_history(state: TrainerState) -> dict[str, Any]:
    """The sums of a run that transformers saved, as far as its logs tell: each has the
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
