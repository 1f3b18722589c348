"""Where in torch's data a run is: DataLoaders, their workers and their streams.

Each batch's indices carry the seed of its draws; whoever takes them, a worker or the
training process, seeds its generators before it reads the rows. A data set, a collator
and a worker_init_fn are called as torch calls them.
"""

from __future__ import annotations

import collections
import copy
import inspect
import itertools
import json
import logging
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, get_worker_info

from ctrainer.adapters import _torch_batches as batches_of
from ctrainer.adapters import reading
from ctrainer.adapters._torch_rank_eval import WholeBatchLoader
from ctrainer.adapters._torch_ranks import DispatchedLoader, RankStream
from ctrainer.adapters.generators import ALL, PlaceDraws, place_word, seed_generators
from ctrainer.checkpoint import from_json, to_json

logger = logging.getLogger("ctrainer.trainer")


def seed_all(word: int) -> None:
    torch.default_generator.manual_seed(word)
    seed_generators(word)


class Draws(PlaceDraws):
    """With torch's generator on the CPU."""

    def now(self) -> tuple[Any, ...]:
        return *super().now(), torch.default_generator.get_state().numpy().tobytes()

    def seed(self, word: int) -> None:
        seed_all(word)

    def take(self) -> None:
        self._torch = torch.default_generator.get_state()
        super().take()

    def put(self) -> None:
        torch.default_generator.set_state(self._torch)
        super().put()


_KEPT = 64  # batches whose indices an indexed reader keeps


# ---- in a worker -------------------------------------------------------------------


class _Fetched:
    """What a worker knows: its epoch, and how many batches it has read of it."""

    epoch: int | None = None
    batches = 0

    @classmethod
    def enter(cls, epoch: int) -> None:
        """Calls set_epoch of a persistent worker's own copy of the data set."""
        if cls.epoch == epoch:
            return
        if cls.epoch is not None:
            cls.batches = 0
            info = get_worker_info()
            set_epoch = getattr(info and info.dataset, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)
        cls.epoch = epoch


def _arrive(word: int | None, epoch: int, indices: Any) -> Any:
    """The indices, in a worker; word: the seed of the batch's draws."""
    _Fetched.enter(epoch)
    if word is not None:
        seed_all(word)
    return indices


def _arrive_in_stream(seed: int | None, epoch: int, rank: int, indices: Any) -> Any:
    """The same for a stream, of which each worker has a part of its own."""
    _Fetched.enter(epoch)
    info = get_worker_info()
    if seed is not None:
        worker = 0 if info is None else info.id
        seed_all(place_word(seed, epoch, rank, worker, _Fetched.batches))
    _Fetched.batches += 1
    return indices


class _Sent:
    """Indices on their way to a worker; to unpickle them there is to arrive."""

    __slots__ = ("arrive", "values")

    def __init__(self, arrive: Callable[..., Any], *values: Any) -> None:
        self.arrive = arrive
        self.values = values

    def __reduce__(self) -> tuple[Any, ...]:
        return self.arrive, self.values


class _BeginWorker:
    """worker_init_fn of a stream that resumes: first the user's, then each worker's
    state. states: None, or JSON, by worker; fetched: the batches that it had read."""

    def __init__(self, init: Any, states: list[str | None], fetched: list[int]) -> None:
        self.init = init
        self.states = states
        self.fetched = fetched

    def __call__(self, worker: int) -> None:
        if self.init is not None:
            self.init(worker)
        info = get_worker_info()
        assert info is not None
        _Fetched.batches = self.fetched[worker]
        state = self.states[worker]
        if state is not None:
            _load(info.dataset, state)


