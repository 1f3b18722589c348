"""Where in the data a run is: epochs of any loader, begun at any place.

A batch draws its random numbers by its place in the epoch, and the place can be found
again: by the loader's own state, or by reading past what was seen.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterator, Mapping
from typing import Any, Self

import numpy as np

from ctrainer import _C
from ctrainer.adapters.generators import PlaceDraws, place_word
from ctrainer.checkpoint import to_json

logger = logging.getLogger("ctrainer.trainer")

SECONDS_BETWEEN_LINES = 5.0
_BYTES = 1 << 14  # how much of a part of a batch its digest looks at
EVALUATION = -1  # in an epoch's place
ADVICE = "ignore_data_skip=True begins the epoch's data anew instead"


class OtherData(ValueError):
    """A batch is not the one that was there."""


class Reader:
    """Iterates over epochs of a loader and knows how many batches it has given.

    seed: of the draws, None for those of the process's generators as they come. rank,
    world_size: batch p of a rank draws as number p * world_size + rank.
    """

    kind = "read"

    def __init__(
        self, loader: Any, seed: int | None, rank: int = 0, world_size: int = 1
    ) -> None:
        self.loader = loader
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.epoch = self.place = 0
        self._draws = self._make_draws() if seed is not None else None
        self._batches: Iterator[Any] = iter(())
        self._last: Any = None  # a checksum of the last batch
        self._own_state: Any = None  # the loader's when the epoch began
        self._warned_of_state = False

    def _make_draws(self) -> PlaceDraws:
        return PlaceDraws()

    # Reading

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        # With its first batch an epoch may begin to draw its order: as it comes.
        draws = self._draws if self.place else None
        if draws is None or not draws.due(self.place):
            batch = next(self._batches)
        else:
            try:
                draws.begin(self.word(self.place))
                batch = next(self._batches)
            finally:
                draws.end()
        self._last = batch_digest(batch)
        self.place += 1
        return batch

    def word(self, place: int) -> int:
        """The seed of a batch's draws."""
        assert self.seed is not None
        at = place * self.world_size + self.rank
        return place_word(self.seed, self.epoch, at)

    def start(self, epoch: int, skip: int, state: Mapping[str, Any] | None) -> Self:
        """Begin the epoch at batch number `skip`; state: what state() said of it.

        Raises ValueError where the batches are not those that the state knows.
        """
        self._at_begin(epoch)
        state = state or {}
        self.check(state, skip)
        own = state.get("loader")
        if skip and own is not None and has_state(self.loader):
            self.loader.load_state_dict(own)
            self._batches, self.place = iter(self.loader), skip
            self._know_draws(state)
            return self
        self._batches = iter(self.loader)
        if skip:
            self.read_past(skip, state.get("last"))
        return self

    def _at_begin(self, epoch: int) -> None:
        self.epoch, self.place, self._last = epoch, 0, None
        self._know_draws({})

    def _know_draws(self, state: Mapping[str, Any]) -> None:
        """How many of the next batches draw, as a state says."""
        if self._draws is not None:
            self._draws.left = state.get("drawing")

    def check(self, state: Mapping[str, Any], skip: int) -> None:
        """Raise ValueError for a state of another kind of loader."""
        if skip and state.get("kind", self.kind) != self.kind:
            raise ValueError(
                f"the checkpoint's data is of the kind {state['kind']!r} and this "
                f"run's {self.kind!r}: the place in it cannot be found; {ADVICE}"
            )

    def read_past(self, n: int, last: Any = None) -> None:
        """Read on to batch number n. Raises ValueError where the last one read is not
        the one that was there."""
        first, began = self.place, time.monotonic()
        line_due = began + SECONDS_BETWEEN_LINES
        for _ in itertools.islice(self, n - first):
            now = time.monotonic()
            if now >= line_due:
                line_due = now + SECONDS_BETWEEN_LINES
                done, rate = self.place - first, (self.place - first) / (now - began)
                logger.warning(
                    "Resuming: read past %d of %d batches that the run has seen (%.0f "
                    "a second, %.0f s to go).", done, n - first, rate,
                    (n - first - done) / rate,
                )  # fmt: skip
        if last is not None and (self.place < n or self._last != last):
            raise OtherData(
                f"batch {n} of epoch {self.epoch} is not the one that the checkpoint's "
                f"run has seen there: {self.describe()} gives other data than before. "
                "Let its order follow from a seed and set_epoch(epoch), or give it "
                f"state_dict() and load_state_dict(); {ADVICE}"
            )

    def pass_epoch(self, state: Mapping[str, Any]) -> None:
        """Draw what the loader's own generators have drawn in an epoch at whose end
        the state was saved."""

    def evaluate(self, training: Reader | None = None) -> Iterator[Any]:
        """The batches of an evaluation, which is no epoch of the training.

        training: the reader of an epoch under way, which is not to be disturbed.
        """
        try:
            yield from self.start(EVALUATION, 0, None)
        finally:
            self.close()

    def close(self) -> None:
        """End the epoch: workers that do not persist end, too."""
        self._batches = iter(())

    def describe(self) -> str:
        return type(self.loader).__name__

    def rows_of(self, place: int) -> Any:
        """The indices of a batch's rows, where they are known: for errors."""

    # State

    def state(self) -> dict[str, Any]:
        """Where the run is: numbers, strings, arrays, and lists and dicts of them."""
        state = {**self._where(), "last": self._last}
        if has_state(self.loader):
            state["loader"] = self.storable(self.loader.state_dict())
        return state

    def _where(self) -> dict[str, Any]:
        drawing = None if self._draws is None else self._draws.left
        return {
            "kind": self.kind, "epoch": self.epoch, "place": self.place,
            "drawing": drawing,
        }  # fmt: skip

    def storable(self, state: Any) -> Any:
        """`state` if a checkpoint can hold it, else None after a warning: what was seen
        will be read and dropped."""
        try:
            to_json(state)
        except TypeError as error:
            self.warn_unstorable(error)
            return None
        return state

    def warn_unstorable(self, why: object) -> None:
        if self._warned_of_state:
            return
        self._warned_of_state = True
        logger.warning(
            "The state of %s cannot be saved (%s): a resumed run will read past what "
            "was seen.", self.describe(), why,
        )  # fmt: skip


