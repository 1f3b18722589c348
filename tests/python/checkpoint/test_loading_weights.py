"""Weights of every kind of folder into a live model."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from ctrainer.adapters import _torch_checkpoint as files  # noqa: E402
from ctrainer.checkpoint import Sink  # noqa: E402


def make(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))


def same(a: Any, b: Any) -> bool:
    states = a.state_dict(), b.state_dict()
    return states[0].keys() == states[1].keys() and all(
        torch.equal(states[0][name], states[1][name]) for name in states[0]
    )


def save(model: Any, folder: Path) -> None:
    files.save_model(Sink(folder, None), model, None)


def test_in_place_where_nothing_stands_in_the_way(tmp_path: Path) -> None:
    source, target = make(0), make(1)
    source[1].num_batches_tracked += 7
    save(source, tmp_path)
    addresses = [p.data_ptr() for p in target.parameters()]
    files.load_model(target, str(tmp_path))
    assert same(source, target)
    assert addresses == [p.data_ptr() for p in target.parameters()]


def test_through_load_state_dict_where_a_hook_wants_to_see_it(tmp_path: Path) -> None:
    source, target, seen = make(0), make(1), []
    save(source, tmp_path)
    target.register_load_state_dict_pre_hook(lambda *args: seen.append(len(args[1])))
    files.load_model(target, str(tmp_path))
    assert same(source, target)
    assert seen


def test_another_dtype_is_converted(tmp_path: Path) -> None:
    source, target = make(0), make(1)
    save(make(0).bfloat16(), tmp_path)
    files.load_model(target, str(tmp_path))
    expected = source[0].weight.bfloat16().float()
    assert torch.equal(target[0].weight, expected)


def test_shards_and_torchs_own_format(tmp_path: Path) -> None:
    source = make(0)
    state = source.state_dict()
    names = list(state)
    parts = {"a.safetensors": names[:2], "b.safetensors": names[2:]}
    sink = Sink(tmp_path, None)
    for name, part in parts.items():
        sink.tensors(name, {n: state[n] for n in part})
    index = {"weight_map": {n: name for name, part in parts.items() for n in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    target = make(1)
    files.load_model(target, str(tmp_path))
    assert same(source, target)
    old = tmp_path / "old"
    old.mkdir()
    torch.save(state, old / "pytorch_model.bin")
    target = make(1)
    files.load_model(target, str(old))
    assert same(source, target)


def test_what_does_not_fit_is_rejected_and_changes_nothing(tmp_path: Path) -> None:
    save(make(0), tmp_path)
    wider = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3))
    with pytest.raises(ValueError, match="size mismatch"):
        files.load_model(wider, str(tmp_path))
    longer = torch.nn.Sequential(*make(1), torch.nn.Linear(3, 3))
    shorter = torch.nn.Sequential(make(1)[0])
    renamed = torch.nn.ModuleDict({"x": torch.nn.Linear(2, 2)})
    for model, told in (
        (longer, r"lacks weights of the model: \['2.bias', '2.weight'\]\. "),
        (shorter, r"has weights that the model lacks: \['1.bias', .*\]\. "),
        (renamed, r"lacks .* \['x.bias', 'x.weight'\] and has .* \['0.bias'"),
    ):
        before = [t.clone() for t in model.state_dict().values()]
        with pytest.raises(ValueError, match=told):
            files.load_model(model, str(tmp_path))
        assert all(map(torch.equal, before, model.state_dict().values()))
    with pytest.raises(FileNotFoundError, match="holds no weights"):
        files.load_model(renamed, str(tmp_path.parent))


def test_values_that_are_no_tensors_are_rejected_by_name(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"\['extra'\]"):
        files.save_model(Sink(tmp_path, None), make(), {"extra": 3})
    assert os.listdir(tmp_path) == []


def test_dtypes_that_numpy_lacks_survive(tmp_path: Path) -> None:
    state = {
        "fp8": torch.ones(3).to(torch.float8_e5m2),
        "u16": torch.arange(3).to(torch.uint16),
        "complex": torch.full((2,), 1 + 2j, dtype=torch.complex64),
        "transposed": torch.arange(6.0).reshape(2, 3).T,
        "conjugate": torch.full((2,), 1 + 2j, dtype=torch.complex64).conj(),
    }
    files.save_model(Sink(tmp_path, None), make(), state)

    class Holder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, value in state.items():
                self.register_buffer(name, torch.zeros_like(value).contiguous())

    target = Holder()
    files.load_model(target, str(tmp_path))
    for name, value in state.items():
        loaded = getattr(target, name)
        assert loaded.dtype == value.dtype
        assert loaded.tolist() == value.tolist(), name
