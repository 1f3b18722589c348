"""Models that sharding moves to a GPU, a unit at a time."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import any_gpu
import pytest
import ranks
import tiny
import torch
from fsdp_scenarios import on_meta
from torch import nn

import ctrainer
from ctrainer import _C
from ctrainer.compat import deepspeed, fairscale
from ctrainer.fsdp import FullyShardedDataParallel as FSDP
from ctrainer.fsdp import initial_values

ON_RANKS = pytest.mark.skipif(any_gpu.REAL, reason="ranks are threads of one GPU")
CPU = torch.device("cpu")
OPTIONS: dict[str, Any] = {"on_neuron": False, "flatten_parameters": True}


@pytest.fixture(scope="module")
def gpu() -> torch.device:
    return any_gpu.device()


class Tied(nn.Module):
    """Two layers of the root have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.table = nn.Linear(4, 6), nn.Linear(6, 6, bias=False)
        self.last = nn.Linear(6, 6)
        self.last.weight = self.table.weight
        self.register_buffer("scale", torch.rand(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.table(self.first(x)) * self.scale)


def policy(module: nn.Module, **_: Any) -> bool:
    return type(module) is nn.Linear and module.in_features == 4


def weights(model: FSDP) -> dict[str, torch.Tensor]:
    return {name: value.cpu() for name, value in model.full_state_dict().items()}


@ON_RANKS
@pytest.mark.parametrize("orig", [False, True])
def test_gradients_are_moved_and_synchronized_after_no_sync(
    gpu: torch.device, orig: bool
) -> None:
    plain = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))

    def work(group: _C.Communicator, device: torch.device) -> Any:
        given = {**OPTIONS, "process_group": group, "use_orig_params": orig}
        first, last = copy.deepcopy(plain)
        model = FSDP(nn.Sequential(FSDP(first, **given), last), **given)
        batch = torch.full((2, 4), 1.0 + group.rank, device="cpu")
        model(batch).square().mean().backward()
        with model.no_sync():
            model(batch).square().mean().backward()
            with pytest.raises(RuntimeError, match="gradients of no_sync"):
                model.to(device)
        model(batch).square().mean().backward()
        with model.no_sync():
            model.to(device)
        assert all(unit._unit.require_sync for unit in model.units())
        model(batch.to(device)).square().mean().backward()
        torch.optim.SGD(model.parameters(), 1.0).step()
        return weights(model)

    found = any_gpu.on_nccl_ranks(work)
    whole = copy.deepcopy(plain)
    for rank in range(2):
        for _ in range(4):
            (whole(torch.full((2, 4), 1.0 + rank)).square().mean() / 2).backward()
    torch.optim.SGD(whole.parameters(), 1.0).step()
    for state in found:
        torch.testing.assert_close(state, dict(whole.state_dict()))


@ON_RANKS
@pytest.mark.parametrize("others", ["cpu", "meta", "gpu"])
@pytest.mark.parametrize("first", ["cpu", "gpu", "cpu, device_id"])
def test_ranks_are_where_the_first_one_is_or_device_id_says(
    gpu: torch.device, first: str, others: str
) -> None:
    plain = Tied()
    bare = on_meta(plain)

    def work(group: _C.Communicator, device: torch.device) -> Any:
        kind = first[:3] if group.rank == 0 else others
        module = copy.deepcopy(bare if kind == "meta" else plain)
        if kind == "gpu":
            module.to(device)
        elif kind == "cpu" and group.rank > 0:
            module._apply(torch.zeros_like)
        if "device_id" in first:
            options = {**OPTIONS, "device_id": device if group.rank else device.index}
        else:
            options = OPTIONS
        try:
            model = FSDP(
                module, process_group=group, sync_module_states=True,
                auto_wrap_policy=policy, **options,
            )  # fmt: skip
        except ValueError as error:
            return str(error)
        placed = {t.device for t in (*model.parameters(), *model.buffers())}
        assert placed == {CPU if first == "cpu" else device}
        (place,) = placed
        model(torch.ones(2, 4, device=place)).sum().backward()
        assert all(p.grad.device == place for p in model.parameters())
        return weights(model)

    found = any_gpu.on_nccl_ranks(work)
    if (first, others) == ("cpu", "gpu"):
        for text in found:
            assert "its device: cpu" in text
            assert "its device: emul" in text
        return
    for state in found:
        assert not isinstance(state, str), state
        assert state.keys() == plain.state_dict().keys()
        for name, value in plain.state_dict().items():
            assert torch.equal(state[name], value)


