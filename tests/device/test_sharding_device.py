"""Sharded modules that torch computes on a device: torch's stream and NCCL's beside it
are late, as those of a GPU. Ranks are threads, each with a device; what comes out is
what the CPU gives."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import any_gpu
import emulated_torch
import pytest
import torch
from any_gpu import RANKS
from torch import nn

import ctrainer
from ctrainer import _C
from ctrainer.fsdp import FullyShardedDataParallel as FSDP
from ctrainer.fsdp import layout, sharded
from ctrainer.fsdp import options as fsdp_options

Values = dict[str, torch.Tensor]

pytestmark = pytest.mark.skipif(any_gpu.REAL, reason="ranks are threads of one GPU")


@pytest.fixture(scope="module")
def gpu() -> torch.device:
    return any_gpu.device()


def trained(
    group: _C.Communicator, device: torch.device, **options: Any
) -> dict[str, torch.Tensor]:
    """What three updates make of the weights: two inner units and the root."""
    source = torch.Generator().manual_seed(5)
    first, second, last = nn.Linear(9, 16), nn.Linear(16, 16), nn.Linear(16, 3)
    for layer in (first, second, last):
        for param in layer.parameters():
            param.data = torch.randn(param.shape, generator=source) / 4
        layer.to(device)
    given: dict[str, Any] = {"on_neuron": False, "flatten_parameters": True}
    given |= {"process_group": group, **options}
    model = FSDP(
        nn.Sequential(FSDP(first, **given), nn.GELU(), FSDP(second, **given), last),
        **given,
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    for step in range(6):
        batch = torch.randn(4, 9, generator=source.manual_seed(10 * step + group.rank))
        if step % 2 == 0:
            with model.no_sync():
                model(batch.to(device)).pow(2).mean().backward()
            continue
        model(batch.to(device)).pow(2).mean().backward()
        model.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.cpu() for name, value in model.full_state_dict().items()}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"compute_dtype": "bfloat16", "watch_released": True},
        {"gather_bits": 8, "reduce_bits": 4},
        {"forward_prefetch": True, "backward_prefetch": "BACKWARD_PRE"},
        {"cpu_offload": True, "compute_dtype": "bfloat16"},
        {"cpu_offload": True, "backward_prefetch": "BACKWARD_POST"},
        {"cpu_offload": True, "gather_bits": 8, "reduce_bits": 8},
        {"cpu_offload": True, "use_orig_params": True, "flatten_parameters": False},
    ],
    ids=[
        "plain",
        "bfloat16",
        "quantized",
        "prefetch",
        "offload",
        "offload, prefetch",
        "offload, quantized",
        "offload, views",
    ],
)
def test_updates_on_the_device_are_those_on_the_host(
    gpu: torch.device, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(fsdp_options, "_usable", lambda device: device)
    cpu = torch.device("cpu")
    on_host = any_gpu.on_nccl_ranks(lambda group, _: trained(group, cpu, **options))
    on_device = any_gpu.on_nccl_ranks(lambda group, gpu: trained(group, gpu, **options))
    for host, device in zip(on_host, on_device, strict=True):
        assert host.keys() == device.keys()
        for name, value in host.items():
            torch.testing.assert_close(device[name], value, msg=name)


def test_a_root_without_parameters_is_where_its_units_are(gpu: torch.device) -> None:
    def clip(group: _C.Communicator, device: torch.device) -> float:
        given: dict[str, Any] = {"process_group": group, "on_neuron": False}
        unit = FSDP(nn.Linear(3, 2, device=device), **given)
        root = FSDP(nn.Sequential(unit), **given)
        root(torch.ones(1, 3, device=device)).sum().backward()
        return float(root.clip_grad_norm_(1.0))

    assert any_gpu.on_nccl_ranks(clip) == [pytest.approx(8**0.5)] * RANKS


def test_any_thread_may_train(gpu: torch.device) -> None:
    """A thread's current GPU is the first one, whichever its module is on."""

    def train(group: _C.Communicator, device: torch.device) -> float:
        given: dict[str, Any] = {"process_group": group, "on_neuron": False}
        unit = FSDP(nn.Linear(3, 2, device=device), **given)
        root = FSDP(nn.Sequential(unit, nn.Linear(2, 2, device=device)), **given)
        batch = torch.ones(1, 3, device=device)
        calls = [
            lambda: root(batch).sum().backward(),
            lambda: root.clip_grad_norm_(1.0),
            lambda: root.full_state_dict(),
        ]
        for call in calls:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(call).result()
        return float(root.clip_grad_norm_(1.0))

    for norm in any_gpu.on_nccl_ranks(train):
        assert norm == pytest.approx(1, rel=1e-5)


