"""Module trees and options of sharding that nobody thought of, and their training.

A tree is a description in plain data, which Hypothesis prints and shrinks. What has to
come out is what the unwrapped module comes to in one process, on the batches of all
ranks one after the other.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from rank_threads import seeded
from torch import nn
from torch.utils.checkpoint import checkpoint

from ctrainer import _C, optim
from ctrainer.fsdp import FullyShardedDataParallel as FSDP
from ctrainer.fsdp import hybrid_groups

WIDTH = 12  # rows that 1 to 4 ranks divide
ROWS = 12  # of a batch, of all ranks
STEPS = 20
Values = dict[str, torch.Tensor]

# ---- modules


class Scale(nn.Module):
    """Parameters and a buffer that belong to no layer, one parameter in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.same = self.weight
        self.register_buffer("shift", torch.linspace(-0.5, 0.5, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight + self.shift * self.same.detach()


class Residual(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x)))


class Spare(nn.Module):
    """Half of it is never called, and a parameter is never used."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.used, self.unused = body, copy.deepcopy(body)
        self.alone = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


class Recomputed(nn.Module):
    def __init__(self, body: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.body, self.reentrant = body, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(self.body, x, use_reentrant=self.reentrant)
        return out


class Packed(nn.Module):
    """Takes a keyword and returns tensors in containers."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, *, given: dict[str, torch.Tensor]) -> dict[str, Any]:
        x = given["x"]
        return {"all": [(self.body(x),), None, x], "text": "x"}


class Unpacks(nn.Module):
    def __init__(self, packed: nn.Module) -> None:
        super().__init__()
        self.packed = packed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (out,), _, first = self.packed(given={"x": x})["all"]
        return out + 0.5 * first


# ---- descriptions of them


class Brief:
    """Printed by Hypothesis as repr() has it: fields that say nothing are left out."""

    def _repr_pretty_(self, printer: Any, _cycle: bool) -> None:
        printer.text(repr(self))


@dataclass(frozen=True, repr=False)
class Layer(Brief):
    """kind: a name in LEAVES or AROUND, or "again": the layer `back` places before it.

    unit: it is wrapped; other: with the tree's second options.
    """

    kind: str
    body: tuple[Layer, ...] = ()
    unit: bool = False
    other: bool = False
    frozen: bool = False
    back: int = 1

    def __repr__(self) -> str:
        said = [f"body={self.body}"] if self.body else []
        said += [name for name in ("unit", "other", "frozen") if getattr(self, name)]
        said += [f"back={self.back}"] if self.kind == "again" else []
        return f"{self.kind}({', '.join(said)})"


LEAVES: dict[str, Callable[[], nn.Module]] = {
    "tanh": nn.Tanh,
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "matrix": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "norm": lambda: nn.LayerNorm(WIDTH),
    "scale": Scale,
    "tied": Tied,
}
AROUND: dict[str, Callable[[nn.Module], nn.Module]] = {
    "nest": lambda body: body,
    "residual": Residual,
    "spare": Spare,
    "recomputed": lambda body: Recomputed(body, reentrant=False),
    "reentrant": lambda body: Recomputed(body, reentrant=True),
    "unpacks": lambda body: Unpacks(Packed(body)),
}


def build(layers: tuple[Layer, ...]) -> nn.Sequential:
    made: list[nn.Module] = []
    for layer in layers:
        if layer.kind == "again":
            made.append(made[-min(layer.back, len(made))] if made else nn.Tanh())
            continue
        if layer.kind in LEAVES:
            module = LEAVES[layer.kind]()
        else:
            module = AROUND[layer.kind](build(layer.body))
        module.description = layer
        made.append(module.requires_grad_(False) if layer.frozen else module)
    return nn.Sequential(*made)


def whole(layers: tuple[Layer, ...]) -> nn.Sequential:
    """Between two layers that learn, so that there always are gradients."""
    with seeded(0):
        body = build(layers)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), body, nn.Linear(WIDTH, WIDTH))


def wrap_below(module: nn.Module, wrap: Callable[..., FSDP]) -> None:
    """Wrap what is described as units, the inner ones first, shared ones once."""
    units: dict[int, nn.Module] = {}

    def visit(parent: nn.Module) -> None:
        for name, child in list(parent._modules.items()):
            if child is None:
                continue
            if id(child) not in units:
                units[id(child)] = child
                visit(child)
                layer = getattr(child, "description", None)
                if layer is not None and layer.unit:
                    units[id(child)] = wrap(child, layer.other)
            setattr(parent, name, units[id(child)])

    visit(module)


