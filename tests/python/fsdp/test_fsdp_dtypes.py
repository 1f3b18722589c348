"""Sharded parameters of any dtype train as those of plain modules, to the bit.

The reference computes each rank's gradients with the plain module, averages them in
float64, rounds the average to the parameter's dtype and updates with the same
optimizer: sums of two bfloat16 or float16 numbers are exact in float32, and halves of
float32 are.
"""

from __future__ import annotations

import copy
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draws import draws
from rank_threads import on_ranks, seeded
from torch import nn

from ctrainer import _C, comm, optim
from ctrainer.arguments.fsdp import Sharding
from ctrainer.fsdp import FullyShardedDataParallel as FSDP
from ctrainer.fsdp import (
    consolidate_sharded_model_checkpoints,
    hybrid_groups,
    load_shard,
    reshard_checkpoints,
    save_shard,
    trained_model,
)

WIDTH, ROWS, WORLD, UPDATES = 10, 4, 2, 3
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
FLAT = {"flatten_parameters": True, "on_neuron": False}
LAYOUTS: dict[str, dict[str, Any]] = {
    "each": {"on_neuron": False},
    "rows": {"on_neuron": False, "shard_param_on_dim_0": True},
    "flat": FLAT,
    "views": FLAT | {"use_orig_params": True},
}


class Layer(nn.Module):
    """Computes in its own dtype."""

    def __init__(self, dtype: torch.dtype, trained: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, dtype=dtype).requires_grad_(trained)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x.to(self.inner.weight.dtype)))


class Quantized(nn.Module):
    """Quantized weights of 8 bits or of 4, two in a byte; a scale a row."""

    def __init__(self, bits: int) -> None:
        super().__init__()
        values = torch.randn(WIDTH, WIDTH)
        scale = values.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
        weight = (values / scale).round().to(torch.int8)
        if bits == 4:
            low, high = (weight.view(torch.uint8).view(-1, 2) & 15).unbind(1)
            weight = low | high << 4
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        if weight.dtype == torch.uint8:
            both = torch.stack([weight & 15, weight >> 4], 1).view(WIDTH, WIDTH)
            weight = both.to(torch.int8) - 16 * (both > 7)
        scale = self.scale.to(x.dtype)
        return nn.functional.linear(x, weight.to(x.dtype) * scale)


def draw_network(draw: random.Random) -> nn.Sequential:
    """Two units of mixed dtypes, and a layer of the root; one at least is trained."""

    def layers(count: int) -> list[nn.Module]:
        made: list[nn.Module] = []
        for _ in range(count):
            kind = draw.choice(["float", "float", "frozen", "quantized"])
            made.append(
                Quantized(draw.choice([4, 8]))
                if kind == "quantized"
                else Layer(draw.choice(FLOATS), kind == "float")
            )
        return made

    with seeded(draw.randrange(1000)):
        units = [nn.Sequential(*layers(3)) for _ in range(2)]
        return nn.Sequential(*units, Layer(draw.choice(FLOATS), True))


def loss_of(model: nn.Module, update: int, rank: int, world: int) -> torch.Tensor:
    inputs = torch.randn(
        world * ROWS, WIDTH, generator=torch.Generator().manual_seed(update)
    )
    return model(inputs.chunk(world)[rank]).float().square().mean()


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def optimizer_of(params: Any, draw: random.Random) -> Any:
    kind = draw.choice(["AdamW", "SGD", "master", "fp32"])
    if kind == "SGD":
        return optim.SGD(params, lr=0.1, momentum=0.9)
    options = {"master": {"master_weights": True}, "fp32": {"fp32_state": True}}
    return optim.AdamW(params, lr=1e-2, **options.get(kind, {}))


def plainly(model: nn.Module, world: int, seed: int) -> tuple[Any, Any, list[float]]:
    """The state after UPDATES updates, the optimizer's by name, and the norms of the
    gradients."""
    params, norms = trained(model), []
    optimizer = optimizer_of(params, random.Random(seed))
    for update in range(UPDATES):
        sums = [torch.zeros_like(p, dtype=torch.float64) for p in params]
        for rank in range(world):
            model.zero_grad()
            loss_of(model, update, rank, world).backward()
            for total, p in zip(sums, params, strict=True):
                total += 0 if p.grad is None else p.grad.double()
        for total, p in zip(sums, params, strict=True):
            p.grad = (total / world).to(p.dtype)
        grads = [p.grad.double() for p in params]
        norms.append(float(torch.stack([g.square().sum() for g in grads]).sum().sqrt()))
        optimizer.step()
    named = {name: optimizer.state[p] for name, p in model.named_parameters()}
    states = {
        name: {k: torch.as_tensor(v) for k, v in state.items()}
        for name, state in named.items()
    }
    return model.state_dict(), states, norms


