"""Trainer: what auto_find_batch_size splits, the micro-batches of training and the
batches of evaluation; see ctrainer/runtime/parts.py."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ctrainer.runtime import parts
from ctrainer.runtime.parts import Parts, is_out_of_memory
from ctrainer.trainer_pt_utils import nested_concat

if TYPE_CHECKING:
    from ctrainer.trainer.run import TrainerRun


def prepare(trainer: TrainerRun, model: Any) -> None:
    """Ready a run: whole micro-batches, until one does not fit."""
    splits = bool(getattr(trainer.args, "auto_find_batch_size", False))
    if splits and trainer.args.world_size > 1 and not trainer._inputs_stay:
        raise ValueError(
            "auto_find_batch_size=True works on one GPU, or on ranks of CPUs: ranks "
            "with a GPU each would wait for the one that runs out of memory"
        )
    kind = MicroBatches if trainer._shard_group is None else ShardedMicroBatches
    trainer._parts = kind(trainer, model) if splits else None


class OfTrainer(Parts):
    """What training and evaluation share. `model` is the wrapped one."""

    size = "per_device_train_batch_size"

    def __init__(self, trainer: TrainerRun, model: Any) -> None:
        self.trainer, self.model = trainer, model
        super().__init__(trainer._adapter)

    def step(self) -> int:
        return self.trainer.state.global_step

    def weight(self, batch: Any, rows: int) -> float:
        """Targets of the batch, where it has labels to count, or rows."""
        targets = self.trainer._count_targets([batch])
        return float(rows if targets < 0 else targets)

    def sums(self) -> Any:
        return dict(self.trainer._means)

    def set_sums(self, sums: Any) -> None:
        self.trainer._means = dict(sums)  # the same beginning may come again

    def coupled(self) -> str:
        if getattr(self.trainer.args, "split_coupled_rows", False):
            return ""
        return f"set split_coupled_rows=True to allow that, or lower {self.size}"


class MicroBatches(OfTrainer):
    """Of training."""

    def modules(self) -> Sequence[Any]:
        return (self.trainer.model,)

    def count(self, batch: Any) -> int | None:
        """Of a packed batch the sequences."""
        if getattr(self.trainer.args, "pack_sequences", False):
            sequences: int | None = self._adapter.packing.count_sequences(batch)
            if sequences is not None:
                return sequences
        return super().count(batch)

    def part(self, batch: Any, rows: int, begin: int, end: int) -> Any:
        if rows == super().count(batch):
            return super().part(batch, rows, begin, end)
        return self._adapter.packing.sequences(self.trainer.model, batch, begin, end)

    def evaluated(self) -> Any:
        return self._adapter.evaluated(self.model)

    def measure(self, batch: Any) -> tuple[float, ...]:
        trainer = self.trainer
        inputs = trainer._prepare_inputs(batch)
        with trainer.compute_loss_context_manager():
            loss = trainer._call_hook(
                "compute_loss", self.model, inputs, num_items_in_batch=None
            )
        return (float(loss),)


# What a rank that is out of memory is in, for messages of the others' collectives.
_REPEATING = "the repetition of passes for want of memory"


class OfShards(OfTrainer):
    """Passes over sharded parameters, which are collectives: every rank makes as many
    parts of each batch, and repeats an update, or a batch of an evaluation, with the
    others.

    A rank whose pass fails leaves the pass at any place and calls for a sum of numbers.
    The others are in another collective, or come to one, and ranks that call for
    different ones all raise. So these leave their passes, too, and call for that sum;
    ranks without a failure do so at the end of the passes.
    """

    pieces = 1  # of each batch
    _dummy = False  # is the batch another rank's, which weighs nothing?

    def __init__(self, trainer: TrainerRun, model: Any) -> None:
        group: Any = trainer._shard_group
        if not group.compares:
            raise ValueError(
                "auto_find_batch_size=True with fsdp needs ranks that compare what "
                "they call, or the others would wait for the one that runs out of "
                "memory: set CTRAINER_CHECK_COLLECTIVES=1 on every rank, or "
                "auto_find_batch_size=False"
            )
        super().__init__(trainer, model)

    def begin(self) -> None:
        self._dummy = self.trainer._dummy_batch
        super().begin()

    def take(self, batch: Any, row: int) -> tuple[Any, float, int]:
        """The part of a batch at place `row`, what it weighs, and the place of the
        next. One of the first row, that weighs nothing, where rows do not suffice."""
        step, rows = self.step(), self.count(batch)
        if self.pieces > 1 and step - self._split_at >= parts.GROWTH_INTERVAL:
            self.pieces, self._split_at = self.pieces // 2, step
        self._batch, pieces = batch, self.pieces
        if pieces == 1:
            return batch, 1.0, -1
        if rows is None:
            raise ValueError(
                f"out of memory: {self.what} has no tensor of rows, so it cannot be "
                f"split: set auto_find_batch_size=False and lower {self.size}"
            )
        begin, end = rows * row // pieces, rows * (row + 1) // pieces
        self.trainer._dummy_batch = self._dummy or begin == end
        part = self.part(batch, rows, begin, end) if begin < end else None
        weight = float(begin < end)
        if part is None:
            part = self.part(batch, rows, 0, 1)
        elif self.kind != "sum":
            of_all = self.weight(batch, rows)  # 0 without any target
            weight = self.weight(part, end - begin) / of_all if of_all else 0.0
        return part, weight, row + 1 if row + 1 < pieces else -1

    def recover(self, part: Any, error: BaseException, row: int) -> bool | None:
        mine, rows = is_out_of_memory(error), self.count(part)
        if not mine and not _says_repeating(error):
            return None
        traceback.clear_frames(error.__traceback__)  # which hold what the pass has made
        splits = mine and rows is not None and rows > 1
        once_more = mine and rows == 1 and self._retried_at != self.step()
        if once_more:
            self._retried_at = self.step()
        gives_up = mine and not splits and not once_more
        return self._repeat(
            error if mine else None, self._share(mine, splits, gives_up)
        )

    def agree(self) -> bool:
        sums = self._share(False, False, False)
        return sums[0] > 0 and bool(self._repeat(None, sums))

    def rewind(self) -> None:
        super().rewind()
        self.trainer._dummy_batch = self._dummy

    def end(self) -> None:
        super().end()
        self._batch, self.trainer._dummy_batch = None, self._dummy

    def _share(self, *flags: bool) -> list[float]:
        """The sums of the flags over the ranks."""
        values = [float(flag) for flag in flags]
        unit = self.model._unit
        for group in (unit.communicator, unit.replicate_group):
            if group is not None:
                values = _sums(group, values)
        return values

    def _repeat(self, error: BaseException | None, sums: list[float]) -> bool | None:
        """On all ranks: forget the passes, and make more parts. error: of this rank,
        which is raised where it has failed with a single row again."""
        failed, splits, gave_up = sums
        self._forget()
        if gave_up:
            if error is not None:
                return None
            raise RuntimeError(
                f"another rank is out of memory with a single row of {self.what}: "
                "shorten the rows, or set gradient_checkpointing=True"
            )
        generators, sums_before = self._update
        draws = not self._adapter.same_rng(self._adapter.rng_state(), generators)
        self.set_sums(sums_before)
        self._split_at = self.step()
        if splits:
            self._choose_kind()
            self.pieces *= 2
            self.logger.warning(
                "Out of memory in %s on %d of the ranks: from here on each one is run "
                "in %d parts. An update has the same rows as before%s.",
                self.what, failed, self.pieces,
                parts.DRAWS if draws else "",
            )  # fmt: skip
        return True

    def _choose_kind(self) -> None:
        if self.kind is None:
            rows = self.count(self._batch)
            self.kind = self._kind(self._batch, 1 if rows is None else rows)

    def _forget(self) -> None:
        self.model._unit.abandon()
        self._adapter.drop_gradients(self.modules())
        self._adapter.empty_cache()
        self.trainer._dummy_batch = self._dummy

    def _compare(self, batch: Any, rows: int) -> str | None:
        """As all ranks find it, by fewer rows where memory does not suffice; a rank
        with a single row has no say."""
        n = parts.TRIED
        while True:
            kinds, error = set(self.kinds), None
            try:
                if rows > 1:
                    kinds = self._kinds(batch, rows, min(rows, n))
                else:
                    with self.evaluated(), self._adapter.no_grad():
                        for _ in range(3):  # the passes of the others
                            self.measure(batch)
            except Exception as raised:
                if not is_out_of_memory(raised) and not _says_repeating(raised):
                    raise
                error = raised
            mine = error is not None and is_out_of_memory(error)
            least = min(rows, n) <= 2
            failed, gave_up, *votes = self._share(
                mine, mine and least, *(kind in kinds for kind in self.kinds)
            )
            if not failed:
                ranks = self.trainer._communicator.world_size
                pairs = zip(self.kinds, votes, strict=True)
                return next((kind for kind, found in pairs if found == ranks), None)
            self._forget()
            if gave_up:
                raise (
                    error
                    if mine and error is not None
                    else RuntimeError(
                        f"another rank is out of memory with two rows of {self.what}: "
                        "shorten the rows"
                    )
                )
            n = max(n // 2, 2)


def _says_repeating(error: BaseException) -> bool:
    return isinstance(error, ValueError) and _REPEATING in str(error)


def _sums(group: Any, values: list[float]) -> list[float]:
    """Of the values of the group's ranks, which may come from passes."""
    try:
        return list(group.sum_numbers(_REPEATING, values))
    except ValueError as error:
        if not _says_repeating(error):
            raise
    return list(group.sum_numbers(_REPEATING, values))  # the others have raised, too


