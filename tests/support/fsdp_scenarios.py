"""What every rank of a group does with sharded modules, and what has to come out.

Each scenario is called on all ranks with a communicator. The reference is the same
module in one process, on the batches of all ranks; its loss is their average.
"""

from __future__ import annotations

import contextlib
import copy
import mmap
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from rank_threads import seeded
from torch import nn
from torch.utils.checkpoint import checkpoint

from ctrainer.fsdp import FullyShardedDataParallel as FSDP

WIDTH = 6
EVERYWHERE: dict[str, Any] = {}  # options of all units that do not say otherwise


def tree(seed: int = 0) -> nn.Sequential:
    with seeded(seed):
        return nn.Sequential(
            nn.Linear(WIDTH, 10),
            nn.Tanh(),
            nn.Sequential(nn.Linear(10, 10), nn.LayerNorm(10)),
            nn.Linear(10, 4),
        )


def linear(*sizes: int, bias: bool = True) -> nn.Linear:
    with seeded(0):
        return nn.Linear(*sizes, bias=bias)


def batch(step: int, group: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets: this rank's part, or everybody's."""
    generator = torch.Generator().manual_seed(step)
    both = (
        torch.randn(12, WIDTH, generator=generator),
        torch.randn(12, 4, generator=generator),
    )
    if group is None:
        return both
    x, y = (t.chunk(group.world_size)[group.rank] for t in both)
    return x, y


def mse(model: nn.Module, step: int, group: Any = None) -> torch.Tensor:
    x, y = batch(step, group)
    return ((model(x) - y) ** 2).mean()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    # eps keeps the update smooth: without it a rounding of a gradient near 0 turns a
    # whole step round.
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def wrap(group: Any, module: nn.Module, **options: Any) -> FSDP:
    return FSDP(
        module,
        **{
            "process_group": group,
            "on_neuron": False,
            "watch_released": True,
            "execute_sharding_on_init": False,
            "flatten_parameters": True,
            **EVERYWHERE,
            **options,
        },
    )


def on_meta(module: nn.Module) -> nn.Module:
    """A copy without values, its tied parameters tied as they were."""
    copied = copy.deepcopy(module)
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    copied.to("meta")
    torch.__future__.set_swap_module_params_on_conversion(swaps)
    return copied


def nested(group: Any, module: nn.Sequential, **options: Any) -> FSDP:
    module[2] = wrap(group, module[2], **options)
    return wrap(group, module, **options)


def averaged(group: Any, value: float) -> float:
    box = torch.tensor([value], dtype=torch.float64)
    group.all_reduce(box, "mean")
    return float(box)


def close(a: float, b: float, bound: float) -> bool:
    if abs(a - b) < bound:
        return True
    raise AssertionError(f"{a} and {b} differ by more than {bound}")


def check_same(
    group: Any,
    sharded: FSDP,
    plain: nn.Module,
    steps: int = 3,
    loss: Callable[..., torch.Tensor] = mse,
    bound: float = 2e-6,
) -> None:
    """Train both; the losses, norms and parameters have to agree.

    bound: a few roundings of float32 at values below 4, which the order of sums over
    the batch changes.
    """
    optimizers = [adamw(sharded), adamw(plain)]
    for step in range(steps):
        own, whole = loss(sharded, step, group), loss(plain, step)
        own.backward()
        whole.backward()
        norm = sharded.clip_grad_norm_(1.0)
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        assert close(averaged(group, own.item()), whole.item(), bound)
        assert close(float(norm), float(expected), bound)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    check_parameters(sharded, plain, bound)


def check_parameters(sharded: FSDP, plain: nn.Module, bound: float = 2e-6) -> None:
    found, expected = sharded.full_state_dict(), plain.state_dict()
    assert list(found) == list(expected) or set(found) == set(expected)
    for name, value in expected.items():
        assert (found[name] - value).abs().max() < bound, name


# ---- layouts and options


def scenario_every_layout_trains_like_one_process(group: Any) -> None:
    layouts: list[dict[str, Any]] = [
        {},
        {"flatten_parameters": False},
        {"flatten_parameters": False, "shard_param_on_dim_0": True},
        {"_shard_size_multiple": 1},
        {"reshard_after_forward": False},
        {"disable_reshard_on_root": False},
    ]
    if group.world_size == 2:  # which divides all rows
        layouts.append({"flatten_parameters": False, "on_neuron": True})
    for layout in layouts:
        plain = tree()
        check_same(group, nested(group, copy.deepcopy(plain), **layout), plain)


def scenario_gradients_accumulate_with_and_without_no_sync(group: Any) -> None:
    for context in ("sync", "no_sync"):
        for options in ({}, {"reshard_after_forward": False}):
            plain = tree()
            sharded = nested(group, copy.deepcopy(plain), **options)
            for step in range(3):
                apart = context == "no_sync" and step < 2
                with sharded.no_sync() if apart else contextlib.nullcontext():
                    mse(sharded, step, group).backward()
                if apart:
                    assert sharded.params_with_grad == []
                mse(plain, step).backward()
            adamw(sharded).step()
            adamw(plain).step()
            check_parameters(sharded, plain)


def scenario_low_precision_accumulates_in_float32(group: Any) -> None:
    """In bfloat16 256 + 1 is 256; kept in float32 until they are reduced, no 1 is lost.

    The gradient of the weight is the input.
    """
    sharded = wrap(group, linear(1, 1, bias=False), compute_dtype=torch.bfloat16)
    for step, value in enumerate((256.0, 1.0, 1.0)):
        with sharded.no_sync() if step < 2 else contextlib.nullcontext():
            sharded(torch.tensor([[value]])).sum().backward()
    total = sum(float(p.grad.sum()) for p in sharded.parameters())
    assert averaged(group, total) * group.world_size == 258.0


def scenario_low_precision_trains(group: Any) -> None:
    """Against the same in one process: bfloat16 has 8 bits, losses are below 4."""
    for options in ({}, {"fp32_reduce_scatter": True}, {"flatten_parameters": False}):
        plain, dtype = tree(), torch.bfloat16
        sharded = nested(group, copy.deepcopy(plain), compute_dtype=dtype, **options)
        for step in range(4):
            own = ((sharded(batch(step, group)[0]) - batch(step, group)[1]) ** 2).mean()
            own.backward()
            low = copy.deepcopy(plain).to(dtype)
            loss = ((low(batch(step)[0].to(dtype)) - batch(step)[1]) ** 2).mean()
            assert abs(averaged(group, own.item()) - loss.item()) < 4 * 2**-8
        assert all(p.grad.dtype == torch.float32 for p in sharded.parameters())


# ---- frozen, tied, unused and reused parameters


class Adapter(nn.Module):
    """A frozen weight beside a trainable one: the input's gradient needs the first."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.frozen = nn.Linear(width, width)
        self.frozen.requires_grad_(False)
        self.low = nn.Linear(width, 2, bias=False)
        self.high = nn.Linear(2, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(x) + self.high(self.low(x)) * self.frozen.weight.mean()


def scenario_frozen_and_trainable_parameters_share_a_unit(group: Any) -> None:
    for options in ({}, {"flatten_parameters": False}):
        with seeded(0):
            layers = Adapter(), Adapter(), nn.Linear(WIDTH, 4).requires_grad_(False)
        plain = nn.Sequential(layers[0], nn.Tanh(), *layers[1:])
        sharded = copy.deepcopy(plain)
        for i in (0, 2, 3):
            sharded[i] = wrap(group, sharded[i], **options)
        sharded = wrap(group, sharded, disable_reshard_on_root=False, **options)
        check_same(group, sharded, plain)
        assert all(p.grad is None for p in sharded.parameters() if not p.requires_grad)
        assert not any(unit.has_full_params for unit in sharded.units())


class Detached(nn.Module):
    """Reads its weight where autograd does not follow, after the weight's gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        early = torch.tanh(x) @ self.weight.detach()
        return early + x.detach() @ self.weight


def scenario_a_weight_that_is_read_detached_stays_for_the_input(group: Any) -> None:
    with seeded(0):
        plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), Detached(), nn.Linear(WIDTH, 4))
    sharded = copy.deepcopy(plain)
    sharded[1] = wrap(group, sharded[1])
    check_same(group, wrap(group, sharded), plain)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH, bias=False)
        self.b = nn.Linear(WIDTH, WIDTH)
        self.b.weight = self.a.weight
        self.out = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.b(torch.tanh(self.a(x)))))


def scenario_tied_parameters_keep_both_names(group: Any) -> None:
    for options in ({}, {"flatten_parameters": False}):
        with seeded(0):
            plain = Tied()
        sharded = wrap(group, copy.deepcopy(plain), **options)
        check_same(group, sharded, plain)
        assert sharded.a.weight is sharded.b.weight
        copy.deepcopy(plain).load_state_dict(sharded.full_state_dict(), strict=True)
        assert list(sharded.get_shard_metadata()["shared_info"]) != []


class Reused(nn.Module):
    """One layer twice, one never, and parameters without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(WIDTH, WIDTH)
        self.pair = nn.ModuleDict(
            {"used": nn.Linear(WIDTH, 4), "unused": nn.Linear(WIDTH, 4)}
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.pair["used"](torch.tanh(self.twice(torch.tanh(self.twice(x)))))


def scenario_units_are_used_twice_and_not_at_all(group: Any) -> None:
    with seeded(0):
        plain = Reused()
    for frozen in (False, True):
        sharded = copy.deepcopy(plain)
        sharded.twice.requires_grad_(not frozen)
        reference = copy.deepcopy(sharded)
        sharded.twice = wrap(group, sharded.twice)
        sharded.never = wrap(group, sharded.never)
        sharded = wrap(group, sharded, flatten_parameters=False)
        check_same(group, sharded, reference)
        assert all(p.grad is None for p in sharded.never.parameters())


# ---- graphs of other shapes


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool, inside: bool) -> None:
        super().__init__()
        self.reentrant, self.inside = reentrant, inside
        self.first = nn.Linear(WIDTH, WIDTH)
        self.block: nn.Module = nn.Sequential(
            nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH)
        )
        self.last = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(2):  # a unit that is computed anew twice
            x = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return self.last(x)


def scenario_activation_checkpoints_of_both_kinds(group: Any) -> None:
    for reentrant in (False, True):
        for inner in (False, True):
            with seeded(0):
                plain = Checkpointed(reentrant, inner)
            sharded = copy.deepcopy(plain)
            if inner:
                sharded.block = wrap(group, sharded.block)
            check_same(group, wrap(group, sharded), plain)


def scenario_one_graph_is_run_backward_twice(group: Any) -> None:
    plain = tree()
    sharded = nested(group, copy.deepcopy(plain))
    for model, own in ((sharded, group), (plain, None)):
        loss = mse(model, 0, own)
        loss.backward(retain_graph=True)
        loss.backward()
        adamw(model).step()
    check_parameters(sharded, plain)


def scenario_two_forwards_then_two_backwards(group: Any) -> None:
    plain = tree()
    sharded = nested(group, copy.deepcopy(plain))
    for model, own in ((sharded, group), (plain, None)):
        losses = [mse(model, step, own) for step in range(2)]
        for loss in losses:
            loss.backward()
        adamw(model).step()
    check_parameters(sharded, plain)
    assert not any(unit.has_full_params for unit in sharded.units())


@dataclass
class Answer:
    first: torch.Tensor
    rest: Any


class Containers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor, kind: str) -> Any:
        a, b = self.a(x), self.b(x)
        packs: dict[str, Any] = {
            "tuple": (a, (b, None)),
            "list": [a, [b, 3]],
            "dict": {"a": a, "b": {"c": b, "d": "text"}},
            "ordered": OrderedDict(a=a, b=b),
            "dataclass": Answer(a, [b]),
            "twice": (a, b, a),
        }
        return packs[kind]


