"""What the log tells of gradients besides their norm."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tiny import Net, make, rows
from torch import nn

import ctrainer
from ctrainer import optim


class Device(ctrainer.Trainer):
    """A trainer that takes its gradients for those of a device."""

    @property
    def _inputs_stay(self) -> bool:
        return False

    @_inputs_stay.setter
    def _inputs_stay(self, value: bool) -> None:
        assert value, "the machine's own answer"


class Deep(nn.Module):
    """Two blocks of two layers each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2)
        )
        self.head = nn.Linear(8, 1)

    def forward(self, x: Any, labels: Any = None) -> dict[str, torch.Tensor]:
        for block in self.blocks:
            x = block(x).tanh()
        y = self.head(x).squeeze(-1)
        return {"loss": nn.functional.mse_loss(y, labels)}


def data() -> list[dict[str, torch.Tensor]]:
    """Rows on whose gradients' direction all agree more than they differ."""
    return [{"x": row["x"], "labels": row["labels"] + 6} for row in rows(64)]


def gradients(model: nn.Module, first: int, n: int) -> dict[str, torch.Tensor]:
    """Of the mean loss of n rows; the model's own gradients are dropped."""
    part = data()[first : first + n]
    batch = {k: torch.stack([r[k] for r in part]) for k in part[0]}
    model.zero_grad()
    model(**batch)["loss"].backward()
    found = {
        k: p.grad.double() for k, p in model.named_parameters() if p.grad is not None
    }
    model.zero_grad()
    return found


def run(
    cls: type = ctrainer.Trainer, model: nn.Module | None = None, **options: Any
) -> list[dict[str, Any]]:
    """The logs of a run without learning, so that reference gradients are easy."""
    options = {"max_steps": 4, "logging_steps": 2, "learning_rate": 0.0, **options}
    trainer = make(
        cls, model or Deep(), data(), train_sampling_strategy="sequential",
        max_grad_norm=0.01, **options,
    )  # fmt: skip
    trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("cls", [ctrainer.Trainer, Device])
@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_each_parameter_s_norm_is_logged_before_clipping(
    cls: type, p: float, accumulation: int
) -> None:
    logs = run(
        cls, grad_norm_type=p, log_layer_grad_norms=True,
        gradient_accumulation_steps=accumulation,
    )  # fmt: skip
    n = 8 * accumulation
    for entry, step in zip(logs, (2, 4), strict=True):
        expected = gradients(Deep(), n * (step - 1), n)
        norms = {k[10:]: v for k, v in entry.items() if k.startswith("grad_norm/")}
        assert norms == pytest.approx(
            {k: g.norm(p).item() for k, g in expected.items()}, rel=1e-5
        )


@pytest.mark.parametrize(
    ("depth", "prefixes"),
    [
        (1, {"blocks", "head"}),
        (2, {"blocks.0", "blocks.1", "head.weight", "head.bias"}),
    ],
)
def test_a_depth_puts_layers_together(depth: int, prefixes: set[str]) -> None:
    logs = run(log_layer_grad_norms=True, layer_grad_norm_depth=depth)
    expected = gradients(Deep(), 8, 8)
    norms = {k[10:]: v for k, v in logs[0].items() if k.startswith("grad_norm/")}
    assert norms.keys() == prefixes
    for prefix, norm in norms.items():
        flat = [
            g.flatten() for k, g in expected.items() if f"{k}.".startswith(f"{prefix}.")
        ]
        assert norm == pytest.approx(torch.cat(flat).norm().item(), rel=1e-5)
    assert math.hypot(*norms.values()) == pytest.approx(logs[0]["grad_norm"], rel=1e-12)


@pytest.mark.parametrize("source", [optim, torch.optim])
def test_the_metrics_change_nothing_of_what_is_trained(source: Any) -> None:
    weights = []
    for log in (False, True):
        model = Deep()
        optimizer = source.AdamW(model.parameters(), lr=0.01)
        run(
            model=model, log_layer_grad_norms=log, max_steps=6,
            parts={"optimizers": (optimizer, None)},
        )  # fmt: skip
        weights.append(list(model.parameters()))
    assert all(map(torch.equal, *weights))