def set_epoch(loader: Any, epoch: int) -> None:
    """Announce the epoch to the loader, its samplers and its data set, as far as they
    want to know."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    parts = (
        loader,
        getattr(loader, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
        getattr(batch_sampler, "batch_sampler", None),
        getattr(loader, "dataset", None),
    )
    for part in {id(part): part for part in parts}.values():
        announce = getattr(part, "set_epoch", None)
        if callable(announce):
            announce(epoch)


class SeededOrder:
    """A sampler of ours: its order follows from its seed and the epoch."""

    seed: int


def seeded_order(loader: Any) -> SeededOrder | None:
    """The sampler of the loader, or of the one whose batches it sends to the ranks, if
    it is a SeededOrder."""
    loader = getattr(loader, "loader", loader)
    batch_sampler = getattr(loader, "batch_sampler", None)
    for part in (loader, batch_sampler):
        sampler = getattr(part, "sampler", None)
        if isinstance(sampler, SeededOrder):
            return sampler
    return None


def has_state(part: Any) -> bool:
    """Does it say where it is, and go there: state_dict() and load_state_dict()?

    accelerate's loaders have both methods, and do what the loader within can do.
    """
    inner = getattr(part, "base_dataloader", None)
    if inner is not None:
        return has_state(inner)
    return callable(getattr(part, "state_dict", None)) and callable(
        getattr(part, "load_state_dict", None)
    )


def batch_digest(batch: Any) -> int:
    """A checksum of a batch's first parts."""
    return _C.batch_digest(batch, _described)


def _described(part: Any) -> list[Any] | bytes | None:
    """What a part is that no plain memory holds: parts of its own, or bytes."""
    if isinstance(part, Mapping):
        return list(part.values())
    try:
        return _head(part) if hasattr(part, "shape") else None
    except Exception:  # whatever an object of another library does not know
        return type(part).__name__.encode()


def _head(leaf: Any) -> bytes:
    """The shape of an array, and the numbers of one in host memory; of a large one the
    first row's first."""
    shape = repr(tuple(leaf.shape)).encode()
    if getattr(getattr(leaf, "device", None), "type", "cpu") != "cpu":
        return shape
    while leaf.ndim > 1 and leaf.nbytes > _BYTES and len(leaf):
        leaf = leaf[0]
    if leaf.nbytes > _BYTES:
        leaf = leaf[: _BYTES // leaf.itemsize]
    try:
        array = np.asarray(leaf.detach() if hasattr(leaf, "detach") else leaf)
    except TypeError:  # a dtype that NumPy lacks
        return shape + repr(leaf.tolist()).encode()
    return shape + array.tobytes()
