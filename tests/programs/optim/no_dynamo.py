"""An update of torch's tensors loads no compiler."""

import sys

import torch

from ctrainer import optim

p = torch.nn.Parameter(torch.ones(2))
p.grad = torch.ones(2)
o = optim.AdamW([p])
o.step(max_norm=1.0)
o.load_state_dict(o.state_dict())
assert "torch._dynamo" not in sys.modules
