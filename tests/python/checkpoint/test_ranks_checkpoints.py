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


SHARDED: dict[str, Any] = {
    "fsdp": "full_shard", "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"},
}  # fmt: skip
WHOLE: dict[str, Any] = {"fsdp": "full_shard auto_wrap"}
MODELS = {"whole": {}, "shards": SHARDED, "gathered": WHOLE}
BACKGROUND = "checkpoint.ranks_background"


@pytest.mark.parametrize("model", MODELS)
def test_files_of_each_rank_are_of_the_step_however_late_they_are_written(
    tmp_path: Any, model: str
) -> None:
    late = told(run(tmp_path / "late", BACKGROUND, how="late", **MODELS[model]))
    whole = told(run(tmp_path / "at once", BACKGROUND, how="whole", **MODELS[model]))
    for rank, found in enumerate(late):
        assert found["problem"] is whole[rank]["problem"] is None
        assert found["seen"] == [[]]  # not in its place without rank 1's files
        assert not any(found["wrong"])
        for name in ("left", "files", "history", "again"):
            assert found[name] == whole[rank][name], name
        assert found["again"] == [found["history"], True]
        assert found["memory"] == [False, True]


@pytest.mark.parametrize("model", MODELS)
def test_a_rank_whose_disk_is_full_fails_the_save_of_all(
    tmp_path: Any, model: str
) -> None:
    one, other = told(run(tmp_path, BACKGROUND, how="full", **MODELS[model]))
    assert one["problem"].startswith("OSError: [Errno 27] rank 1 could not write its")
    assert other["problem"].startswith("OSError: [Errno 27] cannot write")
    assert one["left"] == other["left"] == []


@pytest.mark.parametrize("model", MODELS)
def test_a_rank_that_dies_before_its_files_are_written_fails_the_save(
    tmp_path: Any, model: str
) -> None:
    ranks = run(tmp_path, BACKGROUND, how="killed", **MODELS[model])
    assert ranks[1].code == -9
    told_by_other = ranks[0].told
    assert all(word in told_by_other["problem"] for word in ("rank 1", "died"))
    assert told_by_other["seen"] == [[]]
    assert told_by_other["left"] == []


@pytest.mark.parametrize("model", MODELS)
def test_overrides_find_the_files_of_their_rank_and_add_others(
    tmp_path: Any, model: str
) -> None:
    options = {"how": "whole", "overrides": True, **MODELS[model]}
    for found in told(run(tmp_path, BACKGROUND, **options)):
        assert found["problem"] is None
        assert not any(found["wrong"])
        assert {"own-0", "own-1", "copy"} <= set(found["files"]["checkpoint-8"])
        assert found["again"] == [found["history"], True]


def test_files_of_a_save_that_training_waits_for_are_not_copied(tmp_path: Any) -> None:
    options = {"how": "whole", "async_save": False}
    for found in told(run(tmp_path, BACKGROUND, **options, **SHARDED)):
        assert found["seen"] == [["checkpoint-4"]]
        assert found["memory"] == [False, False]
        assert found["again"] == [found["history"], True]


def test_shards_in_files_are_not_copied_to_memory(tmp_path: Any) -> None:
    config = {**SHARDED["fsdp_config"], "shard_folder": str(tmp_path)}
    options = {**SHARDED, "fsdp_config": config, "how": "whole"}
    for found in told(run(tmp_path, BACKGROUND, **options)):
        assert found["memory"] == [False, False]
        assert found["again"] == [found["history"], True]


REPLICAS: dict[str, Any] = {
    "deepspeed": {"zero_optimization": {"stage": 3, "mics_shard_size": 1}},
}  # fmt: skip
RESERVING: list[tuple[dict[str, Any], list[bool]]] = [
    ({}, [True, False]),
    (SHARDED, [True, True]),
    (REPLICAS, [True, False]),
    ({**SHARDED, "async_save": False}, [False, False]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "expected"), RESERVING, ids=["whole", "shards", "replicas", "waits"]
)
def test_ranks_that_copy_weights_reserve_memory_for_them(
    tmp_path: Any, options: dict[str, Any], expected: list[bool]
) -> None:
    ranks = told(run(tmp_path, BACKGROUND, how="whole", reserves=True, **options))
    assert [found["memory"][0] for found in ranks] == expected
