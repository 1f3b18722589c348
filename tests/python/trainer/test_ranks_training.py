"""Training on two ranks, against one process; tests/parity has it against HF."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from ranks import run, told


def test_like_one_process_and_alike_on_both(tmp_path) -> None:
    import torch
    from rank_trainings import parameters, trained

    ranks = told(run(tmp_path / "two", "trainer.ranks"))
    alone = trained(str(tmp_path), 48, per_device_train_batch_size=8)
    for number, found in enumerate(ranks):
        # Means of halves are added where the whole is: an ulp or two an update.
        torch.testing.assert_close(
            torch.tensor(found["parameters"]), parameters(alone), rtol=2e-6, atol=2e-6
        )
        assert found["wrapped"] == "DataParallel"
        assert found["steps"] == [6, 1.0]
        torch.testing.assert_close(
            torch.tensor(found["synced"]), torch.tensor(found["accumulated"]),
            rtol=2e-6, atol=2e-6,
        )  # fmt: skip
        assert found["exchanges"] == [[False, True, False, True], [True] * 4]
        assert found["drawn"][0] == found["drawn"][1] == ranks[0]["drawn"][0]
        assert found["late"] == ["checkpoint-6", found["parameters"]]
        assert found["differ"] == (
            "some ranks resume from a checkpoint and others do not "
            "(resume_from_checkpoint is rank 0: '', rank 1: 'True'); give all of them "
            "one or none"
        )
        assert found["stopped"] == 4
        assert (found["spoilt"], found["spoilt finite"]) == (1, True)
        assert found["spoilt sum"] == ranks[0]["spoilt sum"] != found["parameters"]
        assert found["warned"] == 1
        # rank 1's overflow halves the scale of both
        assert found["scales"] == [2.0, ranks[0]["scales"][1]]
        assert found["held"] == "OSError: no_sync() of its own"
        # as transformers leaves it, and TRL's log() expects it
        assert found["modes"] == [["log", False], ["step", True]]
        assert found["again"] == found["parameters"] == ranks[0]["parameters"]
        assert found["torch.distributed"]  # for scripts
        assert found["shown"] == [False, 3, 7]
        assert found["accelerator"] == [2, number, [0, 1]]
    assert [found["left over"] > 0 for found in ranks] == [True, False]
    assert ranks[1]["failure"] == "ZeroDivisionError: of its own"
    (note,) = ranks[1]["note"]
    assert note.splitlines()[:2] == [
        "ctrainer: raised in Failing.compute_loss, in training_step",
        "  at step 3 of 6, epoch 1 of 1, micro-batch 1 of 1, rank 1 of 2",
    ]
    assert "rank 1 (process" in ranks[0]["failure"]
    assert "has left the group" in ranks[0]["failure"]
