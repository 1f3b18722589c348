"""What optimizers make of the attribute `_part`, by which a sharded parameter says of
what it is a part."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ctrainer import _C, optim
from ctrainer.fsdp.layout import Part


def part_of(whole: torch.Tensor, part: Any) -> Any:
    """A row of the whole's elements, with a gradient, which is said to be the part."""
    made: Any = torch.nn.Parameter(whole.detach().reshape(-1).clone())
    made.grad = torch.linspace(-1.0, 1.0, made.numel())
    made._part = part
    return made


@pytest.mark.parametrize("kind", [optim.LAMB, optim.LARS, optim.Adafactor, optim.Muon])
def test_a_row_that_is_all_of_a_parameter_is_updated_as_it(kind: Any) -> None:
    whole = torch.nn.Parameter(torch.arange(20.0).view(4, 5) / 7)
    row = part_of(whole, Part(_C.Communicator(), 0, (4, 5)))
    whole.grad = row.grad.view(4, 5).clone()
    for param in (whole, row):
        optimizer = kind([param])
        for _ in range(3):
            optimizer.step()
    assert torch.equal(whole.view(-1), row)


def test_what_lies_behind_the_end_is_padding() -> None:
    row = part_of(torch.ones(6), Part(_C.Communicator(), 0, (2, 2)))
    alone = torch.nn.Parameter(torch.ones(2, 2))
    alone.grad = row.grad[:4].view(2, 2).clone()
    for param in (row, alone):
        optim.Adafactor([param], lr=0.1, relative_step=False).step()
    assert torch.equal(row[:4].view(2, 2), alone)
    assert row[4:].tolist() == [1.0, 1.0]


def closed() -> _C.Communicator:
    group = _C.Communicator()
    group.close()
    return group


@pytest.mark.parametrize(
    ("part", "error", "message"),
    [
        (
            7,
            TypeError,
            r"_part of param_groups.* is a int; expected",
        ),
        ((_C.Communicator(), 0), TypeError, "_part"),
        ((None, 0, (4,)), TypeError, "expected a ctrainer.Communicator, got a None"),
        ((closed(), 0, (4,)), ValueError, "has been closed"),
        ((_C.Communicator(), 5, (4,)), ValueError, "begins at element 5 of 4"),
        ((_C.Communicator(), -1, (4,)), ValueError, "begins at element -1 of 4"),
        ((_C.Communicator(), 0, (-4,)), ValueError, r"a shape of \(-4,\)"),
        ((_C.Communicator(), 0, ("4",)), TypeError, "integer"),
    ],
)
def test_what_does_not_say_of_what_it_is_a_part_is_rejected(
    part: Any, error: type[Exception], message: str
) -> None:
    param = part_of(torch.ones(4), part)
    with pytest.raises(error, match=message):
        optim.LAMB([param]).step()
    assert param.tolist() == [1.0] * 4


def test_elementwise_optimizers_do_not_ask() -> None:
    param = part_of(torch.ones(4), 7)
    optim.AdamW([param], lr=0.1).step()
    assert (param != 1.0).sum() == 4
