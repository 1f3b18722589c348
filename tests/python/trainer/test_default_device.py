"""What ctrainer keeps in host memory is there whatever torch's default device."""

import ast
import inspect
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rank_threads import on_ranks, seeded
from torch import nn
from torch.utils._device import _device_constructors

import ctrainer
from ctrainer import _C, optim
from ctrainer.adapters import _torch_batches
from ctrainer.adapters._torch_checkpoint import load_object, save_object
from ctrainer.checkpoint import Sink
from ctrainer.comm import parallel
from ctrainer.comm.process_group import ProcessGroupBackend
from ctrainer.compat.fairscale import OSS, ShardedGradScaler
from ctrainer.compat.fairscale import FullyShardedDataParallel as Fairscale
from ctrainer.fairseq.data.dictionary import Dictionary
from ctrainer.fairseq.modules.positional_embedding import SinusoidalPositionalEmbedding
from ctrainer.fsdp import FullyShardedDataParallel as FSDP

FOLDER = Path(ctrainer.__file__).parent
# A module's own buffers and a batch are made where the user says, as by the originals.
BY_DEFAULT = {
    "_stack", "_labels", "SinusoidalPositionalEmbedding.__init__",
    "Embedded._add_embedding",
}  # fmt: skip


def makers(tree: ast.AST, within: str = "") -> list[tuple[str, int]]:
    """The calls that make a tensor on the default device, and the functions they are
    in."""
    found, names = [], {f.__name__ for f in _device_constructors()}
    for node in ast.iter_child_nodes(tree):
        name = within
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            name = f"{within}.{node.name}".lstrip(".")
        found += makers(node, name)
        call = node.func if isinstance(node, ast.Call) else None
        if (
            isinstance(call, ast.Attribute)
            and isinstance(call.value, ast.Name)
            and (call.value.id, call.attr in names) == ("torch", True)
            and "device" not in {k.arg for k in node.keywords}
        ):
            found.append((within, node.lineno))
    return found


def test_every_tensor_that_is_made_names_its_device() -> None:
    missing, seen = [], set()
    for path in sorted(FOLDER.rglob("*.py")):
        for function, line in makers(ast.parse(path.read_text())):
            seen.add(function)
            if function not in BY_DEFAULT:
                missing.append(f"{path.relative_to(FOLDER)}:{line} in {function}")
    assert not missing
    assert seen == BY_DEFAULT


def both(function: Callable[[], Any]) -> tuple[Any, Any]:
    """What the function gives as ever, and with a default device of no memory."""
    expected = function()
    with torch.device("meta"):
        return function(), expected


def equal(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", [n for n in optim.__all__ if hasattr(optim, n)])
def test_an_optimizers_state_is_in_host_memory(name: str) -> None:
    cls = getattr(optim, name)
    if not inspect.isclass(cls) or not issubclass(cls, torch.optim.Optimizer):
        pytest.skip("no optimizer")
    if cls is optim.Composite:
        pytest.skip("made of the others")

    def train() -> Any:
        generator = torch.Generator().manual_seed(0)
        weights = torch.randn(128, 64, generator=generator, device="cpu")
        param = nn.Parameter(weights)
        made = cls([param], **({} if cls is optim.Adafactor else {"lr": 1e-2}))
        if hasattr(made, "train"):
            made.train()
        for _ in range(2):
            param.grad = param.detach().sign()
            made.step()
        state = {k: v for k, v in made.state[param].items()}
        return param.detach(), state

    equal(*both(train))


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with seeded(0):
            self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh())


def backward(model: Any, group: _C.Communicator) -> None:
    x = torch.full((2, 6), 1.0 + group.rank, device="cpu")
    model(x).square().mean().backward()


@pytest.mark.parametrize("flatten", [True, False])
def test_optimizer_states_of_shards_and_wholes_are_in_host_memory(
    flatten: bool,
) -> None:
    def run(group: _C.Communicator) -> Any:
        model = Two()
        model.second = FSDP(model.second, process_group=group)
        model = FSDP(model, process_group=group, flatten_parameters=flatten)
        made = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=False)
        backward(model, group)
        made.step()

        def states() -> Any:
            full = FSDP.full_optim_state_dict(model, made, rank0_only=False)
            own = FSDP.shard_full_optim_state_dict(full, model, optim=made)
            sent = FSDP.scatter_full_optim_state_dict(full, model, optim=made)
            norm = model.clip_grad_norm_(1e9)
            return full["state"], own["state"], sent["state"], norm

        equal(*both(states))

    on_ranks(2, run)


def test_fairscales_norms_and_scales_are_in_host_memory() -> None:
    def run(group: _C.Communicator) -> Any:
        def train() -> Any:
            with torch.device("cpu"):
                model, sharded = Two(), Fairscale(Two(), group)
                made = OSS(model.parameters(), torch.optim.SGD, group, lr=1.0)
            for each in (model, sharded):
                backward(each, group)
            found = [made.clip_grad_norm(0.1, kind) for kind in (2.0, "inf")]
            chosen = sharded.clip_grad_norm_(1e9, filter_params_fn=list)
            with torch.device("cpu"):
                scaler = ShardedGradScaler(init_scale=8.0, process_group=group)
                plain = torch.optim.SGD(model.parameters(), lr=1.0)
                scaler.scale(model(torch.ones(1, 6)).mean()).backward()
            if group.rank == 1:
                next(model.parameters()).grad.view(-1)[0] = float("inf")
            scaler.unscale_(plain)
            scaler.step(plain)
            return *found, chosen, model.state_dict()

        equal(*both(train))

    on_ranks(2, run)


def test_files_are_read_and_written_in_host_memory(tmp_path: Path) -> None:
    state = {"none": torch.zeros(0), "some": torch.arange(3.0), "step": 3}

    def through_a_file() -> Any:
        save_object(Sink(str(tmp_path), None), "optimizer.pt", state)
        return load_object(str(tmp_path), "optimizer.pt")

    found, expected = both(through_a_file)
    equal(found, expected)
    equal(found, state)


class Rows:
    def __len__(self) -> int:
        return 40


def test_the_order_of_rows_does_not_depend_on_the_default_device() -> None:
    def orders() -> list[list[int]]:
        args = SimpleNamespace(data_seed=3)
        with seeded(5):
            samplers = [
                _torch_batches.SeededSampler(Rows(), args),
                _torch_batches.DrawnSampler(Rows(), 40),
                _torch_batches.LengthGroupedSampler(4, list(range(40))),
            ]
            drawn = torch.utils.data.RandomSampler(Rows())
            return [*map(list, samplers), list(_torch_batches._randomly(drawn, 0, 0))]

    found, expected = both(orders)
    assert found == expected


def test_flat_gradients_and_empty_messages_are_in_host_memory() -> None:
    with torch.device("meta"):
        params = [nn.Parameter(torch.zeros(2, 3, device="cpu"))]
        flat, views = parallel.allocate(params)
        empty = ProcessGroupBackend._tensor(memoryview(b""), "float32")
    assert {t.device.type for t in (flat, *views, empty)} == {"cpu"}


def test_sentences_and_waves_are_in_host_memory() -> None:
    def made() -> Any:
        words = Dictionary()
        for word in "abc":
            words.add_symbol(word)
        embedding = SinusoidalPositionalEmbedding(7, 1, 4).to_empty(device="cpu")
        state: dict[str, Any] = {}
        embedding.upgrade_state_dict_named(state, "")
        embedding.load_state_dict(state)
        ids = words.encode_line("a b c")
        return ids, embedding(torch.full((1, 9), 3, device="cpu"))

    equal(*both(made))
