"""Ranks on GPUs of which one dies: the others continue from the update that all have
made, whatever their GPUs were busy with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import any_gpu
import pytest
import ranks

pytestmark = pytest.mark.skipif(any_gpu.REAL, reason="NCCL needs a GPU for each rank")
AT = 4


def run(folder: Path, place: str, world: int = 3, **arguments: Any) -> list[ranks.Rank]:
    return ranks.run(
        folder, "trainer.outlived_on_gpu", world, place=place, at=AT,
        arguments=arguments,
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The weights by update of a run of which no rank dies."""
    return ranks.told(run(tmp_path_factory.mktemp("whole"), "nowhere"))[0]["weights"]


@pytest.mark.parametrize("place", ["behind", "within", "updated"])
def test_the_others_continue_from_the_last_whole_update(
    tmp_path: Path, whole: Any, place: str
) -> None:
    *left, dead = run(tmp_path, place)
    assert dead.code == 9
    for found in ranks.told(left):
        saved = f"checkpoint-{AT + (place == 'updated')}"
        assert found["resumed"].endswith(saved)
        assert found["step"] == AT + 4
        assert found["weights"][saved] == whole[saved]
        assert found["finite"]
        assert not found["enqueued"]  # a dead rank's GPU may not have sent its part


@pytest.mark.parametrize("offload", ["", " offload"])
def test_the_others_take_the_shards_of_a_checkpoint_to_their_gpus(
    tmp_path: Path, offload: str
) -> None:
    """The model is made anew, without values, and sharded over fewer ranks."""
    options = {"fsdp": "full_shard" + offload, "fsdp_config": {"min_num_params": 10}}
    *left, dead = run(tmp_path, "within", save_steps=3, **options)
    assert dead.code == 9
    told = ranks.told(left)
    saved = told[0]["resumed"]
    assert saved.endswith("checkpoint-3")
    fewer = ranks.told(
        run(
            tmp_path / "fewer", "nowhere", 2, resume=saved, save_steps=100,
            max_steps=AT + 4, **options,
        )
    )  # fmt: skip
    for found, wanted in zip(told, fewer, strict=True):
        assert found["kinds"] == wanted["kinds"] == (["cpu"] if offload else ["emul"])
        assert found["step"] == wanted["step"] == AT + 4
        assert found["last"] == wanted["last"]