class ShardedMicroBatches(OfShards, MicroBatches):
    """Of training with sharded parameters."""


class _NoLossError(Exception):
    """Batches have none, as those of predict() without labels."""


class Evaluations(OfTrainer):
    """Of evaluations: what prediction_step returns of the parts of a batch becomes what
    it returns of the batch."""

    what = "a batch of an evaluation"
    size = "per_device_eval_batch_size"
    counted: tuple[Any] | None = None  # the batch's num_items_in_batch, for its parts

    def take(self, batch: Any, row: int) -> tuple[Any, float, int]:
        if self.counted is None:
            trainer = self.trainer
            count = trainer._get_num_items_in_batch([batch], trainer.args.device)
            self.counted = (count,)
        return super().take(batch, row)

    def end(self) -> None:
        super().end()
        self.counted = None

    def evaluated(self) -> Any:
        return contextlib.nullcontext()

    def measure(self, batch: Any) -> tuple[float, ...]:
        loss, _, _ = self.trainer._call_hook(
            "prediction_step", self.model, batch, True, ignore_keys=None
        )
        if loss is None:
            raise _NoLossError
        return (float(_mean(loss)),)

    def _kind(self, part: Any, rows: int) -> str | None:
        with contextlib.suppress(_NoLossError):
            return super()._kind(part, rows)
        return None

    def join(
        self, batch: Any, targets: int, taken: list[tuple[tuple[Any, ...], float]]
    ) -> tuple[Any, ...]:
        """The batch that _evaluate_batches() keeps, of what `take` returned of each
        part, and what the part weighs. Called by C."""
        first = taken[0][0]
        if len(taken) == 1:
            return (*first[:-1], targets)
        if first[4] is not None and self.kind is None:
            rows = self.count(batch)
            self.kind = self._kind(batch, 1 if rows is None else rows)
        if any(item[-2] for item, _ in taken):
            taken = [pair for pair in taken if pair[0][-2]]  # without repeated rows
        items = [item for item, _ in taken]
        n_rows = [item[-2] for item in items]
        for item in items:
            self._check_rows(item[:3], item[-2])
        values = [_concat([item[i] for item in items]) for i in range(3)]
        losses = [_mean(item[4]) for item in items]
        whole = None if first[3] is None else batch
        loss = self._loss_of(losses, [weight for _, weight in taken])
        return *values, whole, loss, sum(n_rows), targets

    def _loss_of(self, losses: list[Any], weights: list[float]) -> Any:
        if losses[0] is None:
            return None
        if self.kind == "sum":
            return sum(losses[1:], start=losses[0])
        found = [w * x for w, x in zip(weights, losses, strict=True) if w]
        return sum(found[1:], start=found[0]) if found else losses[0]

    def _check_rows(self, values: Any, rows: int) -> None:
        """Raise ValueError for an output that is not of rows."""
        for value in (v for v in _tensors(values) if rows > 0):
            shape = tuple(value.shape)
            if not shape or shape[0] % rows:
                raise ValueError(
                    f"out of memory in {self.what}, and prediction_step returns an "
                    f"output of shape {shape} for {rows} rows, so that what it returns "
                    "of parts cannot be put together: leave it out by ignore_keys, or "
                    f"lower {self.size}"
                )


