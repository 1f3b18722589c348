"""Trainer: data loaders, samplers and columns, and the reading of an epoch from any
place on.

Functions that TrainerRun has as methods, and what these share.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ctrainer import _C
from ctrainer.adapters.lengths import LongestFirst, TokenBatches
from ctrainer.adapters.reading import seeded_order
from ctrainer.arguments.accelerator import config_of
from ctrainer.checkpoint.files import naming
from ctrainer.introspect import base_model, named
from ctrainer.runtime.hooks import takes_positional
from ctrainer.trainer.checkpoint import own_state_file
from ctrainer.trainer_utils import has_length

if TYPE_CHECKING:
    from ctrainer.trainer.run import TrainerRun

logger = logging.getLogger("ctrainer.trainer")


def get_train_dataloader(trainer: TrainerRun) -> Any:
    """Return the loader of training batches.

    Raises ValueError without a train_dataset.
    """
    if trainer.train_dataset is None:
        raise ValueError("training needs a train_dataset; pass one to the trainer")
    return trainer._get_dataloader(
        dataset=trainer.train_dataset,
        description="Training",
        batch_size=trainer._train_batch_size,
        sampler_fn=trainer._get_train_sampler,
        is_training=True,
    )


def get_eval_dataloader(trainer: TrainerRun, eval_dataset: Any = None) -> Any:
    """Return the loader of evaluation batches.

    Args:
        eval_dataset (default None): A data set, a key of self.eval_dataset, or None
            for self.eval_dataset.

    Raises:
        ValueError: there is none.
    """
    key = eval_dataset if isinstance(eval_dataset, str) else "eval"
    kept = trainer._eval_dataloaders
    if key in kept and trainer.args.dataloader_persistent_workers:
        return kept[key]
    chosen = trainer.eval_dataset if eval_dataset is None else eval_dataset
    chosen = named(trainer.eval_dataset, chosen) if isinstance(chosen, str) else chosen
    if chosen is None:
        raise ValueError("evaluation needs an eval_dataset; pass one")
    return trainer._get_dataloader(
        dataset=chosen,
        description="Evaluation",
        batch_size=trainer.args.eval_batch_size,
        sampler_fn=trainer._get_eval_sampler,
        dataloader_key=key,
    )


def get_test_dataloader(trainer: TrainerRun, test_dataset: Any) -> Any:
    """Return the loader of batches to predict.

    Args:
        test_dataset: The data set.
    """
    return trainer._get_dataloader(
        dataset=test_dataset,
        description="Test",
        batch_size=trainer.args.eval_batch_size,
        sampler_fn=trainer._get_eval_sampler,
    )


def get_dataloader(
    trainer: TrainerRun,
    dataset: Any,
    description: str,
    batch_size: int,
    sampler_fn: Callable[[Any], Any] | None = None,
    is_training: bool = False,
    dataloader_key: str | None = None,
) -> Any:
    collator, whole = trainer.data_collator, dataset
    if getattr(trainer.args, "pack_sequences", False):
        collator = trainer._adapter.packing.collator(trainer.model, is_training)
    if _is_datasets(dataset):
        dataset = trainer._remove_unused_columns(dataset, description=description)
        trainer._with_all_columns = (dataset, whole)
    else:
        collator = trainer._get_collator_with_removed_columns(collator, description)
    if has_length(dataset) and len(dataset) == 0:
        raise ValueError(f"the {description.lower()} data set is empty; pass rows")
    indexed = not trainer._adapter.is_iterable(dataset)
    sampler = _sampler(sampler_fn, dataset) if indexed and sampler_fn else None
    if max_tokens(trainer) is not None:
        check_token_batches(trainer, sampler, indexed)
    loader = trainer._adapter.data_loader(
        dataset,
        trainer.args,
        training=is_training,
        sampler=sampler,
        batch_size=batch_size,
        collate_fn=collator,
    )
    if dataloader_key is not None and trainer.args.dataloader_persistent_workers:
        trainer._eval_dataloaders[dataloader_key] = loader
    return loader


def get_train_sampler(trainer: TrainerRun, train_dataset: Any = None) -> Any:
    dataset = trainer.train_dataset if train_dataset is None else train_dataset
    if dataset is None or not has_length(dataset):
        return None
    args = trainer.args
    strategy = getattr(args, "train_sampling_strategy", "random")
    if max_tokens(trainer) is not None:
        packed = bool(getattr(args, "pack_sequences", False))
        return token_batches(trainer, dataset, packed, own_seed(trainer))
    if strategy == "group_by_length":
        size = args.train_batch_size * args.gradient_accumulation_steps
        return trainer._adapter.length_grouped_sampler(size, lengths(trainer, dataset))
    if strategy == "sequential":
        return trainer._adapter.sequential_sampler(dataset)
    return trainer._adapter.random_sampler(dataset, args)


def get_eval_sampler(trainer: TrainerRun, eval_dataset: Any) -> Any:
    """In the data set's order; grouped by length the longest rows come first, and the
    results go back to that order."""
    if eval_dataset is None or not has_length(eval_dataset):
        return None
    if max_tokens(trainer) is not None:
        return token_batches(trainer, eval_dataset, False, None)
    strategy = getattr(trainer.args, "train_sampling_strategy", "random")
    if strategy == "group_by_length" and trainer.args.eval_do_concat_batches:
        return LongestFirst(lengths(trainer, eval_dataset))
    return trainer._adapter.sequential_sampler(eval_dataset)


def max_tokens(trainer: TrainerRun) -> int | None:
    """The limit of a micro-batch in tokens, where batches are cut by it."""
    limit: int | None = getattr(trainer.args, "max_tokens_per_batch", None)
    return limit


def token_batches(
    trainer: TrainerRun, dataset: Any, packed: bool, seed: int | None
) -> TokenBatches:
    limit = max_tokens(trainer)
    assert limit is not None
    return TokenBatches(lengths(trainer, dataset), limit, packed, seed)


def check_token_batches(trainer: TrainerRun, sampler: Any, indexed: bool) -> None:
    """Raise ValueError where max_tokens_per_batch would have no effect."""
    config = config_of(trainer.args.accelerator_config)
    fault = None
    if not indexed:
        fault = "the data set has no length, so its rows come as they are"
    elif not isinstance(sampler, TokenBatches):
        fault = f"the sampler is {type(sampler).__name__}, which an override returns"
    elif trainer.args.world_size > 1 and (
        config.split_batches or config.dispatch_batches
    ):
        fault = "split_batches and dispatch_batches cut batches by rows"
    if fault is not None:
        raise ValueError(
            f"max_tokens_per_batch cuts batches by length, and {fault}; "
            "leave it out, or override get_train_dataloader"
        )


def lengths(trainer: TrainerRun, dataset: Any) -> Any:
    """The length of each example: a column of that name, also one that the model does
    not take, or that of its input. They are read once for a data set."""
    dropped, whole = trainer._with_all_columns
    whole = whole if dropped is dataset else dataset
    kept, found = trainer._known_lengths.get(id(whole), (None, None))
    if kept is not whole:
        found = _read_lengths(trainer, dataset, whole)
        trainer._known_lengths[id(whole)] = whole, found
    return found


def _read_lengths(trainer: TrainerRun, dataset: Any, whole: Any) -> Any:
    column = trainer.args.length_column_name
    names = getattr(trainer.processing_class, "model_input_names", ["input_ids"])
    if column in (getattr(whole, "column_names", None) or ()):
        return whole[column][:]
    if _is_datasets(dataset) and names[0] in dataset.column_names:
        found = _arrow_lengths(dataset, names[0])
        if found is not None:
            return found
    try:
        return [len(example[names[0]]) for example in dataset]
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(
            "batches by length need the lengths of the examples: a column "
            f"{column!r}, or examples with {names[0]!r}"
        ) from error


def _arrow_lengths(dataset: Any, column: str) -> Any:
    """The lengths of a column's lists without reading these; None for a column of
    another kind, and for rows that a function makes."""
    import pyarrow.compute  # type: ignore[import-untyped]

    values = dataset.data.column(column)
    lists = str(values.type).startswith(("list<", "large_list<"))
    if not lists or dataset.format["type"] == "custom":
        return None
    found = pyarrow.compute.list_value_length(values).to_numpy()
    order = dataset._indices
    return found if order is None else found[order.column(0).to_numpy()]


def set_signature_columns_if_needed(trainer: TrainerRun) -> None:
    """Fill _signature_columns: the names that the model's forward takes, and those
    of the labels."""
    if trainer._signature_columns is None:
        model = base_model(trainer.model)
        forward = getattr(model, "forward", model)
        names = list(inspect.signature(forward).parameters)
        labels = {"label", "label_ids", *(trainer.label_names or ())}
        trainer._signature_columns = names + sorted(labels)


def remove_unused_columns(
    trainer: TrainerRun, dataset: Any, description: str | None = None
) -> Any:
    """`dataset` without the columns that the model's forward does not take."""
    if not trainer.args.remove_unused_columns:
        return dataset
    trainer._set_signature_columns_if_needed()
    assert trainer._signature_columns is not None
    wanted = set(trainer._signature_columns)
    unused = [c for c in dataset.column_names if c not in wanted]
    warn_unused("column", unused, trainer.model.__class__.__name__, description)
    if len(unused) == len(dataset.column_names):
        raise ValueError(
            f"none of the columns {dataset.column_names} is an argument of the "
            f"model's forward ({', '.join(trainer._signature_columns)}); set "
            "remove_unused_columns=False, or rename them"
        )
    return dataset.remove_columns(unused)