class _WithState:
    """A collator that sends the stream's state along: (worker, JSON or what hinders
    it, batch)."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, rows: Any) -> tuple[int, str, Any]:
        batch, info = self.collate(rows), get_worker_info()
        assert info is not None
        return info.id, _state_text(info.dataset), batch


def _state_text(dataset: Any) -> str:
    try:
        return _text_of(dataset.state_dict())
    except TypeError as error:
        return f"!{error}"


# ---- in the training process -------------------------------------------------------


class _Indices(BatchSampler):
    """The loader's batches of indices, each with the seed of its draws.

    The loader's iterator has them, and does not own the reader, which owns the loader:
    workers of an iterator that the garbage collector finds in a cycle are not asked to
    end, and torch waits 5 seconds for each of them.
    """

    def __init__(self, inner: Any, reader: LoaderReader) -> None:
        self.inner = inner
        self.serve(reader)
        self.batch_size = getattr(inner, "batch_size", None)  # type: ignore[assignment]
        self.drop_last = getattr(inner, "drop_last", False)

    def __len__(self) -> int:
        return len(self.inner)

    def serve(self, reader: LoaderReader) -> None:
        self.kind = type(reader)
        self._reader = weakref.ref(reader)

    def __iter__(self) -> Iterator[Any]:
        reader = self._reader()
        if reader is None:  # the loader outlives it
            return iter(self.inner)
        reader.inner = self.inner
        return self.kind.indices(weakref.proxy(reader), reader.place)


class LoaderReader(reading.Reader):
    """Of a DataLoader that asks for indices as torch's does."""

    def __init__(
        self, loader: Any, seed: int | None, rank: int = 0, world_size: int = 1
    ) -> None:
        super().__init__(loader, seed, rank, world_size)
        self.inner: Any = None  # the loader's batches of indices
        self._generators: list[torch.Tensor] = []
        if loader.persistent_workers:
            self._take_workers(loader)

    def _make_draws(self) -> PlaceDraws:
        return Draws()

    def _take_workers(self, loader: Any) -> None:
        """End workers that another reader has begun."""
        loader._iterator = None

    def start(self, epoch: int, skip: int, state: Mapping[str, Any] | None) -> Self:
        self._at_begin(epoch)
        self._begin(dict(state or {}), skip)
        return self

    def _begin(self, state: dict[str, Any], skip: int) -> None:
        self.check(state, skip)
        ordered = getattr(self.loader, "in_order", True)
        if skip and self.loader.num_workers > 1 and not ordered:
            raise ValueError(
                "dataloader_in_order=False gives batches as they come: which of them "
                f"the run has seen is not known; {reading.ADVICE}"
            )
        owned, states = _owned(self.loader), state.get("generators") or ()
        for generator, own in zip(owned, states, strict=False):
            generator.set_state(own)
        self._generators = [generator.get_state() for generator in owned]

    def _iterate(self, **changes: Any) -> Iterator[Any]:
        """iter(loader), which sees changed attributes."""
        attributes = vars(self.loader)
        name = "sampler" if self.loader.batch_sampler is None else "batch_sampler"
        changes[name] = _Indices(attributes[name], self)
        kept = {name: attributes[name] for name in changes}
        stay = self.loader.persistent_workers and self.loader._iterator is not None
        if stay and self.seed is not None:
            # An epoch of workers that stay takes as much of the run's generator as one
            # of workers that begin, or of none.
            taken = torch.empty((), dtype=torch.int64, device="cpu")
            taken.random_(generator=self.loader.generator)
        try:
            attributes.update(changes)
            return iter(self.loader)
        finally:
            attributes.update(kept)

    def indices(self, place: int) -> Iterator[Any]:
        """Those of `inner`, from a batch on; self is a proxy."""
        raise NotImplementedError

    def __next__(self) -> Any:
        try:
            batch = next(self._batches)
        finally:
            self._put_back()
        self.place += 1
        return batch

    def _put_back(self) -> None:
        if self._draws is not None:
            self._draws.end()

    def state(self) -> dict[str, Any]:
        state = self._where()
        if self._generators:
            state["generators"] = self._generators
        return state

    def describe(self) -> str:
        return type(self.loader.dataset).__name__


