"""save_best_limit: which checkpoints are kept, against a ranking of all evaluations."""

import json
import math
import os
import random

import pytest
from draws import draws
from ranks import run, told

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tiny import Net, rows  # noqa: E402

import ctrainer  # noqa: E402

DIRECTIONS = {"loss": -1, "accuracy": 1, "wer": -1}
STEPS = 8


def args_of(package, folder, **options):
    options = {
        "max_steps": STEPS, "eval_strategy": "steps", "eval_steps": 1, "save_steps": 1,
        "metric_for_best_model": "accuracy", **options,
    }  # fmt: skip
    return package.TrainingArguments(
        str(folder), per_device_train_batch_size=2, use_cpu=True, report_to=[],
        disable_tqdm=True, save_only_model=False, **options,
    )  # fmt: skip


def scripted(package, folder, values, **options):
    """A trainer whose evaluation at step N has the metrics values[N]."""

    class Scripted(package.Trainer):
        def evaluate(self, *args, **kwargs):
            metrics = super().evaluate(*args, **kwargs)
            found = values[self.state.global_step].items()
            # After the log: the history of the state does not have them.
            return {**metrics, **{f"eval_{name}": value for name, value in found}}

    args = args_of(package, folder, **options)
    return Scripted(Net(), args, train_dataset=rows(40), eval_dataset=rows(2))


def kept(folder):
    return {
        int(name.split("-")[1])
        for name in os.listdir(folder)
        if name.startswith("checkpoint-")
    }


def ranked(values, names, limit, steps):
    """The best of the steps, by each metric."""
    found = set()
    for name in names:
        able = [s for s in steps if not math.isnan(values[s][name])]
        found |= set(
            sorted(able, key=lambda s: (-DIRECTIONS[name] * values[s][name], s))[:limit]
        )
    return found


def drawn(generator):
    choices = [0.0, 0.25, 0.5, 0.75, math.nan, math.inf]
    return {
        step: {name: generator.choice(choices) for name in DIRECTIONS}
        for step in range(1, STEPS + 1)
    }


METRICS = {"loss": "loss", "accuracy": "eval_accuracy", "wer": "wer:min"}


