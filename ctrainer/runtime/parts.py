"""Batches in parts, where memory does not suffice: what both Trainers share.

A batch that runs out of memory is run again in parts of half the rows, and so are later
ones; after 100 updates parts twice as large are tried again. Rows, order and the
generators' states stay as they are, and each part weighs what it has of the batch.
That is the same batch where its loss is a mean or a sum over rows, which is tried out
before the first split. C calls begin(), take(), recover(), agree(), rewind() and
end(); see binding/engine/parts.c.
"""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Sequence
from typing import Any

from ctrainer import _C

GROWTH_INTERVAL = 100  # updates
TRIED = 8  # rows, of which the loss is compared with that of their halves
_TOLERANCE = 1e-3
_OTHER = 2  # times that a gradient was added to: more than once, or a new one
DRAWS = (
    ", but the model draws random numbers, as dropout does, which are others for parts"
)
_TEXTS = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


class Parts:
    """The size of parts, and what is needed to repeat one that has failed.

    A subclass says what a batch is. `adapter` is ctrainer.adapters.torch.
    """

    rows = 0  # at most so many in memory at once; 0: all
    kind: str | None = None  # of the loss of rows: "mean", "sum" or "coupled"
    kinds: Sequence[str] = ("mean", "sum")  # of loss that may be split
    what = "a micro-batch"
    spoilt = False  # gradients have more of the batch that has failed than its parts
    logger = logging.getLogger("ctrainer.trainer")

    def __init__(self, adapter: Any) -> None:
        self._adapter = adapter
        self._split_at = 0  # the update of the last split
        self._retried_at = -1  # the update in which a single row was tried once more
        self._additions: list[int] = []  # of each parameter, in passes that ended
        self.end()

    # What a subclass has

    def step(self) -> int:
        """Updates, or evaluations, that are done."""
        raise NotImplementedError

    def modules(self) -> Sequence[Any]:
        """The modules whose gradients the passes add to; none in an evaluation."""
        return ()

    def measure(self, batch: Any) -> tuple[float, ...]:
        """The loss of a batch, and what has to add up beside it."""
        raise NotImplementedError

    def weight(self, batch: Any, rows: int) -> float:
        """What a batch weighs in a loss that is a mean."""
        return float(rows)

    def count(self, batch: Any) -> int | None:
        """The rows of a batch; None: no tensor says how many."""
        return _C.find_batch_size(batch)

    def part(self, batch: Any, rows: int, begin: int, end: int) -> Any:
        """The rows from `begin` to before `end`."""
        return rows_of(batch, rows, begin, end, self.what)

    def sums(self) -> Any:
        """What the passes add up beside the gradients, a copy; None: nothing."""
        return None

    def set_sums(self, sums: Any) -> None:
        """Set that to what sums() returned, which stays as it is."""

    def evaluated(self) -> Any:
        """A context in which measure() may run."""
        raise NotImplementedError

    def coupled(self) -> str:
        """What is to be done about a loss that couples rows, for an error; "" where
        it may be split."""
        raise NotImplementedError

    def coupling(self) -> str | None:
        """What couples rows, whatever the loss; None: nothing that is known."""
        found = any(map(self._adapter.normalizes_batches, self.modules()))
        return (
            "normalizes by the other rows of the batch (BatchNorm)" if found else None
        )

    # What C calls

    def begin(self) -> None:
        """Note what an update begins with."""
        self.end()
        self._update = self._adapter.rng_state(), self.sums()

    def take(self, batch: Any, row: int) -> tuple[Any, float, int]:
        """The part of a batch from `row` on, what it weighs in the batch, and the first
        row after it, -1 where none is left."""
        rows = self.count(batch)
        step = self.step()
        if self.rows and step - self._split_at >= GROWTH_INTERVAL:
            self.rows, self._split_at = 2 * self.rows, step
        if self._at_end:
            self._hold(())
        self._note_gradients()
        self._start = self._adapter.rng_state(), self.sums()
        whole = not self.rows or rows is None or rows <= self.rows
        if rows is None or (whole and not self._held):
            self._at_end = True
            return batch, 1.0, -1
        end = rows if whole else min(row + self.rows, rows)
        self._hold(held := [h for h in self._held if h[0] > row])
        end = min([end, *(last for last, _ in held)])
        part = self.part(batch, rows, row, end)
        weight = 1.0
        if self.kind != "sum" and (row, end) != (0, rows):
            of_all = self.weight(batch, rows)  # 0 without any target
            weight = self.weight(part, end - row) / of_all if of_all else 0.0
        self._at_end = end == rows
        return part, weight, -1 if self._at_end else end

    def recover(self, part: Any, error: BaseException, row: int) -> bool | None:
        """Choose smaller parts after an error in the one that begins at `row`; True
        where the update has to begin anew.

        A single row is tried once more. None where that has failed, too, or the error
        is not about memory, and stands. Raises ValueError where the loss does not allow
        a split.
        """
        adapter, rows = self._adapter, self.count(part)
        once_more = rows == 1 and self._retried_at != self.step()
        if not is_out_of_memory(error) or rows is None or (rows < 2 and not once_more):
            self.spoilt = bool(self._held)
            self._hold(())
            self._at_end = True
            return None
        traceback.clear_frames(error.__traceback__)  # which hold what the pass has made
        adapter.empty_cache()
        generators, sums = self._start
        draws = not adapter.same_rng(adapter.rng_state(), generators)
        if once_more:
            self._retried_at = self.step()
        elif self.kind is None:
            self.kind = self._kind(part, rows)
        adapter.set_rng_state(generators)
        self.set_sums(sums)
        self._split_at, self._at_end = self.step(), False
        anew = self._undo(row, row + rows, draws)
        if not once_more:
            self.rows = (rows + 1) // 2
            self.logger.warning(
                "Out of memory in %s of %d rows (%s): from here on at most %d rows are "
                "in memory at once. An update has the same rows as before%s.",
                self.what, rows, str(error).partition("\n")[0][:120], self.rows,
                DRAWS if draws else "",
            )  # fmt: skip
        return anew

    def agree(self) -> bool:
        """After the last pass of an update: True where it has to begin anew, since
        another rank has run out of memory."""
        return False

    def rewind(self) -> None:
        """Begin the update anew: without gradients, with its generators and sums."""
        generators, sums = self._update
        self._hold(())
        self._marks = None
        self._adapter.drop_gradients(self.modules())
        self._adapter.set_rng_state(generators)
        self.set_sums(sums)
        self._at_end = True

    def end(self) -> None:
        """Forget the update."""
        self._hold(())
        self._at_end, self._marks = True, None
        self._update = self._start = None, None

    # Gradients of a pass that has failed

    _at_end: bool  # the next part begins another batch
    _held: Sequence[tuple[int, frozenset[int]]] = ()
    _handles: Sequence[Any] = ()
    _marks: list[tuple[int, int] | None] | None

    def _hold(self, held: Sequence[tuple[int, frozenset[int]]]) -> None:
        """Keep gradients as they are in passes over rows up to some row: for each such
        row the places of the parameters."""
        if len(held) == len(self._held):
            return
        for handle in self._handles:
            handle.remove()
        places = sorted(frozenset[int]().union(*(places for _, places in held)))
        self._held, self._handles = held, ()
        if places:
            self._handles = self._adapter.hold_gradients(self.modules(), places)

    def _note_gradients(self) -> None:
        """Count how often the pass that has ended has added to each gradient."""
        before, now = self._marks, self._adapter.gradient_marks(self.modules())
        if len(self._additions) != len(now):
            self._additions = [0] * len(now)
        for i, old in enumerate(before or ()):
            if old is not None:
                self._additions[i] = max(self._additions[i], _additions(old, now[i]))
        self._marks = now

    def _undo(self, row: int, end: int, draws: bool) -> bool:
        """After a failure in the rows up to `end`: keep what the pass has added to some
        parameters' gradients, so that it is not added again when the rows are repeated.
        True where that is not known to be right, and the update has to begin anew.

        It is right where a pass adds to a gradient once, as passes before have shown,
        and computes the same when it is repeated.
        """
        before, now = self._marks, self._adapter.gradient_marks(self.modules())
        self._marks = None
        assert before is not None
        touched = [i for i, mark in enumerate(now) if mark != before[i]]
        fresh = [i for i in touched if before[i] is None]
        added = [i for i in touched if before[i] is not None]
        for i in added:
            if draws or self.kind not in ("mean", "sum", None):
                return True
            if self._additions[i] != 1 or _additions(before[i], now[i]) != 1:
                return True
        self._adapter.drop_gradients(self.modules(), fresh)
        if added:
            self._hold([*self._held, (end, frozenset(added))])
        return False

    # What kind of loss it is

    def _kind(self, part: Any, rows: int) -> str | None:
        """Is the loss of rows the mean of the losses of their halves, or the sum? Each
        is computed for a few rows, without gradients and in evaluation mode.

        Raises ValueError for any other loss, unless such a loss may be split.
        """
        why = self.coupling()
        if why is None:
            kind = self._compare(part, rows)
            if kind is not None:
                return kind
            kinds = " nor the ".join(self.kinds)
            why = f"has a loss of rows that is not the {kinds} of its parts'"
        remedy = self.coupled()
        if not remedy:
            return "coupled"
        raise ValueError(
            f"out of memory in {self.what} of {rows} rows, and the model {why}, so "
            f"parts of it would train differently: {remedy}"
        )

    def _compare(self, batch: Any, rows: int) -> str | None:
        """By the loss of the first rows and the losses of their halves: one of `kinds`,
        or None for another."""
        n = min(rows, TRIED)
        while True:
            try:
                kinds = self._kinds(batch, rows, n)
                return next((kind for kind in self.kinds if kind in kinds), None)
            except Exception as error:
                if not is_out_of_memory(error) or n == 2:
                    raise
                n = max(n // 2, 2)

    def _kinds(self, batch: Any, rows: int, n: int) -> set[str]:
        """Of the loss of the first n rows."""
        cuts = ((0, n), (0, n // 2), (n // 2, n))
        tried = [self.part(batch, rows, begin, end) for begin, end in cuts]
        with self.evaluated(), self._adapter.no_grad():
            found = [self.measure(part) for part in tried]
        sizes = (end - begin for begin, end in cuts)
        weights = list(map(self.weight, tried, sizes))
        return _kinds_of(weights, list(zip(*found, strict=True)))


def _additions(before: tuple[int, int] | None, after: tuple[int, int] | None) -> int:
    """How often a gradient was added to between two marks."""
    if before is None or after is None or before[0] != after[0]:
        return _OTHER
    return after[1] - before[1]


def _kinds_of(weights: list[float], values: list[tuple[float, ...]]) -> set[str]:
    """values: of each number that of the whole, and those of its halves."""
    if not weights[0] or not all(math.isfinite(whole) for whole, *_ in values):
        return set()
    kinds = {"mean", "sum"}
    for whole, *halves in values:
        scale = _TOLERANCE * max(abs(x) for x in (whole, *halves) if math.isfinite(x))
        seen = [(w, x) for w, x in zip(weights[1:], halves, strict=True) if w]
        if abs(whole - sum(w * x for w, x in seen) / weights[0]) > scale:
            kinds.discard("mean")
        if abs(whole - sum(x for _, x in seen)) > scale:
            kinds.discard("sum")
    return kinds


def is_out_of_memory(error: BaseException) -> bool:
    """Is it Python's, torch's or a library's report of too little memory?"""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(t in str(error) for t in _TEXTS)


def rows_of(value: Any, n: int, begin: int, end: int, what: str) -> Any:
    """The rows of a batch, a mapping or list of tensors whose first dimension they are;
    what has no rows is in every part."""
    if hasattr(value, "keys"):
        parts = {key: rows_of(value[key], n, begin, end, what) for key in value.keys()}
        return type(value)(parts)
    shape = getattr(value, "shape", None)
    if shape is not None:
        if len(shape) == 0 or (shape[0] == 1 and n != 1):
            return value
        if shape[0] != n:
            raise ValueError(
                f"out of memory: {what} of {n} rows has a tensor of shape "
                f"{tuple(shape)}, whose rows are not known, so it cannot be split: "
                "make it smaller, and accumulate gradients over more of them instead"
            )
        return value[begin:end]
    if isinstance(value, list | tuple) and any(hasattr(v, "shape") for v in value):
        return type(value)([rows_of(part, n, begin, end, what) for part in value])
    if isinstance(value, list | tuple) and len(value) == n:
        return value[begin:end]
    return value