def same(found: Any, expected: Any, exactly: bool) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        if exactly or not value.is_floating_point():
            assert torch.equal(found[name], value), name
        else:
            torch.testing.assert_close(found[name], value)


@pytest.mark.parametrize("seed", range(draws(12, 300)))
def test_mixed_dtypes_train_like_a_plain_module(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    plain = draw_network(draw)
    hybrid = draw.random() < 0.25
    world = 4 if hybrid else WORLD
    options = {
        **LAYOUTS[draw.choice(list(LAYOUTS))],
        "reshard_after_forward": draw.random() < 0.8,
        "forward_prefetch": draw.random() < 0.5,
        "backward_prefetch": draw.choice([None, "BACKWARD_PRE", "BACKWARD_POST"]),
        # A sum of two in their own dtype is rounded once, as the average is.
        "fp32_reduce_scatter": hybrid or draw.random() < 0.5,
    }
    copies = [copy.deepcopy(plain) for _ in range(world)]
    before = plain.state_dict()
    expected, states, norms = plainly(copy.deepcopy(plain), world, seed)

    def train(group: _C.Communicator) -> None:
        groups = hybrid_groups(2, group) if hybrid else group
        model = copies[group.rank]
        given = {"process_group": groups, **options}
        for place in (0, 1):
            model[place] = FSDP(model[place], **given)
        sharded = FSDP(model, **given)
        same(sharded.full_state_dict(), before, exactly=True)
        params = trained(sharded)
        optimizer = optimizer_of(params, random.Random(seed))
        for update, norm in enumerate(norms):
            optimizer.zero_grad()
            loss_of(sharded, update, group.rank, world).backward()
            assert all(p.grad.dtype == p.dtype for p in params if p.grad is not None)
            assert sharded.clip_grad_norm_(1e9).item() == pytest.approx(norm, rel=1e-3)
            optimizer.step()
        assert sharded._unit.live_bytes == 0 or not options["reshard_after_forward"]
        same(sharded.full_state_dict(), expected, exactly=not hybrid)
        if group.rank < sharded.world_size:  # replicas have the same
            content = {
                "model": sharded.state_dict(),
                "shard_metadata": sharded.get_shard_metadata(),
                "optimizer": sharded.sharded_optim_state_dict(sharded, optimizer),
            }
            save_shard(content, tmp_path / f"shard-{sharded.rank}.safetensors")

    on_ranks(world, train)
    if hybrid:
        return
    whole, _ = consolidate_sharded_model_checkpoints(
        str(tmp_path / "shard-"), "*.safetensors", save_model=False
    )
    same(whole, expected, exactly=True)
    (path,) = reshard_checkpoints(
        str(tmp_path / "shard-"),
        "*.safetensors",
        world_size=1,
        save_prefix=str(tmp_path / "one"),
    )
    content = load_shard(path)

    def load(group: _C.Communicator) -> None:
        model = copy.deepcopy(plain)
        given = {"process_group": group, **options}
        for place in (0, 1):
            model[place] = FSDP(model[place], **given)
        alone = FSDP(model, **given)
        optimizer = optimizer_of(trained(alone), random.Random(seed))
        alone.load_state_dict(content["model"])
        optimizer.load_state_dict(content["optimizer"])
        same(alone.full_state_dict(), expected, exactly=True)
        found = alone.full_optim_state_dict(alone, optimizer)["state"]
        for name, values in states.items():
            for key, value in values.items():
                assert torch.equal(torch.as_tensor(found[name][key]), value), key

    on_ranks(1, load)


class Either(nn.Module):
    """Of two bfloat16 layers each rank uses the first, and none the second."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = (
            Layer(torch.bfloat16, True),
            Layer(torch.bfloat16, True),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        used: torch.Tensor = self.used(x)
        return used


@pytest.mark.parametrize("options", [{}, {"reduce_bits": 8, "gather_bits": 8}])
def test_a_parameter_that_no_rank_uses_has_no_gradient(options: dict[str, Any]) -> None:
    with seeded(0):
        copies = [Either()]
    copies.append(copy.deepcopy(copies[0]))

    def train(group: _C.Communicator) -> None:
        given = LAYOUTS["views"] | options
        model = FSDP(copies[group.rank], process_group=group, **given)
        loss_of(model, 0, group.rank, WORLD).backward()
        grads = {name: p.grad is not None for name, p in model.named_parameters()}
        assert grads == {name: "unused" not in name for name in grads}

    on_ranks(WORLD, train)


@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_collectives_leave_quantized_weights_as_they_are(bits: int) -> None:
    with seeded(0):
        copies = [nn.Sequential(Quantized(bits), Layer(torch.bfloat16, True))]
    copies.append(copy.deepcopy(copies[0]))
    expected = copies[0][0].weight.clone()

    def train(group: _C.Communicator) -> None:
        seen: list[torch.Tensor] = []
        quantized: Any = copies[group.rank][0]
        quantized.register_forward_hook(lambda m, *_: seen.append(m.weight.clone()))
        model = FSDP(
            copies[group.rank],
            process_group=group,
            gather_bits=8,
            reduce_bits=8,
            **FLAT,
        )
        loss_of(model, 0, group.rank, WORLD).backward()
        (weight,) = seen
        assert torch.equal(weight, expected)
        state = model.full_state_dict()
        assert torch.equal(state["0.weight"], expected)
        model.load_full_state_dict(state)

    on_ranks(WORLD, train)


def test_a_gradient_is_rounded_once_after_its_division() -> None:
    with seeded(0):
        copies = [Layer(torch.bfloat16, True)]
    copies.append(copy.deepcopy(copies[0]))
    total = torch.zeros(WIDTH, WIDTH, dtype=torch.float64)
    for rank, layer in enumerate(copy.deepcopy(copies)):
        loss_of(layer, 0, rank, WORLD).backward()
        total += layer.inner.weight.grad.double()

    def train(group: _C.Communicator) -> torch.Tensor:
        given = LAYOUTS["views"] | {"fp32_reduce_scatter": True}
        model = FSDP(copies[group.rank], process_group=group, **given)
        model.set_gradient_divide_factors(1.0, 3.0, recursive=True)
        loss_of(model, 0, group.rank, WORLD).backward()
        grads = dict(model.named_parameters())
        return grads["inner.weight"].grad

    found = torch.cat(on_ranks(WORLD, train))
    assert torch.equal(found, (total / 3).bfloat16().view(-1))


@pytest.mark.parametrize("mixed", [True, False])
def test_mixed_precision_widens_what_a_trainer_trains_and_nothing_else(
    mixed: bool,
) -> None:
    model = nn.Sequential(Layer(torch.bfloat16, True), Layer(torch.bfloat16, False))
    args = SimpleNamespace(bf16=mixed, fp16=False)
    made = trained_model.shard(model, Sharding(), args, comm.world())
    found = {param.requires_grad: param.dtype for param in made.parameters()}
    trained = torch.float32 if mixed else torch.bfloat16
    assert found == {True: trained, False: torch.bfloat16}


class Normalized(nn.Module):
    """Running statistics, which are float32 whatever computes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("flat", [True, False])
def test_batch_norm_computes_in_the_dtype_of_its_statistics(
    flat: bool, dtype: torch.dtype
) -> None:
    plain = Normalized()
    batches = torch.randn(3, 8, 4)

    def train(group: _C.Communicator) -> None:
        whole = copy.deepcopy(plain)
        model = FSDP(
            copy.deepcopy(plain), process_group=group, compute_dtype=dtype,
            buffer_dtype=torch.float32, fp32_reduce_scatter=True,
            flatten_parameters=flat, use_orig_params=flat, on_neuron=False,
        )  # fmt: skip
        for x in batches:  # all ranks have all of the batch
            for each in (model, whole):
                with torch.autocast("cpu", dtype):
                    each(x).float().square().mean().backward()
            optimizers = (torch.optim.SGD(m.parameters(), 0.1) for m in (model, whole))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        found, expected = model.full_state_dict(), whole.state_dict()
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert found[name].dtype == value.dtype
            torch.testing.assert_close(found[name], value, rtol=0, atol=0)

    on_ranks(2, train)