def tensors_in(out: Any) -> list[torch.Tensor]:
    if isinstance(out, torch.Tensor):
        return [out]
    if isinstance(out, Answer):
        out = vars(out)
    values = out.values() if isinstance(out, dict) else out
    if not isinstance(values, list | tuple | type({}.values())):
        return []
    return [t for value in values for t in tensors_in(value)]


def scenario_outputs_of_any_container(group: Any) -> None:
    for kind in ("tuple", "list", "dict", "ordered", "dataclass", "twice"):
        with seeded(0):
            plain = Containers()
        sharded = copy.deepcopy(plain)

        def loss(model: nn.Module, step: int, own: Any = None, k: str = kind) -> Any:
            out = tensors_in(model(batch(step, own)[0], kind=k))
            assert len(out) > 1
            return sum((t**2).mean() for t in out)

        check_same(group, wrap(group, sharded), plain, 2, loss)


# ---- evaluation, loading, failures


def scenario_loading_after_an_evaluation_takes_effect(group: Any) -> None:
    sharded = nested(group, tree(0))
    kept = {k: v.clone() for k, v in sharded.state_dict().items()}
    other = nested(group, tree(1))
    x = batch(0)[0]
    with torch.no_grad():
        expected = sharded(x)
        assert not torch.equal(other(x), expected)
        other.load_state_dict(kept)
        assert torch.equal(other(x), expected)
        other(x)
        for p in other.parameters():
            p.zero_()  # as an optimizer does, behind the module's back
        assert not torch.equal(other(x), expected)


