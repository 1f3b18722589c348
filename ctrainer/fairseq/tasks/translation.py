"""Translation, by the name of fairseq's tasks/translation.py."""

from __future__ import annotations

import logging
import os
from itertools import count
from typing import Any

from ctrainer.fairseq.config.tasks import TranslationConfig
from ctrainer.fairseq.data import (
    AppendTokenDataset,
    ConcatDataset,
    LanguagePairDataset,
    PrependTokenDataset,
    StripTokenDataset,
    TruncateDataset,
    data_utils,
    indexed_dataset,
)
from ctrainer.fairseq.tasks import FairseqTask, register_task
from ctrainer.fairseq.utils import split_paths

logger = logging.getLogger(__name__)

_REJECTED = {
    "eval_bleu": "nothing generates translations here to score",
    "load_alignments": "no criterion here learns from alignments",
    "num_batch_buckets": "batches are padded to their longest sample alone",
}


def load_langpair_dataset(
    data_path: str,
    split: str,
    src: str,
    src_dict: Any,
    tgt: str,
    tgt_dict: Any,
    combine: bool,
    dataset_impl: str | None,
    upsample_primary: int,
    left_pad_source: bool,
    left_pad_target: bool,
    max_source_positions: int,
    max_target_positions: int,
    prepend_bos: bool = False,
    truncate_source: bool = False,
    shuffle: bool = True,
    pad_to_multiple: int = 1,
) -> LanguagePairDataset:
    """SPLIT.SRC-TGT.SRC and .TGT of a folder, or SPLIT.TGT-SRC...; with `combine`
    SPLIT1, SPLIT2 and so on too, the first upsample_primary times.

    Raises FileNotFoundError where there is no such split.
    """
    sources, targets = [], []
    for k in count():
        prefix = _prefix(data_path, f"{split}{k or ''}", src, tgt, dataset_impl)
        if prefix is None:
            break
        source = data_utils.load_indexed_dataset(prefix + src, src_dict, dataset_impl)
        if truncate_source:
            stripped = StripTokenDataset(source, src_dict.eos())
            cut = TruncateDataset(stripped, max_source_positions - 1)
            source = AppendTokenDataset(cut, src_dict.eos())
        sources.append(source)
        target = data_utils.load_indexed_dataset(prefix + tgt, tgt_dict, dataset_impl)
        if target is not None:
            targets.append(target)
        logger.info("%s %s-%s %s examples", prefix, src, tgt, len(source))
        if not combine:
            break
    if not sources:
        raise FileNotFoundError(f"Dataset not found: {split} ({data_path})")
    if targets and len(targets) != len(sources):
        raise ValueError(f"{data_path}: {split} has targets for some sources only")
    source = _joined(sources, upsample_primary)
    target = _joined(targets, upsample_primary) if targets else None
    if prepend_bos:
        source = PrependTokenDataset(source, src_dict.bos())
        target = target and PrependTokenDataset(target, tgt_dict.bos())
    return LanguagePairDataset(
        source, source.sizes, src_dict,
        target, None if target is None else target.sizes, tgt_dict,
        left_pad_source=left_pad_source, left_pad_target=left_pad_target,
        shuffle=shuffle, pad_to_multiple=pad_to_multiple,
    )  # fmt: skip


def _prefix(
    folder: str, split: str, src: str, tgt: str, impl: str | None
) -> str | None:
    """What the files of a split begin with, whichever language comes first."""
    for pair in (f"{src}-{tgt}", f"{tgt}-{src}"):
        prefix = os.path.join(folder, f"{split}.{pair}.")
        if indexed_dataset.dataset_exists(prefix + src, impl or "mmap"):
            return prefix
    return None


def _joined(datasets: list[Any], upsample_primary: int) -> Any:
    if len(datasets) == 1:
        return datasets[0]
    ratios = [max(upsample_primary, 1), *[1] * (len(datasets) - 1)]
    return ConcatDataset(datasets, ratios)


@register_task("translation", dataclass=TranslationConfig)
class TranslationTask(FairseqTask):
    """From one language to another.

    cfg.data: a folder with dict.LANG.txt and the binarised splits, or several,
    separated by colons, one an epoch for training. The languages are those of the
    files where cfg names none.
    """

    def __init__(self, cfg: Any, src_dict: Any, tgt_dict: Any) -> None:
        super().__init__(cfg)
        self.src_dict = src_dict
        self.tgt_dict = tgt_dict

    @classmethod
    def setup_task(cls, cfg: Any, **kwargs: Any) -> Any:
        """Raises ValueError for options that are not acted on, and where no languages
        are named or found."""
        for name, why in _REJECTED.items():
            if getattr(cfg, name, False):
                raise ValueError(f"task.{name} is {getattr(cfg, name)!r}: {why}")
        if not cfg.data:
            raise ValueError("translation needs the folder of the data")
        folder = split_paths(cfg.data)[0]
        if cfg.source_lang is None or cfg.target_lang is None:
            found = data_utils.infer_language_pair(folder)
            cfg.source_lang, cfg.target_lang = found
        if cfg.source_lang is None or cfg.target_lang is None:
            raise ValueError(
                f"Could not infer language pair of {folder}, please provide it "
                "explicitly: --source-lang, --target-lang"
            )
        languages = (cfg.source_lang, cfg.target_lang)
        names = [os.path.join(folder, f"dict.{name}.txt") for name in languages]
        dictionaries = [cls.load_dictionary(name) for name in names]
        for language, dictionary in zip(languages, dictionaries, strict=True):
            logger.info("[%s] dictionary: %s types", language, len(dictionary))
        return cls(cfg, *dictionaries)

    def load_dataset(
        self,
        split: str,
        combine: bool = False,
        task_cfg: Any = None,
        epoch: int = 1,
        **kwargs: Any,
    ) -> None:
        """Only the training split is looked for in later folders."""
        cfg = self.cfg
        paths = split_paths(cfg.data)
        if split != cfg.train_subset:
            paths = paths[:1]
        self.datasets[split] = load_langpair_dataset(
            paths[(epoch - 1) % len(paths)], split,
            cfg.source_lang, self.src_dict, cfg.target_lang, self.tgt_dict,
            combine=combine, dataset_impl=cfg.dataset_impl,
            upsample_primary=cfg.upsample_primary,
            left_pad_source=cfg.left_pad_source, left_pad_target=cfg.left_pad_target,
            max_source_positions=cfg.max_source_positions,
            max_target_positions=cfg.max_target_positions,
            truncate_source=cfg.truncate_source, shuffle=split != "test",
            pad_to_multiple=cfg.required_seq_len_multiple,
        )  # fmt: skip

    def max_positions(self) -> tuple[int, int]:
        return self.cfg.max_source_positions, self.cfg.max_target_positions

    @property
    def source_dictionary(self) -> Any:
        return self.src_dict

    @property
    def target_dictionary(self) -> Any:
        return self.tgt_dict
