"""BMUF over torch's tensors on 2 ranks, beside the original's formulas."""

import io
import itertools
import json
import os
from types import SimpleNamespace

import numpy as np
import torch
from programs.run import rank, tell, world

import ctrainer
from ctrainer import optim
from ctrainer.comm import from_environment

torch.set_num_threads(1)
group = from_environment(120.0)


def model(dtype=torch.float32, seed=rank):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((3, 4), (0,), (7,), ())
    made = [torch.randn(s, generator=generator).to(dtype) for s in shapes]
    return [torch.nn.Parameter(p) for p in made]


def set_grads(params, update):
    generator = torch.Generator().manual_seed(1000 * update + rank)
    for p in params:
        noise = torch.randn(p.shape, generator=generator).to(p.dtype)
        p.grad = noise + 0.1 * p.detach()


def config(**more):
    return SimpleNamespace(distributed_world_size=world, **more)


told = {}


def bits(tensors):
    return [
        t.detach().contiguous().view(-1).view(torch.uint8).tolist() if t.numel() else []
        for t in tensors
    ]


class Original:
    """The original, an operation at a time, in the parameter's dtype."""

    def __init__(self, cfg, optimizer, params):
        self.cfg, self.inner, self.params, self.n = cfg, optimizer, params, 0
        self.initial = optimizer.state_dict()
        self.reset()

    def reset(self):
        self.model = [p.detach().numpy().copy() for p in self.params]
        self.smoothed = [np.zeros_like(m) for m in self.model]

    def sum(self, values):
        """Over ranks, of arrays: gathered as bytes, added in rank order."""
        rows = group.gather_bytes(b"".join(v.tobytes() for v in values))
        flat = [np.frombuffer(row, np.float32) for row in rows]
        total = flat[0]
        for row in flat[1:]:
            total = total + row
        cuts = np.cumsum([v.size for v in values])[:-1]
        return [
            t.reshape(v.shape)
            for t, v in zip(np.split(total, cuts), values, strict=False)
        ]

    def write(self, values):
        with torch.no_grad():
            for p, v in zip(self.params, values, strict=True):
                p.copy_(torch.from_numpy(np.array(v, np.float32)))

    def average_moments(self):
        state = self.inner.state
        found = [
            state[p][k]
            for p in self.params
            for k in ("exp_avg", "exp_avg_sq")
            if "exp_avg_sq" in state[p]
        ]
        f = np.float32
        shares = [t.numpy() / f(world) for t in found]
        for t, v in zip(found, self.sum(shares), strict=True):
            t.copy_(torch.from_numpy(np.array(v, np.float32)))

    def step(self):
        self.inner.step()
        self.n += 1
        cfg = self.cfg
        if self.n == cfg.warmup_iterations:
            first = group.broadcast_bytes(
                b"".join(p.detach().numpy().tobytes() for p in self.params)
                if rank == 0
                else None,
                0,
            )
            flat = np.frombuffer(first, np.float32)
            cuts = np.cumsum([p.numel() for p in self.params])[:-1]
            self.write(
                [
                    v.reshape(p.shape)
                    for v, p in zip(np.split(flat, cuts), self.params, strict=True)
                ]
            )
            if cfg.average_sync:
                self.average_moments()
            else:
                self.inner.load_state_dict(self.initial)
            self.reset()
        elif self.n > cfg.warmup_iterations and self.n % cfg.global_sync_iter == 0:
            self.block()

    def block(self):
        cfg, f = self.cfg, np.float32
        bm, blr = f(cfg.block_momentum), f(cfg.block_lr)
        values = [p.detach().numpy() for p in self.params]
        if cfg.block_momentum == 0:
            self.write(self.sum([v / f(world) for v in values]))
        else:
            deltas = self.sum(
                [(m - v) / f(world) for m, v in zip(self.model, values, strict=True)]
            )
            for i, g in enumerate(deltas):
                s = bm * self.smoothed[i] + blr * g
                moved = self.model[i] - s
                if cfg.use_nbm:
                    moved = moved - bm * s
                self.smoothed[i] = s
                self.model[i] = moved
            self.write(self.model)
        if cfg.average_sync:
            self.average_moments()


makers = {
    "torch SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "torch Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "our AdamW": lambda p: optim.AdamW(p, lr=0.01),
    "our Lion": lambda p: optim.Lion(p, lr=0.01),
}
found = {}
for (name, make), bm, nbm, average, warmup, every in itertools.product(
    makers.items(), (0.0, 0.875), (False, True), (False, True), (0, 2), (1, 3)
):
    cfg = config(
        block_momentum=bm,
        block_lr=0.7,
        use_nbm=nbm,
        average_sync=average,
        warmup_iterations=warmup,
        global_sync_iter=every,
    )
    start = rank if warmup else 0  # without a warm-up all have to start alike
    ours, theirs = model(seed=start), model(seed=start)
    bmuf = ctrainer.BMUF(cfg, make(ours), group)
    original = Original(cfg, make(theirs), theirs)
    same = True
    for update in range(7):
        set_grads(ours, update)
        set_grads(theirs, update)
        bmuf.step()
        original.step()
        same = same and bits(ours) == bits(theirs)
    found[f"{name} {bm} {nbm} {average} {warmup} {every}"] = same
told["oracle"] = found