def scenario_assigned_shards_are_used(group: Any) -> None:
    sharded, other = nested(group, tree(0)), nested(group, tree(1))
    other.load_state_dict(sharded.state_dict(), assign=True)
    x = batch(0)[0]
    assert torch.equal(other(x), sharded(x))
    assert [p._orig_name for p in other.parameters()] == [
        p._orig_name for p in sharded.parameters()
    ]


class Fragile(nn.Module):
    fails = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails == "forward":
            raise KeyError("forward")
        if self.fails == "backward":
            x = Breaks.apply(x)
        return x * 1


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise KeyError("backward")


def scenario_an_exception_leaves_the_module_usable(group: Any) -> None:
    for fails in ("forward", "backward"):
        with seeded(0):
            first, last = nn.Linear(WIDTH, 10), nn.Linear(10, 4)
        plain = nn.Sequential(nn.Sequential(first, Fragile()), last)
        sharded = copy.deepcopy(plain)
        fragile = sharded[0][1]
        sharded[0] = wrap(group, sharded[0])
        sharded = wrap(group, sharded)
        fragile.fails = fails
        with pytest.raises(KeyError, match=fails):
            mse(sharded, 0, group).backward()
        fragile.fails = ""
        with sharded.no_sync():  # it is idle
            pass
        sharded.zero_grad()
        check_same(group, sharded, plain)


