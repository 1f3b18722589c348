"""The iterators over batches of fairseq's data/iterators.py, by its names."""

from ctrainer.fairseq._buffered_iterator import BufferedIterator
from ctrainer.fairseq._counting_iterators import (
    CountingIterator,
    GroupedIterator,
    ShardedIterator,
)
from ctrainer.fairseq._epoch_iterating import (
    EpochBatchIterating,
    StreamingEpochBatchIterator,
)
from ctrainer.fairseq._epoch_iterators import (
    EpochBatchIterator,
    FrozenBatchSampler,
    GroupedEpochBatchIterator,
)

__all__ = [
    "BufferedIterator",
    "CountingIterator",
    "EpochBatchIterating",
    "EpochBatchIterator",
    "FrozenBatchSampler",
    "GroupedEpochBatchIterator",
    "GroupedIterator",
    "ShardedIterator",
    "StreamingEpochBatchIterator",
]
