"""Two ranks against transformers' Trainer on two ranks over gloo: the same metrics and
predictions, checkpoints that each loads from the other."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("optuna")

from ranks import run, told


def near(values: Any) -> Any:
    """torch fuses products and sums in AdamW and means losses in float32, ours does
    neither: a few ulp of float32 in each of 4 updates."""
    return pytest.approx(values, rel=1e-5, abs=1e-6)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("ranks")
    return told(run(folder, "parity.ranks"))


def test_batches_and_parameters_are_those_of_transformers(found: Any) -> None:
    assert [rank["cases"] for rank in found] == [10, 10]
    assert found[0]["initialized"]


def test_metrics_and_predictions_are_those_of_transformers(found: Any) -> None:
    for rank in found:
        ours, theirs = rank["ours"], rank["theirs"]
        assert ours["weights"] == near(theirs["weights"])
        assert ours["predictions"] == near(theirs["predictions"])
        assert ours["labels"] == theirs["labels"]
        assert ours["tokens"] == theirs["tokens"]
        assert ours["losses"] == near(theirs["losses"])
        assert ours["evaluate"] == near(theirs["evaluate"])
        assert ours["test"]["test_n"] == 10


def test_a_checkpoint_has_the_files_of_transformers_and_three_of_ours(
    found: Any,
) -> None:
    own = {"ctrainer_manifest.json", "ctrainer_state.json", "ctrainer_state_1.json"}
    theirs = found[0]["theirs files"]
    assert found[0]["ours files"] == {
        name: sorted({*names, *own}) for name, names in theirs.items()
    }


def test_each_resumes_from_the_others_checkpoint(found: Any) -> None:
    for rank in found:
        for kind in ("theirs", "ours"):
            weights, tokens = rank[kind + " resumed"]
            assert weights == near(rank[kind]["weights"])
            assert tokens == rank[kind]["tokens"]


def test_a_search_is_asked_by_rank_0_and_followed_by_the_others(found: Any) -> None:
    names = ["learning_rate", "weight_decay"]
    assert [rank["search"] for rank in found] == [names, None]
    assert found[0]["learning_rate"] == found[1]["learning_rate"]


def test_a_pruned_trial_ends_on_all_ranks_and_a_failed_search_too(found: Any) -> None:
    assert [rank["steps"] for rank in found] == [[4, 2, 4]] * 2
    assert found[0]["failure"] == "ZeroDivisionError: in hp_space"
    assert found[1]["failure"] == (
        "RuntimeError: hyperparameter_search: it failed on rank 0, whose own error "
        "says why"
    )