def scenario_second_order_gradients_are_rejected(group: Any) -> None:
    sharded = nested(group, tree())
    message = "^FSDP only works with gradients that don't require gradients$"
    with pytest.raises(RuntimeError, match=message):
        mse(sharded, 0, group).backward(create_graph=True)
    check_same(group, sharded, tree())


# ---- numbers


def scenario_norms_of_any_order(group: Any) -> None:
    for norm_type in (1.0, 2, 3.5, float("inf"), "inf"):
        plain = tree()
        sharded = nested(group, copy.deepcopy(plain))
        mse(sharded, 0, group).backward()
        mse(plain, 0).backward()
        norm = sharded.clip_grad_norm_(0.1, norm_type)
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1, norm_type)
        assert norm.dtype == torch.float32
        assert norm.shape == ()
        # A sum of 200 terms in float32: 200 roundings of 2**-24 at most.
        assert abs(float(norm) - float(expected)) <= 200 * 2**-24 * float(expected)
        adamw(sharded).step()
        adamw(plain).step()
        check_parameters(sharded, plain, 1e-4)


def scenario_norms_without_the_others(group: Any) -> None:
    sharded = nested(group, tree(), _debug_dummy_all_reduce_op=True)
    mse(sharded, 0, group).backward()
    if group.rank == 0:  # nobody else is asked
        squares = [p.grad.double().square().sum() for p in sharded.params_with_grad]
        norm = sharded.clip_grad_norm_(0.1)
        assert close(float(norm), float(sum(squares)) ** 0.5, 1e-6)


def scenario_divide_factors(group: Any) -> None:
    sharded = nested(group, tree(), flatten_parameters=False)
    world = group.world_size
    assert sharded.gradient_predivide_factor == 2.0
    assert sharded.gradient_postdivide_factor == world / 2
    rounds = 0.0 if world in (2, 4) else 2**-22  # powers of two are exact
    mse(sharded, 0, group).backward()
    means = [p.grad.clone() for p in sharded.parameters()]
    sharded.zero_grad()
    sharded.set_gradient_divide_factors(4.0, world / 4, recursive=True)
    mse(sharded, 0, group).backward()
    for mean, p in zip(means, sharded.parameters(), strict=True):
        torch.testing.assert_close(p.grad, mean, rtol=rounds, atol=rounds)
    sharded.zero_grad()
    sharded.set_gradient_divide_factors(1.0, 1.0, recursive=True)
    mse(sharded, 0, group).backward()
    for mean, p in zip(means, sharded.parameters(), strict=True):
        torch.testing.assert_close(p.grad, mean * world, rtol=rounds, atol=rounds)


