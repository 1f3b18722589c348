"""fairseq's Trainer and what surrounds it, natively.

Names are imported on first use: `import ctrainer.fairseq` loads neither torch nor any
of the modules below.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ctrainer.fairseq._install import install, uninstall
    from ctrainer.fairseq.aliases import install_fairseq_aliases
    from ctrainer.fairseq.config import FairseqConfig, as_config, parse_training_args
    from ctrainer.fairseq.data_utils import batch_by_size
    from ctrainer.fairseq.indexed_dataset import (
        MMapIndexedDataset,
        MMapIndexedDatasetBuilder,
    )
    from ctrainer.fairseq.iterators import (
        CountingIterator,
        EpochBatchIterator,
        GroupedIterator,
    )
    from ctrainer.fairseq.lr_scheduler import build_lr_scheduler
    from ctrainer.fairseq.progress_bar import training_progress_bar
    from ctrainer.fairseq.trainer import Trainer

_HOMES = {
    "CountingIterator": "iterators",
    "EpochBatchIterator": "iterators",
    "FairseqConfig": "config",
    "GroupedIterator": "iterators",
    "MMapIndexedDataset": "indexed_dataset",
    "MMapIndexedDatasetBuilder": "indexed_dataset",
    "Trainer": "trainer",
    "as_config": "config",
    "batch_by_size": "data_utils",
    "build_lr_scheduler": "lr_scheduler",
    "install": "_install",
    "install_fairseq_aliases": "aliases",
    "parse_training_args": "config",
    "training_progress_bar": "progress_bar",
    "uninstall": "_install",
}
_MODULES = {
    "aliases",
    "binarizer",
    "checkpoint_utils",
    "concat_dataset",
    "config",
    "criterions",
    "data",
    "data_utils",
    "dataclass",
    "distributed",
    "fairseq_dataset",
    "indexed_dataset",
    "iterators",
    "logging",
    "lr_scheduler",
    "meters",
    "metrics",
    "models",
    "modules",
    "optim",
    "options",
    "preprocess",
    "progress_bar",
    "registry",
    "tasks",
    "tokenizer",
    "train",
    "trainer",
    "utils",
}

__all__ = [
    "CountingIterator",
    "EpochBatchIterator",
    "FairseqConfig",
    "GroupedIterator",
    "MMapIndexedDataset",
    "MMapIndexedDatasetBuilder",
    "Trainer",
    "as_config",
    "batch_by_size",
    "build_lr_scheduler",
    "install",
    "install_fairseq_aliases",
    "parse_training_args",
    "training_progress_bar",
    "uninstall",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(import_module(f"ctrainer.fairseq.{_HOMES[name]}"), name)
    elif name in _MODULES:
        value = import_module(f"ctrainer.fairseq.{name}")
    else:
        raise AttributeError(f"module 'ctrainer.fairseq' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
