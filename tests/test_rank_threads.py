"""Ranks as threads do not depend on which of them comes first."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_threads import on_ranks, seeded

GLOBAL: dict[str, Callable[[], Any]] = {
    "manual_seed": lambda: torch.manual_seed(0),
    "set_default_dtype": lambda: torch.set_default_dtype(torch.float64),
    "chdir": lambda: os.chdir("/"),
    "putenv": lambda: os.environ.update(CTRAINER_OF_A_RANK="1"),
    "unsetenv": lambda: os.environ.pop("CUDA_VISIBLE_DEVICES"),
    "warns": lambda: pytest.warns(UserWarning, match="x"),
}


@pytest.mark.parametrize("name", GLOBAL)
def test_a_rank_does_not_change_what_is_global_in_the_process(name: str) -> None:
    folder = Path.cwd()
    with pytest.raises(AssertionError, match=f"{name} on a rank changes it for all"):
        on_ranks(2, lambda group: GLOBAL[name]())
    assert torch.get_default_dtype() == torch.float32
    assert Path.cwd() == folder


@pytest.mark.parametrize(
    ("name", "draw"),
    [
        ("torch", lambda: torch.rand(1)),
        ("numpy", lambda: np.random.rand()),
    ],
)
def test_a_rank_does_not_draw_from_a_global_generator(
    name: str, draw: Callable[[], Any]
) -> None:
    with pytest.raises(AssertionError, match=f"the global generator of {name}, in an"):
        on_ranks(2, lambda group: draw())


def test_seeded_draws_are_equal_on_all_ranks_and_leave_no_trace() -> None:
    def draw(group: Any) -> list[list[float]]:
        found = []
        for number in range(200):
            with seeded(number):
                found.append(torch.rand(2).tolist() + torch.rand(1).tolist())
        return found

    before = torch.get_rng_state()
    alone = draw(None)
    assert on_ranks(4, draw) == [alone] * 4
    assert torch.equal(torch.get_rng_state(), before)
