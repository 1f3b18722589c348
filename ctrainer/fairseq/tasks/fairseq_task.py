"""The base of tasks, by the name of fairseq's tasks/fairseq_task.py."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

from ctrainer.adapters import torch_fairseq as tools
from ctrainer.fairseq import data_utils, iterators, metrics
from ctrainer.fairseq.data.dictionary import Dictionary
from ctrainer.fairseq.fairseq_dataset import FairseqDataset
from ctrainer.fairseq.optim import AMPOptimizer
from ctrainer.fairseq.registry import Registered
from ctrainer.fairseq.tokenizer import tokenize_line
from ctrainer.fairseq.utils import deprecation_warning


class StatefulContainer:
    """Attributes that are saved with checkpoints, made on first use.

    Example:
        >>> from ctrainer.fairseq.tasks import StatefulContainer
        >>> state = StatefulContainer()
        >>> state.add_factory("seen", list)
        >>> state.seen
        []
    """

    def __init__(self) -> None:
        self._state: dict[str, Any] = {}
        self._factories: dict[str, Callable[[], Any]] = {}

    def add_factory(self, name: str, factory: Callable[[], Any]) -> None:
        """Let a function make an attribute where no checkpoint has it.

        Args:
            name (str): Of the attribute.
            factory (Callable[[], Any]): The function.
        """
        self._factories[name] = factory

    def merge_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over attributes.

        Args:
            state_dict (dict[str, Any]): Attributes by name.
        """
        self._state.update(state_dict)

    @property
    def state_dict(self) -> dict[str, Any]:
        """The attributes by name."""
        return self._state

    def __getattr__(self, name: str) -> Any:
        if name in ("_state", "_factories"):  # asked for before __init__, by copy
            raise AttributeError(name)
        if name not in self._state:
            if name not in self._factories:
                raise AttributeError(f"Task state has no factory for attribute {name}")
            self._state[name] = self._factories[name]()
        return self._state[name]