def test_the_bad_layer_is_found() -> None:
    class Poisoned(ctrainer.TrainerCallback):
        def on_step_begin(self, *args: Any, model: Any, **kwargs: Any) -> None:
            model.head.bias.register_hook(lambda grad: grad * math.nan)

    with pytest.warns(RuntimeWarning, match="not finite"):
        logs = run(log_layer_grad_norms=True, callbacks=[Poisoned()])
    bad = {k for k, v in logs[0].items() if k.startswith("grad_norm/") and v != v}
    assert bad == {"grad_norm/head.bias"}


def test_only_updates_that_are_logged_are_measured() -> None:
    calls = []

    class Counts(ctrainer.Trainer):
        def _parameter_labels(self) -> dict[Any, str]:
            calls.append(self.state.global_step + 1)
            return super()._parameter_labels()  # type: ignore[no-any-return]

    run(Counts, log_layer_grad_norms=True, max_steps=7, logging_steps=3)
    assert calls == [3, 6]
    calls.clear()
    run(Counts, log_layer_grad_norms=True, logging_first_step=True, logging_steps=4)
    assert calls == [1, 4]
    calls.clear()
    run(
        Counts, log_layer_grad_norms=True, logging_strategy="epoch", max_steps=-1,
        num_train_epochs=2,
    )  # fmt: skip
    assert calls == [8, 16]
    calls.clear()
    run(Counts, log_layer_grad_norms=False, logging_steps=1)
    assert calls == []


