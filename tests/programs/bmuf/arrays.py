"""BMUF over NumPy's arrays on 3 and 4 ranks, and what one rank's trouble does."""

import itertools
import os
import time
from types import SimpleNamespace

import numpy as np
from programs.run import rank, tell

import ctrainer
from ctrainer.comm import from_environment

group = from_environment(120.0)
three = from_environment(120.0, ranks=[0, 1, 2]) if group.rank < 3 else None
f = np.float32
told = {}


class Inner:
    """SGD with momentum over arrays, with the interface of fairseq's optimizers."""

    def __init__(self, params, rate=0.1):
        self.param_groups = [{"params": params, "lr": rate}]
        self.optimizer = self
        self.state = {}
        self.grads = [np.zeros_like(p) for p in params]
        self.momentum = [np.zeros_like(p) for p in params]
        self.averages = 0

    def get_lr(self):
        return self.param_groups[0]["lr"]

    def set_lr(self, rate):
        self.param_groups[0]["lr"] = rate

    def average_params(self):
        self.averages += 1

    def step(self):
        rate = f(self.get_lr())
        for p, g, m in zip(
            self.param_groups[0]["params"], self.grads, self.momentum, strict=True
        ):
            m *= f(0.9)
            m += g
            p -= rate * m

    def state_dict(self):
        return {"momentum": [m.copy() for m in self.momentum]}

    def load_state_dict(self, state):
        for m, saved in zip(self.momentum, state["momentum"], strict=True):
            m[:] = saved


class Empty(dict):
    def __contains__(self, key):
        return False


LONGEST = [300]


def params(seed=0):
    generator = np.random.default_rng(seed)
    return [generator.standard_normal(n).astype(f) for n in (5, 0, LONGEST[0], 1)]


def inner(values, rate=0.1):
    made = Inner(values, rate)
    made.state = Empty()
    return made


def set_grads(made, update, of=rank):
    generator = np.random.default_rng(1000 * update + of)
    for g, p in zip(made.grads, made.param_groups[0]["params"], strict=True):
        g[:] = generator.standard_normal(g.shape).astype(f) + f(0.1) * p


def config(**more):
    return SimpleNamespace(**more)


def bits(values):
    return [v.tobytes() for v in values]


