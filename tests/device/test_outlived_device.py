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


def run(folder: Path, place: str) -> list[ranks.Rank]:
    return ranks.run(folder, "trainer.outlived_on_gpu", 3, place=place, at=AT)


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
