"""fairseq's Trainer: what --split-oom-batches makes parts of; see
ctrainer/runtime/parts.py."""

from __future__ import annotations

import contextlib
import logging
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from ctrainer.adapters import torch as adapter
from ctrainer.runtime.parts import Parts

# Of a sample, beside its tensors: numbers of the rows and of their tokens.
_ROWS, _TOKENS = "nsentences", "ntokens"


class Samples(Parts):
    """The samples of updates. The criterion's loss and sample_size have to be sums over
    sentences, so that those of parts add up to those of the sample."""

    what = "a sample"
    kinds = ("sum",)
    logger = logging.getLogger("ctrainer.fairseq.trainer")

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        super().__init__(adapter)

    def step(self) -> int:
        return int(self.trainer.get_num_updates())

    def modules(self) -> Sequence[Any]:
        found = self.trainer.get_model(), self.trainer.get_criterion()
        return [module for module in found if hasattr(module, "parameters")]

    def measure(self, batch: Any) -> tuple[float, ...]:
        trainer = self.trainer
        sample, _ = trainer._prepare_sample(batch)
        loss, size, _ = trainer.task.valid_step(
            sample, trainer.model, trainer.criterion
        )
        return float(loss), float(size)

    def part(self, batch: Any, rows: int, begin: int, end: int) -> Any:
        return _counted(super().part(batch, rows, begin, end), batch, rows, begin, end)

    @contextlib.contextmanager
    def evaluated(self) -> Any:
        with contextlib.ExitStack() as stack:
            for module in self.modules():
                stack.enter_context(adapter.evaluated(module))
            yield

    def coupled(self) -> str:
        return (
            "leave out --split-oom-batches, which is for sums over sentences, or lower "
            "--max-tokens and raise --update-freq"
        )


def _counted(part: Any, whole: Any, rows: int, begin: int, end: int) -> Any:
    """A part with its number of sentences, and of the tokens a share by its rows: these
    add up to the sample's."""
    for name, value in whole.items() if isinstance(whole, Mapping) else ():
        if isinstance(value, Mapping):
            _counted(part[name], value, rows, begin, end)
        elif name == _ROWS:
            part[name] = end - begin
        elif name == _TOKENS:
            tokens = operator.index(value)
            part[name] = tokens * end // rows - tokens * begin // rows
    return part
