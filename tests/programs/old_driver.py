"""The plugin's import, over the emulation of a driver for CUDA 12."""

import os

os.environ["EMUL_DRIVER_VERSION"] = "12080"

import emulated_torch
import torch

from ctrainer import _C

param = torch.ones(2, device=emulated_torch.device())
print("kernels:", _C.has_kernels(param))