def scenario_summoned_parameters_can_be_read_and_written(group: Any) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        plain = tree()
        sharded = nested(group, copy.deepcopy(plain), compute_dtype=dtype)
        with sharded.summon_full_params():
            assert torch.equal(sharded[0].weight, plain[0].weight)
            assert torch.equal(sharded[2][1].bias, plain[2][1].bias)
            with torch.no_grad():
                sharded[0].weight.add_(1.0)
                plain[0].weight.add_(1.0)
        with sharded.summon_full_params(writeback=False), torch.no_grad():
            sharded[0].weight.zero_()
        check_parameters(sharded, plain, 0.0 + 1e-12)
        assert not any(unit.has_full_params for unit in sharded.units())


def scenario_full_states_load(group: Any) -> None:
    plain, sharded = tree(1), nested(group, tree(0))
    sharded.load_full_state_dict(plain.state_dict())
    check_parameters(sharded, plain, 1e-12)
    before = sharded.full_state_dict()
    wrong = {**plain.state_dict(), "0.weight": torch.zeros(2, 2), "more": torch.ones(1)}
    del wrong["0.bias"]
    with pytest.raises(RuntimeError) as rejected:
        sharded.load_full_state_dict(wrong)
    assert "0.weight has shape (2, 2), expected (10, 6)" in str(rejected.value)
    assert "Missing key(s): ['0.bias']" in str(rejected.value)
    assert "Unexpected key(s): ['more']" in str(rejected.value)
    check_parameters(sharded, plain, 1e-12)
    assert set(before) == set(plain.state_dict())


def scenario_a_run_resumes_bit_for_bit(group: Any) -> None:
    first = nested(group, tree())
    optimizer = adamw(first)

    def train(model: FSDP, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            mse(model, step, group).backward()
            optimizer.step()
            optimizer.zero_grad()

    train(first, optimizer, range(3))
    saved = copy.deepcopy([first.state_dict(), optimizer.state_dict()])
    train(first, optimizer, range(3, 6))
    second = nested(group, tree(1))
    resumed = adamw(second)
    second.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    train(second, resumed, range(3, 6))
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


def scenario_memory_is_everything_shared_and_one_unit(group: Any) -> None:
    """The engine's own count: the root's parameters stay, inner ones come one by one.

    In the backward a unit's parameters and its gradients are there together.
    """
    width, depth = 256, 6
    with seeded(0):
        layers = [nn.Linear(width, width) for _ in range(depth)]
    blocks = [wrap(group, layer) for layer in layers]
    model = wrap(group, nn.Sequential(*blocks, nn.Linear(width, 4)))
    unit_bytes = blocks[0]._groups[0].size * 4
    root_bytes = model._groups[0].size * 4
    out = model(torch.ones(2, width))
    engine = model._unit
    # From a file the shard of the next unit is read ahead, to whole pages.
    page, shard = mmap.PAGESIZE, unit_bytes // group.world_size
    ahead = -(-shard // page) * page if "shard_folder" in EVERYWHERE else 0
    assert engine.peak_bytes == root_bytes + unit_bytes + ahead
    assert engine.live_bytes == root_bytes
    out.sum().backward()
    assert engine.live_bytes == 0
    assert engine.peak_bytes <= 2 * unit_bytes + 2 * root_bytes
    resident = sum(p.numel() * 4 for p in model.parameters())
    whole = depth * unit_bytes + root_bytes
    assert resident * group.world_size == whole


def scenario_our_optimizers_and_layouts_of_their_own(group: Any) -> None:
    from ctrainer import optim

    plain = tree()
    sharded = nested(group, copy.deepcopy(plain))
    for model, own in ((sharded, group), (plain, None)):
        optimizer = optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            mse(model, step, own).backward()
            optimizer.step()
            optimizer.zero_grad()
    check_parameters(sharded, plain)
