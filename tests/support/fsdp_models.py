"""A table of 500 models and options of sharding, and their training.

What is trained, frozen, detached, tied and computed anew differs. Each value of an axis
is in as many models as the others, or nearly, and axes are dealt independently. What
has to come out is what plain torch comes to in one process on the whole batch; in low
precision, on the batches of the ranks one after the other.
"""

from __future__ import annotations

import contextlib
import copy
import random
from typing import Any

import peft
import torch
from dealing import Case as Spec
from dealing import deal
from torch import nn
from torch.utils.checkpoint import checkpoint

from ctrainer import _C
from ctrainer.fsdp import FullyShardedDataParallel as FSDP

COUNT, STEPS, RATE = 500, 2, 1.0
WIDTH, ROWS, BLOCKS = 12, 12, 3  # rows that 1 to 4 ranks divide
Values = dict[str, torch.Tensor]

AXES: dict[str, tuple[Any, ...]] = {
    "world": (1, 2, 3, 4),
    # Which of the parameters are frozen, below and in the blocks.
    "frozen": ("none", "first block", "last block", "some", "all but one block"),
    # Weights of the root that are read above the blocks for gradients of these.
    "above": ("none", "frozen", "detached", "both", "both"),
    "units": ("root", "blocks", "layers", "pairs", "some"),
    "detached": ("none", "in blocks"),
    "tied": ("none", "in the root", "in blocks", "called twice"),
    "recompute": ("no", "in units", "in units, reentrant", "units", "units, reentrant"),
    "context": ("input", "closure"),  # how tensors of the root come to the blocks
    "adapter": ("none", "none", "lora", "dora", "modules_to_save"),
    "dtype": ("float32", "float32", "bfloat16", "float16", "mixed", "gather", "reduce"),
    "reshard": (True, False),
    "rows": ("flat", "each", "views"),
    "prefetch": ("none", "before", "after"),
    "micro": ("1", "2", "2 in no_sync"),
    "released": ("nan", "told"),
}


def table() -> list[Spec]:
    return deal("models of sharding", AXES, COUNT)


# ---- modules


class Context:
    """What the root gives its blocks beside their input."""

    value: torch.Tensor | None = None


