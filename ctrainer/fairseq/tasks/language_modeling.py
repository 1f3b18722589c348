"""Language models, by the name of fairseq's tasks/language_modeling.py."""

from __future__ import annotations

import logging
import os
from typing import Any

from ctrainer.fairseq.config.tasks import LanguageModelingConfig
from ctrainer.fairseq.data import (
    MonolingualDataset,
    TokenBlockDataset,
    TruncatedDictionary,
    data_utils,
    maybe_shorten_dataset,
)
from ctrainer.fairseq.tasks import FairseqTask, register_task
from ctrainer.fairseq.utils import split_paths

logger = logging.getLogger(__name__)


@register_task("language_modeling", dataclass=LanguageModelingConfig)
class LanguageModelingTask(FairseqTask):
    """Predict words from those before them.

    cfg.data: a folder with dict.txt and the binarised splits, or several, separated by
    colons, one an epoch. targets: "future" by default, "self" and "past".
    """

    def __init__(
        self,
        args: Any,
        dictionary: Any,
        output_dictionary: Any = None,
        targets: list[str] | None = None,
    ) -> None:
        super().__init__(args)
        self.args = args
        self.dictionary = dictionary
        self.output_dictionary = output_dictionary or dictionary
        self.targets = targets or ["future"]

    @classmethod
    def setup_dictionary(cls, args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """(dictionary, the one of the output), of the first folder."""
        if not args.data:
            raise ValueError("language_modeling needs the folder of the data")
        dictionary = cls.load_dictionary(
            os.path.join(split_paths(args.data)[0], "dict.txt")
        )
        logger.info("dictionary: %s types", len(dictionary))
        if args.output_dictionary_size < 0:
            return dictionary, dictionary
        return dictionary, TruncatedDictionary(dictionary, args.output_dictionary_size)

    @classmethod
    def setup_task(cls, cfg: Any, **kwargs: Any) -> Any:
        dictionary, output_dictionary = cls.setup_dictionary(cfg, **kwargs)
        targets = [
            name
            for name in ("self", "future", "past")
            if getattr(cfg, f"{name}_target", False)
        ]
        return cls(cfg, dictionary, output_dictionary, targets=targets)

    def build_model(self, args: Any, from_checkpoint: bool = False) -> Any:
        """Raises ValueError where the model does not learn what the task targets."""
        model = super().build_model(args, from_checkpoint)
        for target in self.targets:
            if target not in model.supported_targets:
                raise ValueError(
                    f"Unsupported language modeling target: {target}; "
                    f"{type(model).__name__} learns "
                    f"{', '.join(sorted(model.supported_targets))}"
                )
        return model

    def load_dataset(
        self,
        split: str,
        combine: bool = False,
        task_cfg: Any = None,
        epoch: int = 1,
        **kwargs: Any,
    ) -> None:
        """Raises FileNotFoundError where the folder of that epoch has no such split."""
        args = self.args
        paths = split_paths(args.data)
        path = os.path.join(paths[(epoch - 1) % len(paths)], split)
        dataset = data_utils.load_indexed_dataset(
            path, self.dictionary, args.dataset_impl, combine=combine
        )
        if dataset is None:
            raise FileNotFoundError(f"Dataset not found: {split} ({path})")
        dataset = maybe_shorten_dataset(
            dataset, split, args.shorten_data_split_list, args.shorten_method,
            args.tokens_per_sample, args.seed,
        )  # fmt: skip
        blocks = TokenBlockDataset(
            dataset, dataset.sizes, args.tokens_per_sample,
            pad=self.dictionary.pad(), eos=self.dictionary.eos(),
            break_mode=args.sample_break_mode, include_targets=True,
        )  # fmt: skip
        self.datasets[split] = MonolingualDataset(
            blocks, blocks.sizes, self.dictionary, self.output_dictionary,
            add_eos_for_other_targets=args.sample_break_mode not in (None, "none"),
            shuffle=True, targets=self.targets, add_bos_token=args.add_bos_token,
            **self._padding(split),
        )  # fmt: skip

    def _padding(self, split: str) -> dict[str, Any]:
        args = self.args
        rows = args.batch_size_valid if "valid" in split else args.batch_size
        return {
            "fixed_pad_length": (
                args.tokens_per_sample if args.pad_to_fixed_length else None
            ),
            "pad_to_bsz": rows if args.pad_to_fixed_bsz else None,
        }

    @property
    def source_dictionary(self) -> Any:
        return self.dictionary

    @property
    def target_dictionary(self) -> Any:
        return self.output_dictionary