def test_no_memory_is_taken_after_the_second_update(
    gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fsdp_options, "_usable", lambda device: device)
    taken: dict[int, list[int]] = {0: [], 1: []}

    def update(group: _C.Communicator, device: torch.device) -> Values:
        model = FSDP(
            nn.Sequential(nn.Linear(64, 300), nn.Linear(300, 3)).to(device),
            on_neuron=False, process_group=group, gather_bits=8, reduce_bits=8,
        )  # fmt: skip
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(5):
            model(torch.ones(2, 64, device=device)).sum().backward()
            model.clip_grad_norm_(0.1)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            group.barrier()  # the count is of both ranks
            taken[group.rank].append(any_gpu.allocations())
            group.barrier()
        return {}

    any_gpu.on_nccl_ranks(update)
    for counts in taken.values():
        assert counts[1:] == [counts[1]] * 4
        assert counts[0] > 0  # it is counted


def four_units(
    group: _C.Communicator, device: torch.device, offload: bool = True, **options: Any
) -> FSDP:
    layers = [nn.Linear(16, 16).to(device) for _ in range(4)]
    given: dict[str, Any] = {"on_neuron": False, "process_group": group}
    given |= {"cpu_offload": offload, "flatten_parameters": True, **options}
    return FSDP(nn.Sequential(*(FSDP(layer, **given) for layer in layers)), **given)


IN_TURN: dict[str, Any] = {"forward_prefetch": False, "backward_prefetch": None}


def test_the_next_unit_is_prefetched_unless_told_otherwise(
    gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU a gather that is needed at once runs beside no computation."""
    monkeypatch.setattr(fsdp_options, "_usable", lambda device: device)

    def peaks(group: _C.Communicator, device: torch.device) -> list[list[int]]:
        batch, found = torch.ones(2, 16, device=device), []
        for options in ({}, IN_TURN, IN_TURN | {"forward_prefetch": True}):
            model = four_units(group, device, False, **options)
            for _ in range(2):  # the first pass knows no order
                model._unit.peak_bytes = 0
                out = model(batch).sum()
                forward, model._unit.peak_bytes = model._unit.peak_bytes, 0
                out.backward()
                model.zero_grad()
            found.append([forward, model._unit.peak_bytes])
        return found

    for default, in_turn, forward in any_gpu.on_nccl_ranks(peaks):
        assert default[0] == forward[0] > in_turn[0]
        assert default[1] > in_turn[1] == forward[1]


@pytest.mark.parametrize("options", [IN_TURN, {}], ids=["in turn", "prefetch"])
def test_the_host_waits_for_copies_at_the_ends_of_passes_alone(
    gpu: torch.device, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(fsdp_options, "_usable", lambda device: device)
    updates, passes = 4, 2

    def waits(group: _C.Communicator, device: torch.device, offload: bool) -> int:
        model = four_units(group, device, offload, **options)
        batch, before = torch.ones(2, 16, device=device), 0
        for step in range(updates + 1):
            if step == 1:  # memory is taken, and other memory freed, in the first
                group.barrier()
                before = any_gpu.waits()  # of both ranks
                group.barrier()
            model(batch).sum().backward()
            assert all(p.grad is not None for p in model.parameters())
            model.zero_grad()
        group.barrier()
        return any_gpu.waits() - before

    fewest, found = (
        max(any_gpu.on_nccl_ranks(lambda g, d, o=offload: waits(g, d, o)))
        for offload in (False, True)
    )
    assert found <= fewest + RANKS * updates * passes


class Unread(nn.Linear):
    """Its parameters may still be on their way when the forward returns."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.mark.parametrize("grads", [False, True])
def test_the_host_may_write_to_shards_after_a_forward(
    gpu: torch.device, monkeypatch: pytest.MonkeyPatch, grads: bool
) -> None:
    monkeypatch.setattr(fsdp_options, "_usable", lambda device: device)

    def work(group: _C.Communicator, device: torch.device) -> None:
        layer = Unread(16, 16)
        layer.weight.data = torch.arange(256.0).view(16, 16)
        model: Any = FSDP(
            layer.to(device), on_neuron=False, process_group=group, cpu_offload=True,
            flatten_parameters=False, reshard_after_forward=False,
        )  # fmt: skip
        with torch.set_grad_enabled(grads):
            model(torch.ones(2, 16, device=device))
        for param in model.parameters():
            param.data.fill_(float("nan"))
        weight = model.full_params[0].detach().cpu().flatten()[:256]
        assert torch.equal(weight, torch.arange(256.0))

    any_gpu.on_nccl_ranks(work)


def test_memory_of_gradients_is_used_again_unless_someone_has_it(
    gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fsdp_options, "_usable", lambda device: device)

    def work(group: _C.Communicator, device: torch.device) -> None:
        model, batch = four_units(group, device), torch.ones(2, 16, device=device)
        first = next(iter(model.parameters()))
        addresses, held = [], []
        for step in range(4):
            (model(batch).sum() * (step + 1)).backward()
            assert first.grad is not None
            addresses.append(first.grad.data_ptr())
            if step == 2:
                held = [first.grad[:3], first.grad[:3].clone()]
            model.zero_grad()
        assert addresses[0] == addresses[1] == addresses[2] != addresses[3]
        assert torch.equal(*held)

    any_gpu.on_nccl_ranks(work)


def test_offloaded_shards_without_memory_to_pin(
    gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fsdp_options, "_usable", lambda device: device)
    one_rank = threading.Lock()

    def work(group: _C.Communicator, device: torch.device, pin: bool) -> Values:
        if not pin:
            monkeypatch.setattr(layout, "pinned_zeros", unpinned)
            monkeypatch.setattr(sharded, "pinned_zeros", unpinned)
        return trained(group, device, cpu_offload=True)

    def unpinned(numel: int, plugin: object) -> _C.MappedMemory:
        with one_rank:
            emulated_torch.fail_pin()
            memory = _C.MappedMemory(4 * numel, pinned_for=plugin)
        assert not memory.pinned
        return memory

    pinned, plain = (
        any_gpu.on_nccl_ranks(lambda g, d, pin=pin: work(g, d, pin))
        for pin in (True, False)
    )
    for a, b in zip(pinned, plain, strict=True):
        for name in a:
            assert torch.equal(a[name], b[name]), name


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.last(torch.relu(self.first(x))).square().mean()}


