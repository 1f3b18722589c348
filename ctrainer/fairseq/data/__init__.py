"""fairseq's data sets, dictionaries and iterators, by the names of fairseq.data."""

import sys

from ctrainer.fairseq import (
    concat_dataset,
    data_utils,
    fairseq_dataset,
    indexed_dataset,
    iterators,
)
from ctrainer.fairseq.concat_dataset import ConcatDataset
from ctrainer.fairseq.data.base_wrapper_dataset import BaseWrapperDataset
from ctrainer.fairseq.data.dictionary import Dictionary, TruncatedDictionary
from ctrainer.fairseq.data.edge_datasets import (
    AppendTokenDataset,
    PrependTokenDataset,
    RandomCropDataset,
    StripTokenDataset,
    TruncateDataset,
    maybe_shorten_dataset,
)
from ctrainer.fairseq.data.language_pair_dataset import LanguagePairDataset
from ctrainer.fairseq.data.monolingual_dataset import MonolingualDataset
from ctrainer.fairseq.data.token_block_dataset import TokenBlockDataset
from ctrainer.fairseq.fairseq_dataset import EpochListening, FairseqDataset
from ctrainer.fairseq.indexed_dataset import (
    IndexedRawTextDataset,
    MMapIndexedDataset,
)
from ctrainer.fairseq.iterators import (
    CountingIterator,
    EpochBatchIterator,
    GroupedIterator,
)

__all__ = [
    "AppendTokenDataset",
    "BaseWrapperDataset",
    "ConcatDataset",
    "CountingIterator",
    "Dictionary",
    "EpochBatchIterator",
    "EpochListening",
    "FairseqDataset",
    "GroupedIterator",
    "IndexedRawTextDataset",
    "LanguagePairDataset",
    "MMapIndexedDataset",
    "MonolingualDataset",
    "PrependTokenDataset",
    "RandomCropDataset",
    "StripTokenDataset",
    "TokenBlockDataset",
    "TruncateDataset",
    "TruncatedDictionary",
    "data_utils",
    "indexed_dataset",
    "iterators",
    "maybe_shorten_dataset",
]

# These modules are older than this package; fairseq has them within it.
for _module in (
    concat_dataset,
    data_utils,
    fairseq_dataset,
    indexed_dataset,
    iterators,
):
    _name = _module.__name__.rpartition(".")[2]
    sys.modules[f"{__name__}.{_name}"] = _module
