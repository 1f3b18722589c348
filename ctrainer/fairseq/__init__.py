"""fairseq's Trainer and what surrounds it, natively.

Names are imported on first use: `import ctrainer.fairseq` loads neither torch nor any
of the modules below.
"""

from pkgutil import iter_modules
from typing import TYPE_CHECKING

from ctrainer.runtime.lazy import on_first_use

if TYPE_CHECKING:
    from ctrainer.fairseq._install import install as install
    from ctrainer.fairseq._install import uninstall as uninstall
    from ctrainer.fairseq.aliases import (
        install_fairseq_aliases as install_fairseq_aliases,
    )
    from ctrainer.fairseq.config import FairseqConfig as FairseqConfig
    from ctrainer.fairseq.config import as_config as as_config
    from ctrainer.fairseq.config import parse_training_args as parse_training_args
    from ctrainer.fairseq.data_utils import batch_by_size as batch_by_size
    from ctrainer.fairseq.indexed_dataset import (
        MMapIndexedDataset as MMapIndexedDataset,
    )
    from ctrainer.fairseq.indexed_dataset import (
        MMapIndexedDatasetBuilder as MMapIndexedDatasetBuilder,
    )
    from ctrainer.fairseq.iterators import CountingIterator as CountingIterator
    from ctrainer.fairseq.iterators import EpochBatchIterator as EpochBatchIterator
    from ctrainer.fairseq.iterators import GroupedIterator as GroupedIterator
    from ctrainer.fairseq.lr_scheduler import build_lr_scheduler as build_lr_scheduler
    from ctrainer.fairseq.progress_bar import (
        training_progress_bar as training_progress_bar,
    )
    from ctrainer.fairseq.trainer import Trainer as Trainer

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
_MODULES = {found.name for found in iter_modules(__path__) if found.name[0] != "_"}

__all__ = sorted(_HOMES)
__getattr__, __dir__ = on_first_use(__name__, _HOMES, _MODULES)
