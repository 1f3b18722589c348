"""HF's Trainer on two ranks that train apart and meet at the ends of blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from ranks import run, told

import ctrainer


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    first = tmp_path_factory.mktemp("killed")
    ranks = run(first, "bmuf.blocks_killed")
    assert ranks[1].code == -9
    assert "rank 1" in ranks[0].told
    folder = tmp_path_factory.mktemp("blocks")
    return told(run(folder, "bmuf.blocks", killed=str(first / "killed")))


def by_hand(updates: int, every: int, warmup: int, step: Any) -> Any:
    """Both ranks' weights, in double, as rows."""
    x = np.array([0.5, 1.0, -0.25])
    rows = np.array([[1.0, -2.0, 3.0]] * 2)  # all begin with the first one's
    model, momentum = rows[0].copy(), np.zeros(3)
    for update in range(1, updates + 1):
        for rank in range(2):
            rows[rank] -= 0.05 * 2 * (x @ rows[rank] - rank) * x
        if update == warmup:
            rows[1] = model = rows[0].copy()
        elif update > warmup and update % every == 0:
            model, momentum = step(model, momentum, model - rows.mean(axis=0))
            rows[:] = model
    return rows


def test_bmuf_by_its_arguments(both: list[Any]) -> None:
    def step(model: Any, momentum: Any, delta: Any) -> Any:
        momentum = 0.5 * momentum + 0.7 * delta
        return model - momentum, momentum

    expected = by_hand(6, 2, 1, step)
    for rank, found in enumerate(both):
        np.testing.assert_allclose(found["bmuf"], expected[rank], atol=2e-6)


def test_diloco_by_its_preset(both: list[Any]) -> None:
    def step(model: Any, momentum: Any, delta: Any) -> Any:
        momentum = 0.9 * momentum + 0.7 * delta
        return model - (0.7 * delta + 0.9 * momentum), momentum

    for updates, name in ((6, "diloco"), (5, "within")):
        expected = by_hand(updates, 3, 0, step)
        for rank, found in enumerate(both):
            np.testing.assert_allclose(found[name], expected[rank], atol=2e-6)
    assert both[0]["within"] != both[1]["within"]


def test_a_run_that_is_resumed_at_the_end_of_a_block_goes_on(both: list[Any]) -> None:
    for found in both:
        assert found["files"]
        assert found["resumed"] == found["bmuf"]


def test_distances_of_4_bits_are_resumed_with_what_they_missed(both: list[Any]) -> None:
    for found in both:
        whole, resumed = found["coded"]
        assert whole == resumed
        # A scale is 1/7 of the largest distance, which was below 2, and 3 blocks end
        assert 0 < np.max(np.abs(np.subtract(whole, found["bmuf"]))) < 3 * 2 / 7


def test_a_block_that_is_on_its_way_arrives_after_a_resume_and_at_the_end(
    both: list[Any],
) -> None:
    def train_by_hand(updates: int) -> Any:
        """Warm-up 1; the block of update 4 moves the model 2 updates later."""
        x = np.array([0.5, 1.0, -0.25])
        rows = np.array([[1.0, -2.0, 3.0]] * 2)
        for update in range(1, updates + 1):
            for rank in range(2):
                rows[rank] -= 0.05 * 2 * (x @ rows[rank] - rank) * x
            if update == 1:
                rows[1] = model = rows[0].copy()
            if update == 4:
                left = rows.copy()
        return model - 0.7 * (model - left.mean(axis=0)) + rows - left

    for rank, found in enumerate(both):
        whole, resumed = found["away"]
        assert whole == resumed
        np.testing.assert_allclose(whole, train_by_hand(6)[rank], atol=2e-6)
        np.testing.assert_allclose(found["ended away"], train_by_hand(5)[rank],
                                   atol=2e-6)  # fmt: skip
    assert both[0]["away"] != both[1]["away"]


def test_a_run_killed_within_a_block_goes_on_exactly_on_every_rank(
    both: list[Any],
) -> None:
    for found in both:
        assert found["again"] == found["whole"]
        (saved,) = found["killed files"].values()
        assert {"blocks.pt", "blocks_1.pt"} < set(saved)
    assert both[0]["whole"][0] != both[1]["whole"][0]  # 8 updates end within a block


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_bmuf": True, "use_diloco": True}, "are both set; set one"),
        (
            {"block_momentum": 0.5},
            "block_momentum is an option of local steps: set use_bmuf",
        ),
        ({"average_sync": True}, "average_sync is an option of local steps"),
        ({"delta_bits": 8}, "delta_bits is an option of local steps"),
        ({"overlap_steps": 1}, "overlap_steps is an option of local steps"),
        ({"use_diloco": True, "use_nbm": True}, "use_diloco has its own"),
    ],
)
def test_contradictions_are_named(
    tmp_path: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ctrainer.TrainingArguments(tmp_path, **options)