def test_no_log_tells_of_another_update() -> None:
    class Asks(ctrainer.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
            control.should_log = state.global_step != 2

    logs = run(log_layer_grad_norms=True, callbacks=[Asks()])
    told = {e["step"]: any(k.startswith("grad_norm/") for k in e) for e in logs}
    assert told == {1: False, 3: False, 4: True}


def test_a_parameter_that_the_model_does_not_know_is_told_by_its_number() -> None:
    model = Net()
    stranger = nn.Parameter(torch.ones(3))
    stranger.grad = torch.full((3,), 2.0)
    optimizer = optim.SGD([*model.parameters(), stranger], lr=0.0)
    logs = run(
        model=model, log_layer_grad_norms=True, logging_steps=1, max_steps=1,
        parts={"optimizers": (optimizer, None)},
    )  # fmt: skip
    number = len(list(model.parameters()))
    assert logs[0][f"grad_norm/parameter {number} of the optimizer"] == math.sqrt(12.0)


# The gradient noise scale


def flat_gradient(first: int, n: int) -> torch.Tensor:
    return torch.cat([g.flatten() for g in gradients(Deep(), first, n).values()])


def estimate(update: int, micro_batches: int) -> tuple[float, float]:
    """T and |G|^2 of one update (from 1) of micro-batches of 8 rows, by the formulas of
    McCandlish et al., appendix A.1."""
    first, n = 8 * micro_batches * (update - 1), 8 * micro_batches
    parts = [flat_gradient(first + 8 * i, 8) for i in range(micro_batches)]
    small = sum(part.square().sum().item() for part in parts) / micro_batches
    big = flat_gradient(first, n).square().sum().item()
    trace = (small - big) / (1 / 8 - 1 / n)
    return trace, (n * big - 8 * small) / (n - 8)


@pytest.mark.parametrize("kind", ["ours", "torch's", "device", "1-norm"])
def test_the_noise_scale_is_that_of_the_paper(kind: str) -> None:
    model = Deep()
    source = torch.optim if kind == "torch's" else optim
    logs = run(
        Device if kind == "device" else ctrainer.Trainer, model,
        log_grad_noise_scale=True, gradient_accumulation_steps=2,
        grad_norm_type=1.0 if kind == "1-norm" else 2.0,
        parts={"optimizers": (source.SGD(model.parameters(), lr=0.0), None)},
    )  # fmt: skip
    (trace, signal), (trace_4, signal_4) = estimate(2, 2), estimate(4, 2)
    assert min(trace, signal, trace_4, signal_4) > 0
    assert logs[0]["grad_noise_scale"] == pytest.approx(trace / signal, rel=1e-4)
    both = (0.9 * trace + trace_4) / (0.9 * signal + signal_4)
    assert logs[1]["grad_noise_scale"] == pytest.approx(both, rel=1e-4)


@pytest.mark.parametrize("micro_batches", [3, 4])
def test_more_micro_batches_are_compared(micro_batches: int) -> None:
    logs = run(
        log_grad_noise_scale=True, gradient_accumulation_steps=micro_batches,
        max_steps=1, logging_steps=1,
    )  # fmt: skip
    trace, signal = estimate(1, micro_batches)
    assert logs[0]["grad_noise_scale"] == pytest.approx(trace / signal, rel=1e-4)


@pytest.mark.parametrize("source", [optim, torch.optim])
def test_measuring_noise_changes_nothing_of_what_is_trained(source: Any) -> None:
    weights = []
    for log in (False, True):
        model = Deep()
        optimizer = source.AdamW(model.parameters(), lr=0.01)
        logs = run(
            model=model, log_grad_noise_scale=log, gradient_accumulation_steps=3,
            logging_steps=1, parts={"optimizers": (optimizer, None)},
        )  # fmt: skip
        weights.append(list(model.parameters()))
        assert all(("grad_noise_scale" in entry) == log for entry in logs)
    assert all(map(torch.equal, *weights))


def test_noise_is_measured_only_where_it_is_logged() -> None:
    calls: list[int] = []

    class Counts(Device):
        def _device_grad_growth(self, optimizer: Any, before: Any) -> Any:
            calls.append(self.state.global_step + 1)
            return super()._device_grad_growth(optimizer, before)

    run(Counts, log_grad_noise_scale=True, gradient_accumulation_steps=2)
    assert calls == [2, 2, 4, 4]
    calls.clear()
    run(Counts, gradient_accumulation_steps=2, logging_steps=1)
    assert calls == []


def test_an_update_of_one_micro_batch_tells_no_noise() -> None:
    logs = run(
        log_grad_noise_scale=True, gradient_accumulation_steps=3, logging_steps=1,
        max_steps=-1, num_train_epochs=1,
    )  # fmt: skip
    assert ["grad_noise_scale" in entry for entry in logs] == [True, True, True]
    logs = run(
        log_grad_noise_scale=True, gradient_accumulation_steps=7, logging_steps=1,
        max_steps=-1, num_train_epochs=1,
    )  # fmt: skip
    assert ["grad_noise_scale" in entry for entry in logs] == [True, False]


def test_without_accumulation_the_noise_scale_is_refused() -> None:
    with pytest.raises(
        ValueError, match="gradient_accumulation_steps is 1; set it to 2"
    ):
        ctrainer.TrainingArguments("unused", log_grad_noise_scale=True)


def test_the_averages_of_noise_are_resumed(tmp_path: Any) -> None:
    options: dict[str, Any] = {
        "log_grad_noise_scale": True, "gradient_accumulation_steps": 2, "max_steps": 4,
        "logging_steps": 1, "learning_rate": 0.01, "max_grad_norm": 0.0,
        "train_sampling_strategy": "sequential", "output_dir": str(tmp_path),
    }  # fmt: skip
    whole = make(
        ctrainer.Trainer, Deep(), data(), **options, save_strategy="steps", save_steps=2
    )
    whole.train()
    resumed = make(ctrainer.Trainer, Deep(), data(), **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    seen = [
        [e["grad_noise_scale"] for e in t.state.log_history if "loss" in e]
        for t in (whole, resumed)
    ]
    assert len(seen[0]) == 4
    assert seen[0] == seen[1]
