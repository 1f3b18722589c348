"""Parameters and gradients of sharded modules that travel quantized to few bits."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from counting import Counting
from fsdp_scenarios import WIDTH, batch, nested, wrap
from rank_threads import on_ranks
from torch import nn

from ctrainer import _C

DEEP = 64  # enough elements for the scales not to matter
ROWS = 4  # of a rank; few enough to be learnt by heart


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    inner = nn.Sequential(nn.Linear(DEEP, DEEP), nn.Tanh())
    return nn.Sequential(nn.Linear(WIDTH, DEEP), nn.Tanh(), inner, nn.Linear(DEEP, 4))


def losses(
    group: _C.Communicator, module: nn.Module, steps: int, **options: Any
) -> list[float]:
    sharded = nested(group, copy.deepcopy(module), **options)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.05)
    found = []
    for _ in range(steps):
        x, y = (rows[:ROWS] for rows in batch(0, group))
        loss = ((sharded(x) - y) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize(
    "options", [{"reduce_bits": 8}, {"reduce_bits": 4}, {"gather_bits": 8}]
)
def test_training_converges_as_with_whole_numbers(options: dict[str, Any]) -> None:
    plain = model()

    def train(group: _C.Communicator) -> None:
        exact = losses(group, plain, 60)
        coded = losses(group, plain, 60, **options)
        assert exact[-1] < 0.5 * exact[0]
        assert abs(coded[-1] - exact[-1]) < 0.01 * exact[0]
        assert coded != exact

    on_ranks(2, train)


def test_codes_are_a_quarter_and_an_eighth_of_the_bytes() -> None:
    plain = model()

    def count(group: _C.Communicator, **options: Any) -> Counter[str]:
        counting = Counting(group)
        losses(_C.Communicator(counting), plain, 2, **options)
        return counting.sent

    def compare(group: _C.Communicator) -> None:
        whole = count(group)
        coded = count(group, gather_bits=8, reduce_bits=4)
        # 1 byte of 4, and a scale of 4 bytes for 256 elements; a few more for the ends.
        assert 0.25 < coded["all_gather"] / whole["all_gather"] < 0.27
        assert coded["reduce_scatter"] == 0
        assert 0.125 < coded["all_to_all"] / whole["reduce_scatter"] < 0.145

    on_ranks(2, compare)


@pytest.mark.parametrize("feedback", [False, True])
def test_what_codes_miss_is_added_to_the_next_gradient(feedback: bool) -> None:
    """A gradient far below its block's scale arrives late, or never."""
    steps = 600
    plain = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(plain.weight)

    def move(group: _C.Communicator) -> float:
        options = {"reduce_bits": 8, "error_feedback": feedback}
        own = copy.deepcopy(plain)
        sharded = wrap(group, own, _shard_size_multiple=2, **options)
        # The second gradient is a thousandth of the first: 127 codes do not have it.
        x = torch.tensor([[1.0, 0.001]])
        optimizer = torch.optim.SGD(sharded.parameters(), lr=1.0)
        for _ in range(steps):
            sharded(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return float(sharded.full_state_dict()["weight"][0, 1])

    moved = on_ranks(2, move)
    # At most half a scale, 1 / 127, is outstanding.
    assert moved == [0.0, 0.0] or feedback
    assert not feedback or all(abs(m + 0.001 * steps) < 1 / 127 for m in moved)


def test_a_run_resumes_with_its_feedback() -> None:
    plain = model()

    def step(sharded: Any, optimizer: Any, group: Any, number: int) -> None:
        x, y = batch(number, group)
        ((sharded(x) - y) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def resume(group: _C.Communicator) -> None:
        options = {"reduce_bits": 8}
        first = nested(group, copy.deepcopy(plain), **options)
        optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
        for number in range(3):
            step(first, optimizer, group, number)
        saved, feedback = first.state_dict(), first.feedback_state_dict()
        saved = {key: value.clone() for key, value in saved.items()}
        step(first, optimizer, group, 3)
        found = []
        for state in (feedback, None):
            second = nested(group, copy.deepcopy(plain), **options)
            second.load_state_dict(saved)
            if state is not None:
                second.load_feedback_state_dict(state)
            other = torch.optim.SGD(second.parameters(), lr=0.1)
            step(second, other, group, 3)
            same = zip(first.parameters(), second.parameters(), strict=True)
            found.append(all(torch.equal(a, b) for a, b in same))
        assert found == [True, False]
        with pytest.raises(ValueError, match="error feedback is of units with"):
            first.load_feedback_state_dict({})
        whole = nested(group, copy.deepcopy(plain))
        assert whole.feedback_state_dict() == {}

    on_ranks(2, resume)


def test_bad_numbers_are_found_on_all_ranks() -> None:
    plain = nn.Linear(2, 2)

    def train(group: _C.Communicator) -> None:
        sharded = wrap(group, copy.deepcopy(plain), reduce_bits=8)
        x = torch.ones(1, 2) * (float("nan") if group.rank == 1 else 1.0)
        sharded(x).sum().backward()
        assert np.isnan(float(sharded.clip_grad_norm_(1.0)))
        sharded.zero_grad()
        sharded(torch.ones(1, 2)).sum().backward()  # leaves no trace
        assert np.isfinite(float(sharded.clip_grad_norm_(1.0)))

    on_ranks(2, train)


def test_other_numbers_of_bits_are_rejected() -> None:
    for name in ("gather_bits", "reduce_bits"):
        with pytest.raises(ValueError, match=f"^{name} is 5; expected 8 or 4"):
            wrap(_C.Communicator(), nn.Linear(2, 2), **{name: 5})
