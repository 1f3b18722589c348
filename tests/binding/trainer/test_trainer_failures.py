"""What a Trainer does when something is wrong: the data, a hook, a number, a signal."""

from __future__ import annotations

import math
import signal
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import run_alone
from tiny import Net, arguments, make, rows
from torch import nn

import ctrainer
from ctrainer.checkpoint import verify_checkpoint


def weights(trainer: Any) -> list[torch.Tensor]:
    return [p.detach().clone() for p in trainer.model.parameters()]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# NaN and Inf


class Poisoned(ctrainer.Trainer):
    """The loss of the updates in `bad`, counted from 1, is not finite."""

    bad: tuple[int, ...] = (2, 3)
    value = math.nan
    before: list[torch.Tensor]
    kept: list[bool]

    def compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
        self.__dict__.setdefault("kept", [])
        if self.state.global_step:
            self.kept.append(same(self.before, weights(self)))
        self.before = weights(self)
        loss: torch.Tensor = model(**inputs)["loss"]
        return loss * self.value if self.state.global_step + 1 in self.bad else loss


def poisoned(**options: Any) -> Any:
    return make(Poisoned, Net(), rows(80), max_steps=5, learning_rate=0.01, **options)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("clip", [1.0, 0.0])
def test_a_step_that_is_not_finite_is_skipped_and_told(
    clip: float, value: float
) -> None:
    trainer = poisoned(max_grad_norm=clip)
    trainer.value = value
    with pytest.warns(RuntimeWarning, match="step 2 are not finite") as told:
        trainer.train()
    assert sum("not finite" in str(w.message) for w in told) == 1
    assert trainer.kept == [False, True, True, False]
    assert trainer.state.global_step == 5
    state = next(iter(trainer.optimizer.state.values()))
    assert int(state["step"]) == 3
    logs = [h for h in trainer.state.log_history if "loss" in h]
    assert [h.get("nonfinite_steps", 0) for h in logs] == [0, 1, 1, 0, 0]
    assert [math.isnan(h["loss"]) for h in logs] == [False, True, True, False, False]
    assert all(h["loss"] != 0.0 for h in logs)
    rates = [h["learning_rate"] for h in logs]
    assert rates[1] == rates[2] == rates[3]  # the schedule waited
    assert rates[0] > rates[1] > rates[4]
    assert trainer.state.log_history[-1]["nonfinite_steps"] == 2
    assert math.isfinite(trainer.state.log_history[-1]["train_loss"])


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_window_s_loss_is_the_mean_of_its_finite_updates(accumulation: int) -> None:
    every = poisoned(gradient_accumulation_steps=accumulation)
    window = poisoned(gradient_accumulation_steps=accumulation, logging_steps=5)
    for trainer in (every, window):
        with pytest.warns(RuntimeWarning, match="not finite"):
            trainer.train()
    losses = [h["loss"] for h in every.state.log_history if "loss" in h]
    finite = [x for x in losses if math.isfinite(x)]
    entry = window.state.log_history[0]
    assert len(finite) == 3
    assert entry["loss"] == pytest.approx(sum(finite) / 3)
    assert entry["nonfinite_steps"] == 2


@pytest.mark.parametrize("clip", [1.0, 0.0])
def test_the_policy_stop_raises_before_the_weights_change(clip: float) -> None:
    trainer = poisoned(nonfinite_policy="stop", max_grad_norm=clip)
    with pytest.raises(FloatingPointError, match="step 2 are not finite"):
        trainer.train()
    assert trainer.state.global_step == 1
    assert same(trainer.before, weights(trainer))


@pytest.mark.parametrize("clip", [1.0, 0.0])
def test_the_policy_keep_updates_all_the_same(clip: float) -> None:
    trainer = poisoned(nonfinite_policy="keep", max_grad_norm=clip)
    with pytest.warns(RuntimeWarning, match="updated all the same"):
        trainer.train()
    assert int(next(iter(trainer.optimizer.state.values()))["step"]) == 5
    assert all(w.isnan().any() for w in weights(trainer))


