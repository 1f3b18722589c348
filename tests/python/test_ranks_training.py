"""Training on two ranks, against one process; tests/parity has it against HF."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from ranks import run_ranks, told

BEHAVIOUR = """
import warnings
import ctrainer, torch
from rank_trainings import Exchanging, Failing, Holding, Moding, Spoiling, Wish
from rank_trainings import parameters, trained

found = {}
whole = trained(folder, 48, per_device_train_batch_size=4)
found["parameters"] = parameters(whole).tolist()
found["wrapped"] = type(whole.model_wrapped).__name__
halves = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
accumulated = trained(folder, 48, base=Exchanging, **halves)
found["steps"] = [accumulated.state.global_step, accumulated.state.epoch]
always = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
synced = trained(folder, 48, base=Exchanging, accelerator_config=always, **halves)
found["synced"] = parameters(synced).tolist()
found["accumulated"] = parameters(accumulated).tolist()
found["exchanges"] = [accumulated.seen[:4], synced.seen[:4]]
shuffled = {"train_sampling_strategy": "random", "num_train_epochs": 2, "max_steps": -1,
            "accelerator_config": {"use_seedable_sampler": False}, "save_steps": 4,
            "per_device_train_batch_size": 4}
drawn = trained(folder, 24, **{**shuffled, "save_strategy": "steps"})
again = trained(folder, 24, resume=f"{folder}/checkpoint-4", **shuffled)
found["drawn"] = [parameters(drawn).tolist(), parameters(again).tolist()]

stopped = trained(folder, 48, Wish(1, 4), per_device_train_batch_size=4)
found["stopped"] = stopped.state.global_step

with warnings.catch_warnings(record=True) as told_of:
    warnings.simplefilter("always", RuntimeWarning)
    spoilt = trained(folder, 48, base=Spoiling, per_device_train_batch_size=4)
found["spoilt"] = spoilt._loss_state()["nonfinite_total"]
found["spoilt finite"] = bool(parameters(spoilt).isfinite().all())
found["spoilt sum"] = parameters(spoilt).tolist()
found["warned"] = sum("of step 3 are not finite" in str(w.message) for w in told_of)

modes = trained(folder, 48, base=Moding, eval_strategy="steps", eval_steps=2)
found["modes"] = sorted(set(modes.seen))

scales = [
    trained(folder, 48, base=base, fp16=True, loss_scaler={"init_scale": 256.0})
    ._loss_scaler.state_dict()["scale"] for base in (ctrainer.Trainer, Spoiling)]
found["scales"] = [scales[0] / scales[1], scales[1]]

uneven = {"even_batches": False, "dispatch_batches": False}
with warnings.catch_warnings(record=True) as told_of:
    warnings.simplefilter("always", UserWarning)
    trained(folder, 12, per_device_train_batch_size=4, accelerator_config=uneven)
left_over = "2 batches on this rank and 1"
found["left over"] = sum(left_over in str(w.message) for w in told_of)

try:
    trained(folder, 48, base=Holding, **halves)
except Exception as problem:
    found["held"] = f"{type(problem).__name__}: {problem}"
try:
    trained(folder, 48, base=Failing, per_device_train_batch_size=4)
except Exception as problem:
    found["failure"] = f"{type(problem).__name__}: {problem}"
again = trained(folder, 48, per_device_train_batch_size=4)
found["again"] = parameters(again).tolist()
found["torch.distributed"] = torch.distributed.is_initialized()
shown = {"even_batches": False, "gradient_accumulation_kwargs": {"num_steps": 1}}
accelerator = trained(folder, 48, per_device_train_batch_size=4, data_seed=3,
                      ddp_bucket_cap_mb=7, accelerator_config=shown).accelerator
found["shown"] = [accelerator.even_batches, accelerator.dataloader_config.data_seed,
                  accelerator.ddp_handler.bucket_cap_mb]
found["accelerator"] = [accelerator.num_processes, accelerator.process_index,
    accelerator.gather(torch.tensor([rank])).tolist()]
tell(found)
"""


def test_like_one_process_and_alike_on_both(tmp_path) -> None:
    import torch
    from rank_trainings import parameters, trained

    ranks = told(run_ranks(tmp_path / "two", BEHAVIOUR))
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
        assert not found["torch.distributed"]
        assert found["shown"] == [False, 3, 7]
        assert found["accelerator"] == [2, number, [0, 1]]
    assert [found["left over"] > 0 for found in ranks] == [True, False]
    assert ranks[1]["failure"] == "ZeroDivisionError: of its own"
    assert "rank 1 (process" in ranks[0]["failure"]
    assert "has left the group" in ranks[0]["failure"]
