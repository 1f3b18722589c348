"""torch without the table by which it exchanges tensors: it is read by its methods."""

import pytest
import torch

if hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):  # from torch 2.10 on
    del torch.Tensor.__dlpack_c_exchange_api__

from ctrainer import optim

dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
params = [torch.nn.Parameter(torch.ones(3, 2, dtype=d)) for d in dtypes]
opt = optim.SGD(params, lr=0.5, momentum=0.9)
for p in params:
    p.grad = torch.ones_like(p)
opt.step(max_norm=1e9, zero_grads=True)
assert all((p == 0.5).all() and not p.grad.any() for p in params)

# Those of any order in memory have the bits of their likes in C order.
images = torch.arange(120.0).view(2, 3, 4, 5)
orders = (
    lambda t: t,
    lambda t: t.transpose(1, 3),
    lambda t: t.to(memory_format=torch.channels_last),
)
updated = []
for order in orders:
    turned = torch.nn.Parameter(order(images.clone()))
    opt = optim.AdamW([turned], lr=0.5)
    for _ in range(2):
        (turned * order(images)).sum().backward()
        assert turned.grad.stride() == turned.stride()
        opt.step(max_norm=1e9, zero_grads=True)
    updated.append(turned.detach())
assert torch.equal(updated[1].transpose(1, 3), updated[0])
assert torch.equal(updated[2], updated[0])

opt.state[turned]["exp_avg"] = torch.zeros(2, 3, 4, 5)
with pytest.raises(ValueError, match=r"\(2, 3, 4, 5\); expected .* with strides"):
    opt.step()
opt.state[turned]["exp_avg"] = torch.zeros(3, 2, 5, 4)
with pytest.raises(ValueError, match=r"\(3, 2, 5, 4\); expected .*\(2, 3, 4, 5\)"):
    opt.step()

for bad, told in (
    (torch.ones(2, 3).t(), "with strides"),
    (torch.ones(3, 4)[:, ::2], "not contiguous"),
    (torch.ones(3, 2).to_sparse(), "to_dense"),
    (torch.ones(3, 2, dtype=torch.complex64), "complex64"),
    (torch.ones(3, 2, device="meta"), "to_empty"),
):

    class Holder:
        data, grad = torch.ones(3, 2), bad

    opt.param_groups[0]["params"] = [Holder()]
    place = r"param_groups\[0\]\['params'\]\[0\]\.grad"
    with pytest.raises((TypeError, ValueError), match=f"{place}.*{told}"):
        opt.step()
