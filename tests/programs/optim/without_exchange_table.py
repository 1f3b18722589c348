"""torch without the table by which it exchanges tensors: it is read by its methods."""

import pytest
import torch

del torch.Tensor.__dlpack_c_exchange_api__

from ctrainer import optim  # noqa: E402

dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
params = [torch.nn.Parameter(torch.ones(3, 2, dtype=d)) for d in dtypes]
opt = optim.SGD(params, lr=0.5, momentum=0.9)
for p in params:
    p.grad = torch.ones_like(p)
opt.step(max_norm=1e9, zero_grads=True)
assert all((p == 0.5).all() and not p.grad.any() for p in params)
for bad in (
    torch.ones(2, 3).t(),
    torch.ones(3, 2).to_sparse(),
    torch.ones(3, 2, dtype=torch.complex64),
    torch.ones(3, 2, device="meta"),
):

    class Holder:
        data, grad = torch.ones(3, 2), bad

    opt.param_groups[0]["params"] = [Holder()]
    with pytest.raises((TypeError, ValueError), match=r"\['params'\]\[0\]\.grad"):
        opt.step()