class Block(nn.Module):
    def __init__(self, spec: Spec, context: Context) -> None:
        super().__init__()
        self.spec, self.context = spec, context
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.side, self.same = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        if spec["tied"] == "in blocks":
            self.same.weight = self.side.weight
        self.recompute = spec["recompute"].startswith("in units")

    def body(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.tanh(self.up(self.norm(x)))
        mix = self.mix.detach() if self.spec["detached"] == "in blocks" else self.mix
        out = self.down(inner) + x @ mix
        if self.context.value is not None:
            out = out + torch.tanh(self.side(self.context.value))
        return x + 0.5 * self.same(torch.tanh(self.side(out)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return recomputed(self.body, x, self.spec) if self.recompute else self.body(x)


def recomputed(fn: Any, x: torch.Tensor, spec: Spec) -> torch.Tensor:
    reentrant = spec["recompute"].endswith("reentrant")
    out: torch.Tensor = checkpoint(fn, x, use_reentrant=reentrant)
    return out


class Pair(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(x))
        return out


class Model(nn.Module):
    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec, self.context = spec, Context()
        self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.prompt = nn.Parameter(torch.randn(WIDTH))
        blocks = [Block(spec, self.context) for _ in range(BLOCKS)]
        if spec["units"] == "pairs":
            self.blocks = nn.ModuleList([Pair(*blocks[:2]), blocks[2]])
        else:
            self.blocks = nn.ModuleList(blocks)
        if spec["tied"] == "in the root":
            self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        if self.spec["recompute"].endswith("reentrant") and not x.requires_grad:
            x.requires_grad_()  # as peft does: such a checkpoint asks its input
        if self.spec["context"] == "closure":
            # A reentrant checkpoint runs backward through what it closes over.
            leaf = self.spec["recompute"].endswith("reentrant")
            self.context.value = self.prompt if leaf else torch.tanh(self.prompt)
        blocks = list(self.blocks)
        again = [blocks[0]] if self.spec["tied"] == "called twice" else []
        for block in [*blocks, *again]:
            outside = self.spec["recompute"].startswith("units")
            x = recomputed(block, x, self.spec) if outside else block(x)
        if self.spec["above"] in ("frozen", "both"):
            x = torch.tanh(self.project(x)) + x
        if self.spec["above"] in ("detached", "both"):
            x = x @ self.project.weight.detach() + x
        out: torch.Tensor = self.head(x)
        return out


def freeze(model: Model, spec: Spec) -> None:
    draw = random.Random(f"frozen {spec.number}")
    blocks = [m for m in model.modules() if isinstance(m, Block)]
    chosen: list[nn.Parameter] = []
    if spec["frozen"] == "first block":
        chosen = [*model.embed.parameters(), *blocks[0].parameters()]
    elif spec["frozen"] == "last block":
        chosen = list(blocks[-1].parameters())
    elif spec["frozen"] == "some":
        chosen = [p for p in model.parameters() if draw.random() < 0.5]
    elif spec["frozen"] == "all but one block":
        left = {id(p) for p in draw.choice(blocks).parameters()}
        chosen = [p for p in model.parameters() if id(p) not in left]
    for param in chosen:
        param.requires_grad_(False)
    if spec["above"] in ("frozen", "both"):
        model.project.requires_grad_(False)
    blocks[0].up.requires_grad_(True)  # there always are gradients, below all others


def adapted(model: Model, spec: Spec) -> nn.Module:
    kind = spec["adapter"]
    if kind == "none":
        return model
    config = peft.LoraConfig(
        r=2,
        lora_alpha=4,
        target_modules=["up", "down"],
        use_dora=kind == "dora",
        modules_to_save=["head"] if kind == "modules_to_save" else None,
        init_lora_weights=False,  # else half of the gradients would be zeros
    )
    found: nn.Module = peft.get_peft_model(model, config)
    return found


def build(spec: Spec) -> nn.Module:
    torch.manual_seed(spec.number)
    model = Model(spec)
    freeze(model, spec)
    return adapted(model, spec)


# ---- sharding


def wanted_units(model: nn.Module, spec: Spec) -> list[nn.Module]:
    """In the order of modules(): no parameter of theirs is another module's, too."""
    draw = random.Random(f"units {spec.number}")
    kinds = {
        "root": (),
        "blocks": (Block,),
        "layers": (Block, nn.Linear, nn.LayerNorm),
        "pairs": (Pair, Block),
        "some": (Block, nn.Linear),
    }[spec["units"]]
    # Whose weights are read by the modules around them.
    inside = [module.project for module in model.modules() if isinstance(module, Model)]
    inside += [
        below
        for module in model.modules()
        if isinstance(module, peft.tuners.tuners_utils.BaseTunerLayer)
        for below in module.modules()
        if below is not module
    ]
    chosen = [
        m
        for m in model.modules()
        if isinstance(m, (*kinds, peft.tuners.lora.Linear) if kinds else ())
        and not any(m is other for other in inside)
        and not shares(m, model)
    ]
    if spec["units"] == "some":
        chosen = [m for m in chosen if draw.random() < 0.6]
    return chosen


def shares(module: nn.Module, model: nn.Module) -> bool:
    own = {id(m) for m in module.modules()}
    params = {id(p) for p in module.parameters()}
    others = (m for m in model.modules() if id(m) not in own)
    return any(id(p) in params for m in others for p in m._parameters.values())


def options(spec: Spec) -> dict[str, Any]:
    found: dict[str, Any] = {"reshard_after_forward": spec["reshard"]}
    if spec["rows"] != "each":
        found["flatten_parameters"] = True
    if spec["rows"] == "views":
        found["use_orig_params"] = True
    if spec["prefetch"] != "none":
        found["forward_prefetch"] = True
        when = "PRE" if spec["prefetch"] == "before" else "POST"
        found["backward_prefetch"] = f"BACKWARD_{when}"
    if compute_dtype(spec) != torch.float32:
        found["compute_dtype"] = compute_dtype(spec)
    if spec["dtype"] == "mixed":
        found["fp32_reduce_scatter"] = True
    if spec["dtype"] in ("gather", "reduce"):
        found[f"{spec['dtype']}_bits"] = 8
    return found


def compute_dtype(spec: Spec) -> torch.dtype:
    names = {"bfloat16": torch.bfloat16, "float16": torch.float16}
    return {**names, "mixed": torch.bfloat16}.get(spec["dtype"], torch.float32)


def sharded(model: nn.Module, spec: Spec, group: _C.Communicator, **given: Any) -> FSDP:
    more = {"process_group": group, "on_neuron": False, **options(spec), **given}
    wanted = wanted_units(model, spec)
    for module in reversed(wanted):  # inner ones first
        unit = FSDP(module, **more)
        for parent in list(model.modules()):
            if parent is unit or parent is unit.module:
                continue
            for name, child in list(parent._modules.items()):
                if child is module:
                    parent._modules[name] = unit
    return FSDP(model, **more)


# ---- training


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    x, y = torch.randn(2, ROWS, WIDTH, generator=generator)
    return x, y


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x).float() - y).square().mean()


def micro_batches(spec: Spec) -> int:
    return int(spec["micro"][0])


def add_gradients(plain: nn.Module, spec: Spec, number: int) -> None:
    """Those of the whole batch; with a low dtype, of each rank's part in that dtype."""
    dtype, world = compute_dtype(spec), spec["world"]
    x, y = batch(number)
    if dtype == torch.float32:
        loss_of(plain, x, y).backward()
        return
    for part, target in zip(x.chunk(world), y.chunk(world), strict=True):
        low = copy.deepcopy(plain).to(dtype)
        loss_of(low, part.to(dtype), target).backward()
        for p, q in zip(plain.parameters(), low.parameters(), strict=True):
            if q.grad is not None:
                grad = q.grad.float() / world
                p.grad = grad if p.grad is None else p.grad + grad


def in_one_process(plain: nn.Module, spec: Spec) -> Values:
    optimizer = torch.optim.SGD(plain.parameters(), lr=RATE)
    number = 0
    for _ in range(STEPS):
        optimizer.zero_grad()
        for _ in range(micro_batches(spec)):
            forget(plain)
            add_gradients(plain, spec, number)
            forget(plain)
            number += 1
        optimizer.step()
    return {name: v.detach() for name, v in plain.state_dict().items()}


def forget(model: nn.Module) -> None:
    """What a forward has left behind: only leaves can be copied."""
    for module in model.modules():
        if isinstance(module, Model):
            module.context.value = None


def on_a_rank(model: FSDP, spec: Spec, group: _C.Communicator) -> Values:
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    count, number = micro_batches(spec), 0
    for _ in range(STEPS):
        optimizer.zero_grad()
        for micro in range(count):
            apart = spec["micro"].endswith("no_sync") and micro + 1 < count
            x, y = (part.chunk(spec["world"])[group.rank] for part in batch(number))
            with model.no_sync() if apart else contextlib.nullcontext():
                loss_of(model, x, y).backward()
            number += 1
        assert model._unit.live_bytes == 0
        optimizer.step()
    return model.full_state_dict()


# ---- what has to come out


def bounds(spec: Spec, moved: float, most: float, largest: float) -> float:
    """How far a parameter may be from the expected, when this one has moved so far, and
    the others at most so far, in all steps.

    In float32 1e-5 of the largest value. A low dtype's gradients are the same before
    they are reduced in it, with a rounding for each rank and one for their sum; the
    second step's weights differ by as little, and come out of the cast a unit in the
    last place apart, which is told by a few times as much again in what is above and
    below it. Codes of parameters are half of 1/127 of the largest value off, in each
    of the ten layers that a gradient passes; those of gradients as much, once a step.
    """
    kind = spec["dtype"]
    if kind == "float32":
        return 1e-5 * largest
    if kind == "gather":
        return 0.4 * moved + 0.1 * most
    if kind == "reduce":
        return 0.1 * moved + most / 64
    eps = torch.finfo(compute_dtype(spec)).eps
    return 16 * eps * moved + 8 * eps * most


def compare(
    found: Values,
    expected: Values,
    before: Values,
    spec: Spec,
) -> None:
    assert found.keys() == expected.keys()
    largest = max(v.abs().max().item() for v in expected.values())
    moves = {n: (v - before[n]).abs().max().item() for n, v in expected.items()}
    for name, value in expected.items():
        off = (found[name] - value).abs().max().item()
        bound = bounds(spec, moves[name], max(moves.values()), largest)
        assert off <= bound, f"{name} is off by {off}, at most {bound}; model {spec}"