def warn_unused(
    kind: str, unused: list[str], model_name: str, description: str | None
) -> None:
    if unused:
        logger.warning(
            "%s data set: %s(s) %s left out, since %s.forward takes no such "
            "argument; remove_unused_columns=False keeps them",
            description or "The", kind, ", ".join(unused), model_name,
        )  # fmt: skip


def get_collator_with_removed_columns(
    trainer: TrainerRun,
    data_collator: Callable[..., Any],
    description: str | None = None,
) -> Callable[..., Any]:
    """A collator that first drops the columns that the model does not take."""
    if not trainer.args.remove_unused_columns:
        return data_collator
    trainer._set_signature_columns_if_needed()
    return ColumnFilter(data_collator, trainer, description)


def get_batch_samples(
    trainer: TrainerRun, epoch_iterator: Any, num_batches: int, device: Any = None
) -> tuple[list[Any], Any]:
    """Take the micro-batches of an update; return them and their count of targets.

    Args:
        epoch_iterator (iterator): Of batches.
        num_batches (int): How many; the list is shorter, or empty, where the iterator
            ends.
        device (default None): Where the count goes.
    """
    batches = list(itertools.islice(epoch_iterator, num_batches))
    return batches, trainer._get_num_items_in_batch(batches, device)


def get_num_items_in_batch(
    trainer: TrainerRun, batch_samples: list[Any], device: Any = None
) -> Any:
    """The predicted targets of a list of batches, of all ranks with
    args.average_tokens_across_devices, as what the loss takes; None where no loss takes
    the count, or a rank has no labels to count."""
    if not trainer.model_accepts_loss_kwargs and trainer.compute_loss_func is None:
        return None
    n: float = trainer._count_targets(batch_samples)
    if trainer.args.average_tokens_across_devices:
        n, uncounted = trainer._sum_over_ranks(max(n, 0), n < 0)
        n = -1 if uncounted else n
    if n < 0:
        return None
    return trainer._adapter.item_count(int(n), device)


