"""What fairseq's Trainer leaves behind when an update fails, and how to repeat it."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from typing import Any

from ctrainer.adapters import torch_fairseq as tools
from ctrainer.adapters.nan_detector import NanDetector, nonfinite_grads
from ctrainer.fairseq._trainer_checks import setting
from ctrainer.fairseq._trainer_ckpt import Checkpoints

logger = logging.getLogger("ctrainer.fairseq.trainer")


class Failures(Checkpoints):
    """Reports of the C half: out of memory, crash.pt, and where NaN comes from."""

    def _log_oom(self, error: BaseException, in_update: bool = False) -> None:
        logger.warning("OOM: Ran out of memory with exception: %s", error)
        for summary in tools.memory_summaries():
            logger.warning(summary)
        if in_update:
            logger.error("OOM during optimization, irrecoverable")
        sys.stderr.flush()

    def crash_extra_state(self) -> dict[str, Any]:
        """What crash.pt has in extra_state beside the trainer's own: the position in
        the data. A program that keeps more, such as the best metric, overrides it."""
        itr = self._epoch_itr
        return {} if itr is None else {"train_iterator": itr.state_dict()}

    def _save_crash(
        self, error: BaseException, samples: list[Any], place: int | None, rng: Any
    ) -> None:
        """Write crash.pt, unless the trainer has not got as far as an optimizer."""
        if self._optimizer is None:
            return
        folder = setting(self.cfg, "checkpoint", "save_dir", "checkpoints")
        rank = self.data_parallel_rank
        path = os.path.join(folder, f"crash.rank{rank}.pt" if rank else "crash.pt")
        try:
            os.makedirs(folder, exist_ok=True)
            tools.save_file(path, self._crash_state(error, samples, place, rng))
        except Exception:
            logger.exception("%s could not be written", path)
            return
        logger.error(
            "update %s failed; `python -m ctrainer replay %s` repeats it",
            self.get_num_updates() + 1,
            path,
        )

    def _crash_state(
        self, error: BaseException, samples: list[Any], place: int | None, rng: Any
    ) -> dict[str, Any]:
        """A checkpoint of before the update, and what made it fail."""
        state = self.state_dict()
        state["extra_state"].update(self.crash_extra_state())
        state["crash"] = {
            "samples": samples,
            "dummy_batch": self._dummy_batch,
            "failed_sample": place,
            "error": f"{type(error).__name__}: {error}",
            "traceback": "".join(traceback.format_exception(error)),
            "rng": rng,
            "folder": os.getcwd(),
        }
        return state

    def _find_nonfinite(
        self, error: BaseException, samples: list[Any], rng: Any
    ) -> None:
        """Name the gradients that are not finite, then repeat the update's forward and
        backward, with the same random numbers, to name what was the first."""
        bad = nonfinite_grads(self.get_model())
        if bad:
            logger.error(
                "gradients of %s parameters are not finite: %s%s",
                len(bad),
                ", ".join(bad[:5]),
                ", ..." if len(bad) > 5 else "",
            )
        tools.set_rng_state(rng)
        with NanDetector(self._watched()) as detector:
            self._repeat_step(samples)
        first = (
            f"first not finite: {detector.findings[0]}"
            if detector.findings
            else ("a second run of the update met nothing that is not finite")
        )
        logger.error(first)
        error.add_note(first)

    def _watched(self) -> dict[str, Any]:
        return {"model": self.get_model(), "criterion": self.get_criterion()}
