"""Checkpoints of two ranks: who writes what, how both resume, what a failure leaves."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from ranks import run, told

COMMON = ["ctrainer_manifest.json", "ctrainer_state.json", "ctrainer_state_1.json"]
HF = [
    "model.safetensors", "optimizer.pt", "rng_state_0.pth", "rng_state_1.pth",
    "scheduler.pt", "trainer_state.json", "training_args.bin",
]  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return told(run(tmp_path_factory.mktemp("ranks"), "checkpoint.ranks"))


def test_a_checkpoint_has_each_file_once_and_the_generators_of_both(found: Any) -> None:
    expected = sorted(COMMON + HF)
    assert found[0]["files"] == dict.fromkeys(
        ["checkpoint-2", "checkpoint-4", "checkpoint-6"], expected
    )
    assert found[0]["files"] == found[1]["files"]
    assert found[0]["each"] == found[0]["files"]
    for rank in found:
        assert rank["each resumed"] == rank["whole"][2]
    assert list(found[0]["rotated"]) == ["checkpoint-4", "checkpoint-6"] or (
        found[0]["best"][1] in found[0]["rotated"] and len(found[0]["rotated"]) == 2
    )
    assert "optimizer.pt" not in found[0]["lean"]["checkpoint-6"]


def test_a_resumed_run_equals_one_that_was_not_interrupted(found: Any) -> None:
    for rank in found:
        assert rank["resumed"] == rank["whole"]
    assert found[0]["whole"] == found[1]["whole"]  # logs are means over the ranks


def test_tokens_are_those_of_all_ranks(found: Any) -> None:
    assert [rank["tokens"] for rank in found] == [2 * 6 * 4 * 4] * 2
    assert [rank["zero"] for rank in found] == [[True, True], [False, False]]


def test_the_best_model_is_loaded_on_all_ranks(found: Any) -> None:
    assert found[0]["best"] == found[1]["best"]
    assert [rank["newest"] for rank in found] == ["checkpoint-6"] * 2


def test_a_save_that_fails_on_one_rank_fails_on_all_and_leaves_nothing(
    found: Any,
) -> None:
    assert found[0]["full"] == "OSError: [Errno 28] No space left on device"
    assert found[1]["full"].startswith("RuntimeError: saving a checkpoint: rank 0 fail")
    assert "No space left on device" in found[1]["full"]
    assert found[1]["torn"] == "ZeroDivisionError: on purpose"
    assert "rank 1 failed: ZeroDivisionError" in found[0]["torn"]
    assert "rank 0 failed" in found[1]["blocked"]
    assert "Error" in found[0]["blocked"]
    assert found[0]["left"] == found[1]["left"] == {"e": [], "f": []}


@pytest.mark.parametrize("where", ["evaluation", "save"])
def test_the_others_of_a_killed_rank_are_told(tmp_path: Any, where: str) -> None:
    ranks = run(tmp_path, "checkpoint.ranks_killed", where=where)
    assert ranks[1].code == -9
    text, left = ranks[0].told
    # That it died is not the word for a rank that does not come in time.
    assert all(part in text for part in ("rank 1", "died", where[:3]))
    assert not [name for name in left if "checkpoint" in name or "saving" in name]