# ---- options


@dataclass(frozen=True, repr=False)
class Case(Brief):
    """How a tree is wrapped and trained."""

    first: dict[str, Any] = field(default_factory=dict)  # options of units
    second: dict[str, Any] = field(default_factory=dict)  # where they differ
    hybrid: bool = False
    micro_batches: int = 1
    no_sync: bool = False
    max_norm: float = 0.0  # 0: no clipping
    norm_type: float = 2.0
    optimizer: str = "AdamW"
    aside: tuple[str, ...] = ()  # what is done before each micro-batch, of ASIDES

    def __repr__(self) -> str:
        plain = Case()
        said = [
            f"{name}={value}"
            for name, value in vars(self).items()
            if value != getattr(plain, name)
        ]
        return f"Case({', '.join(said)})"

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = self.first.get("compute_dtype", torch.float32)
        return found


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    # Without decay: zeros for a gradient and none are then the same. eps keeps updates
    # smooth: without it a rounding of a gradient near 0 turns a whole step round.
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-3, weight_decay=0.0),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "ours": lambda p: optim.AdamW(p, lr=1e-2, eps=1e-3, weight_decay=0.0),
}


def some(**options: Any) -> st.SearchStrategy[dict[str, Any]]:
    """Any of the options, each with one of its values."""
    values = {name: st.sampled_from(given) for name, given in options.items()}
    return st.fixed_dictionaries({}, optional=values)


DIVIDED = st.one_of(
    st.just({"flatten_parameters": True}),
    st.just({}),
    st.just({"on_neuron": True}),
    st.just({"shard_param_on_dim_0": True}),
)
OF_A_UNIT = some(
    reshard_after_forward=[False],
    _shard_size_multiple=[1, 8],
    fp32_reduce_scatter=[True],
)
OF_ALL = some(
    disable_reshard_on_root=[False],
    use_orig_params=[True],
    forward_prefetch=[True],
    backward_prefetch=["BACKWARD_PRE", "BACKWARD_POST"],
    compute_dtype=[torch.bfloat16],
)


# ---- what changes nothing


class Broken(Exception):
    """What is raised on purpose."""


def breaks(*unused: object) -> None:
    raise Broken


def fail_in_forward(model: FSDP, x: torch.Tensor) -> None:
    hook = model.module.module[2].register_forward_hook(breaks)
    with contextlib.suppress(Broken):
        model(x)
    hook.remove()


def summon(model: FSDP, x: torch.Tensor) -> None:
    with model.summon_full_params():
        model(x)


def call_units(model: FSDP, x: torch.Tensor) -> None:
    """Those that take a tensor, alone."""
    for unit in model.units()[1:]:
        if not isinstance(unit.module.module, Packed):
            unit(x)


ASIDES: dict[str, Callable[[FSDP, torch.Tensor], object]] = {
    "evaluate": torch.no_grad()(lambda model, x: model(x)),
    "drop a graph": lambda model, x: model(x),
    "fail in forward": fail_in_forward,
    "summon": summon,
    "call units": call_units,
    "load": lambda model, x: model.load_state_dict(model.state_dict()),
    "load all": lambda model, x: model.load_full_state_dict(model.full_state_dict()),
}


