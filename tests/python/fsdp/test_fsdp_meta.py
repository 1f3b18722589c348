"""HF's Trainer with fsdp and models on the meta device, on two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ranks


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder: Path = tmp_path_factory.mktemp("meta")
    return ranks.told(ranks.run(folder, "fsdp.meta"))


def test_a_rank_without_values_trains_as_if_it_had_them(told: list[Any]) -> None:
    for rank in told:
        first = rank["first"]
        assert len(first["all"]) == 4
        assert first["one"] == first["all"]


def test_a_model_without_values_goes_on_from_a_checkpoint(told: list[Any]) -> None:
    for rank in told:
        first = rank["first"]
        assert first["on all"] == first["on one"] == first["all"][-2:]
        # Sums of two ranks' gradients are the same in either order; norms, by which
        # they are clipped, are added in another.
        whole = rank["whole"]
        assert whole["on"] == pytest.approx(whole["plain"], rel=1e-6)


def test_a_model_of_which_no_rank_has_values_begins_as_its_class_says(
    told: list[Any],
) -> None:
    for rank in told:
        found = rank["anew"]
        assert found["std"] == pytest.approx(0.02, rel=0.2)  # of 800 draws
        assert found["norms"]
        # Nothing is known of 50 words, so the loss is the logarithm of their number.
        assert found["losses"][0] == pytest.approx(3.91, abs=0.1)
    assert told[0]["anew"]["sum"] == told[1]["anew"]["sum"]


def test_rank_0_alone_reads_the_file(told: list[Any]) -> None:
    assert [rank["loaded"]["meta"] for rank in told] == [False, True]
    assert [rank["loaded"]["failure"] for rank in told] == [False, True]
    looks = ["eager", "torch.float32", False]
    assert [rank["loaded"]["looks"] for rank in told] == [looks, looks]
    assert told[0]["loaded"]["losses"] == told[1]["loaded"]["losses"]
    # It was saved in 16 bits.
    expected = pytest.approx(told[0]["first"]["all"], rel=1e-2)
    assert told[0]["loaded"]["losses"] == expected


def test_a_rank_without_values_never_has_more_than_its_shards_and_a_block(
    told: list[Any],
) -> None:
    memory = told[1]["memory"]
    # Half of the model stays; a block arrives and is cut, and as much is left for what
    # the allocator keeps and the run itself takes.
    most = memory["whole"] / 2 + 2 * memory["block"] + 2
    assert memory["peak"] < most < memory["whole"]
