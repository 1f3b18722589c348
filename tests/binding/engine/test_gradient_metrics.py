"""What the log tells of gradients besides their norm."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tiny import Net, make, rows
from torch import nn

import ctrainer
import ctrainer.adapters.torch
from ctrainer import adapters, optim


class Device(ctrainer.Trainer):
    """A trainer that takes its gradients for those of a device."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._inputs_stay = False


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


def test_only_updates_that_are_logged_are_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls, trainers = [], []
    labels = adapters.torch.parameter_labels

    def counts(model: Any, depth: int | None) -> dict[Any, str]:
        calls.append(trainers[-1].state.global_step + 1)
        return labels(model, depth)

    monkeypatch.setattr(adapters.torch, "parameter_labels", counts)

    class Counts(ctrainer.Trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            trainers.append(self)

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

    class Begins(ctrainer.TrainerCallback):
        def on_step_begin(self, *given: Any, **kwargs: Any) -> None:
            stranger.grad = torch.full((3,), 2.0)

    optimizer = optim.SGD([*model.parameters(), stranger], lr=0.0)
    logs = run(
        model=model, log_layer_grad_norms=True, logging_steps=1, max_steps=1,
        callbacks=[Begins()], parts={"optimizers": (optimizer, None)},
    )  # fmt: skip
    number = len(list(model.parameters()))
    assert logs[0][f"grad_norm/parameter {number} of the optimizer"] == math.sqrt(12.0)
