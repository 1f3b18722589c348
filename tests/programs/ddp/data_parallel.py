"""DataParallel on 2 ranks, beside torch's DistributedDataParallel."""

import gc
from copy import deepcopy

import torch
from programs.run import folder, join_gloo, rank, tell, world
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ctrainer import _C, DataParallel
from ctrainer.comm.data_parallel import is_wrapped
from ctrainer.comm.process_group import communicator

join_gloo()


shared = _C.shared_memory_communicator(folder, rank, world, 60.0)
gloo = communicator()
found = {}


class Net(nn.Module):
    "Parameters of several dtypes, layouts and lengths; some used by one rank alone."

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 4).double()
        self.long = nn.Linear(4, 40000).double()
        self.ours = nn.Linear(4, 1).double()
        self.nobodys = nn.Linear(2, 2)
        self.tied = self.head

    def forward(self, x, branch=True, all_of_it=False):
        h = self.norm(self.conv(x)).mean((2, 3)).double()
        h = self.tied(self.head(h).repeat(1, 2))
        out = {"sum": self.long(h).mean(1), "extra": [h.sum(), None, "text"]}
        if branch:
            out["sum"] = out["sum"] + self.ours(h).squeeze(1)
        if all_of_it:
            out["sum"] = out["sum"] + sum(p.sum() for p in self.nobodys.parameters())
        return out


def make(seed=0):
    torch.manual_seed(seed)
    return Net()


def grads(module):
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def same(a, b):
    return all(
        (x is None) == (y is None) and (x is None or torch.equal(x, y))
        for x, y in zip(a, b, strict=True)
    )


def data(step):
    torch.manual_seed(100 + 2 * step + rank)
    return torch.randn(4, 3, 6, 6)


def loss(module, step, **kwargs):
    return module(data(step), **kwargs)["sum"].square().mean()


def train(wrapped, steps=3, **kwargs):
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad(set_to_none=step != 1)
        if step == 1:
            with wrapped.no_sync():
                loss(wrapped, 10, **kwargs).backward()
        loss(wrapped, step, **kwargs).backward()
        optimizer.step()
    return grads(wrapped), [t.clone() for t in wrapped.state_dict().values()]


def both(kwargs, **options):
    theirs = train(DistributedDataParallel(make(), **options), **kwargs)
    named = {"finite": all(t.isfinite().all().item() for t in theirs[1])}
    for name, group in (("shm", shared), ("gloo", gloo)):
        for views in (True, False):
            wrapped = DataParallel(
                make(rank), group, gradient_as_bucket_view=views, **options
            )
            ours = train(wrapped, **kwargs)
            named[f"{name} {views}"] = same(ours[0], theirs[0]) and same(
                ours[1], theirs[1]
            )
    return named


everything = {"all_of_it": True}
found["all used"] = both(everything)
found["small buckets"] = both(everything, bucket_cap_mb=0.001)
found["buffers stay"] = both(everything, broadcast_buffers=False)
found["unused"] = both({"branch": rank == 0}, find_unused_parameters=True)
found["static"] = both(everything, static_graph=True)

# Compressed
whole = DataParallel(make(), shared)
loss(whole, 0, all_of_it=True).backward()
for name, hook in (("fp16", "fp16"), ("bf16", default_hooks.bf16_compress_hook)):
    worst = 0.0
    for group in (shared, gloo):
        ours = DataParallel(make(), group)
        ours.register_comm_hook(None, hook)
        loss(ours, 0, all_of_it=True).backward()
        worst = max(
            worst,
            *(
                ((a - b).abs().max() / (b.abs().max() + 2.0**-12)).item()
                for a, b in zip(grads(ours), grads(whole), strict=True)
            ),
        )
    found[name] = worst
try:
    DataParallel(make(), shared).register_comm_hook(None, powerSGD_hook.powerSGD_hook)
except ValueError as e:
    found["other hook"] = str(e)


# Ranks whose data ends at different times
def uneven(wrapped, **options):
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    with wrapped.join(**options):
        for step in range(3 + 2 * rank):
            optimizer.zero_grad()
            loss(wrapped, step, all_of_it=True).backward()
            optimizer.step()
    return [t.clone() for t in wrapped.state_dict().values()]


for divide in (True, False):
    options = {"divide_by_initial_world_size": divide}
    theirs = uneven(DistributedDataParallel(make()), **options)
    for name, group in (("shm", shared), ("gloo", gloo)):
        ours = uneven(DataParallel(make(), group), **options)
        found[f"join {name} {divide}"] = same(ours, theirs)