class Block:
    """All ranks in one process; an operation at a time, in float32."""

    def __init__(self, cfg, world, look="plain"):
        self.cfg, self.look, self.world = cfg, look, world
        seeds = range(world) if cfg.warmup_iterations else [0] * world
        self.inner = [inner(params(s)) for s in seeds]
        self.start = [i.state_dict() for i in self.inner]
        self.n = 0
        self.left = None  # of all ranks, while an average is on its way
        self.begin()

    def values(self, r):
        return self.inner[r].param_groups[0]["params"]

    def begin(self):
        self.model = [p.copy() for p in self.values(0)]
        self.smoothed = [np.zeros_like(p) for p in self.model]

    def sum(self, rows):  # shares in double, rounded once
        return np.sum([r.astype(np.float64) for r in rows], axis=0).astype(f)

    def code(self, values, residual):  # of whole blocks: what arrives
        x = values + residual
        most = f({8: 127, 4: 7}[self.cfg.delta_bits])
        out = np.empty_like(x)
        for at in range(0, len(x), 256):
            block = x[at : at + 256]
            scale = np.max(np.abs(block)) / most
            inverse = f(1) / scale if scale > 0 else f(0)
            codes = np.clip(np.rint(block * inverse), -most, most)
            out[at : at + 256] = codes * scale
        residual[:] = x - out
        return out

    def sum_coded(self, rows):  # to the ranks that add up parts, and to all
        if not hasattr(self, "residual"):
            self.residual = [np.zeros_like(rows[0]) for _ in rows]
        blocks = -(-len(rows[0]) // 256)
        part = -(-blocks // self.world) * 256
        out = np.empty_like(rows[0])
        for owner in range(self.world):
            own = slice(owner * part, (owner + 1) * part)
            total = np.zeros_like(out[own])
            for row, residual in zip(rows, self.residual, strict=True):
                total = total + self.code(row[own], residual[own])
            out[own] = self.code(total, self.residual[owner][own])
        return out

    def deltas(self, rows):
        w = f(self.world)
        shares = [
            [(m - p) / w for m, p in zip(self.model, row, strict=True)] for row in rows
        ]
        if self.cfg.delta_bits == 32:
            return [self.sum(same) for same in zip(*shares, strict=True)]
        cuts = np.cumsum([p.size for p in self.model])[:-1]
        return np.split(self.sum_coded([np.concatenate(s) for s in shares]), cuts)

    def step(self, update):
        for r, i in enumerate(self.inner):
            set_grads(i, update, r)
            i.step()
        self.n += 1
        cfg = self.cfg
        since = self.n % cfg.global_sync_iter
        if self.left is not None and (since == 0 or since >= cfg.overlap_steps):
            self.meet(self.left)
        if self.n == cfg.warmup_iterations:
            for r, i in enumerate(self.inner):
                self.write(r, [p.copy() for p in self.values(0)])
                if not cfg.average_sync:
                    i.load_state_dict(self.start[r])
            self.begin()
        elif self.n > cfg.warmup_iterations and self.n % cfg.global_sync_iter == 0:
            rows = [[p.copy() for p in self.values(r)] for r in range(self.world)]
            if cfg.overlap_steps:
                self.left = rows
            else:
                self.meet(rows)

    def write(self, r, values):
        for p, v in zip(self.values(r), values, strict=True):
            p[:] = v

    def meet(self, rows):
        cfg, w = self.cfg, f(self.world)
        bm, blr, rate = f(cfg.block_momentum), f(cfg.block_lr), self.inner[0].get_lr()
        averages = self.deltas(rows)
        for k in range(len(self.model)):
            if cfg.block_momentum == 0:
                moved = self.sum([row[k] / w for row in rows])
            else:
                g = averages[k]
                if self.look == "slowmo":
                    s = bm * self.smoothed[k] + f(1 / rate) * g
                    moved = self.model[k] - f(cfg.block_lr * rate) * s
                else:
                    s = bm * self.smoothed[k] + blr * g
                    moved = self.model[k] - s
                    if self.look == "nesterov":
                        moved = self.model[k] - (blr * g + bm * s)
                    elif cfg.use_nbm:
                        moved = moved - bm * s
                self.smoothed[k] = s
            self.model[k] = moved
        for r in range(self.world):
            self.write(
                r,
                self.model
                if self.left is None
                else [
                    m + (p - left)
                    for m, p, left in zip(
                        self.model, self.values(r), rows[r], strict=True
                    )
                ],
            )
        self.left = None


def compare(
    group, look, bm, nbm, average, warmup, every, width=32, overlap=0, updates=4
):
    cfg = config(
        block_momentum=bm,
        block_lr=0.7,
        use_nbm=nbm,
        average_sync=average,
        warmup_iterations=warmup,
        global_sync_iter=every,
        delta_bits=width,
        overlap_steps=overlap,
    )
    mine = inner(params(group.rank if warmup else 0))
    bmuf = ctrainer.BMUF(cfg, mine, group, look=look)
    block = Block(cfg, group.world_size, look or "plain")
    for update in range(updates):
        set_grads(mine, update, group.rank)
        bmuf.step()
        block.step(update)
        if bits(mine.param_groups[0]["params"]) != bits(block.values(group.rank)):
            return False
    return True


found = {}
for communicator in (group, three):
    for options in itertools.product(
        (None, "nesterov", "slowmo"),
        (0.0, 0.875),
        (False, True),
        (False, True),
        (0, 2),
        (1, 3),
    ):
        if communicator is not None and not (options[0] and options[2]):
            name = f"{communicator.world_size} {options}"
            found[name] = compare(communicator, *options)
LONGEST[0] = 70_000  # several pieces of shared memory
found["long"] = compare(group, "nesterov", 0.875, False, False, 2, 1)
LONGEST[0] = 300
told["oracle"] = found
LONGEST[0] = 1500  # parts of whole blocks and a shorter one, or none
told["coded"] = {
    f"{width} {communicator.world_size} {look}": compare(
        communicator, look, 0.5, False, False, warmup, 1, width
    )
    for communicator in (group, three)
    if communicator is not None
    for look, warmup in ((None, 2), ("nesterov", 0), ("slowmo", 0))
    for width in (8, 4)
}
told["overlapped"] = {
    f"{overlap} {communicator.world_size} {look}": compare(
        communicator, look, 0.5, False, False, warmup, 3, 32, overlap, 11
    )
    for communicator in (group, three)
    if communicator is not None
    for look, warmup in ((None, 2), ("nesterov", 0), ("slowmo", 0))
    for overlap in (1, 2)
}
LONGEST[0] = 300


def twins(cfg):
    whole, again = inner(params()), inner(params())
    return whole, again, *(ctrainer.BMUF(cfg, i, group) for i in (whole, again))


def run(bmuf, mine, updates):
    for update in updates:
        set_grads(mine, update)
        bmuf.step()


def copy(whole, again):
    for p, v in zip(
        again.param_groups[0]["params"], whole.param_groups[0]["params"], strict=True
    ):
        p[:] = v


def resume_within(overlap):
    """A state of an average on its way; and what finish() does."""
    cfg = config(
        block_momentum=0.5,
        warmup_iterations=0,
        global_sync_iter=4,
        overlap_steps=overlap,
    )
    whole, again, first, second = twins(cfg)
    run(first, whole, range(5))
    state, away = first.state_dict(), first.is_pending
    copy(whole, again)
    second.load_state_dict(state)
    try:
        second.regroup(group)
    except RuntimeError as error:
        rejected = "finish() first" in str(error)
    run(first, whole, range(5, 10))
    run(second, again, range(5, 10))
    same = bits_of(whole) == bits_of(again)
    found = [away, rejected, same, first.is_pending]
    second.load_state_dict(first.state_dict())  # what is on its way is waited for
    group.barrier()
    first.finish()
    second.finish()
    first.finish()  # nothing is left to do
    model = first.state_dict()["bmuf"]
    finished = [first.is_pending, bits_of(whole) == bits_of(again), "left" in model]
    # An average on its way is no part of blocks that begin anew.
    run(first, whole, range(10, 13))
    run(second, again, range(10, 13))
    second.finish()
    left = first.is_pending
    for bmuf, mine in ((first, whole), (second, again)):
        for p in mine.param_groups[0]["params"]:
            p[:] = 0.25
        bmuf.load_blocks_state_dict({"num_updates": 0})
    stays = first.is_pending
    run(first, whole, range(13, 21))
    run(second, again, range(13, 21))
    anew = [left, stays, bits_of(whole) == bits_of(again)]
    return [*found, *finished, *anew]


def resume(width):
    cfg = config(
        block_momentum=0.5, warmup_iterations=0, global_sync_iter=2, delta_bits=width
    )
    whole, again, first, second = twins(cfg)
    run(first, whole, range(4))
    state = first.state_dict()
    copy(whole, again)
    second.load_state_dict(state)
    remembered = any(np.any(r) for r in state["bmuf"]["residual"])
    run(first, whole, range(4, 8))
    run(second, again, range(4, 8))
    same = bits_of(whole) == bits_of(again)
    # another rank's residual is not taken over
    other = {**state["bmuf"], "place": [rank + 1, 4]}
    second.load_blocks_state_dict(other)
    fresh = not any(np.any(r) for r in second.own_state_dict()["residual"])
    return [remembered, same, fresh]


def bits_of(made):
    return bits(made.param_groups[0]["params"])


told["coded resume"] = [resume(8), resume(4)]
told["overlapped resume"] = resume_within(3)


def fresh(seed=0, **more):
    mine = inner(params(seed))
    cfg = config(**{"warmup_iterations": 0, "global_sync_iter": 2, **more})
    return mine, ctrainer.BMUF(cfg, mine, group)


# A NaN in one rank's parameters
mine, bmuf = fresh()
for update in range(2):
    set_grads(mine, update)
    if rank == 2 and update == 1:
        mine.grads[2][7] = np.nan
    bmuf.step()
values = mine.param_groups[0]["params"]
told["nan"] = [int(np.isnan(v).sum()) for v in values] + [bool(np.isnan(values[2][7]))]

# A rank that takes its time
results = []
for slow in (False, True):
    mine, bmuf = fresh()
    for update in range(2):
        set_grads(mine, update)
        if slow and rank == 1:
            time.sleep(0.3)
        bmuf.step()
    results.append(bits(mine.param_groups[0]["params"]))
told["slow"] = results[0] == results[1]

# An update that one rank skips counts
mine, bmuf = fresh()
for update in range(4):
    set_grads(mine, update)
    if rank == 3 and update == 2:
        bmuf.count_update()
    else:
        bmuf.step()
told["skip"] = [
    bmuf.get_num_updates(),
    len(set(group.gather_bytes(b"".join(bits(mine.param_groups[0]["params"]))))),
]

# Other parameters at the start, and no warm-up
mine, bmuf = fresh(seed=int(rank == 1))
bmuf.step()
try:
    bmuf.step()
except ValueError as error:
    told["unlike"] = str(error)
mine, bmuf = fresh(seed=rank, block_momentum=0)  # averaged: alike after the first block
bmuf.step()
bmuf.step()
told["averaged"] = len(set(group.gather_bytes(mine.param_groups[0]["params"][0])))


# Ranks that leave, and one that joins, at the ends of blocks
def same(group, values):
    return len(set(group.gather_bytes(b"".join(bits(values)))))


mine = inner(params())
values = mine.param_groups[0]["params"]
cfg = config(warmup_iterations=0, global_sync_iter=2, block_momentum=0.5, block_lr=0.7)
joins = from_environment(120.0)  # formed when rank 3 joins
if rank < 3:
    bmuf = ctrainer.BMUF(cfg, mine, three)
    for update in range(4):
        set_grads(mine, update)
        bmuf.step()
    before = bits(bmuf.state_dict()["bmuf"]["momentum"]), bits(values)
    bmuf.regroup(joins)
    kept = (bits(bmuf.state_dict()["bmuf"]["momentum"]), bits(values)) == before
else:
    for p in values:
        p += 1  # not what the others began with
    bmuf = ctrainer.BMUF(cfg, mine, ctrainer.Communicator())
    bmuf.regroup(joins)
    kept = True
found = {"kept": kept, "updates": bmuf.get_num_updates(), "joined": same(group, values)}
momentum = bmuf.state_dict()["bmuf"]["momentum"]
found["momentum"] = [same(group, momentum), bool(np.any(momentum[0]))]
for update in range(4, 6):
    set_grads(mine, update)
    bmuf.step()
found["trained"] = same(group, values)
stay = bmuf.remaining_ranks(stays=rank != 0)
found["stay"] = stay
if rank in stay:
    left = from_environment(120.0, ranks=stay)
    bmuf.regroup(left)
    for update in range(6, 8):
        set_grads(mine, update)
        bmuf.step()
    found["left"] = [left.world_size, bmuf.get_num_updates(), same(left, values)]
told["elastic"] = found

# SlowMo divides by the rate
mine = inner(params(), rate=0.0)
try:
    ctrainer.BMUF.slowmo(mine, group, every=1).step()
except ValueError as error:
    told["rate"] = str(error)

# Death
mine, bmuf = fresh()
bmuf.step()
if rank == 3:
    tell(told)
    os._exit(0)
try:
    bmuf.step()
except RuntimeError as error:
    told["death"] = str(error)
tell(told)