class FairseqTask(Registered):
    """Holds dictionaries and data sets, builds model and criterion, does a step.

    `datasets` has data sets by split; `state` is a StatefulContainer.

    Args:
        cfg: The task's config.
        **kwargs: Of subclasses.

    Example:
        >>> from ctrainer.fairseq.tasks import FairseqTask
        >>> task = FairseqTask.setup_task(None)
        >>> task.max_positions(), task.datasets
        (None, {})
    """

    uses_ema = False

    def __init__(self, cfg: Any, **kwargs: Any) -> None:
        self.cfg = cfg
        self.datasets: dict[str, Any] = {}
        self.dataset_to_epoch_iter: dict[Any, Any] = {}
        self.state = StatefulContainer()

    @classmethod
    def setup_task(cls, cfg: Any, **kwargs: Any) -> Any:
        """Return the task of a config; a subclass loads its dictionaries here.

        Args:
            cfg: The task's config.
            **kwargs: Of the constructor.
        """
        return cls(cfg, **kwargs)

    @staticmethod
    def logging_outputs_can_be_summed(criterion: Any) -> bool:
        """Return whether workers may add their logging outputs up.

        Args:
            criterion: The criterion.
        """
        return bool(criterion.logging_outputs_can_be_summed())

    # ---- dictionaries ----------------------------------------------------------------

    @classmethod
    def load_dictionary(cls, filename: str) -> Dictionary:
        """Return the dictionary of a file.

        Args:
            filename (str): The file.
        """
        return Dictionary.load(filename)

    @classmethod
    def build_dictionary(
        cls,
        filenames: Any,
        workers: int = 1,
        threshold: int = -1,
        nwords: int = -1,
        padding_factor: int = 8,
    ) -> Dictionary:
        """Return the dictionary of the words of text files; see Dictionary.finalize()
        for the limits.

        Args:
            filenames: The files.
            workers (int, default 1): Processes.
            threshold (int, default -1): Words seen less often are dropped.
            nwords (int, default -1): Words that are kept at most.
            padding_factor (int, default 8): Words of no text fill up to a multiple of
                it.
        """
        dictionary = Dictionary()
        for filename in filenames:
            Dictionary.add_file_to_dictionary(
                filename, dictionary, tokenize_line, workers
            )
        dictionary.finalize(threshold, nwords, padding_factor)
        return dictionary

    @property
    def source_dictionary(self) -> Any:
        """The dictionary of the source; None without one."""
        return None

    @property
    def target_dictionary(self) -> Any:
        """The dictionary of the target; None without one."""
        return None

    # ---- data ------------------------------------------------------------------------

    def _options(self) -> Any:
        return self.cfg

    def has_sharded_data(self, split: str) -> bool:
        """Return whether `data` names several folders, one an epoch.

        Args:
            split (str): Of the data.
        """
        return os.pathsep in (getattr(self._options(), "data", "") or "")

    def load_dataset(
        self, split: str, combine: bool = False, task_cfg: Any = None, **kwargs: Any
    ) -> None:
        """Put the data set of a split into `datasets`.

        Args:
            split (str): Its name.
            combine (bool, default False): Put its parts together.
            task_cfg (default None): Options in place of the task's.
            **kwargs: epoch, from 1.
        """
        raise NotImplementedError

    def dataset(self, split: str) -> Any:
        """Return a loaded data set.

        Args:
            split (str): Its name.

        Raises:
            KeyError: it is not loaded.
            TypeError: it is no FairseqDataset.
        """
        if split not in self.datasets:
            raise KeyError(f"Dataset not loaded: {split}")
        if not isinstance(self.datasets[split], FairseqDataset):
            raise TypeError("Datasets are expected to be of type FairseqDataset")
        return self.datasets[split]

    def filter_indices_by_size(
        self,
        indices: Any,
        dataset: Any,
        max_positions: Any = None,
        ignore_invalid_inputs: bool = False,
    ) -> Any:
        """Return the indices of samples within max_positions.

        Args:
            indices: (n,).
            dataset: The data set.
            max_positions (default None): As that of max_positions().
            ignore_invalid_inputs (bool, default False): Warn of the others; else raise
                for the first of them.

        Raises:
            ValueError: a sample is too long, without ignore_invalid_inputs.
        """
        kept, ignored = dataset.filter_indices_by_size(indices, max_positions)
        data_utils.report_ignored(
            dataset, ignored, max_positions, not ignore_invalid_inputs
        )
        return kept

    def can_reuse_epoch_itr(self, dataset: Any) -> bool:
        """Return whether an iterator serves later epochs too.

        Args:
            dataset: The data set.
        """
        return bool(getattr(dataset, "can_reuse_epoch_itr_across_epochs", False))

    def get_batch_iterator(
        self,
        dataset: Any,
        max_tokens: int | None = None,
        max_sentences: int | None = None,
        max_positions: Any = None,
        ignore_invalid_inputs: bool = False,
        required_batch_size_multiple: int = 1,
        seed: int = 1,
        num_shards: int = 1,
        shard_id: int = 0,
        num_workers: int = 0,
        epoch: int = 1,
        data_buffer_size: int = 0,
        disable_iterator_cache: bool = False,
        skip_remainder_batch: bool = False,
        grouped_shuffling: bool = False,
        update_epoch_batch_itr: bool = False,
    ) -> Any:
        """Return an EpochBatchIterator.

        Args:
            dataset: The data set.
            max_tokens (int | None, default None): Tokens of a batch at most; None is no
                limit.
            max_sentences (int | None, default None): Samples of a batch at most; None
                is no limit.
            max_positions (default None): As that of max_positions().
            ignore_invalid_inputs (bool, default False): Leave out samples that are too
                long, with a warning; else raise.
            required_batch_size_multiple (int, default 1): A batch of more samples has a
                multiple of it.
            seed (int, default 1): Of order and draws.
            num_shards (int, default 1): Ranks.
            shard_id (int, default 0): This rank, from 0.
            num_workers (int, default 0): Processes that read.
            epoch (int, default 1): Where to begin, from 1.
            data_buffer_size (int, default 0): Batches that a thread holds ready.
            disable_iterator_cache (bool, default False): Make the iterator anew.
            skip_remainder_batch (bool, default False): Leave the last batch out.
            grouped_shuffling (bool, default False): Permute groups of num_shards
                batches.
            update_epoch_batch_itr (bool, default False): Make the batches anew in each
                epoch.

        Raises:
            TypeError: it is no FairseqDataset.
        """
        reuse = (
            not disable_iterator_cache
            and not update_epoch_batch_itr
            and self.can_reuse_epoch_itr(dataset)
        )
        if reuse and dataset in self.dataset_to_epoch_iter:
            return self.dataset_to_epoch_iter[dataset]
        if not isinstance(dataset, FairseqDataset):
            raise TypeError(f"{type(dataset).__name__} is no FairseqDataset")
        dataset.set_epoch(epoch)
        with data_utils.numpy_seed(seed):
            indices = dataset.ordered_indices()
        if max_positions is not None:
            indices = self.filter_indices_by_size(
                indices, dataset, max_positions, ignore_invalid_inputs
            )
        made = iterators.EpochBatchIterator(
            dataset=dataset,
            collate_fn=dataset.collater,
            batch_sampler=dataset.batch_by_size(
                indices, max_tokens, max_sentences, required_batch_size_multiple
            ),
            seed=seed,
            num_shards=num_shards,
            shard_id=shard_id,
            num_workers=num_workers,
            epoch=epoch,
            buffer_size=data_buffer_size,
            skip_remainder_batch=skip_remainder_batch,
            grouped_shuffling=grouped_shuffling,
        )
        if reuse:
            self.dataset_to_epoch_iter[dataset] = made
        return made

    def max_positions(self) -> Any:
        """Return the longest samples that are used: a number, a tuple, or None."""
        return None

    # ---- model and step --------------------------------------------------------------

    def build_model(self, cfg: Any, from_checkpoint: bool = False) -> Any:
        """Return the model of a config.

        Args:
            cfg: The model's config.
            from_checkpoint (bool, default False): The weights come from a checkpoint.
        """
        from ctrainer.fairseq import models

        return models.build_model(cfg, self, from_checkpoint)

    def build_criterion(self, cfg: Any, from_checkpoint: bool = False) -> Any:
        """Return the criterion of a config.

        Args:
            cfg: The criterion's config.
            from_checkpoint (bool, default False): The run resumes from a checkpoint.
        """
        from ctrainer.fairseq import criterions

        return criterions.build_criterion(cfg, self, from_checkpoint)

    def train_step(
        self,
        sample: Any,
        model: Any,
        criterion: Any,
        optimizer: Any,
        update_num: int,
        ignore_grad: bool = False,
    ) -> Any:
        """Run forward and backward pass of a sample; return (loss, sample size, logging
        output).

        Args:
            sample: A batch.
            model: The model.
            criterion: The criterion.
            optimizer: Scales the loss.
            update_num (int): Updates done.
            ignore_grad (bool, default False): Its gradients count for nothing.
        """
        model.train()
        model.set_num_updates(update_num)
        with tools.autocast(model, isinstance(optimizer, AMPOptimizer)):
            loss, sample_size, logging_output = criterion(model, sample)
        if ignore_grad:
            loss *= 0
        optimizer.backward(loss)
        return loss, sample_size, logging_output

    def valid_step(self, sample: Any, model: Any, criterion: Any) -> Any:
        """Run the forward pass of a sample; return (loss, sample size, logging output).

        Args:
            sample: A batch.
            model: The model.
            criterion: The criterion.
        """
        model.eval()
        with tools.no_grad():
            return criterion(model, sample)

    def optimizer_step(self, optimizer: Any, model: Any, update_num: int) -> None:
        """Update the parameters.

        Args:
            optimizer: The optimizer.
            model: The model.
            update_num (int): Updates done.
        """
        optimizer.step()

    def begin_epoch(self, epoch: int, model: Any) -> None:
        """Do nothing; called before each epoch.

        Args:
            epoch (int): From 1.
            model: The model.
        """

    def begin_valid_epoch(self, epoch: int, model: Any) -> None:
        """Do nothing; called before each validation.

        Args:
            epoch (int): From 1.
            model: The model.
        """

    # ---- metrics and state -----------------------------------------------------------

    def aggregate_logging_outputs(
        self, logging_outputs: list[dict[str, Any]], criterion: Any
    ) -> Any:
        """Return the numbers to log; the old name of reduce_metrics().

        Args:
            logging_outputs (list[dict[str, Any]]): Of all micro-batches and ranks.
            criterion: The criterion.
        """
        deprecation_warning(
            "The aggregate_logging_outputs API is deprecated. "
            "Please use the reduce_metrics API instead."
        )
        with metrics.aggregate() as agg:
            self.reduce_metrics(logging_outputs, criterion)
            return agg.get_smoothed_values()

    def reduce_metrics(
        self, logging_outputs: list[dict[str, Any]], criterion: Any
    ) -> None:
        """Log words and sentences a batch, words a second, and the criterion's numbers.

        Args:
            logging_outputs (list[dict[str, Any]]): Of all micro-batches and ranks.
            criterion: The criterion.
        """
        theirs = type(self).aggregate_logging_outputs
        if theirs is not FairseqTask.aggregate_logging_outputs:
            deprecation_warning(
                "Tasks should implement the reduce_metrics API. "
                "Falling back to deprecated aggregate_logging_outputs API."
            )
            numbers = self.aggregate_logging_outputs(logging_outputs, criterion)
            for key, value in numbers.items():
                metrics.log_scalar(key, value)
            return
        words = _total("ntokens", logging_outputs, "wpb or wps")
        if words is not None:
            metrics.log_scalar("wpb", words, priority=180, round=1)
            metrics.log_speed("wps", words, priority=90, round=1)
        sentences = _total("nsentences", logging_outputs, "bsz")
        if sentences is not None:
            metrics.log_scalar("bsz", sentences, priority=190, round=1)
        criterion.__class__.reduce_metrics(logging_outputs)

    def state_dict(self) -> dict[str, Any]:
        """Return the attributes of `state`."""
        return self.state.state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the attributes of `state`.

        Args:
            state_dict (dict[str, Any]): What state_dict() returned.
        """
        self.state.merge_state_dict(state_dict)


class LegacyFairseqTask(FairseqTask):
    """A task whose options are flat.

    Args:
        args: The options.
    """

    def __init__(self, args: Any) -> None:
        super().__init__(None)
        self.args = args

    def _options(self) -> Any:
        return self.args


def _total(key: str, outputs: list[dict[str, Any]], what: str) -> Any:
    """The sum over outputs that have it, or None and a warning."""
    found = [log[key] for log in outputs if key in log]
    if not found:
        warnings.warn(
            f"{key} not found in Criterion logging outputs, cannot log {what}",
            stacklevel=3,
        )
        return None
    return sum(found)
