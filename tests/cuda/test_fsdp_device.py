"""Sharded modules over a device: the plugin over the emulation, in whose memory torch
computes as in the host's. Ranks are threads; what comes out is what the CPU gives."""

from __future__ import annotations

import copy
import ctypes
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import emulated_cuda
import pytest

torch = pytest.importorskip("torch")

import fsdp_models as models  # noqa: E402
import missing_gradients  # noqa: E402
from draws import draws  # noqa: E402
from torch import nn  # noqa: E402

from ctrainer import _C  # noqa: E402
from ctrainer.fsdp import FullyShardedDataParallel as FSDP  # noqa: E402
from ctrainer.fsdp import options as fsdp_options  # noqa: E402

RANKS = 2
Values = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def cuda() -> Iterator[Any]:
    """ctrainer._cuda of the emulation, its memory shown to the host."""
    module = emulated_cuda.load()
    library = ctypes.CDLL(str(emulated_cuda.LIBRARY))
    library.emul_show_memory(1)
    yield module
    library.emul_show_memory(0)


def on_every_rank(
    cuda: Any, work: Callable[[_C.Communicator], Any], ranks: int = RANKS
) -> list[Any]:
    id = cuda.comm_id()

    def be_rank(rank: int) -> Any:
        emulated_cuda.be_host(rank)
        group = _C.plugin_communicator(cuda.plugin, id, rank, ranks, 0, 30.0)
        try:
            return work(group)
        finally:
            group.close()

    with ThreadPoolExecutor(ranks) as pool:
        begun = [pool.submit(be_rank, rank) for rank in range(ranks)]
        return [done.result(60) for done in begun]


def sharded(group: _C.Communicator, **options: Any) -> Any:
    """Two inner units and the root; the weights are those of a seed."""
    source = torch.Generator().manual_seed(5)
    first, second, last = nn.Linear(9, 16), nn.Linear(16, 16), nn.Linear(16, 3)
    for layer in (first, second, last):
        for param in layer.parameters():
            param.data = torch.randn(param.shape, generator=source) / 4
    given: dict[str, Any] = {"on_neuron": False, "flatten_parameters": True}
    given |= {"process_group": group, **options}
    return FSDP(
        nn.Sequential(FSDP(first, **given), nn.GELU(), FSDP(second, **given), last),
        **given,
    )


def batch(rank: int, step: int) -> torch.Tensor:
    source = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, 9, generator=source)