class ShardedEvaluations(Evaluations, OfShards):
    """Of evaluations with sharded parameters."""

    def _choose_kind(self) -> None:
        """join() does, where batches have a loss."""


def for_evaluation(trainer: TrainerRun, model: Any) -> Evaluations | None:
    """What splits the batches of an evaluation of this model; None where they are not
    to be split, or calls of prediction_step belong to collectives or to each other."""
    args = trainer.args
    if not getattr(args, "auto_find_batch_size", False):
        return None
    if getattr(args, "past_index", -1) >= 0 or "gather_function" in vars(trainer):
        return None
    kind = Evaluations if trainer._shard_group is None else ShardedEvaluations
    found = trainer._evaluations
    if not isinstance(found, kind):
        trainer._evaluations = found = kind(trainer, model)
    found.model = model
    return found


def _mean(loss: Any) -> Any:
    """An override of prediction_step may return the losses of rows."""
    return loss.mean() if len(getattr(loss, "shape", ())) > 0 else loss


def _tensors(value: Any) -> Any:
    if isinstance(value, Mapping | list | tuple):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(one)
    elif hasattr(value, "shape"):
        yield value


def _concat(values: list[Any]) -> Any:
    """The rows of all; shorter ones are filled with -100, as those of batches are."""
    while len(values) > 1 and values[0] is not None:
        pairs = zip(values[::2], values[1::2], strict=False)
        rest = values[-1:] if len(values) % 2 else []
        values = [*(nested_concat(a, b) for a, b in pairs), *rest]
    return values[0]