def weights_of_a_run(device: torch.device, folder: Path, fsdp: str) -> Values:
    torch.manual_seed(0)
    rows = [{"x": torch.randn(8)} for _ in range(40)]
    args = ctrainer.TrainingArguments(
        output_dir=str(folder), max_steps=10, per_device_train_batch_size=2,
        gradient_accumulation_steps=2, max_grad_norm=0.1, save_strategy="no",
        logging_strategy="no", report_to="none", disable_tqdm=True, fsdp=fsdp,
        fsdp_config={"min_num_params": 10} if fsdp else None, learning_rate=0.01,
        use_cpu=device.type == "cpu",
    )  # fmt: skip
    trainer = ctrainer.Trainer(Model().to(device), args, train_dataset=rows)
    trainer.train()
    model: Any = trainer.model
    whole: Values = model.full_state_dict() if fsdp else model.state_dict()
    return {name: value.detach().cpu() for name, value in whole.items()}


def test_a_trainer_offloads_as_it_trains_on_the_host(
    gpu: torch.device, tmp_path: Path
) -> None:
    host = weights_of_a_run(torch.device("cpu"), tmp_path, "")
    device = weights_of_a_run(gpu, tmp_path, "full_shard auto_wrap offload")
    assert host.keys() == device.keys()
    for name, value in host.items():
        torch.testing.assert_close(device[name], value, msg=name)


class Rehomed(nn.Linear):
    """Gives its weight other memory in each forward, as cuDNN's layers do."""

    factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data = self.weight.data * self.factor
        return super().forward(x)


def test_weights_that_a_forward_moves_return_to_the_unit(
    gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fsdp_options, "_usable", lambda device: device)

    def train(group: _C.Communicator, device: torch.device) -> list[float]:
        source = torch.Generator().manual_seed(2)
        layers = [Rehomed(5, 5), nn.Linear(5, 5)]
        layers[1].load_state_dict(layers[0].state_dict())
        losses = []
        for layer in layers:
            for param in layer.parameters():
                param.data = torch.randn(param.shape, generator=source.manual_seed(3))
            model = FSDP(layer.to(device), process_group=group, on_neuron=False)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            for _ in range(3):
                loss = model(torch.ones(2, 5, device=device)).pow(2).mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        assert losses[:3] == losses[3:]
        changing: Any = Rehomed(5, 5)
        changing.factor = 0.5
        model = FSDP(changing.to(device), process_group=group, on_neuron=False)
        with pytest.raises(RuntimeError, match=r"^weight\.data has been assigned"):
            model(torch.ones(2, 5, device=device))
        return losses

    for losses in any_gpu.on_nccl_ranks(train):
        assert losses[0] > losses[2]