def trained(group: _C.Communicator, **options: Any) -> Values:
    """What three updates make of the weights, and the norms on the way."""
    model = sharded(group, **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    norms = []
    for step in range(3):
        with model.no_sync():
            model(batch(group.rank, 2 * step)).pow(2).mean().backward()
        model(batch(group.rank, 2 * step + 1)).pow(2).mean().backward()
        norms.append(model.clip_grad_norm_(0.1))
        optimizer.step()
        optimizer.zero_grad()
    state: Values = model.full_state_dict()
    return state | {"norms": torch.stack(norms)}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"compute_dtype": "bfloat16", "watch_released": True},
        {"gather_bits": 8, "reduce_bits": 4},
        {"forward_prefetch": True, "backward_prefetch": "BACKWARD_PRE"},
        {"use_orig_params": True, "reshard_after_forward": False},
        {"cpu_offload": True, "compute_dtype": "bfloat16"},
    ],
    ids=["plain", "bfloat16", "quantized", "prefetch", "views", "offload"],
)
def test_updates_on_the_device_are_those_on_the_host(
    cuda: Any, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    on_host = on_every_rank(cuda, lambda group: trained(group, **options))
    home = fsdp_options.Home(torch.device("cpu"), cuda.plugin)
    monkeypatch.setattr(fsdp_options, "home_of", lambda *_: home)
    on_device = on_every_rank(cuda, lambda group: trained(group, **options))
    before = on_every_rank(cuda, lambda group: sharded(group).full_state_dict())
    assert not torch.equal(on_host[0]["3.weight"], before[0]["3.weight"])
    for rank in range(RANKS):
        assert on_device[rank].keys() == on_host[rank].keys()
        for name, value in on_host[rank].items():
            if name == "norms":  # powers are added in another order
                torch.testing.assert_close(on_device[rank][name], value)
            else:
                assert torch.equal(on_device[rank][name], value), name


@pytest.mark.parametrize("number", range(draws(4, models.COUNT)))
def test_any_model_trains_on_the_device_like_plain_torch(
    cuda: Any, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """What is released is taken away at once: a read of it would end the process."""
    spec = models.table()[number]
    plain = models.build(spec)
    copies = [copy.deepcopy(plain) for _ in range(spec["world"])]
    before = {name: v.clone() for name, v in plain.state_dict().items()}
    with warnings.catch_warnings():
        # A reentrant checkpoint of what needs no gradient says so, in both runs.
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad")
        expected = models.in_one_process(plain, spec)
        home = fsdp_options.Home(torch.device("cpu"), cuda.plugin)
        monkeypatch.setattr(fsdp_options, "home_of", lambda *_: home)

        def train(group: _C.Communicator) -> None:
            model = models.sharded(copies[group.rank], spec, group, watch_released=True)
            models.compare(models.on_a_rank(model, spec, group), expected, before, spec)

        on_every_rank(cuda, train, spec["world"])


@pytest.mark.parametrize("seed", range(draws(6, 200)))
@pytest.mark.parametrize(
    "options",
    [{}, {"reduce_bits": 8}, {"cpu_offload": True}, {"compute_dtype": "bfloat16"}],
    ids=["plain", "quantized", "offload", "bfloat16"],
)
def test_a_parameter_without_a_gradient_has_none_on_the_device(
    cuda: Any, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], seed: int
) -> None:
    case = missing_gradients.drawn(seed) | {"hybrid": False}
    expected = missing_gradients.train_whole(case)
    home = fsdp_options.Home(torch.device("cpu"), cuda.plugin)
    monkeypatch.setattr(fsdp_options, "home_of", lambda *_: home)

    def train(group: _C.Communicator) -> None:
        found = missing_gradients.train_sharded(case, group, **options)
        missing_gradients.compare(case, found, expected, exact=not options)

    on_every_rank(cuda, train, case["world"])


def test_memory_is_the_devices_and_comes_and_goes(
    cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = fsdp_options.Home(torch.device("cpu"), cuda.plugin)
    monkeypatch.setattr(fsdp_options, "home_of", lambda *_: home)

    def work(group: _C.Communicator) -> list[Any]:
        model = sharded(group)
        unit = model.module[0]._unit
        addresses = [p.data_ptr() for p in model.module[0].full_params]
        unit.gather()
        gathered = [p.detach().clone() for p in model.module[0].full_params]
        unit.release()
        twin = copy.deepcopy(model)
        twin(batch(group.rank, 0)).sum().backward()
        same = [p.data_ptr() for p in model.module[0].full_params] == addresses
        return [unit.full.on_host, unit.live_bytes, same, gathered[0], twin]

    for on_host, live, same, weight, twin in on_every_rank(cuda, work):
        assert (on_host, live, same) == (False, 0, True)
        assert weight.std() > 0.1
        assert all(shard.grad is not None for shard in twin.parameters())


def test_memory_of_a_device_is_no_buffer_of_the_hosts(cuda: Any) -> None:
    memory = _C.MappedMemory(100, plugin=cuda.plugin)
    with pytest.raises(BufferError, match=r"torch\.from_dlpack"):
        memoryview(memory)
    row = torch.from_dlpack(memory)
    assert row.shape == (100,)
    assert row.dtype == torch.uint8
    with pytest.raises(ValueError, match="PyCapsule"):
        _C.MappedMemory(100, plugin="cuda")


def test_tensors_keep_the_memory_that_they_are_views_of() -> None:
    memory = _C.MappedMemory(16)
    row = torch.from_dlpack(memory)
    memoryview(memory)[3] = 7
    del memory
    assert row.tolist() == [0, 0, 0, 7] + [0] * 12
    memory = _C.MappedMemory(8)
    assert memory.__dlpack_device__() == (1, 0)
    with pytest.raises(BufferError, match="exported in place"):
        memory.__dlpack__(copy=True)
    with pytest.raises(BufferError, match="exported in place"):
        memory.__dlpack__(dl_device=(2, 0))


def test_parameters_on_two_devices_are_named() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2, device="meta")})
    with pytest.raises(ValueError, match=r"a\.bias on cpu, b\.bias on meta"):
        fsdp_options.home_of(model)
    with pytest.raises(ValueError, match="the module is to be on meta; parameters"):
        fsdp_options.home_of(model["b"])