try:
    uneven(DataParallel(make(), shared), throw_on_early_termination=True)
except RuntimeError as e:
    found["early"] = str(e)

# What one process gets from the whole batch
alone = make().eval()
torch.manual_seed(5)
batch = torch.randn(8, 3, 6, 6)
alone(batch, all_of_it=True)["sum"].square().mean().backward()
ours = DataParallel(make(), shared).eval()
ours(batch[rank::2], all_of_it=True)["sum"].square().mean().backward()
found["whole batch"] = max(
    ((a - b).abs().max() / (a.abs().max() + 1e-30)).item()
    for a, b in zip(grads(alone), grads(ours), strict=True)
)


def error(run):
    try:
        run()
    except Exception as e:
        return f"{type(e).__name__}: {e}"


# Two passes without zeroing add up, and a second pass through one graph is rejected
found["unused rejected"] = error(lambda: loss(ours, 0).backward())
ours.zero_grad()
value = ours(data(0), all_of_it=True)["sum"].mean()
value.backward(retain_graph=True)
once = grads(ours)
value.backward()
found["again"] = [
    torch.allclose(a, 2 * b, rtol=1e-6, atol=1e-6 * b.abs().max().item())
    for a, b in zip(grads(ours), once, strict=True)
]

# A rank that knows nothing of a number
ours.zero_grad()
x = batch[rank::2].clone()
x[0, 0, 0, 0] = float("nan") if rank == 1 else 0.0
ours(x, all_of_it=True)["sum"].mean().backward()
found["nan"] = [not bool(g.isfinite().all()) for g in grads(ours)]


# No part of a rank's output depends on a parameter
class Sometimes(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x, use):
        return (x * self.weight).sum() if use else (x * 2).sum()


some = DataParallel(Sometimes(), shared, find_unused_parameters=True)
some(torch.ones(3, requires_grad=True), rank == 0).backward()
found["one rank has one"] = some.weight.grad.tolist()


# Checkpoints that run their part in a pass of their own
class Folded(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        h = checkpoint(self.a, x, use_reentrant=True)
        return checkpoint(self.b, h, use_reentrant=True).sum()


torch.manual_seed(3)
plain = Folded()
folded = DataParallel(deepcopy(plain), shared)
x = torch.full((2, 4), 1.0 + rank, requires_grad=True)
folded(x).backward()
plain(torch.full((2, 4), 1.5, requires_grad=True)).backward()
found["checkpoints"] = [
    torch.allclose(a, b) for a, b in zip(grads(folded), grads(plain), strict=True)
]

# Frozen for a while, from the beginning or later
torch.manual_seed(5)
plain = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
plain[1].requires_grad_(False)
changing = DataParallel(deepcopy(plain), shared, find_unused_parameters=True)
changing.register_comm_hook(None, "no")
found["thawed"] = []
for step, trained in enumerate([(0, 2), (0, 1, 2), (1, 2), (0, 1, 2)]):
    for model in (plain, changing.module):
        for i, layer in enumerate(model):
            layer.requires_grad_(i in trained)
        model.zero_grad()
    for other in range(world):
        torch.manual_seed(10 * step + other)
        x = torch.randn(2, 3)
        (plain(x).square().mean() / world).backward()
        if other == rank:
            changing(x).square().mean().backward()
    found["thawed"] += [
        (p.grad is None) == (q.grad is None)
        and (p.grad is None or torch.allclose(p.grad, q.grad))
        for p, q in zip(plain.parameters(), changing.parameters(), strict=True)
    ]

odd = nn.Linear(3, 2 + rank)
found["differ"] = error(lambda: DataParallel(odd, shared))
found["frozen"] = error(lambda: DataParallel(nn.Linear(2, 2).requires_grad_(False)))
found["wrapped"] = [
    is_wrapped(ours),
    is_wrapped(odd),
    error(lambda: DataParallel(ours, shared)).split(" is a ")[1][:20],
]
found["keys"] = list(ours.state_dict())[:2]
found["forwarded"] = ours.head is ours.module.head
found["missing"] = error(lambda: ours.no_such)

# It goes, and what it leaves on the parameters does nothing
module = nn.Linear(2, 1)
gone = DataParallel(module, shared)
gone.reducer.close()
module(torch.full((1, 2), rank + 1.0)).sum().backward()
found["closed"] = module.weight.grad.tolist()
gone = DataParallel(nn.Linear(2, 1), shared)
module = gone.module
del gone

gc.collect()
module(torch.full((1, 2), rank + 1.0)).sum().backward()
found["gone"] = module.weight.grad.tolist()
tell(found)