def test_a_foreign_optimizer_is_skipped_too() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = make(
        Poisoned, model, rows(80), max_steps=5, parts={"optimizers": (optimizer, None)}
    )
    with pytest.warns(RuntimeWarning, match="skipped"):
        trainer.train()
    assert trainer.kept == [False, True, True, False]


# Hooks that raise or replace


@pytest.mark.parametrize(
    "error", [ValueError, StopIteration, KeyboardInterrupt, MemoryError]
)
@pytest.mark.parametrize(
    "hook",
    [
        "compute_loss", "training_step", "_prepare_inputs", "log", "get_batch_samples",
        "_get_num_items_in_batch", "floating_point_ops", "_get_learning_rate",
    ],
)  # fmt: skip
def test_an_error_in_a_hook_arrives_and_the_trainer_stays_usable(
    hook: str, error: type[BaseException]
) -> None:
    trainer = make(ctrainer.Trainer, Net(), rows(), max_steps=4)
    default, calls = getattr(trainer, hook), []

    def fails(*args: Any, **kwargs: Any) -> Any:
        calls.append(hook)
        if len(calls) == 3:
            raise error("from the hook")
        return default(*args, **kwargs)

    setattr(trainer, hook, fails)
    with pytest.raises(error, match="from the hook"):
        trainer.train()
    assert len(calls) == 3
    assert not trainer.is_in_train
    delattr(trainer, hook)
    fresh = make(ctrainer.Trainer, Net(), rows(), max_steps=4)
    fresh.train()
    trainer.optimizer = trainer.lr_scheduler = None
    trainer.model.load_state_dict(Net().state_dict())
    trainer.model.zero_grad()
    assert trainer.train().global_step == 4
    assert same(weights(trainer), weights(fresh))


def test_a_hook_that_returns_the_wrong_thing_is_named() -> None:
    cases = {
        "get_batch_samples": (lambda *a, **k: 5, TypeError, "get_batch_samples"),
        "training_step": (
            lambda *a, **k: torch.ones(2), ValueError, "must be a scalar",
        ),
        "set_initial_training_values": (
            lambda *a, **k: 5, TypeError, "set_initial_training_values",
        ),
    }  # fmt: skip
    for name, (wrong, error, words) in cases.items():
        trainer = make(ctrainer.Trainer, Net(), rows(), max_steps=2)
        setattr(trainer, name, wrong)
        with pytest.raises(error, match=words):
            trainer.train()


def test_a_step_that_is_no_number_ends_the_run_before_an_epoch() -> None:
    class Misses(ctrainer.TrainerCallback):
        epochs = 0

        def on_train_begin(self, args: Any, state: Any, *_: Any, **kw: Any) -> None:
            state.global_step = "three"

        def on_epoch_begin(self, *_: Any, **kw: Any) -> None:
            self.epochs += 1

    misses = Misses()
    trainer = make(ctrainer.Trainer, Net(), rows(), max_steps=2, callbacks=[misses])
    with pytest.raises(ValueError, match="three"):
        trainer.train()
    assert misses.epochs == 0


def test_a_hook_may_replace_the_optimizer() -> None:
    class Replaces(ctrainer.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, *rest: Any, **kw: Any) -> None:
            if state.global_step == 2:
                trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.5)

    trainer = make(
        ctrainer.Trainer, Net(), rows(), max_steps=3, callbacks=[Replaces()],
        max_grad_norm=0.0, learning_rate=1e-9,
    )  # fmt: skip
    before = weights(trainer)
    trainer.train()
    pairs = zip(before, weights(trainer), strict=True)
    moved = max(float((a - b).abs().max()) for a, b in pairs)
    assert moved > 0.01


def test_a_hook_may_replace_the_model() -> None:
    other = Net()

    class Replaces(ctrainer.Trainer):
        def create_optimizer(self, model: Any = None) -> Any:
            self.model = self.model_wrapped = other
            return super().create_optimizer()

    first = Net()
    trainer = make(Replaces, first, rows(), max_steps=3, learning_rate=0.1)
    trainer.train()
    assert same(list(first.parameters()), list(Net().parameters()))
    assert not same(list(other.parameters()), list(Net().parameters()))


