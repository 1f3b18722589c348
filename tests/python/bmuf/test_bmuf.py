"""BMUF on 2 processes against the original's formulas, written out with NumPy."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ranks
import torch

import ctrainer
from ctrainer import optim


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of 2 ranks found: importing torch takes longer than all of it."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    return ranks.told(ranks.run(folder, "bmuf.tensors"))


Told = list[dict[str, Any]]


def test_every_combination_gives_the_originals_parameters_bit_for_bit(
    told: Told,
) -> None:
    for found in (rank["oracle"] for rank in told):
        assert len(found) == 4 * 2**5
        assert [name for name, same in found.items() if not same] == []


def test_16_bit_parameters_are_averaged_with_more_bits(told: Told) -> None:
    for found in (rank["sixteen"] for rank in told):
        assert all(f["alike"] and f["copies"] for f in found.values())
        assert found["masters"]["masters"] == ["torch.float32"]
        assert [found[n]["state"] for n in ("masters", "half", "double")] == [
            ["torch.float32"],
            ["torch.float32"],
            ["torch.float64"],
        ]


def test_float32_copies_of_an_optimizer_of_fairseq_s_are_averaged_and_brought_back(
    told: Told,
) -> None:
    for found in (rank["foreign"] for rank in told):
        assert len(found) == 2**3
        assert [name for name, same in found.items() if not same] == []


def test_a_resumed_run_goes_on_bit_for_bit(told: Told) -> None:
    for found in (rank["resume"] for rank in told):
        assert found == dict.fromkeys(found, True)
        assert len(found) == 4


def test_diloco_is_sgd_with_nesterov_momentum_between_blocks(told: Told) -> None:
    # numbers up to 8: a few roundings a block, of half an ulp of 4.8e-7 each
    assert max(rank["diloco"] for rank in told) < 1e-5


def test_a_rank_that_dies_is_named_by_step(told: Told) -> None:
    error = told[0]["death"]
    assert "rank 1 (process " in error
    assert "died" in error


def alone(**options: Any) -> tuple[ctrainer.BMUF, list[torch.nn.Parameter]]:
    params = [torch.nn.Parameter(torch.ones(3))]
    inner = torch.optim.SGD(params, lr=0.5)
    return ctrainer.BMUF(SimpleNamespace(**options), inner), params


def test_one_rank_trains_as_without() -> None:
    bmuf, params = alone(warmup_iterations=1, global_sync_iter=1)
    params[0].grad = torch.ones(3)
    bmuf.step()
    assert params[0].tolist() == [0.5] * 3
    assert bmuf.get_num_updates() == 1
    bmuf.set_num_updates(7)
    assert bmuf.get_num_updates() == 7


def test_what_is_not_here_is_the_optimizers() -> None:
    bmuf, params = alone()
    assert isinstance(bmuf.optimizer, torch.optim.SGD)
    assert bmuf.params[0] is params[0]
    assert bmuf.get_lr() == 0.5
    bmuf.set_lr(0.25)
    assert bmuf.optimizer.param_groups[0]["lr"] == 0.25
    bmuf.backward((params[0] * 2).sum())
    assert params[0].grad is not None
    assert params[0].grad.tolist() == [2.0] * 3
    bmuf.zero_grad()
    assert params[0].grad is None
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = bmuf.nothing_of_the_kind


def test_options_are_the_originals_and_out_of_range_ones_are_named() -> None:
    bmuf, _ = alone()
    assert (bmuf.sync_iter, bmuf.warmup_iteration) == (50, 500)
    assert (bmuf.block_momentum, bmuf.block_lr) == (0.875, 1.0)
    assert (bmuf.use_nbm, bmuf.average_sync, bmuf.world_size) == (False, False, 1)
    assert alone(use_nbm=True)[0].use_nbm
    for options, text in (
        ({"global_sync_iter": 0}, "global_sync_iter must be at least 1, got 0"),
        ({"warmup_iterations": -1}, "warmup_iterations must be at least 0"),
        ({"block_momentum": float("nan")}, "block_momentum"),
        ({"block_lr": float("inf")}, "block_lr must be finite"),
    ):
        with pytest.raises(ValueError, match=text):
            alone(**options)


def test_a_group_of_another_size_is_rejected() -> None:
    params = [torch.nn.Parameter(torch.ones(3))]
    cfg = SimpleNamespace(distributed_world_size=2)
    with pytest.raises(ValueError, match="distributed_world_size is 2, and the group"):
        ctrainer.BMUF(cfg, optim.SGD(params, lr=0.1), ctrainer.Communicator())


def test_the_state_of_an_optimizer_alone_can_be_loaded() -> None:
    bmuf, params = alone()
    params[0].grad = torch.ones(3)
    bmuf.step()
    plain = bmuf.optimizer.state_dict()
    bmuf.load_state_dict(plain)
    assert bmuf.get_num_updates() == 1
    state = bmuf.state_dict()
    assert state["bmuf"]["num_updates"] == 1
    assert state["bmuf"]["model"][0].tolist() == [0.5] * 3
    assert state["bmuf"]["momentum"][0].tolist() == [0.0] * 3


def test_parameters_that_change_within_a_block_are_an_error() -> None:
    bmuf, _ = alone()
    bmuf.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    with pytest.raises(ValueError, match="5 elements of float32 and had 3"):
        bmuf.state_dict()
