"""A process that is killed while a data set gets its names."""

import os
import sys

import numpy as np

from ctrainer.fairseq.indexed_dataset import make_builder

builder = make_builder(sys.argv[1] + ".bin", "mmap")
builder.add_item(np.array([1, 2]))
replace = os.replace


def dies(source, target):
    if target.endswith(sys.argv[2]):
        os._exit(9)
    replace(source, target)


os.replace = dies
builder.finalize(sys.argv[1] + ".idx")