def position(trainer: TrainerRun, updates_per_epoch: int) -> tuple[int, int]:
    """Epoch and micro-batch that the loaded checkpoint stands at."""
    data = trainer._resume_state.get("data")
    if data is not None:
        place, anew = int(data["place"]), trainer.args.ignore_data_skip
        done = 0 < (data.get("length") or 0) <= place
        if not anew:  # the save may have been before what an epoch's end does
            done = trainer._resume_state.get("epoch_done", done)
        place = 0 if anew or done else place
        return int(data["epoch"]) + done, place
    epoch, updates = divmod(trainer.state.global_step, updates_per_epoch)
    skipped = 0 if trainer.args.ignore_data_skip else updates
    return epoch, skipped * trainer.args.gradient_accumulation_steps


class Reading:
    """How far a loader is read, by the names that accelerate's loaders have: what
    trainer.accelerator knows of a loader of ours. A loader of accelerate's, which says
    so itself, comes on top.

    remainder: rows of the last round of all ranks' batches that are no repetition; -1
    where nothing is repeated or known.
    """

    end_of_dataloader: bool = False

    def __init__(self, loader: Any, batches: int | None = None) -> None:
        self.batches = batches  # that remain; None: not known
        size = getattr(loader, "total_batch_size", None)
        try:
            rows = getattr(loader, "total_dataset_length", None)
        except TypeError:  # accelerate's, of a stream
            rows = None
        parts = loader, getattr(loader, "batch_sampler", None)
        drops = any(getattr(part, "drop_last", False) for part in parts)
        self.remainder = rows % size if size and rows and not drops else -1

    def begin_batch(self) -> None:
        """Another batch is run."""
        if self.batches:
            self.batches -= 1
            self.end_of_dataloader = self.batches == 0


