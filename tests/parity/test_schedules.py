"""Learning rates of whole runs, and of resumed ones, against transformers' Trainer."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny import Net, Run, make, rows, run

import ctrainer

STEPS = 30
FOLLOW = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "score"}
SCHEDULES: dict[str, dict[str, Any]] = {
    "linear": {},
    "cosine": {"num_cycles": 1.5},
    "cosine_with_restarts": {"num_cycles": 3},
    "polynomial": {"power": 2.0, "lr_end": 1e-4},
    "constant": {},
    "constant_with_warmup": {},
    "inverse_sqrt": {"timescale": 9},
    "cosine_with_min_lr": {"min_lr": 1e-3},
    "cosine_warmup_with_min_lr": {"min_lr_rate": 0.1, "warmup_lr_rate": 0.2},
    "warmup_stable_decay": {"num_decay_steps": 12, "decay_type": "1-sqrt"},
    "reduce_lr_on_plateau": {"patience": 1, "factor": 0.5, "cooldown": 1},
    "greedy": {"patience": 1, "factor": 0.5, "min_lr": 1e-5, "smooth": True},
}
ON_METRIC = ("reduce_lr_on_plateau", "greedy")


def scores() -> Callable[[Any], dict[str, float]]:
    """A metric that follows a list, whatever the model says."""
    told = iter([5, 4, 3, 3, 3.1, 3.2, 3.3, 2, 2.1, 2.2, 2.3, 1, 0.9, 0.8, 0.8, 0.7])

    def compute(prediction: Any) -> dict[str, float]:
        return {"score": next(told)}

    return compute


def options_for(name: str, **more: Any) -> dict[str, Any]:
    made = {
        "max_steps": STEPS,
        "learning_rate": 0.01,
        "warmup_steps": 4,
        "lr_scheduler_type": name,
        "lr_scheduler_kwargs": SCHEDULES[name],
        **(FOLLOW if name in ON_METRIC else {}),
        **more,
    }
    parts = {"eval_dataset": rows(8), "compute_metrics": scores()}
    return {**made, "parts": parts}


def trained(cls: Any, name: str, **more: Any) -> Run:
    return run(cls, Net(), rows(), **options_for(name, **more))


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_logged_rate_is_that_of_transformers(name: str) -> None:
    ours, theirs = (trained(t.Trainer, name) for t in (ctrainer, transformers))
    assert ours.logged("learning_rate") == theirs.logged("learning_rate")
    assert len(set(ours.logged("learning_rate"))) > 1 or name == "constant"


@pytest.mark.parametrize("name", SCHEDULES)
def test_scheduler_pt_holds_the_same(name: str, tmp_path: Path) -> None:
    states = []
    for module in (ctrainer, transformers):
        folder = tmp_path / module.__name__
        saves = {"save_strategy": "steps", "save_steps": 13, "output_dir": str(folder)}
        trained(module.Trainer, name, **saves)
        states.append(torch.load(folder / "checkpoint-13" / "scheduler.pt"))
    assert states[0] == states[1]


class Skipped:
    """The metrics from where a resumed run goes on."""

    def __init__(self, evaluations: int) -> None:
        self.compute = scores()
        for _ in range(evaluations):
            self.compute(None)


@pytest.mark.parametrize("name", ["polynomial", "warmup_stable_decay", *ON_METRIC])
@pytest.mark.parametrize("ours_first", [True, False])
def test_a_run_goes_on_in_the_other_trainer(
    name: str, ours_first: bool, tmp_path: Path
) -> None:
    """Rates of a run that ours begins and transformers' ends, and the other way round,
    are those of one that was not interrupted."""
    whole = trained(ctrainer.Trainer, name).logged("learning_rate")
    first, second = (ctrainer, transformers)[:: 1 if ours_first else -1]
    saves = {"save_strategy": "steps", "save_steps": 14, "output_dir": str(tmp_path)}
    trained(first.Trainer, name, **saves)
    options = options_for(name, **saves)
    options["parts"]["compute_metrics"] = Skipped(14 // 2).compute
    trainer = make(second.Trainer, Net(), rows(), **options)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-14"))
    history = [h for h in trainer.state.log_history if "learning_rate" in h]
    assert [h["learning_rate"] for h in history] == whole


# What scheduler.pt held when these two schedules were classes of ctrainer's own, after
# the metrics 5, 4, 3, 3, 3.1, 3.2, 3.3, 2, and the rates that they then gave.
INF = float("inf")
KEPT: dict[str, tuple[dict[str, Any], list[list[float]]]] = {
    "reduce_lr_on_plateau": (
        {
            "min_lrs": [0.0, 0.0], "_last_lr": [0.05, 0.0015], "default_min_lr": 0.0,
            "mode_worse": INF, "factor": 0.5, "eps": 1e-08, "threshold": 0.0001,
            "best": 2.0, "patience": 1, "cooldown": 1, "cooldown_counter": 0,
            "num_bad_epochs": 0, "last_epoch": 8, "mode": "min",
            "threshold_mode": "rel",
        },
        [[0.05, 0.0015], [0.025, 0.00075], [0.025, 0.00075], [0.025, 0.00075]],
    ),
    "greedy": (
        {
            "factor": 0.5, "threshold": 1e-06, "best": 2.833333333333334,
            "eps": 1e-08, "patience": 1, "cooldown": 0, "warmup": 0,
            "cooldown_counter": 0, "warmup_counter": 0, "num_bad_epochs": 0,
            "num_good_epochs": 1, "last_epoch": 8, "window_size": 3,
            "reset_start": 500, "reset_start_original": 500, "verbose": False,
            "smooth": True, "mode": "min", "threshold_mode": "abs",
            "min_lrs": [1e-05, 1e-05], "max_lrs": [1.0, 1.0],
            "_init_lrs": [0.1, 0.003], "_last_lr": [0.2, 0.006],
            "_streaming_avg": {
                "window_size": 3, "values": [3.2, 3.3, 2.0], "sum": 8.500000000000002
            },
        },
        [[0.4, 0.012], [0.4, 0.012], [0.4, 0.012], [0.4, 0.012], [0.8, 0.024]],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ON_METRIC)
def test_states_of_the_former_classes_are_loaded(name: str) -> None:
    state, expected = KEPT[name]
    groups = [
        {"params": [torch.nn.Parameter(torch.zeros(2))], "lr": rate}
        for rate in state["_last_lr"]
    ]
    scheduler = ctrainer.optim.get_scheduler(name, torch.optim.SGD(groups))
    scheduler.load_state_dict(state)
    for metric, rates in zip([2.1, 2.2, 2.3, 1.0, 0.9], expected, strict=False):
        scheduler.step(metric)
        assert scheduler.get_last_lr() == rates


# Schedulers of torch that the user passes


def halves(step: int) -> float:
    return 0.5 ** (step // 5)


def in_sequence(optimizer: Any) -> Any:
    lr = torch.optim.lr_scheduler
    parts = [lr.ConstantLR(optimizer, 0.1, 4), lr.ExponentialLR(optimizer, 0.9)]
    return lr.SequentialLR(optimizer, parts, milestones=[6])


PASSED: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 4, 0.5),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, STEPS + 1),
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, halves),
    "SequentialLR": in_sequence,
    "ReduceLROnPlateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(
        o, factor=0.5, patience=0
    ),
    "GreedyLR": lambda o: transformers.optimization.GreedyLR(
        o, factor=0.5, patience=0, min_lr=1e-5
    ),
}


def with_torchs(cls: Any, name: str, **more: Any) -> Any:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    follow = FOLLOW if name in ("ReduceLROnPlateau", "GreedyLR") else {}
    trainer = make(
        cls, model, rows(), max_steps=STEPS, **{**follow, **more},
        parts={
            "optimizers": (optimizer, PASSED[name](optimizer)),
            "eval_dataset": rows(8), "compute_metrics": scores(),
        },
    )  # fmt: skip
    return trainer


def logged_rates(trainer: Any) -> list[float]:
    history = [h for h in trainer.state.log_history if "learning_rate" in h]
    return [h["learning_rate"] for h in history]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", PASSED)
def test_a_scheduler_that_the_user_passes_is_stepped_as_theirs(
    name: str, tmp_path: Path
) -> None:
    saves = {"save_strategy": "steps", "save_steps": 13, "output_dir": str(tmp_path)}
    ours = with_torchs(ctrainer.Trainer, name, **saves)
    theirs = with_torchs(transformers.Trainer, name)
    for trainer in (ours, theirs):
        trainer.train()
    assert logged_rates(ours) == logged_rates(theirs)
    assert len(set(logged_rates(ours))) > 2
    resumed = with_torchs(ctrainer.Trainer, name)
    resumed.compute_metrics = Skipped(13 // 2).compute
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-13"))
    assert logged_rates(resumed) == logged_rates(ours)


# The metric


def test_the_metric_that_decides_is_that_of_the_arguments() -> None:
    """By default the loss, which falls here while "score" rises."""
    more: dict[str, Any] = {
        "eval_strategy": "steps", "eval_steps": 2, "max_steps": STEPS,
        "lr_scheduler_type": "reduce_lr_on_plateau", "learning_rate": 0.01,
        "lr_scheduler_kwargs": {"patience": 0, "threshold": 0.0},
    }  # fmt: skip
    rising = iter(range(1000))
    parts = {
        "eval_dataset": rows(8),
        "compute_metrics": lambda prediction: {"score": float(next(rising))},
    }
    by_loss = run(ctrainer.Trainer, Net(), rows(), parts=parts, **more)
    by_score = run(
        ctrainer.Trainer, Net(), rows(), parts=parts,
        metric_for_best_model="eval_score", **more,
    )  # fmt: skip
    losses = by_loss.logged("eval_loss")
    falls = sum(b >= min(losses[: i + 1]) for i, b in enumerate(losses[1:]))
    expected = 0.01 * 0.1**falls
    assert by_loss.logged("learning_rate")[-1] == pytest.approx(expected, rel=1e-12)
    assert by_loss.trainer.args.metric_for_best_model == "loss"
    assert by_score.logged("learning_rate")[-1] < expected


def test_a_metric_that_evaluation_does_not_give_is_named() -> None:
    options = options_for("greedy", metric_for_best_model="accuracy")
    trainer = make(ctrainer.Trainer, Net(), rows(), **options)
    with pytest.raises(KeyError, match=r"eval_accuracy.*eval_score"):
        trainer.train()


@pytest.mark.parametrize("name", ON_METRIC)
def test_without_evaluation_a_schedule_on_a_metric_is_rejected(name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}' follows .* eval_strategy is 'no'"):
        make(ctrainer.Trainer, Net(), rows(), lr_scheduler_type=name)


def test_without_evaluation_a_passed_one_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer = with_torchs(ctrainer.Trainer, "ReduceLROnPlateau", eval_strategy="no")
    with caplog.at_level(logging.WARNING, logger="ctrainer"):
        trainer.train()
    assert "ReduceLROnPlateau is stepped when an evaluation ends" in caplog.text


def test_options_that_are_no_dict_are_rejected() -> None:
    with pytest.raises(ValueError, match="lr_scheduler_kwargs must be a dict"):
        make(ctrainer.Trainer, Net(), rows(), lr_scheduler_kwargs="num_cycles=2")


def test_an_option_that_the_schedule_does_not_have_is_named() -> None:
    trainer = make(
        ctrainer.Trainer, Net(), rows(), lr_scheduler_kwargs={"num_cycles": 2}
    )
    with pytest.raises(ValueError, match="'linear' has no option 'num_cycles'"):
        trainer.train()
