"""A Trainer whose optimizer has compact state."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ctrainer import Trainer, TrainerCallback, TrainingArguments

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
NAMES = ("adamw_compact", "lion_compact")


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(100, 33)
        self.layers = nn.Sequential(nn.Linear(33, 40), nn.Tanh(), nn.Linear(40, 1))
        self.to(dtype)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.layers(self.table(x).mean(1)).squeeze(-1)
        return {"loss": nn.functional.mse_loss(y.float(), labels), "logits": y}


def rows() -> list[dict[str, Any]]:
    x = torch.randint(100, (64, 5), generator=torch.Generator().manual_seed(1))
    return [{"x": row, "labels": float(row.sum() % 3)} for row in x]


def trainer(
    folder: Path, name: str, dtype: torch.dtype = torch.bfloat16, **options: Any
) -> Trainer:
    settings = {"save_strategy": "no", "max_steps": 12, "learning_rate": 3e-3}
    args = TrainingArguments(
        str(folder), optim=name, per_device_train_batch_size=16, report_to="none",
        disable_tqdm=True, **{**settings, **options},
    )  # fmt: skip
    return Trainer(
        model=Model(dtype), args=args, train_dataset=rows(), eval_dataset=rows()
    )


def losses(folder: Path, name: str, dtype: torch.dtype, **options: Any) -> list[float]:
    run = trainer(folder, name, dtype, logging_steps=1, max_steps=40, **options)
    run.train()
    return [line["loss"] for line in run.state.log_history if "loss" in line]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_its_losses_stay_near_those_of_float32(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    compact = losses(tmp_path, "adamw_compact", dtype)
    wide = losses(tmp_path, "adamw_torch", torch.float32)
    assert compact != wide
    assert compact[-1] < compact[0] / 2
    torch.testing.assert_close(compact, wide, rtol=0.03, atol=0.015)


@pytest.mark.parametrize("name", NAMES)
def test_a_run_is_resumed_to_the_bit(name: str, tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 5}
    whole = trainer(tmp_path, name, **options)
    whole.train()
    path = tmp_path / "checkpoint-5"
    saved = torch.load(path / "optimizer.pt", weights_only=True)
    for state in saved["state"].values():
        assert state["step"] == 5
        assert state["exp_avg"].dtype == state["error_bits"].dtype == torch.int8
        assert state["exp_avg_scale"].dtype == torch.float16
    resumed = trainer(tmp_path, name, **options)
    resumed.train(resume_from_checkpoint=str(path))
    for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)
        for key, value in whole.optimizer.state[a].items():
            other = resumed.optimizer.state[b][key]
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other)), key


def test_accumulation_clipping_and_an_average_of_the_weights_work(
    tmp_path: Path,
) -> None:
    """The average is of the bfloat16 parameters, in float32."""
    run = trainer(
        tmp_path, "adamw_compact", gradient_accumulation_steps=2, max_grad_norm=0.1,
        ema_decay=0.5, ema_fp32=True, average_in_eval=False,
    )  # fmt: skip
    before = run.evaluate()["eval_loss"]
    averages = [p.detach().float() for p in run.model.parameters()]

    class Replay(TrainerCallback):
        def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            for mean, param in zip(averages, kwargs["model"].parameters(), strict=True):
                mean += 0.5 * (param.detach().float() - mean)

    run.add_callback(Replay())
    run.train()
    assert run.optimizer._engine.clip_coef < 1.0
    assert run.evaluate()["eval_loss"] < before
    with run.weight_average.applied():
        for mean, param in zip(averages, run.model.parameters(), strict=True):
            assert torch.equal(mean.bfloat16(), param)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"master_weights": True},
            "master_weights=True: compact state takes its place",
        ),
        ({"stochastic_rounding": True}, "with master_weight_bits=24, whose correction"),
        ({"optim_args": "optim_bits=8"}, "optim_args has 'optim_bits', which"),
        ({"optim_args": "master_weight_bits=16"}, "is 16; expected 24 or None"),
    ],
)
def test_what_does_not_go_with_it_is_rejected(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, "adamw_compact", **options).train()


def test_corrections_can_be_left_out(tmp_path: Path) -> None:
    run = trainer(
        tmp_path, "adamw_compact", optim_args="master_weight_bits=None",
        stochastic_rounding=True, max_steps=2,
    )  # fmt: skip
    run.train()
    assert not any("error_bits" in state for state in run.optimizer.state.values())


@pytest.mark.exhaustive  # ten runs of 400 updates: some minutes
def test_a_gpt2_ends_within_the_losses_of_five_seeds_of_float32() -> None:
    import compact_loss

    found = {
        way: [compact_loss.train(way, seed, 400)[0] for seed in range(5)]
        for way in ("AdamW, float32", "AdamWCompact, bfloat16")
    }
    wide, compact = found.values()
    assert min(wide) <= sum(compact) / 5 <= max(wide)
    spread = max(wide) - min(wide)
    assert all(abs(a - b) < spread / 4 for a, b in zip(wide, compact, strict=True))