@pytest.mark.parametrize("seed", range(draws(6, 60)))
def test_the_best_by_each_metric_and_the_newest_are_kept(tmp_path, seed) -> None:
    generator = random.Random(seed)
    values, limit = drawn(generator), generator.choice([1, 2, 3])
    names = generator.sample(list(DIRECTIONS), generator.choice([1, 2, 3]))
    newest, every = generator.choice([None, 1, 3]), generator.choice([1, 2])
    stop = generator.choice([3, 5, STEPS])
    options = {
        "save_best_limit": limit, "save_best_metrics": [METRICS[n] for n in names],
        "save_total_limit": newest, "save_steps": every, "metric_for_best_model": None,
    }  # fmt: skip
    seen = {}

    class Look(ctrainer.TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            seen[state.global_step] = kept(tmp_path)
            control.should_training_stop |= state.global_step >= stop

    for _ in range(2):  # stops and resumes, with the record of what was evaluated
        trainer = scripted(ctrainer, tmp_path, values, **options)
        trainer.add_callback(Look())
        trainer.train(resume_from_checkpoint=stop > STEPS)
        stop = STEPS + 1
    saved = []
    for step, folders in sorted(seen.items()):
        saved.append(step)
        there = ranked(values, names, limit, saved) | set(saved[-(newest or 1) :])
        assert folders == there, (step, values)
    assert saved[-1] == STEPS


@pytest.mark.parametrize("seed", range(draws(3, 20)))
def test_save_strategy_best_saves_what_is_among_the_best(tmp_path, seed) -> None:
    values = drawn(random.Random(seed))
    trainer = scripted(
        ctrainer, tmp_path, values, save_strategy="best", save_best_limit=2,
        save_best_metrics=["accuracy", "wer:min"], load_best_model_at_end=True,
    )  # fmt: skip
    saved = []

    class Look(ctrainer.TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            saved.append(state.global_step)

    trainer.add_callback(Look())
    trainer.train()
    names = ["accuracy", "wer"]
    steps = range(1, STEPS + 1)
    due = [s for s in steps if s in ranked(values, names, 2, range(1, s + 1))]
    assert saved == due
    assert kept(tmp_path) == ranked(values, names, 2, due) | {due[-1]}
    (best,) = ranked(values, ["accuracy"], 1, due)
    assert trainer.state.best_model_checkpoint == f"{tmp_path}/checkpoint-{best}"


def test_transformers_keeps_the_last_ones(tmp_path) -> None:
    """What save_best_limit is for: of three of the five best nothing is left."""
    accuracies = [0.9, 0.8, 0.7, 0.1, 0.2, 0.3, 0.1, 0.2]
    values = {i + 1: {"accuracy": a} for i, a in enumerate(accuracies)}
    options = {"save_total_limit": 3}
    theirs = scripted(transformers, tmp_path / "theirs", values, **options)
    theirs.train()
    assert kept(tmp_path / "theirs") == {1, 7, 8}
    options = {"save_total_limit": 1, "save_best_limit": 3}
    scripted(ctrainer, tmp_path / "ours", values, **options).train()
    assert kept(tmp_path / "ours") == {1, 2, 3}


def test_a_checkpoint_of_transformers_has_its_evaluations(tmp_path) -> None:
    """From its history: the checkpoints that it has left are ranked, too."""
    values = {i + 1: {"accuracy": 1.0 - i / 10} for i in range(STEPS)}

    class Logged(transformers.Trainer):
        def log(self, logs, *args, **kwargs):
            if "eval_loss" in logs:
                logs["eval_accuracy"] = values[self.state.global_step]["accuracy"]
            super().log(logs, *args, **kwargs)

        def evaluate(self, *args, **kwargs):
            accuracy = values[self.state.global_step]["accuracy"]
            return {**super().evaluate(*args, **kwargs), "eval_accuracy": accuracy}

    args = args_of(transformers, tmp_path, save_strategy="steps")
    theirs = Logged(Net(), args, train_dataset=rows(40), eval_dataset=rows(2))

    class Stop(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step >= 4

    theirs.add_callback(Stop())
    theirs.train()
    ours = scripted(ctrainer, tmp_path, values, save_best_limit=2)
    ours.train(resume_from_checkpoint=True)
    assert kept(tmp_path) >= {1, 2, 8}
    assert not kept(tmp_path) & {3, 4, 5, 6, 7}


def test_ranks_keep_the_same(tmp_path) -> None:
    ranks = told(run(tmp_path, "checkpoint.best_checkpoints"))
    assert [r["kept"] for r in ranks] == [[2, 3, 5, 6]] * 2
    state = json.loads(
        (tmp_path / "checkpoint-6" / "ctrainer_state_1.json").read_text()
    )
    assert [e["step"] for e in state["evaluated"]] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("options", "match"),
    [({"save_best_limit": 2, "eval_strategy": "no"}, "set it to 'steps' or 'epoch'"),
     ({"save_best_metrics": ["loss"]}, "needs save_best_limit, the number"),
     ({"save_best_limit": 0}, "save_best_limit must be"),
     ({"save_best_limit": 1, "save_best_metrics": ["loss", "eval_loss:max"]},
      "'eval_loss:max', which is empty or occurs twice")],
)  # fmt: skip
def test_what_contradicts_is_rejected(tmp_path, options, match) -> None:
    with pytest.raises(ValueError, match=match):
        args_of(ctrainer, tmp_path, **options)


def test_a_metric_that_no_evaluation_has_is_named(tmp_path) -> None:
    values = {1: {"accuracy": 0.5}}
    options = {"save_best_limit": 1, "save_best_metrics": ["f1"]}
    with pytest.raises(KeyError, match="save_best_metrics='eval_f1' is not among"):
        scripted(ctrainer, tmp_path, values, **options).train()
