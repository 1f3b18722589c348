"""Checkpoints of two ranks: who writes what, how both resume, what a failure leaves."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from ranks import run_ranks, told

WORK = """
import errno, json, os
import ctrainer
from ctrainer import checkpoint
from rank_checkpoints import files, history, make, rows, weights

best = {
    "eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True,
    "metric_for_best_model": "loss", "save_total_limit": 2,
}
found = {}
whole = make(folder + "/a")
output = whole.train()
found["whole"] = [weights(whole), history(whole), output.training_loss]
found["tokens"] = whole.state.num_input_tokens_seen
found["files"] = files(folder + "/a")
found["zero"] = [whole.state.is_world_process_zero, whole.is_local_process_zero()]

again = make(folder + "/b")
output = again.train(resume_from_checkpoint=folder + "/a/checkpoint-2")
found["resumed"] = [weights(again), history(again), output.training_loss]
assert again.state.is_world_process_zero == (rank == 0)

# the best model on every rank, rotation by one
chosen = make(folder + "/c", **best)
chosen.train()
found["best"] = [weights(chosen), chosen.state.best_model_checkpoint[-12:]]
found["rotated"] = files(folder + "/c")
found["newest"] = make(folder + "/c")._last_checkpoint()[-12:]

# an asynchronous save, the model alone
lean = make(folder + "/d", async_save=True, save_only_model=True)
lean.train()
found["lean"] = files(folder + "/d")

# rank 1's files go through the group where it has no part in rank 0's folder
each = make(folder + "/h", save_on_each_node=True)
each.train()
found["each"] = files(folder + "/h")
found["each resumed"] = make(folder + "/i").train(
    resume_from_checkpoint=folder + "/h/checkpoint-2").training_loss

def failure(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"

class Full(ctrainer.Trainer):
    def _save_optimizer_and_scheduler(self, output_dir):
        if rank == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        super()._save_optimizer_and_scheduler(output_dir)

class Torn(ctrainer.Trainer):
    def _save_rng_state(self, output_dir):
        super()._save_rng_state(output_dir)
        if rank == 1:
            raise ZeroDivisionError("on purpose")

found["full"] = failure(make(folder + "/e", Full).train)
found["torn"] = failure(make(folder + "/f", Torn).train)
blocked = folder + "/g"
trainer = make(blocked)
if rank == 0:
    os.rmdir(blocked)
    open(blocked, "w").close()
found["blocked"] = failure(trainer.train)
found["left"] = {n: os.listdir(f"{folder}/{n}") for n in "ef"}
tell(found)
"""

COMMON = ["ctrainer_manifest.json", "ctrainer_state.json", "ctrainer_state_1.json"]
HF = [
    "model.safetensors", "optimizer.pt", "rng_state_0.pth", "rng_state_1.pth",
    "scheduler.pt", "trainer_state.json", "training_args.bin",
]  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return told(run_ranks(tmp_path_factory.mktemp("ranks"), WORK))


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


KILLED = """
import os, signal, time
import ctrainer
from rank_checkpoints import make

class Dying(ctrainer.Trainer):
    def prediction_step(self, *args, **kwargs):
        if rank == 1 and where == "evaluation":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().prediction_step(*args, **kwargs)

    def _save_rng_state(self, output_dir):
        if rank == 1 and where == "save":
            os.kill(os.getpid(), signal.SIGKILL)
        super()._save_rng_state(output_dir)

trainer = make(folder, Dying)
try:
    trainer.evaluate() if where == "evaluation" else trainer.train()
except RuntimeError as problem:
    tell([str(problem), os.listdir(folder)])
"""


@pytest.mark.parametrize("where", ["evaluation", "save"])
def test_the_others_of_a_killed_rank_are_told(tmp_path: Any, where: str) -> None:
    ranks = run_ranks(tmp_path, f"where = {where!r}" + KILLED)
    assert ranks[1].code == -9
    text, left = ranks[0].told
    # That it died is not the word for a rank that does not come in time.
    assert all(part in text for part in ("rank 1", "died", where[:3]))
    assert not [name for name in left if "checkpoint" in name or "saving" in name]
