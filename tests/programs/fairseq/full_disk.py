"""A data set is built on a disk that is full."""

import contextlib
import resource
import signal
import sys

import numpy as np

from ctrainer.fairseq.indexed_dataset import make_builder

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, 3 << 20))
builder = make_builder(sys.argv[1] + ".bin", "mmap")
for _ in range(5):
    with contextlib.suppress(OSError):
        builder.add_item(np.arange(300_000))
builder.finalize(sys.argv[1] + ".idx")
