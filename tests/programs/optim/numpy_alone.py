"""An update of NumPy's arrays loads no torch."""

import sys

import numpy as np

from ctrainer.adapters.numpy import AdamW, Parameter

p = Parameter(np.ones(3, np.float32))
p.grad = np.ones(3, np.float32)
AdamW([p], lr=0.5, weight_decay=0).step(max_norm=1.0)
assert abs(p.data - 0.5).max() < 1e-6
assert "torch" not in sys.modules