@pytest.mark.parametrize(
    ("flag", "event", "steps"),
    [
        ("should_training_stop", "on_step_end", 3),
        ("should_epoch_stop", "on_step_end", 6),
        ("should_training_stop", "on_substep_end", 2),
    ],
)
def test_a_callback_stops_the_epoch_or_the_run(
    flag: str, event: str, steps: int
) -> None:
    def stop(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        wanted = 3 if event == "on_step_end" else 2
        if state.global_step % 3 == wanted % 3 and state.global_step >= wanted:
            setattr(control, flag, True)
        return control

    callback = type("Stops", (ctrainer.TrainerCallback,), {event: stop})()
    trainer = make(
        ctrainer.Trainer, Net(), rows(80), num_train_epochs=2, callbacks=[callback],
        gradient_accumulation_steps=2,
    )  # fmt: skip
    trainer.train()
    assert trainer.state.global_step == steps


# Bad input


def test_bad_input_is_told_by_its_cause() -> None:
    cases: list[tuple[Any, type[Exception], str]] = [
        (lambda: ctrainer.Trainer(), RuntimeError, "model or model_init"),
        (lambda: ctrainer.Trainer(Net(), arguments(), nothing=1), TypeError, "nothing"),
        (
            lambda: ctrainer.Trainer(Net(), arguments(), data_collator=3),
            TypeError,
            "data_collator must be callable",
        ),
        (
            lambda: ctrainer.Trainer(Net(), arguments(eval_strategy="epoch")),
            ValueError,
            "needs an eval_dataset",
        ),
        (
            lambda: make(ctrainer.Trainer, Net(), None).train(),
            ValueError,
            "train_dataset",
        ),
        (lambda: make(ctrainer.Trainer, Net(), []).train(), ValueError, "empty"),
        (
            lambda: make(ctrainer.Trainer, Net(), iter([])).train(),
            ValueError,
            "max_steps",
        ),
        (
            lambda: make(ctrainer.Trainer, Net(), rows()).train(unknown=1),
            TypeError,
            "unknown",
        ),
        (
            lambda: make(
                ctrainer.Trainer, Net(), [{"x": r["x"]} for r in rows()]
            ).train(),
            ValueError,
            "returned no loss, only .*logits.* labels",
        ),
        (
            lambda: make(
                ctrainer.Trainer, Net(), rows(),
                parts={"data_collator": lambda e: (torch.ones(2, 8), torch.ones(2))},
            ).train(),
            TypeError,
            "maps the names",
        ),
        (
            lambda: make(
                ctrainer.Trainer, Net(), rows(), parts={"data_collator": lambda e: {}}
            ).train(),
            ValueError,
            "the batch is empty",
        ),
        (
            lambda: make(ctrainer.Trainer, Net(), rows()).train("/nowhere"),
            ValueError,
            "at '/nowhere': there is no such",
        ),
        (
            lambda: make(ctrainer.Trainer, Net(), rows()).train(True),
            ValueError,
            "No valid checkpoint found",
        ),
    ]  # fmt: skip
    for call, error, words in cases:
        with pytest.raises(error, match=words):
            call()


def test_ranks_that_cannot_meet_are_told_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises((RuntimeError, ValueError), match="MASTER_ADDR"):
        make(ctrainer.Trainer, Net(), rows()).train()


# Parameters of every kind


class Odd(nn.Module):
    """Frozen, shared, not contiguous, and unused parameters beside plain ones."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        made = [torch.randn(8, 8, generator=generator) for _ in range(4)]
        self.frozen = nn.Parameter(made[0], requires_grad=False)
        self.shared = self.twin = nn.Parameter(made[1])
        self.turned = nn.Parameter(made[2].t())
        self.unused = nn.Parameter(made[3])

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        y = x @ self.frozen @ self.shared @ self.turned @ self.twin
        return ((y.sum(-1) / 100 - labels) ** 2).mean(), y


@pytest.mark.parametrize("clip", [0.0, 0.1])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_frozen_shared_turned_and_unused_parameters(
    clip: float, accumulation: int
) -> None:
    torch.manual_seed(0)
    model, reference = Odd(), Odd()
    assert not model.turned.is_contiguous()
    trainer = make(
        ctrainer.Trainer, model, rows(64), max_steps=4, max_grad_norm=clip,
        learning_rate=0.01, lr_scheduler_type="constant",
        train_sampling_strategy="sequential", gradient_accumulation_steps=accumulation,
    )  # fmt: skip
    trainer.train()
    trained = [p for p in reference.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01, weight_decay=0.0)
    for step in range(4):
        n = 8 * accumulation
        part = rows(64)[step * n : (step + 1) * n]
        batch = {k: torch.stack([r[k] for r in part]) for k in part[0]}
        reference(**batch)[0].backward()
        if clip:
            nn.utils.clip_grad_norm_(trained, clip)
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(model.frozen, Odd().frozen)
    assert torch.equal(model.unused, Odd().unused)
    for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
        # A hundredth of a step: torch's norm is summed in fp32.
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-4)


def test_gradients_outside_the_optimizer_do_not_pile_up() -> None:
    model = Net()
    head = list(model.layers[3].parameters())
    optimizer = torch.optim.SGD(head, lr=0.01)
    norms = []

    class Look(ctrainer.TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            norms.append([p.grad for p in model.parameters() if p.grad is not None])

    make(
        ctrainer.Trainer, model, rows(), max_steps=3, callbacks=[Look()],
        parts={"optimizers": (optimizer, None)},
    ).train()  # fmt: skip
    assert norms == [[], [], []]


# Signals


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_leaves_a_checkpoint_and_ends_the_process(
    name: str, tmp_path: Path
) -> None:
    flags = ["-X", "dev", "-W", "ignore"]
    program = "trainer.killed_by_signal"
    done = run_alone(program, str(tmp_path), name, flags=flags)
    number = getattr(signal, name)
    assert done.returncode in (-number, 128 + number), done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-3"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = make(
            ctrainer.Trainer, Net(), rows(), max_steps=10, output_dir=str(tmp_path)
        )
        assert again.train(resume_from_checkpoint=True).global_step == 10
    whole = make(ctrainer.Trainer, Net(), rows(), max_steps=10)
    whole.train()
    assert same(weights(again), weights(whole))


def test_an_evaluation_that_fails_before_the_first_step_ends_the_run() -> None:
    class Failing(ctrainer.Trainer):
        def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
            raise ValueError("no labels to evaluate")

    trainer = make(
        Failing, Net(), rows(8), max_steps=2, eval_on_start=True,
        eval_strategy="steps", parts={"eval_dataset": rows(4)},
    )  # fmt: skip
    with pytest.raises(ValueError, match="no labels to evaluate"):
        trainer.train()
    assert trainer.state.global_step == 0


@pytest.mark.parametrize("core", [None, [1, 2]])
def test_a_weight_average_of_another_kind_is_a_type_error(core: Any) -> None:
    trainer = make(ctrainer.Trainer, Net(), rows(16), max_steps=1)
    trainer.weight_average = SimpleNamespace(core=core)
    with pytest.raises(TypeError, match="weight_average must be None"):
        trainer.train()


def test_a_run_that_fails_has_written_its_last_checkpoint(tmp_path: Path) -> None:
    released: list[bool] = []

    class Saves(ctrainer.Trainer):
        def _wait_for_save(self, release: bool = False) -> None:
            super()._wait_for_save(release)
            released.append(release)

        def log(self, logs: dict[str, float], *args: Any) -> None:
            if self.state.global_step == 3:
                raise LookupError("from log()")
            super().log(logs, *args)

    trainer = make(
        Saves, Net(), rows(), max_steps=4, logging_steps=1, save_strategy="steps",
        save_steps=1, output_dir=str(tmp_path),
    )  # fmt: skip
    with pytest.raises(LookupError):
        trainer.train()
    assert released[-1]
    verify_checkpoint(tmp_path / "checkpoint-2")
