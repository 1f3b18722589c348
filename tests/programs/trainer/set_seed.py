"""set_seed() seeds a torch that is loaded later."""

import sys

from ctrainer.trainer_utils import set_seed

assert "torch" not in sys.modules
set_seed(7)

import torch  # noqa: E402

print(torch.rand(1).item())
