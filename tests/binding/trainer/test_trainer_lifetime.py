"""What training leaves behind: no memory, no references, no changed settings."""

from __future__ import annotations

import gc
import itertools
import signal
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_alone
from tiny import Net, make, rows

import ctrainer
from ctrainer import _C

# torch's tables of weak references and Python's free lists grow for hundreds of runs,
# by leaps; what is lost in each run shows in the calmest of several windows too. An
# object lost at each of a run's 6 micro-batches is 6 blocks.
WINDOWS, RUNS, PER_RUN = 12, 20, 5


def again(trainer: Any) -> None:
    trainer.optimizer = trainer.lr_scheduler = None
    trainer.train()


def calmest_growth(run: Callable[[], None]) -> int:
    """The fewest blocks by which the process grew in a window of RUNS runs."""
    sizes = []
    for _ in range(WINDOWS + 1):
        gc.collect()
        sizes.append(sys.getallocatedblocks())
        for _ in range(RUNS):
            run()
    return min(b - a for a, b in itertools.pairwise(sizes))


@pytest.mark.parametrize("accumulation", [1, 3])
def test_training_again_and_again_keeps_no_memory(accumulation: int) -> None:
    class Overrides(ctrainer.Trainer):
        def compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
            loss: torch.Tensor = model(**inputs)["loss"]
            return loss

        def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
            super()._maybe_log_save_evaluate(*args, **kwargs)

    trainer = make(
        Overrides, Net(), rows(24), num_train_epochs=2,
        gradient_accumulation_steps=accumulation,
    )  # fmt: skip
    watched = [None, True, False, trainer, trainer.model, trainer.args, Net, _C.Trainer]

    again(trainer)
    gc.collect()
    before = [sys.getrefcount(w) for w in watched]
    assert calmest_growth(lambda: again(trainer)) < PER_RUN * RUNS
    now = [sys.getrefcount(w) for w in watched]
    for had, has in zip(before[3:], now[3:], strict=True):
        assert has <= had
    assert abs(now[0] - before[0]) < RUNS


def test_a_hook_that_raises_keeps_no_memory() -> None:
    trainer = make(ctrainer.Trainer, Net(), rows(24), max_steps=3)

    def fails(*args: Any, **kwargs: Any) -> None:
        raise LookupError("gone")

    trainer.compute_loss = fails

    def run() -> None:
        with pytest.raises(LookupError):
            again(trainer)

    assert calmest_growth(run) < PER_RUN * RUNS


def test_the_signal_handlers_are_as_before() -> None:
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(n) for n in numbers]
    make(ctrainer.Trainer, Net(), rows(), max_steps=2).train()
    assert [signal.getsignal(n) for n in numbers] == before


def test_a_run_in_development_mode_is_silent() -> None:
    flags = ["-X", "dev", "-W", "error:::ctrainer"]
    done = run_alone("trainer.development", flags=flags)
    assert done.returncode == 0, done.stderr
    assert "ctrainer" not in done.stderr


# Optimizers and schedules of others


def reference(scheduler: bool, clip: float = 1.0) -> list[torch.Tensor]:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(6):
        part = rows(48)[step * 8 : step * 8 + 8]
        batch = {k: torch.stack([r[k] for r in part]) for k in part[0]}
        model(**batch)["loss"].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler:
            schedule.step()
    return list(model.parameters())


def test_torch_s_optimizer_and_schedule_are_driven_as_they_are() -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    events: list[str] = []
    optimizer.register_step_pre_hook(lambda *a: events.append("pre"))
    optimizer.register_step_post_hook(lambda *a: events.append("post"))
    trainer = make(
        ctrainer.Trainer, model, rows(48), num_train_epochs=1,
        train_sampling_strategy="sequential",
        parts={"optimizers": (optimizer, schedule)},
    )  # fmt: skip
    trainer.train()
    assert trainer.optimizer is optimizer
    assert trainer.lr_scheduler is schedule
    assert events == ["pre", "post"] * 6
    for mine, other in zip(model.parameters(), reference(True), strict=True):
        # A hundredth of a step: torch's norm is summed in fp32.
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-4)


def test_hooks_of_our_optimizer_run_around_its_step() -> None:
    events: list[str] = []

    class Hooked(ctrainer.Trainer):
        def create_optimizer(self, model: Any = None) -> Any:
            optimizer = super().create_optimizer(model)
            optimizer.register_step_pre_hook(lambda *a: events.append("pre"))
            optimizer.register_step_post_hook(lambda *a: events.append("post"))
            return optimizer

    make(Hooked, Net(), rows(), max_steps=2).train()
    assert events == ["pre", "post"] * 2


def test_a_schedule_of_metrics_steps_after_an_evaluation() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, patience=0, threshold=0.5
    )
    trainer = make(
        ctrainer.Trainer, model, rows(24), max_steps=9, eval_strategy="steps",
        eval_steps=3, metric_for_best_model="loss",
        parts={"optimizers": (optimizer, schedule), "eval_dataset": rows(8)},
    )  # fmt: skip
    trainer.train()
    rates = [h["learning_rate"] for h in trainer.state.log_history if "loss" in h]
    assert rates == pytest.approx([1e-6] * 6 + [1e-7] * 3)


def test_callbacks_before_the_step_see_clipped_gradients() -> None:
    seen: list[tuple[float, float]] = []

    class Look(ctrainer.TrainerCallback):
        def on_pre_optimizer_step(self, *args: Any, model: Any, **kw: Any) -> None:
            norms = [p.grad.norm() for p in model.parameters()]
            seen.append((float(torch.stack(norms).norm()), 0.0))

    trainer = make(
        ctrainer.Trainer, Net(), rows(), max_steps=3, max_grad_norm=0.25,
        callbacks=[Look()],
    )  # fmt: skip
    trainer.train()
    logged = [h["grad_norm"] for h in trainer.state.log_history if "loss" in h]
    assert all(norm > 0.25 for norm in logged)
    assert [norm for norm, _ in seen] == pytest.approx([0.25] * 3, rel=1e-5)


def test_an_override_of_clipping_decides() -> None:
    class Clips(ctrainer.Trainer):
        def _clip_grad_norm(self, model: Any) -> torch.Tensor:
            for parameter in model.parameters():
                parameter.grad.zero_()
            return torch.tensor(7.0)

    model = Net()
    trainer = make(Clips, model, rows(), max_steps=2, learning_rate=0.1)
    trainer.train()
    assert all(
        torch.equal(a, b)
        for a, b in zip(model.parameters(), Net().parameters(), strict=True)
    )
    logged = [h["grad_norm"] for h in trainer.state.log_history if "loss" in h]
    assert logged == [7.0, 7.0]
