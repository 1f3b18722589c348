"""skip_grad_norm_sigmas: which updates are skipped, against NumPy's formula.

The loss of a row is the weight times the row's number, so that the gradient of an
update is the mean of its rows, and the weight shows which updates were made.
"""

import logging

import numpy as np
import pytest
from draws import draws
from ranks import run, told

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from programs.trainer.spikes import RATE, Slope, arguments_of, slopes  # noqa: E402

import ctrainer  # noqa: E402

STEPS = 150


def expected(norms, sigmas):
    """The steps that are skipped, from 0."""
    skipped = []
    for step, norm in enumerate(norms):
        window = np.array(norms[:step][-128:], np.float64)
        if len(window) >= 64:
            limit = window.mean() + sigmas * window.std(ddof=1)
            if norm > limit:
                skipped.append(step)
    return skipped


def drawn(seed, n=STEPS):
    """Gradients with a trend, some of them far off, and a level that rises for good."""
    generator = np.random.default_rng(seed)
    slopes = 1.0 + 0.1 * generator.standard_normal(n) + np.linspace(0, 0.5, n)
    at = generator.choice(n, 8, replace=False)
    slopes[at] *= generator.choice([-4.0, 1.5, 3.0], 8)
    slopes[generator.integers(64, n)] = generator.choice([-1e3, 1e3])
    slopes[generator.integers(80, n) :] += generator.choice([0.0, 3.0])
    return np.float32(slopes).astype(np.float64)


def train(folder, rows, resume=None, optimizer=None, package=ctrainer, **options):
    args = arguments_of(package, folder, len(rows), **options)
    model = Slope()
    trainer = package.Trainer(
        model, args, train_dataset=slopes(rows),
        optimizers=(optimizer and optimizer(model.parameters(), lr=RATE), None),
    )  # fmt: skip
    if package is ctrainer:
        trainer.remove_callback(ctrainer.PrinterCallback)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def weight_after(rows, skipped):
    """By float32 arithmetic, as SGD's."""
    weight = np.float32(0.0)
    for step, slope in enumerate(rows):
        if step not in skipped:
            weight = weight - np.float32(RATE) * np.float32(slope)
    return weight


def counts(trainer):
    entries = [e for e in trainer.state.log_history if "loss" in e]
    return [e.get("spike_steps", 0) for e in entries]


@pytest.mark.parametrize("seed", range(draws(6, 60)))
@pytest.mark.parametrize("optimizer", [None, torch.optim.SGD])
def test_the_updates_of_numpy_s_formula_are_skipped(tmp_path, seed, optimizer) -> None:
    rows, sigmas = drawn(seed), [2.0, 6.0][seed % 2]
    skipped = expected(np.abs(rows), sigmas)
    trainer = train(
        tmp_path, rows, optimizer=optimizer, skip_grad_norm_sigmas=sigmas,
        logging_steps=10,
    )  # fmt: skip
    assert trainer.model.weight.item() == pytest.approx(
        weight_after(rows, skipped), rel=1e-6
    )
    each = [sum(a <= s < a + 10 for s in skipped) for a in range(0, STEPS, 10)]
    assert counts(trainer) == each
    assert trainer.state.log_history[-1].get("spike_steps", 0) == len(skipped)
    assert skipped


def test_a_resumed_run_compares_with_the_norms_before(tmp_path, caplog) -> None:
    rows = 1.0 + np.arange(STEPS) % 11 / 100
    rows[[100, 103]] = 50.0
    options = {"skip_grad_norm_sigmas": 6.0, "logging_steps": 1}
    whole = train(
        tmp_path / "a", rows, save_strategy="steps", save_steps=101, **options
    )
    skipped = expected(rows, 6.0)
    assert {100, 103} <= set(skipped)
    with caplog.at_level(logging.WARNING, "ctrainer.trainer"):
        again = train(
            tmp_path / "b", rows, tmp_path / "a" / "checkpoint-101", **options
        )
    assert counts(again) == counts(whole)
    assert again.model.weight.item() == whole.model.weight.item()
    assert again.state.log_history[-1]["spike_steps"] == len(skipped)
    assert "step 104 is skipped: its gradient norm is 50" in caplog.text


def test_the_schedule_and_the_optimizer_wait(tmp_path) -> None:
    rows = np.ones(80)
    rows[:70] += np.arange(70) % 7 / 100
    rows[75] = 100.0
    trainer = train(
        tmp_path, rows, skip_grad_norm_sigmas=6.0, logging_steps=1, optim="adamw_torch",
        lr_scheduler_type="linear",
    )  # fmt: skip
    rates = [e["learning_rate"] for e in trainer.state.log_history if "loss" in e]
    assert [i for i in range(79) if rates[i] == rates[i + 1]] == [75]
    (state,) = trainer.optimizer.state.values()
    assert int(state["step"]) == 79
    assert trainer.state.global_step == 80


def test_gradients_that_are_not_finite_are_no_norms_to_compare_with(tmp_path) -> None:
    rows = np.abs(drawn(2))
    rows[[70, 90]] = np.inf
    with pytest.warns(RuntimeWarning, match="step 71 are not finite"):
        trainer = train(tmp_path, rows, skip_grad_norm_sigmas=6.0)
    finite = rows[np.isfinite(rows)]
    assert trainer.state.log_history[-1]["spike_steps"] == len(expected(finite, 6.0))
    assert trainer.state.log_history[-1]["nonfinite_steps"] == 2


def test_ranks_skip_alike(tmp_path) -> None:
    """A spike of one rank's rows is one of the mean of the gradients."""
    ranks = told(run(tmp_path, "trainer.spikes"))
    for rank in ranks:
        norms = np.mean([r["rows"] for r in ranks], axis=0)
        skipped = expected(norms, 6.0)
        assert 90 in skipped
        assert rank["counts"] == len(skipped)
        assert rank["weight"] == pytest.approx(weight_after(norms, skipped), rel=1e-6)


def test_transformers_updates_by_the_spike(tmp_path) -> None:
    rows = 1.0 + np.arange(STEPS) % 11 / 100
    rows[100] = 1e6
    theirs = train(tmp_path, rows, package=transformers)
    assert theirs.model.weight.item() == pytest.approx(weight_after(rows, []), rel=1e-5)
    ours = train(tmp_path, rows, skip_grad_norm_sigmas=6.0)
    assert abs(ours.model.weight.item()) < 1e3 * RATE
