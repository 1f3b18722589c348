"""The iterators that fairseq's Trainer asks its task for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from ctrainer.fairseq._trainer_checks import setting
from ctrainer.fairseq._trainer_core import Core
from ctrainer.fairseq.iterators import EpochBatchIterator, StreamingEpochBatchIterator

logger = logging.getLogger("ctrainer.fairseq.trainer")


def resolve_max_positions(*limits: Any) -> Any:
    """The least of limits that are None, numbers, tuples of them or dicts of them.

    A number beside a tuple or a dict limits each of its entries.
    """
    found = None
    for limit in limits:
        found = _least(found, limit)
    return found


def _least(a: Any, b: Any) -> Any:
    if a is None or b is None:
        return b if a is None else a
    if isinstance(a, dict) or isinstance(b, dict):
        of_a = a if isinstance(a, dict) else dict.fromkeys(b, a)
        of_b = b if isinstance(b, dict) else dict.fromkeys(a, b)
        return {k: _least(of_a.get(k), of_b.get(k)) for k in {**of_a, **of_b}}
    if isinstance(a, tuple | list) or isinstance(b, tuple | list):
        in_a = a if isinstance(a, tuple | list) else [a] * len(b)
        in_b = b if isinstance(b, tuple | list) else [b] * len(a)
        return tuple(map(_least, in_a, in_b))
    return min(a, b)


class Iterators(Core):
    """get_train_iterator() and get_valid_iterator()."""

    def get_train_iterator(
        self,
        epoch: int,
        combine: bool = True,
        load_dataset: bool = True,
        data_selector: Callable[..., Any] | None = None,
        shard_batch_itr: bool = True,
        disable_iterator_cache: bool = False,
    ) -> Any:
        """The EpochBatchIterator of the training subset at `epoch`, from 1.

        load_dataset: have the task load the subset first. shard_batch_itr: this
        worker's share of the batches, else all of them.
        """
        data, limit = self.cfg.dataset, self._option("max_tokens", None)
        if load_dataset:
            logger.info("loading train data for epoch %s", epoch)
            self.task.load_dataset(
                data.train_subset, epoch=epoch, combine=combine,
                data_selector=data_selector, tpu=False,
            )  # fmt: skip
        seed = setting(self.cfg, "common", "seed", 1)
        reorders = self._option("update_ordered_indices_seed", False)
        batch_iterator = self.task.get_batch_iterator(
            dataset=self.task.dataset(data.train_subset),
            max_tokens=limit,
            max_sentences=self._option("batch_size", None),
            max_positions=self._max_positions(limit),
            ignore_invalid_inputs=True,
            seed=seed + epoch if reorders else seed,
            epoch=epoch,
            disable_iterator_cache=disable_iterator_cache,
            skip_remainder_batch=setting(
                self.cfg, "optimization", "skip_remainder_batch", False
            ),
            grouped_shuffling=self._option("grouped_shuffling", False),
            update_epoch_batch_itr=self._option("update_epoch_batch_itr", False),
            **self._common_options(shard_batch_itr),
        )
        self.reset_dummy_batch(batch_iterator.first_batch)
        self._epoch_itr = batch_iterator
        return batch_iterator

    def get_valid_iterator(
        self, subset: str, disable_iterator_cache: bool = False
    ) -> Any:
        """The EpochBatchIterator of a validation subset, which the task has loaded.

        Every validation begins at epoch 1, with the same draws. One on the data set
        that is being trained on has an iterator of its own, and leaves the data set at
        training's epoch."""
        dataset, of_training = self.task.dataset(subset), self._epoch_itr
        is_trained_on = getattr(of_training, "dataset", None) is dataset
        batch_iterator = self.task.get_batch_iterator(
            dataset=dataset,
            max_tokens=self._option(
                "max_tokens_valid", self._option("max_tokens", None)
            ),
            max_sentences=self._option(
                "batch_size_valid", self._option("batch_size", None)
            ),
            max_positions=self._max_positions(),
            ignore_invalid_inputs=self._option(
                "skip_invalid_size_inputs_valid_test", False
            ),
            seed=setting(self.cfg, "common", "seed", 1),
            epoch=of_training.epoch if is_trained_on else 1,
            disable_iterator_cache=disable_iterator_cache or is_trained_on,
            skip_remainder_batch=False,
            **self._common_options(True),
        )
        if isinstance(batch_iterator, EpochBatchIterator | StreamingEpochBatchIterator):
            batch_iterator.load_state_dict({"epoch": 1})
        self.reset_dummy_batch(batch_iterator.first_batch)
        return batch_iterator

    def _option(self, name: str, default: Any) -> Any:
        return setting(self.cfg, "dataset", name, default)

    def _common_options(self, shard: bool) -> dict[str, Any]:
        return {
            "required_batch_size_multiple": self._option(
                "required_batch_size_multiple", 8
            ),
            "num_shards": self.data_parallel_world_size if shard else 1,
            "shard_id": self.data_parallel_rank if shard else 0,
            "num_workers": self._option("num_workers", 1),
            "data_buffer_size": self._option("data_buffer_size", 10),
        }

    def _max_positions(self, *more: int | None) -> Any:
        of_model = getattr(self.get_model(), "max_positions", None)
        limit = None if of_model is None else of_model()
        return resolve_max_positions(self.task.max_positions(), limit, *more)