class TrainReading(Reading):
    """Of the epochs of a run."""

    def __init__(self, loader: Any, run: _C.Run) -> None:
        super().__init__(loader)
        self.run = run if has_length(loader) else None

    @property
    def end_of_dataloader(self) -> bool:  # type: ignore[override]
        """Whether the last micro-batch of the epoch has begun."""
        run = self.run
        return run is not None and run.begun >= run.steps_in_epoch


def begin_reading(trainer: TrainerRun, reading: Reading) -> None:
    """Show a loader to the accelerator, if it is made."""
    trainer._readings.append(reading)
    state = getattr(trainer._accelerator, "gradient_state", None)
    if state is not None:
        state._add_dataloader(reading)


def end_readings(trainer: TrainerRun, kept: int = 0) -> None:
    """Forget all but the first loaders that are read."""
    state = getattr(trainer._accelerator, "gradient_state", None)
    for reading in trainer._readings[kept:]:
        if state is not None:
            state._remove_dataloader(reading)
    del trainer._readings[kept:]


def epoch_iterator(trainer: TrainerRun, run: _C.Run) -> Any:
    """Batches of the run's epoch from its micro-batch on.

    The generators' states at the beginning of the epoch are kept for checkpoints:
    a run resumed in its middle starts the epoch with them, so that its order is
    the same, and then takes those of the moment of saving. One resumed between two
    epochs starts with those.
    """
    loader, epoch = run.loader, run.epoch
    end_readings(trainer)
    begin_reading(trainer, TrainReading(loader, run))
    skip, checkpoint = run.micro_step, run.checkpoint
    keep_seeds(trainer, loader)
    began = trainer._resume_state.get("epoch_rng") if checkpoint and skip else None
    if began is not None:
        assert checkpoint is not None
        with naming(os.path.join(checkpoint, own_state_file(trainer))):
            trainer._adapter.set_rng_state(began)
    else:
        if checkpoint and not skip:
            pass_epoch_before(trainer, loader, epoch)
        trainer._load_rng_state(None if skip else checkpoint)
        trainer._resume_state["epoch_rng"] = trainer._adapter.rng_state()
    if trainer._communicator.world_size > 1:
        trainer._adapter.share_order(loader, trainer._communicator)
    known = trainer._resume_state.pop("data", None) if checkpoint and skip else None
    reader = reader_of(trainer, loader)
    trainer._adapter.set_epoch(loader, epoch)
    iterator = reader.start(epoch, skip, known)
    if skip:
        trainer._load_rng_state(checkpoint)
    return iterator


def resume_seed(trainer: TrainerRun) -> None:
    """Keep the seeds of the checkpoint's data, unless its place is not kept either."""
    if trainer.args.ignore_data_skip:
        trainer._resume_state.pop("seeds", None)
    own = own_seed(trainer)
    resumed = (trainer._resume_state.get("seeds") or {}).get("seed", own)
    if resumed != own:
        logger.warning(
            "Resuming: the checkpoint's run took seed %d for its data, and the "
            "arguments of this run say %d. The order of the rows, and the numbers that "
            "they draw, continue with seed %d; ignore_data_skip=True takes seed %d.",
            resumed, own, resumed, own,
        )  # fmt: skip