def merged(*parts: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[Any]:
    return st.tuples(*parts).map(
        lambda given: {k: v for d in given for k, v in d.items()}
    )


@st.composite
def cases(draw: st.DrawFn, world: int) -> Case:
    return Case(
        first=draw(merged(OF_ALL, DIVIDED, OF_A_UNIT)),
        second=draw(merged(DIVIDED, OF_A_UNIT)),
        hybrid=world % 2 == 0 and draw(st.booleans()),
        micro_batches=draw(st.integers(1, 3)),
        no_sync=draw(st.booleans()),
        max_norm=draw(st.sampled_from([0.0, 0.1])),
        norm_type=draw(st.sampled_from([2.0, 1.0, float("inf")])),
        optimizer=draw(st.sampled_from(list(OPTIMIZERS))),
        aside=tuple(draw(st.lists(st.sampled_from(list(ASIDES)), max_size=2))),
    )


@st.composite
def trees(draw: st.DrawFn, depth: int = 2) -> tuple[Layer, ...]:
    around = list(AROUND) if depth else []
    kinds = st.sampled_from([*LEAVES, "again", *around])
    layers = []
    for kind in draw(st.lists(kinds, max_size=3)):
        body = draw(trees(depth - 1)) if kind in AROUND else ()
        unit, other = draw(st.booleans()), draw(st.booleans())
        frozen = draw(st.integers(0, 3)) == 3
        layers.append(Layer(kind, body, unit, other, frozen, draw(st.integers(1, 2))))
    return tuple(layers)


# ---- training


@dataclass
class Trained:
    """What a run came to: the loss of each micro-batch, each norm, the parameters."""

    losses: list[float]
    norms: list[float]
    values: Values


def part(number: int, rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's rows of a batch, inputs and targets."""
    generator = torch.Generator().manual_seed(number)
    both = torch.randn(2, ROWS, WIDTH, generator=generator).chunk(world, 1)[rank]
    return both[0], both[1]


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x).float() - y).square().mean()


def clipped(model: nn.Module, case: Case) -> Iterator[float]:
    """The norm that the gradients had, if they are clipped."""
    if case.max_norm:
        clip = getattr(model, "clip_grad_norm_", None)
        if clip is None:
            params = list(model.parameters())
            norm = nn.utils.clip_grad_norm_(params, case.max_norm, case.norm_type)
        else:
            norm = clip(case.max_norm, case.norm_type)
        yield float(norm)


def in_one_process(plain: nn.Module, case: Case, world: int) -> list[Trained]:
    """Train it; what each rank has to come to. Gradients are added up in float32."""
    optimizer = OPTIMIZERS[case.optimizer](plain.parameters())
    found: list[Trained] = [Trained([], [], {}) for _ in range(world)]
    for number in range(STEPS * case.micro_batches):
        for rank in range(world):
            low = copy.deepcopy(plain).to(case.dtype)
            x, y = part(number, rank, world)
            loss = loss_of(low, x.to(case.dtype), y)
            loss.backward()
            found[rank].losses.append(loss.item())
            for p, q in zip(plain.parameters(), low.parameters(), strict=True):
                if q.grad is not None:
                    grad = q.grad.float() / world
                    p.grad = grad if p.grad is None else p.grad + grad
            low.zero_grad()
        if (number + 1) % case.micro_batches == 0:
            norms = list(clipped(plain, case))
            optimizer.step()
            optimizer.zero_grad()
            for trained in found:
                trained.norms += norms
    for trained in found:
        trained.values = plain.state_dict()
    return found


def sharded(model: nn.Sequential, case: Case, world: _C.Communicator) -> FSDP:
    groups: Any = hybrid_groups(world.world_size // 2, world) if case.hybrid else world
    common = {
        "process_group": groups,
        "on_neuron": False,
        "watch_released": True,
        "execute_sharding_on_init": False,
    }
    second = {
        **case.first,
        **dict.fromkeys(("on_neuron", "shard_param_on_dim_0"), False),
    }
    second |= {"flatten_parameters": False, **case.second}

    def wrap(module: nn.Module, other: bool) -> FSDP:
        return FSDP(module, **{**common, **(second if other else case.first)})

    wrap_below(model, wrap)
    return wrap(model, other=False)


def on_a_rank(model: FSDP, case: Case, group: _C.Communicator) -> Trained:
    optimizer = OPTIMIZERS[case.optimizer](model.parameters())
    found = Trained([], [], {})
    for number in range(STEPS * case.micro_batches):
        last = (number + 1) % case.micro_batches == 0
        apart = case.no_sync and not last
        for name in case.aside:
            ASIDES[name](model, part(0, group.rank, group.world_size)[0])
        with model.no_sync() if apart else contextlib.nullcontext():
            loss = loss_of(model, *part(number, group.rank, group.world_size))
            loss.backward()
        found.losses.append(loss.item())
        if not apart:
            assert model._unit.live_bytes == 0, f"after backward {number}"
        if last:
            found.norms += clipped(model, case)
            optimizer.step()
            optimizer.zero_grad()
    found.values = model.full_state_dict()
    return found