def test_devices_that_make_no_sense_are_rejected(gpu: torch.device) -> None:
    layer, kind = nn.Linear(2, 2), any_gpu.KIND
    for given, text in (
        (True, "device_id is True; expected a torch.device"),
        ("meta", "is to be on meta; parameters can be sharded on the CPU and on"),
        (3, f"is to be on {kind}:3, the current device is {kind}:0: call torch.{kind}"),
    ):
        with pytest.raises(ValueError, match=text):
            FSDP(layer, device_id=given)
    with pytest.raises(ValueError, match=f"is on {kind}:0 and device_id is cpu: "):
        FSDP(nn.Linear(2, 2).to(gpu), device_id="cpu")


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many elements were on the device whenever a unit had been moved there, but
    for those of shards."""
    counts: list[int] = []
    move = initial_values._move

    def moves(own: list[nn.Module], device: torch.device) -> None:
        move(own, device)
        tensors = {id(p): p for m in own for p in m.parameters(recurse=False)}
        there = [p for p in tensors.values() if not hasattr(p, "_sharded_param")]
        assert all(p.device == device for p in there)
        counts.append(sum(p.numel() for p in there))

    monkeypatch.setattr(initial_values, "_move", moves)
    return counts


def trainer(folder: Path, model: nn.Module, **options: Any) -> ctrainer.Trainer:
    options = {"fsdp": True, "use_cpu": False, **options}
    made: ctrainer.Trainer = tiny.make(
        ctrainer.Trainer, model, tiny.tokens(8), output_dir=str(folder),
        max_steps=2, learning_rate=1e-1, optim="sgd", **options,
    )  # fmt: skip
    return made


@pytest.mark.parametrize("offload", ["", " offload"])
def test_a_trainer_moves_a_unit_at_a_time(
    gpu: torch.device, tmp_path: Path, whole: list[int], offload: str
) -> None:
    sizes = [sum(p.numel() for p in m.parameters()) for m in tiny.gpt2().transformer.h]
    expected = trainer(tmp_path, tiny.gpt2(), fsdp=False, use_cpu=True)
    made = trainer(tmp_path, tiny.gpt2(), fsdp="full_shard" + offload)
    assert {p.device for p in made.model.parameters()} == {CPU}
    for _ in range(2):  # sharded, and then as it is
        losses = [t.evaluate(tiny.tokens(4))["eval_loss"] for t in (made, expected)]
        assert losses[0] == pytest.approx(losses[1], rel=max(1e-6, any_gpu.LIMIT))
        made.train()
        expected.train()
        for name, value in weights(made.model).items():
            any_gpu.assert_same(value, expected.model.state_dict()[name], close=1e-6)
    rest = sum(p.numel() for p in tiny.gpt2().parameters()) - sum(sizes)
    assert whole == [*sizes, rest]
    shards = {p.device for p in made.model.parameters()}
    assert shards == {CPU if offload else gpu}


def test_an_engine_moves_a_unit_at_a_time(gpu: torch.device, whole: list[int]) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    }  # fmt: skip
    batch = {n: v[None].to(gpu) for n, v in tiny.tokens(1)[0].items()}
    losses = []
    for bare in (False, True):
        with torch.device("meta" if bare else "cpu"):
            model = tiny.gpt2()
        engine, *_ = deepspeed.initialize(model=model, config=config)
        assert engine.device == gpu
        assert {p.device for p in engine.parameters()} == {gpu}
        for _ in range(3):
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
        losses.append(loss.item())
        assert len(whole) > 1
        assert sum(whole) == sum(p.numel() for p in tiny.gpt2().parameters())
        whole.clear()
    assert all(loss < 3.9 for loss in losses)


@pytest.mark.skipif(any_gpu.REAL, reason="NCCL needs a GPU for each rank")
@pytest.mark.parametrize(
    ("stage", "from_last", "asks"),
    [(0, 1, False), (0, 1, True), (1, 3, False), (3, 1, False), (3, 2, True)],
)
def test_an_engine_saves_no_update_behind_a_failed_collective(
    tmp_path: Path, stage: int, from_last: int, asks: bool
) -> None:
    program, options = "fsdp.deepspeed_broken_behind", {"from_last": from_last}
    for rank in ranks.run(tmp_path, program, stage=stage, asks=asks, **options):
        assert rank.code == 0, rank.output
        error, saved = rank.told
        assert "not done, within 2 seconds" in error
        assert saved == []


LAYERS = [nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)]


def trained(
    group: _C.Communicator, device: torch.device, moves: str, options: dict[str, Any]
) -> list[Any]:
    """What updates leave of a model that was moved before or after it was wrapped, with
    what is around inner units, or between updates, and back."""
    given = {**OPTIONS, "process_group": group, **options}
    layers = copy.deepcopy(LAYERS)
    if moves == "before":
        layers = [layer.to(device) for layer in layers]
    inner = FSDP(layers[0], **given), layers[1], FSDP(layers[2], **given)
    outer = nn.Sequential(*inner)
    model = FSDP(outer.to(device) if moves == "around" else outer, **given)
    if moves == "after":
        assert model.to(device) is model
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    kept = [id(p) for p in model.parameters()]
    found: list[Any] = []
    for update in range(4):
        if moves == "between" and update in (1, 3):
            before = weights(model)
            model.to(device if update == 1 else CPU)
            found.append(
                all(torch.equal(v, before[n]) for n, v in weights(model).items())
            )
            assert [id(p) for p in model.parameters()] == kept
        places = {t.device for t in (*model.parameters(), *model.buffers())}
        (place,) = places
        assert model._unit.forward_prefetch == (place != CPU)
        assert model._unit.backward_pre == (
            place != CPU and "backward_prefetch" not in options
        )
        batch = torch.randn(4, 5, generator=torch.Generator().manual_seed(update))
        out = model(batch.to(place))
        out.square().mean().backward()
        model.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    found.append(place.type)
    return [*found, weights(model)]


@ON_RANKS
@pytest.mark.parametrize(
    "options",
    [
        {}, {"flatten_parameters": False}, {"use_orig_params": True},
        {"reduce_bits": 8, "gather_bits": 8}, {"compute_dtype": "bfloat16"},
        {"reshard_after_forward": False, "backward_prefetch": "BACKWARD_POST"},
    ],
    ids=["flat", "each", "views", "quantized", "bfloat16", "kept"],
)  # fmt: skip
def test_sharded_modules_are_moved(gpu: torch.device, options: dict[str, Any]) -> None:
    def work(moves: str) -> Any:
        return any_gpu.on_nccl_ranks(lambda g, d: trained(g, d, moves, options))

    each = map(work, ("before", "after", "around", "between"))
    for one, other, around, third in zip(*each, strict=True):
        assert one[0] == other[0] == around[0] == "emul"
        assert third[:3] == [True, True, "cpu"]
        for name, value in one[1].items():
            assert torch.equal(other[1][name], value)
            assert torch.equal(around[1][name], value)
            near = 1e-2 if options.get("compute_dtype") else 1e-5
            torch.testing.assert_close(third[3][name], value, rtol=near, atol=near)


def test_offloaded_units_stay_on_the_host_and_are_not_moved(gpu: torch.device) -> None:
    model = FSDP(nn.Linear(4, 4).to(gpu), cpu_offload=True, **OPTIONS)
    model(torch.ones(2, 4, device=gpu)).sum().backward()
    model.to(gpu)
    assert {t.device for p in model.parameters() for t in (p, p.grad)} == {CPU}
    with pytest.raises(RuntimeError, match="move the module before it is wrapped, or"):
        model.cpu()


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("how", ["cuda", "offload", "compute_device"])
def test_fairscales_units_get_to_the_gpu_as_fairscales_do(
    gpu: torch.device, how: str, flat: bool
) -> None:
    options = {
        "cuda": {}, "offload": {"move_params_to_cpu": True},
        "compute_device": {"compute_device": gpu},
    }[how]  # fmt: skip
    plain = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    inner = fairscale.FullyShardedDataParallel(
        copy.deepcopy(plain[0]), flatten_parameters=flat, **options
    )
    model = fairscale.FullyShardedDataParallel(
        nn.Sequential(inner, copy.deepcopy(plain[1])),
        flatten_parameters=flat,
        **options,
    )
    if how == "cuda":
        assert {p.device for p in model.parameters()} == {CPU}
        model.to(gpu)
    assert {p.device for p in model.parameters()} == {CPU if how == "offload" else gpu}
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (plain, model)]
    for _ in range(2):
        batch = torch.randn(3, 4)
        plain(batch).square().mean().backward()
        model(batch.to(gpu)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, value in model.state_dict().items():
        any_gpu.assert_same(value, plain.state_dict()[name], close=1e-6)
