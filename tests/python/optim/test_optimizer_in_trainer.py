"""How the trainer drives an optimizer: its engine where nobody looks, else step()."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ctrainer
from ctrainer import Trainer, TrainingArguments, optim

UPDATES = 6


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.mse_loss(self.layer(x).squeeze(-1), labels)}


DATA = [
    {"x": torch.tensor([i / 9, 1.0, -i / 5]), "labels": float(i % 3)} for i in range(24)
]


def run(folder: Path, optimizer: Any, scheduler: Any = None, **options: Any) -> Any:
    model = optimizer.model
    args = TrainingArguments(
        output_dir=str(folder),
        max_steps=UPDATES,
        per_device_train_batch_size=4,
        max_grad_norm=0.5,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **options,
    )
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=DATA,
        optimizers=(optimizer, scheduler),
    )
    trainer.train()
    return [p.detach().clone() for p in model.parameters()]


def make(cls: type[torch.optim.Optimizer] = optim.AdamW) -> Any:
    model = Regression()
    optimizer = cls(model.parameters(), lr=0.05)  # type: ignore[call-arg]
    optimizer.model = model  # type: ignore[attr-defined]
    return optimizer


@pytest.fixture
def expected(tmp_path: Path) -> list[torch.Tensor]:
    found: list[torch.Tensor] = run(tmp_path, make())
    return found


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def close(a: list[torch.Tensor], b: list[torch.Tensor]) -> None:
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


def test_torchs_own_optimizer_gives_the_same(
    tmp_path: Path, expected: list[torch.Tensor]
) -> None:
    close(run(tmp_path, make(torch.optim.AdamW)), expected)


def test_step_hooks_are_called(tmp_path: Path, expected: list[torch.Tensor]) -> None:
    optimizer, calls = make(), []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    close(run(tmp_path, optimizer), expected)
    assert calls == ["before", "after"] * UPDATES


def test_overridden_step_is_called(
    tmp_path: Path, expected: list[torch.Tensor]
) -> None:
    class Counting(optim.AdamW):
        steps = 0

        def step(self, *args: Any, **kwargs: Any) -> Any:
            self.steps += 1
            return super().step(*args, **kwargs)

    optimizer = make(Counting)
    close(run(tmp_path, optimizer), expected)
    assert optimizer.steps == UPDATES


def test_step_replaced_on_the_instance_is_called(
    tmp_path: Path, expected: list[torch.Tensor]
) -> None:
    optimizer, calls = make(), []
    inner = optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return inner(*args, **kwargs)

    optimizer.step = step
    close(run(tmp_path, optimizer), expected)
    assert len(calls) == UPDATES


def test_torchs_scheduler_sees_the_steps(tmp_path: Path) -> None:
    optimizer = make()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler.step.*")
        run(tmp_path, optimizer, scheduler)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05 * 0.5**UPDATES)


def test_state_is_where_torch_keeps_it(tmp_path: Path) -> None:
    optimizer = make()
    run(tmp_path, optimizer)
    for param in optimizer.model.parameters():
        assert optimizer.state[param]["step"].item() == UPDATES
        assert param.grad is None


def test_engine_and_step_agree_to_the_bit(
    tmp_path: Path, expected: list[torch.Tensor]
) -> None:
    optimizer = make()
    model = optimizer.model
    args = TrainingArguments(output_dir=str(tmp_path), max_steps=1, report_to="none")
    trainer = Trainer(model=model, args=args, train_dataset=DATA)
    sampler = trainer._get_train_sampler()
    order = [i for _ in range(2) for i in sampler][: 4 * UPDATES]
    rates = [0.05 * (1 - i / UPDATES) for i in range(UPDATES)]
    for i, rate in enumerate(rates):
        batch = trainer.data_collator([DATA[j] for j in order[4 * i : 4 * i + 4]])
        model(**batch)["loss"].backward()
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step(max_norm=0.5)
        optimizer.zero_grad()
    assert same([p.detach() for p in model.parameters()], expected)


def test_what_a_trainer_tells_of_its_optimizer_is_what_transformers_tells() -> None:
    transformers = pytest.importorskip("transformers")
    import tiny

    told = []
    for cls in (Trainer, transformers.Trainer):
        made = tiny.make(cls, tiny.gpt2(), tiny.tokens(4), weight_decay=0.1)
        made.model.transformer.wpe.weight.requires_grad_(False)
        for ask in (made.get_learning_rates, made.get_optimizer_group):
            with pytest.raises(ValueError, match=r"the optimizer|optimizer is None"):
                ask()
        made.create_optimizer()
        groups = [
            [tuple(p.shape) for p in group] for group in made.get_optimizer_group()
        ]
        count = made.get_num_trainable_parameters()
        told.append((count, made.get_learning_rates(), groups))
    assert told[0] == told[1]
    made = tiny.make(Trainer, tiny.gpt2(), tiny.tokens(4), weight_decay=0.1)
    for group in made.create_optimizer().param_groups:
        for parameter in group["params"]:
            assert made.get_optimizer_group(parameter) is group
    assert made.get_optimizer_group(nn.Parameter(torch.zeros(1))) is None


@pytest.mark.parametrize("of_the_model", [True, False])
def test_an_optimizer_of_another_model_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, of_the_model: bool
) -> None:
    optimizer = make(torch.optim.SGD)
    if not of_the_model:
        optimizer.model = Regression()
    before = [p.detach().clone() for p in optimizer.model.parameters()]
    after = run(tmp_path, optimizer)
    changed = not all(map(torch.equal, before, after))
    warned = "has none of the model's parameters" in caplog.text
    assert (changed, warned) == (of_the_model, not of_the_model)


class Listens(ctrainer.TrainerCallback):
    """As one of ctrainer's own, which do not keep the engine from clipping."""

    __module__ = "ctrainer.listens"

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.trainer: Any = None

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.norms.append(self.trainer._last_grad_norm)


def test_the_norm_is_known_before_the_update(tmp_path: Path) -> None:
    args = TrainingArguments(
        str(tmp_path), max_steps=3, max_grad_norm=0.5, save_strategy="no",
        report_to="none", disable_tqdm=True, logging_steps=1, use_cpu=True,
    )  # fmt: skip
    listens = Listens()
    trainer = Trainer(Regression(), args, train_dataset=DATA, callbacks=[listens])
    listens.trainer = trainer
    trainer.train()
    logged = [entry["grad_norm"] for entry in trainer.state.log_history[:-1]]
    assert listens.norms == pytest.approx(logged)