class IndexedReader(LoaderReader):
    """Of a data set with an index: what was seen is skipped in the order alone, and its
    last indices show whether the order is the same."""

    kind = "indexed"

    def _take_workers(self, loader: Any) -> None:
        """Those of an evaluation before continue with this reader's indices."""
        indices = getattr(loader._iterator, "_index_sampler", None)
        if isinstance(indices, _Indices) and issubclass(indices.kind, IndexedReader):
            indices.serve(self)
        else:
            super()._take_workers(loader)

    def _begin(self, state: dict[str, Any], skip: int) -> None:
        super()._begin(state, skip)
        self._sent: collections.deque[Any] = collections.deque()
        self._seen: collections.deque[Any] = collections.deque([None], _KEPT)
        self._source: Iterator[Any] | None = None
        self._know_draws(state)
        self.place = skip
        self._batches = self._iterate()
        if skip and self._source is None:
            # The generators are still as they were when the epoch began.
            self._source = self._seek(self.inner)
        expected = state.get("last")
        if skip and expected not in (None, _order_digest(self._seen[-1])):
            raise ValueError(
                f"batch {skip} of epoch {self.epoch} has not the rows that the "
                f"checkpoint's run has seen there: {_sampler_name(self.inner)} gives "
                "another order, or the data set or the batch size has changed. Let "
                f"the order follow from a seed and set_epoch(epoch); {reading.ADVICE}"
            )

    def pass_epoch(self, state: Mapping[str, Any]) -> None:
        for _ in self.start(state["epoch"], state["place"], {**state, "last": None}):
            pass

    def _seek(self, inner: Any) -> Iterator[Any]:
        """The order from the place on; notes the indices before it."""
        if not self.place:
            return batches_of.after(inner, 0)
        source = batches_of.after(inner, self.place - 1)
        self._seen.append(next(source, None))
        return source

    def indices(self, place: int) -> Iterator[Any]:
        epoch, workers = self.epoch, self.loader.num_workers
        if self._source is None:
            self._source = self._seek(self.inner)
        source = self._source
        for at in itertools.count(place):
            indices = next(source, self)
            if indices is self:
                return
            self._sent.append(indices)
            if workers:
                word = None if self._draws is None else self.word(at)
                yield _Sent(_arrive, word, epoch, indices)
                continue
            if self._draws is not None and self._draws.due(at):
                self._draws.begin(self.word(at))
            yield indices

    def __next__(self) -> Any:
        batch = super().__next__()
        self._seen.append(self._sent.popleft())
        return batch

    def rows_of(self, place: int) -> Any:
        known = [*self._seen, *self._sent]
        at = place - self.place + len(self._seen)
        return known[at] if 0 <= at < len(known) else None

    def state(self) -> dict[str, Any]:
        return {**super().state(), "last": _order_digest(self._seen[-1])}


def _order_digest(indices: Any) -> int:
    return zlib.crc32(repr(indices).encode())


def _sampler_name(inner: Any) -> str:
    sampler = getattr(inner, "sampler", None)
    return type(inner if sampler is None else sampler).__name__


