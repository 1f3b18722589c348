"""Two ranks against transformers' Trainer on two ranks over gloo: the same metrics and
predictions, checkpoints that each loads from the other."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("optuna")

from ranks import run_ranks, told

WORK = """
import logging, os, sys
import numpy as np
import optuna
import torch
import transformers
import ctrainer
from rank_checkpoints import Net, files, rows
from rank_trainings import CASES, compare, run

transformers.logging.set_verbosity_error()
torch.set_num_threads(1)
ours = {name: run(ctrainer, folder, name) for name in CASES}
found = {"initialized": torch.distributed.is_initialized()}
for name, mine in ours.items():
    compare(name, mine, run(transformers, folder, name))
found["cases"] = len(ours)

class Plain(Net):
    def __init__(self):
        super().__init__()
        self.layers[1].p = 0.0

def metrics(given):
    error = np.abs(given.predictions - given.label_ids)
    return {"n": len(error), "error": float(error.sum(dtype=np.float64))}

def make(kind, name, **options):
    module = {"theirs": transformers, "ours": ctrainer}[kind]
    args = module.TrainingArguments(
        f"{folder}/{name}", use_cpu=True, report_to="none", disable_tqdm=True,
        per_device_train_batch_size=4, per_device_eval_batch_size=4, max_steps=4,
        save_steps=2, logging_steps=2, learning_rate=1e-2, optim="adamw_torch",
        ddp_backend="gloo", include_num_input_tokens_seen="all", **options)
    return module.Trainer(
        Plain(), args, train_dataset=rows(40), eval_dataset=rows(16),
        compute_metrics=metrics)

def plain(values):
    return {k: v for k, v in values.items() if "runtime" not in k and "second" not in k}

def weights(trainer):
    model = trainer.model
    parameters = getattr(model, "module", model).parameters()
    return torch.cat([p.detach().flatten() for p in parameters]).tolist()

for kind in ("theirs", "ours"):
    trainer = make(kind, kind)
    trainer.train()
    predicted = trainer.predict(rows(10))
    state = trainer.state
    found[kind] = {
        "evaluate": plain(trainer.evaluate()),
        "predictions": predicted.predictions.tolist(),
        "labels": predicted.label_ids.tolist(),
        "test": plain(predicted.metrics),
        "weights": weights(trainer),
        "losses": [e["loss"] for e in state.log_history if "loss" in e],
        "tokens": state.num_input_tokens_seen,
    }
    torch.distributed.barrier()
    found[kind + " files"] = files(f"{folder}/{kind}")

for kind, other in (("theirs", "ours"), ("ours", "theirs")):
    trainer = make(kind, kind + " resumed")
    if kind == "theirs":  # torch cannot restore to its "cpu:0", which it asks for
        vars(trainer.args)["_setup_devices"] = torch.device("cpu")
    trainer.train(resume_from_checkpoint=f"{folder}/{other}/checkpoint-2")
    found[kind + " resumed"] = [weights(trainer), trainer.state.num_input_tokens_seen]

class Second(optuna.pruners.BasePruner):
    def prune(self, study, trial):
        return trial.number == 1

steps = []

class Counting(ctrainer.TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        steps.append(0)

    def on_step_end(self, args, state, control, **kwargs):
        steps[-1] = state.global_step

def space(trial):
    if trial.number == 4:
        raise ZeroDivisionError("in hp_space")
    return {"learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-2),
            "weight_decay": trial.suggest_categorical("weight_decay", [0.0, 0.1])}

trainer = make("ours", "search", eval_strategy="steps", eval_steps=2)
trainer.add_callback(Counting())
trainer.model_init = Plain
best = trainer.hyperparameter_search(
    hp_space=space, n_trials=3, direction="minimize", backend="optuna",
    pruner=Second(), compute_objective=lambda m: m["eval_loss"])
found["search"] = None if best is None else sorted(best.hyperparameters)
found["learning_rate"] = trainer.args.learning_rate
found["steps"] = list(steps)
try:
    trainer.hyperparameter_search(
        hp_space=space, n_trials=5, direction="minimize", backend="optuna",
        compute_objective=lambda m: m["eval_loss"])
except Exception as problem:
    found["failure"] = f"{type(problem).__name__}: {problem}"
tell(found)
"""


def near(values: Any) -> Any:
    """torch fuses products and sums in AdamW and means losses in float32, ours does
    neither: a few ulp of float32 in each of 4 updates."""
    return pytest.approx(values, rel=1e-5, abs=1e-6)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("ranks")
    return told(run_ranks(folder, WORK))


def test_batches_and_parameters_are_those_of_transformers(found: Any) -> None:
    assert [rank["cases"] for rank in found] == [10, 10]
    assert not found[0]["initialized"]  # ours need no torch.distributed


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