found = {}
for name, make, dtype in (
    ("masters", lambda p: optim.AdamW(p, lr=0.01, master_weights=True), torch.bfloat16),
    ("half", lambda p: optim.SGD(p, lr=0.1), torch.float16),
    ("double", lambda p: torch.optim.SGD(p, lr=0.1), torch.float64),
):
    params = model(dtype)
    inner = make(params)
    bmuf = ctrainer.BMUF(config(warmup_iterations=1, global_sync_iter=2), inner, group)
    for update in range(4):
        set_grads(params, update)
        bmuf.step()
    masters = [inner.state[p]["master_param"] for p in params if "master" in name]
    close = all(
        torch.equal(m.to(dtype), p) for m, p in zip(masters, params, strict=False)
    )
    found[name] = {
        "alike": len(set(group.gather_bytes(json.dumps(bits(params)).encode()))) == 1,
        "masters": sorted({str(m.dtype) for m in masters}),
        "copies": close,
        "state": sorted({str(t.dtype) for t in bmuf.state_dict()["bmuf"]["model"]}),
    }
told["sixteen"] = found


class Foreign:
    # fairseq's interface, for a model in 16 bits that is updated in float32
    def __init__(self, params, as_dict):
        self.model = params
        self.masters = [torch.nn.Parameter(p.detach().float()) for p in params]
        self.fp32_params = dict(enumerate(self.masters)) if as_dict else self.masters
        self.inner = self.optimizer = torch.optim.SGD(
            self.masters, lr=0.1, momentum=0.9
        )
        self.averaged = 0

    def step(self, closure=None):
        for master, p in zip(self.masters, self.model, strict=True):
            master.grad = p.grad.float()
        self.inner.step()
        self._sync_fp32_params_to_fp16()

    def _sync_fp32_params_to_fp16(self):
        with torch.no_grad():
            for master, p in zip(self.masters, self.model, strict=True):
                p.copy_(master)

    def get_lr(self):
        return 0.1

    def average_params(self):
        self.averaged += 1

    def state_dict(self):
        return self.inner.state_dict()

    def load_state_dict(self, state_dict, overrides=None):
        self.inner.load_state_dict(state_dict)


found = {}
for as_dict, average, warmup in itertools.product((False, True), (False, True), (0, 2)):
    cfg = config(
        warmup_iterations=warmup,
        global_sync_iter=3,
        average_sync=average,
        block_momentum=0.5,
    )
    params, plain = (model(torch.bfloat16, rank if warmup else 0) for _ in range(2))
    foreign = Foreign(params, as_dict)
    plain = [torch.nn.Parameter(p.detach().float()) for p in plain]
    bmuf = ctrainer.BMUF(cfg, foreign, group)
    other = ctrainer.BMUF(cfg, torch.optim.SGD(plain, lr=0.1, momentum=0.9), group)
    same, met = True, 0
    for update in range(1, 8):
        set_grads(params, update)
        for a, b in zip(plain, params, strict=True):
            a.grad = b.grad.float()
        bmuf.step()
        other.step()
        met += update == warmup or (update > warmup and update % 3 == 0)
        same = (
            same
            and bits(foreign.masters) == bits(plain)
            and bits(params) == bits([m.to(torch.bfloat16) for m in plain])
            and foreign.averaged == (met if average else 0)
        )
    found[f"{as_dict} {average} {warmup}"] = same
told["foreign"] = found


def run(bmuf, params, updates):
    for update in updates:
        set_grads(params, update)
        bmuf.step()


found = {}
for look, bm, warmup in (
    ("plain", 0.875, 2),
    ("nbm", 0.5, 0),
    ("plain", 0.0, 4),
    ("nesterov", 0.9, 0),
):
    cfg = config(block_momentum=bm, warmup_iterations=warmup, global_sync_iter=2)
    params = model(seed=0)
    whole = ctrainer.BMUF(cfg, optim.AdamW(params, lr=0.01), group, look=look)
    run(whole, params, range(3))
    file = io.BytesIO()
    torch.save({"optimizer": whole.state_dict(), "model": params}, file)
    run(whole, params, range(3, 9))
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again = [torch.nn.Parameter(p.detach().clone()) for p in saved["model"]]
    resumed = ctrainer.BMUF(cfg, optim.AdamW(again, lr=0.01), group, look=look)
    resumed.load_state_dict(saved["optimizer"])
    run(resumed, again, range(3, 9))
    found[f"{look} {bm} {warmup}"] = bits(params) == bits(again)
told["resume"] = found

params = [torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))]
outer = [params[0].detach().clone().requires_grad_()]
sgd = torch.optim.SGD(outer, lr=0.7, momentum=0.9, nesterov=True)
bmuf = ctrainer.BMUF.diloco(torch.optim.SGD(params, lr=0.1), group, every=2)
worst = 0.0
for block in range(4):
    for update in range(2):
        set_grads(params, 2 * block + update)
        if update == 1:  # what the others have by the end of the block
            mine = params[0].detach() - 0.1 * params[0].grad
            rows = group.gather_bytes(mine.numpy().tobytes())
        bmuf.step()
    mean = np.mean([np.frombuffer(row, np.float32) for row in rows], axis=0)
    outer[0].grad = outer[0].detach() - torch.from_numpy(mean)
    sgd.step()
    worst = max(worst, (params[0] - outer[0]).abs().max().item())
told["diloco"] = worst

params = model()
bmuf = ctrainer.BMUF(
    config(warmup_iterations=1, global_sync_iter=1),
    torch.optim.SGD(params, lr=0.1),
    group,
)
set_grads(params, 0)
bmuf.step()
if rank == 1:
    tell(told)
    os._exit(0)
try:
    bmuf.step()
except RuntimeError as error:
    told["death"] = str(error)
tell(told)