class StreamReader(LoaderReader):
    """Of an IterableDataset: it resumes by its state if it has one; else the batches
    that were seen are read and dropped. The last, read once more, must be the same."""

    kind = "stream"

    def __init__(
        self, loader: Any, seed: int | None, rank: int = 0, world_size: int = 1
    ) -> None:
        super().__init__(loader, seed, rank, world_size)
        # A stream that all ranks read, each a part of it, must be the same on all.
        self._shared = isinstance(loader.dataset, RankStream)
        self._stateful = _resumes_exactly(loader.dataset)
        self._workers = loader.num_workers
        self._opened: int | None = None  # the epoch that was begun last
        self._copy: Any = None  # of the data set, to read in its place
        # A worker that stays hears of the epoch with its first batch, when an __iter__
        # that is no generator has looked already.
        begin: Any = type(loader.dataset).__iter__
        takes_epoch = callable(getattr(loader.dataset, "set_epoch", None))
        self._begins_early = takes_epoch and not inspect.isgeneratorfunction(begin)

    def _know_draws(self, state: Mapping[str, Any]) -> None:
        super()._know_draws(
            {"drawing": ALL}
        )  # batches that are read and dropped draw once more

    def evaluate(self, training: reading.Reader | None = None) -> Iterator[Any]:
        dataset, trained = self.loader.dataset, getattr(training, "loader", None)
        self._stateful = False
        # What says where it is has one place, but for its copies in workers.
        shares = getattr(trained, "dataset", None) is dataset
        if shares and not self._workers and reading.has_state(dataset):
            self._copy = _copied(dataset)
        return super().evaluate(training)

    def check(self, state: Mapping[str, Any], skip: int) -> None:
        super().check(state, skip)
        saved = state.get("workers", self._workers)
        if skip and max(saved, 1) != max(self._workers, 1):
            raise ValueError(
                f"the checkpoint was saved with {saved} workers of the data loader and "
                f"this run has {self._workers}: which of them gives which rows of "
                f"{self.describe()} depends on their number. Set "
                f"dataloader_num_workers={saved}; {reading.ADVICE}"
            )
        ranks = state.get("ranks", self.world_size)
        if skip and not self._shared and ranks != self.world_size:
            raise ValueError(
                f"the checkpoint was saved by {ranks} ranks, each with a part of "
                f"{self.describe()} of its own, and {self.world_size} resume from it: "
                f"their parts are others; {reading.ADVICE}"
            )

    def _begin(self, state: dict[str, Any], skip: int) -> None:
        super()._begin(state, skip)
        generator = torch.get_rng_state()
        if skip and state.get("states") and self._stateful:
            dataset = self.loader.dataset
            beginning = dataset.state_dict()
            try:
                return self._go_on(state, skip)
            except reading.OtherData:
                logger.warning(
                    "The state of %s does not lead back to batch %d: reading past what "
                    "was seen. (Rows that a map makes many at a time, with random "
                    "numbers, are made anew.)", self.describe(), skip,
                )  # fmt: skip
            dataset.load_state_dict(beginning)
            torch.set_rng_state(generator)
        self._open([None] * max(self._workers, 1), [0] * max(self._workers, 1))
        if skip:
            self.read_past(skip, state.get("last"))

    def _go_on(self, state: dict[str, Any], skip: int) -> None:
        """From the state, reading the last batches once more."""
        texts = [None if s is None else _text_of(s) for s in state["states"]]
        if not self._workers and texts[0] is not None:
            _load(self.loader.dataset, texts[0])
        self._open(texts, state["fetched"])
        self.place = skip - state["past"]
        self.read_past(skip, state.get("last"))

    def _open(self, texts: list[str | None], fetched: list[int]) -> None:
        """Begin with these states of the workers, after so many batches of each."""
        self._fetched = [*fetched]
        # Of each worker the states before and after its last batch.
        self._states = [collections.deque([text], 2) for text in texts]
        self.place = 0
        if self.loader.persistent_workers and (
            self._begins_early or self._opened == self.epoch
        ):
            self.loader._iterator = None  # workers that stay would not hear of it
        self._opened = self.epoch
        known = any(text is not None for text in texts)
        self._batches = self._iterate(**self._wraps(known))

    def _wraps(self, known: bool) -> dict[str, Any]:
        """Attributes of the loader that let workers send and load states."""
        if self._copy is not None:
            return {"dataset": self._copy}
        if not self._workers or not self._stateful:
            return {}
        changes: dict[str, Any] = {"collate_fn": _WithState(self.loader.collate_fn)}
        if known:
            texts = [states[0] for states in self._states]
            changes["worker_init_fn"] = _BeginWorker(
                self.loader.worker_init_fn, texts, self._fetched
            )
        return changes

    def indices(self, place: int) -> Iterator[Any]:
        rank, first = 0 if self._shared else self.rank, self._fetched[0]
        for at, indices in enumerate(self.inner, first):
            if self._workers:
                yield _Sent(_arrive_in_stream, self.seed, self.epoch, rank, indices)
                continue
            if self._draws is not None and self.seed is not None:
                self._draws.begin(place_word(self.seed, self.epoch, rank, 0, at))
            yield indices

    def __next__(self) -> Any:
        batch = super().__next__()
        if self._stateful:
            worker, text = 0, ""
            if self._workers:
                worker, text, batch = batch
            else:
                text = _state_text(self.loader.dataset)
            self._fetched[worker] += 1
            self._states[worker].append(text)
        self._last = reading.batch_digest(batch)
        return batch

    def state(self) -> dict[str, Any]:
        state = {
            **super().state(), "last": self._last,
            "workers": self._workers, "ranks": self.world_size,
        }  # fmt: skip
        if self._stateful:
            state.update(self._states_of_workers())
        return state

    def _states_of_workers(self) -> dict[str, Any]:
        """States of the workers at the end of their last whole round before the last
        batch, and how many batches were given since."""
        last = max(self._fetched)
        ahead = [n == last for n in self._fetched]
        pairs = zip(self._states, ahead, strict=True)
        states = [kept[0] if is_ahead else kept[-1] for kept, is_ahead in pairs]
        wrong = [text[1:] for text in states if text is not None and text[0] == "!"]
        if wrong:
            self.warn_unstorable(wrong[0])
            return {}
        fetched = [min(n, last - 1) for n in self._fetched]
        values = [None if t is None else _state_of(t) for t in states]
        return {"states": values, "fetched": fetched, "past": sum(ahead)}


def _text_of(state: Any) -> str:
    return json.dumps(to_json(state))


def _state_of(text: str) -> Any:
    return from_json(json.loads(text))


def _load(dataset: Any, text: str) -> None:
    dataset.load_state_dict(_state_of(text))