def keep_seeds(trainer: TrainerRun, loader: Any) -> None:
    """Give the loader's order the seed that a resumed run had, and note the seeds for
    checkpoints."""
    seeds, order = trainer._resume_state.get("seeds") or {}, seeded_order(loader)
    if order is not None and seeds.get("order") is not None:
        order.seed = seeds["order"]
    trainer._resume_state["seeds"] = {
        "seed": seeds.get("seed", own_seed(trainer)),
        "order": None if order is None else order.seed,
    }


def own_seed(trainer: TrainerRun) -> int:
    """The seed of the data that the arguments ask for."""
    args = trainer.args
    return int(args.seed if args.data_seed is None else args.data_seed)


def pass_epoch_before(trainer: TrainerRun, loader: Any, epoch: int) -> None:
    """Let the loader's own generators go where the epoch that the checkpoint ends
    has left them; no row is read."""
    data = trainer._resume_state.get("data") or {}
    if data.get("generators") and data["epoch"] == epoch - 1:
        trainer._adapter.set_epoch(loader, epoch - 1)
        reader_of(trainer, loader).pass_epoch(data)


def reader_of(trainer: TrainerRun, loader: Any) -> Any:
    if trainer._reader is None or trainer._reader.loader is not loader:
        trainer._reader = make_reader(trainer, loader)
    return trainer._reader


def make_reader(trainer: TrainerRun, loader: Any) -> Any:
    """What reads epochs of the loader, with the draws that
    dataloader_seed_by_place asks for."""
    seed: int | None = None
    if getattr(trainer.args, "dataloader_seed_by_place", True):
        resumed = trainer._resume_state.get("seeds") or {}
        seed = resumed.get("seed", own_seed(trainer))
    group = trainer._communicator
    return trainer._adapter.reader(loader, seed, group.rank, group.world_size)


def evaluation_batches(trainer: TrainerRun, loader: Any) -> Any:
    """An evaluation's batches, which draw alike each time, by their place: what
    they draw changes neither the training that follows nor what a resumed run
    finds."""
    if not getattr(trainer.args, "dataloader_seed_by_place", True):
        return loader
    return make_reader(trainer, loader).evaluate(trainer._reader)


class ColumnFilter:
    """Passes on the columns of each example that the model takes."""

    def __init__(
        self, collator: Callable[..., Any], trainer: TrainerRun, description: str | None
    ) -> None:
        assert trainer._signature_columns is not None
        self.data_collator = collator
        self.wanted = frozenset(trainer._signature_columns)
        self.model_name = trainer.model.__class__.__name__
        self.description = description
        self.has_warned = False

    def __call__(self, features: list[Any]) -> Any:
        if features and isinstance(features[0], dict):
            if not self.has_warned:
                self.check(features[0])
            features = [
                {k: v for k, v in f.items() if k in self.wanted}
                if isinstance(f, dict)
                else f
                for f in features
            ]
        return self.data_collator(features)

    def check(self, example: dict[str, Any]) -> None:
        """Say once which columns go; raise when none is left."""
        self.has_warned = True
        unused = [name for name in example if name not in self.wanted]
        if unused and len(unused) == len(example):
            raise ValueError(
                f"none of the examples' fields {unused} is an argument of "
                f"{self.model_name}.forward ({', '.join(sorted(self.wanted))}); set "
                "remove_unused_columns=False, or rename them"
            )
        warn_unused("field", unused, self.model_name, self.description)


def _sampler(hook: Callable[..., Any], dataset: Any) -> Any:
    """_get_train_sampler took no data set before transformers 4.50."""
    return hook(dataset) if takes_positional(hook, 1) else hook()


def _is_datasets(dataset: Any) -> bool:
    """A datasets.Dataset, which can drop columns without reading them."""
    return (
        type(dataset).__module__.startswith("datasets.")
        and hasattr(dataset, "remove_columns")
        and getattr(dataset, "column_names", None) is not None
    )
