"""Trainer: data loaders, samplers and columns."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

from ctrainer.runtime.hooks import takes_positional
from ctrainer.trainer.base import TrainerBase
from ctrainer.trainer_utils import has_length

logger = logging.getLogger("ctrainer.trainer")


class DataMixin(TrainerBase):
    """The hooks that make batches. Each is called by attribute lookup, so any may be
    overridden alone."""

    def get_train_dataloader(self) -> Any:
        """Return the loader of training batches.

        Raises ValueError without a train_dataset.
        """
        if self.train_dataset is None:
            raise ValueError("training needs a train_dataset; pass one to the trainer")
        return self._get_dataloader(
            dataset=self.train_dataset,
            description="Training",
            batch_size=self._train_batch_size,
            sampler_fn=self._get_train_sampler,
            is_training=True,
        )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return the loader of evaluation batches of `eval_dataset`: a data set, a key
        of self.eval_dataset, or None for self.eval_dataset."""
        key = eval_dataset if isinstance(eval_dataset, str) else "eval"
        kept = self.__dict__.setdefault("_eval_dataloaders", {})
        if key in kept and self.args.dataloader_persistent_workers:
            return kept[key]
        chosen = self.eval_dataset if eval_dataset is None else eval_dataset
        chosen = self.eval_dataset[chosen] if isinstance(chosen, str) else chosen
        if chosen is None:
            raise ValueError("evaluation needs an eval_dataset; pass one")
        return self._get_dataloader(
            dataset=chosen,
            description="Evaluation",
            batch_size=self.args.eval_batch_size,
            sampler_fn=self._get_eval_sampler,
            dataloader_key=key,
        )

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Return the loader of batches to predict."""
        return self._get_dataloader(
            dataset=test_dataset,
            description="Test",
            batch_size=self.args.eval_batch_size,
            sampler_fn=self._get_eval_sampler,
        )

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Callable[[Any], Any] | None = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> Any:
        collator = self.data_collator
        if _is_datasets(dataset):
            dataset = self._remove_unused_columns(dataset, description=description)
        else:
            collator = self._get_collator_with_removed_columns(collator, description)
        if has_length(dataset) and len(dataset) == 0:
            raise ValueError(f"the {description.lower()} data set is empty")
        indexed = not self._adapter.is_iterable(dataset)
        loader = self._adapter.data_loader(
            dataset,
            self.args,
            training=is_training,
            sampler=_sampler(sampler_fn, dataset) if indexed and sampler_fn else None,
            batch_size=batch_size,
            collate_fn=collator,
        )
        if dataloader_key is not None and self.args.dataloader_persistent_workers:
            self.__dict__.setdefault("_eval_dataloaders", {})[dataloader_key] = loader
        return loader

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        dataset = self.train_dataset if train_dataset is None else train_dataset
        if dataset is None or not has_length(dataset):
            return None
        strategy = getattr(self.args, "train_sampling_strategy", "random")
        if strategy == "group_by_length":
            size = self.args.train_batch_size * self.args.gradient_accumulation_steps
            return self._adapter.length_grouped_sampler(size, self._lengths(dataset))
        if strategy == "sequential":
            return self._adapter.sequential_sampler(dataset)
        return self._adapter.random_sampler(dataset, self.args)

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        if eval_dataset is None or not has_length(eval_dataset):
            return None
        return self._adapter.sequential_sampler(eval_dataset)

    def _lengths(self, dataset: Any) -> list[int]:
        """The length of each example: a column of that name, or that of its input."""
        column = self.args.length_column_name
        if column in (getattr(dataset, "column_names", None) or ()):
            return list(dataset[column])
        names = getattr(self.processing_class, "model_input_names", ["input_ids"])
        try:
            return [len(example[names[0]]) for example in dataset]
        except (KeyError, TypeError, IndexError) as error:
            raise ValueError(
                f"group_by_length needs the lengths of the examples: a column "
                f"{column!r}, or examples with {names[0]!r}"
            ) from error

    def _set_signature_columns_if_needed(self) -> None:
        """Fill _signature_columns: the names that the model's forward takes, and those
        of the labels."""
        if self._signature_columns is None:
            model = _base_model(self.model)
            forward = getattr(model, "forward", model)
            names = list(inspect.signature(forward).parameters)
            labels = {"label", "label_ids", *(self.label_names or ())}
            self._signature_columns = names + sorted(labels)

    def _remove_unused_columns(
        self, dataset: Any, description: str | None = None
    ) -> Any:
        """`dataset` without the columns that the model's forward does not take."""
        if not self.args.remove_unused_columns:
            return dataset
        self._set_signature_columns_if_needed()
        assert self._signature_columns is not None
        wanted = set(self._signature_columns)
        unused = [c for c in dataset.column_names if c not in wanted]
        if unused:
            self._tell_unused(unused, description)
        if len(unused) == len(dataset.column_names):
            raise ValueError(
                f"none of the columns {dataset.column_names} is an argument of the "
                f"model's forward ({', '.join(self._signature_columns)}); set "
                "remove_unused_columns=False, or rename them"
            )
        return dataset.remove_columns(unused)

    def _tell_unused(self, unused: list[str], description: str | None) -> None:
        logger.warning(
            "%s data set: column(s) %s left out, since %s.forward takes no such "
            "argument; remove_unused_columns=False keeps them",
            description or "The",
            ", ".join(unused),
            type(self.model).__name__,
        )

    def _get_collator_with_removed_columns(
        self, data_collator: Callable[..., Any], description: str | None = None
    ) -> Callable[..., Any]:
        """A collator that first drops the columns that the model does not take."""
        if not self.args.remove_unused_columns:
            return data_collator
        self._set_signature_columns_if_needed()
        return ColumnFilter(data_collator, self, description)


class ColumnFilter:
    """Passes on the columns of each example that the model takes."""

    def __init__(
        self,
        collator: Callable[..., Any],
        trainer: TrainerBase,
        description: str | None,
    ) -> None:
        assert trainer._signature_columns is not None
        self.data_collator = collator
        self.wanted = frozenset(trainer._signature_columns)
        self.model_name = type(trainer.model).__name__
        self.description = description
        self.told = False

    def __call__(self, features: list[Any]) -> Any:
        if features and isinstance(features[0], dict):
            if not self.told:
                self.tell(features[0])
            features = [
                {k: v for k, v in f.items() if k in self.wanted} for f in features
            ]
        return self.data_collator(features)

    def tell(self, example: dict[str, Any]) -> None:
        """Say once which columns go; raise when none is left."""
        self.told = True
        unused = [name for name in example if name not in self.wanted]
        if unused and len(unused) == len(example):
            raise ValueError(
                f"none of the examples' fields {unused} is an argument of "
                f"{self.model_name}.forward ({', '.join(sorted(self.wanted))}); set "
                "remove_unused_columns=False, or rename them"
            )
        if unused:
            logger.warning(
                "%s data set: field(s) %s left out, since %s.forward takes no such "
                "argument; remove_unused_columns=False keeps them",
                self.description or "The",
                ", ".join(unused),
                self.model_name,
            )


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


def _base_model(model: Any) -> Any:
    """The model inside a PEFT wrapper."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