def _resumes_exactly(dataset: Any) -> bool:
    """Has a stream a state that says all? One of `datasets` leaves out the rows in its
    shuffle buffers, and some of those that it reads as tables (datasets 5.2,
    IterableDataset.load_state_dict)."""
    if not reading.has_state(dataset):
        return False
    parts = [getattr(dataset, "_ex_iterable", None)]
    for part in parts:
        if "BufferShuffled" in type(part).__name__:
            return False
        inner = getattr(part, "ex_iterable", None)
        parts += [
            p for p in (inner, *getattr(part, "ex_iterables", ())) if p is not None
        ]
    return not getattr(getattr(dataset, "_formatting", None), "is_table", False)


def _copied(dataset: Any) -> Any:
    try:
        return copy.deepcopy(dataset)
    except Exception as error:
        raise ValueError(
            f"{type(dataset).__name__} is trained on and evaluated on, and has one "
            f"state: an evaluation reads a copy, and it cannot be copied ({error}). "
            "Give eval_dataset an object of its own, or set dataloader_num_workers"
        ) from error


class ObjectReader(reading.Reader):
    """Of a loader of which no more is known than that it gives batches."""

    def _make_draws(self) -> PlaceDraws:
        return Draws()


class WholeBatchReader(reading.Reader):
    """Of batches of an evaluation that rank 0 reads and sends to the others."""

    def evaluate(self, training: reading.Reader | None = None) -> Iterator[Any]:
        inner = None
        if self.rank == 0:
            inner = reader(self.loader.loader, self.seed).evaluate()
        else:
            self.loader.draw_seed()
        found: Iterator[Any] = self.loader.turns(inner)
        return found


class DispatchedReader(reading.Reader):
    """Of batches that rank 0 reads and sends to the others."""

    kind = "dispatched"

    def __init__(
        self, loader: Any, seed: int | None, rank: int = 0, world_size: int = 1
    ) -> None:
        super().__init__(loader, None, rank, world_size)
        self._inner = reader(loader.loader, seed) if rank == 0 else None

    def start(self, epoch: int, skip: int, state: Mapping[str, Any] | None) -> Self:
        self.epoch, self.place = epoch, skip
        state = state or {}
        self.check(state, skip)
        if self._inner is None:
            self.loader.draw_seed()
            self._batches = self.loader.scatter(None)
            return self
        inner = state.get("inner") or {}
        before = torch.get_rng_state()
        beginning = []
        begun = {k: v for k, v in inner.items() if k == "generators"}
        batches = self._inner.start(epoch, 0, begun)
        if skip:
            beginning = list(itertools.islice(batches, self.loader.together))
            torch.set_rng_state(before)
            reading.set_epoch(self.loader.loader, epoch)
            place = inner.get("place", skip * self.loader.together)
            batches = self._inner.start(epoch, place, inner)
        self._batches = self.loader.scatter(batches, beginning)
        return self

    def close(self) -> None:
        super().close()
        if self._inner is not None:
            self._inner.close()

    def __next__(self) -> Any:
        batch = next(self._batches)
        self.place += 1
        return batch

    def state(self) -> dict[str, Any]:
        state = {"kind": self.kind, "epoch": self.epoch, "place": self.place}
        return state if self._inner is None else {**state, "inner": self._inner.state()}


# ---- which reader ------------------------------------------------------------------


def reader(
    loader: Any, seed: int | None, rank: int = 0, world_size: int = 1
) -> reading.Reader:
    kind: type[reading.Reader]
    if isinstance(loader, DispatchedLoader):
        kind = DispatchedReader
    elif isinstance(loader, WholeBatchLoader):
        kind = WholeBatchReader
    elif not isinstance(loader, DataLoader) or not _asks_as_torch(loader):
        kind = ObjectReader
    else:
        is_stream = isinstance(loader.dataset, IterableDataset)
        kind = StreamReader if is_stream else IndexedReader
    return kind(loader, seed, rank, world_size)


def _asks_as_torch(loader: DataLoader[Any]) -> bool:
    """Does it ask its sampler for indices, when iter() is called, and nobody else?"""
    own = type(loader).__iter__ is DataLoader.__iter__
    return own or type(loader).__module__.startswith("torchdata.")


def _owned(loader: Any) -> list[torch.Generator]:
    """The generators that the loader and its parts have for themselves."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    parts = (
        loader,
        getattr(loader, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
        getattr(loader, "dataset", None),
    )
    found = (getattr(part, "generator", None) for part in parts)
    kept = {id(g): g for g in found if isinstance(g, torch.Generator)}
    return list(kept.values())
