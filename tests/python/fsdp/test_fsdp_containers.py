"""Tensors in containers, under XlaFullyShardedDataParallel's and fairscale's names."""

import copy
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from ctrainer.fsdp import (
    FLOAT_DTYPES,
    FullyShardedDataParallel,
    apply_to_tensors,
    collect_tensors,
)


class Pair(NamedTuple):
    a: int
    b: torch.Tensor


class Fixed(Mapping[str, Any]):
    """Neither a dict nor to be changed."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __getitem__(self, name: str) -> Any:
        return {"y": self.value}[name]

    def __iter__(self) -> Iterator[str]:
        return iter(("y",))

    def __len__(self) -> int:
        return 1


def test_every_tensor_is_visited_and_containers_keep_their_types() -> None:
    t = [torch.full((n,), float(n)) for n in range(7)]
    packed = pack_padded_sequence(t[6].view(3, 2, 1), torch.tensor([3, 2]))
    given = [
        {"x": t[0], 1: (t[1], "s")}, {t[2]}, OrderedDict(k=t[3]), Pair(1, t[4]), packed,
        [t[0], None, UserDict({"u": t[5]})],
    ]  # fmt: skip
    found = apply_to_tensors(lambda x: x + 1, given)
    assert [type(value) for value in found] == [type(value) for value in given]
    each = [*t[:5], packed.data, t[0], t[5]]
    for one, two in zip(each, collect_tensors(found), strict=True):
        assert torch.equal(one + 1, two)
    once = [x.data_ptr() for x in each if x is not t[0]]
    assert [x.data_ptr() for x in collect_tensors(given)] == [t[0].data_ptr(), *once]


class Returning(nn.Module):
    def __init__(self, kind: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(3, 3), kind

    def forward(self, x: torch.Tensor) -> Any:
        return self.kind(self.layer(x))


KINDS: dict[str, Callable[[torch.Tensor], Any]] = {
    "user dict": lambda y: UserDict({"y": y}),
    "batch": lambda y: transformers.BatchEncoding({"y": y}),
    "mapping": Fixed,
    "nested": lambda y: [UserDict({"x": (Fixed(y),)})],
}


@pytest.mark.parametrize("name", KINDS)
def test_a_backward_comes_through_outputs_in_mappings(name: str) -> None:
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(3, 3), Returning(KINDS[name]))
    copied = copy.deepcopy(plain)
    options: dict[str, Any] = {"on_neuron": False, "use_orig_params": True}
    copied[1] = FullyShardedDataParallel(copied[1], **options)
    found = []
    for model in (plain, FullyShardedDataParallel(copied, **options)):
        y = model(torch.ones(2, 3))
        while not torch.is_tensor(y):
            (y,) = y.values() if isinstance(y, Mapping) else y
        y.square().sum().backward()
        found.append([p.grad.flatten() for p in model.parameters()])
    for one, two in zip(*found, strict=True):
        assert torch.equal(one, two)


def test_a_backward_through_an_object_of_another_class_is_told() -> None:
    model = FullyShardedDataParallel(
        Returning(lambda y: SimpleNamespace(y=y)), on_neuron=False
    )
    y = model(torch.ones(2, 3)).y
    with pytest.raises(ValueError, match="not in objects of other classes"):
        y.sum().backward()


def test_a_packed_sequence_may_be_changed_in_place() -> None:
    packed = pack_padded_sequence(torch.ones(3, 1, 2), torch.tensor([3]))

    def clear(data: torch.Tensor) -> None:
        data.zero_()

    found = apply_to_tensors(clear, packed)
    assert not pad_packed_sequence(found)[0].any()


def test_the_dtypes_to_compute_in_are_told() -> None:
    for dtype in FLOAT_DTYPES:
        FullyShardedDataParallel(nn.Linear(2, 2), compute_dtype=dtype)
    with pytest.raises(ValueError, match="compute_dtype must be one of"):
        FullyShardedDataParallel(nn.Linear(2, 2), compute_dtype=torch.float64)


@pytest.mark.parametrize("whole", [False, True])
def test_a_block_with_a_compiled_forward_is_wrapped(whole: bool) -> None:
    block = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    x, gradients = torch.ones(2, 3), []
    for sharded in (False, True):
        block.zero_grad()
        model: nn.Module = block
        if sharded and whole:
            model = torch.compile(block, backend="eager")  # type: ignore[assignment]
        elif sharded:
            block.forward = torch.compile(block.forward, backend="eager")
        if sharded:
            model = FullyShardedDataParallel(model, flatten_parameters=True)
        model(x).sum().backward()
        gradients.append([p.grad.reshape(-1) for p in model.parameters()])
    assert torch.equal(gradients[1][0][:12], torch.cat(gradients[0]))
