"""master_weights and stochastic_rounding of the arguments, and a checkpoint of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Net, rows

import ctrainer


class Half(Net):
    """Parameters of bfloat16; inputs and labels come as float32."""

    def __init__(self) -> None:
        super().__init__()
        self.to(torch.bfloat16)

    def forward(self, x: torch.Tensor, labels: Any = None) -> dict[str, torch.Tensor]:
        out = super().forward(x.to(torch.bfloat16))
        loss = torch.nn.functional.mse_loss(out["logits"].float(), labels)
        return {"loss": loss, "logits": out["logits"]}


def run(folder: Path, resume: str | None = None, **args: Any) -> ctrainer.Trainer:
    settings: dict[str, Any] = {
        "max_steps": 12, "save_steps": 6, "logging_steps": 1, "learning_rate": 3e-3,
        "report_to": "none", "disable_tqdm": True, "use_cpu": True, **args,
    }  # fmt: skip
    training = ctrainer.TrainingArguments(str(folder), **settings)
    trainer = ctrainer.Trainer(Half(), training, train_dataset=rows())
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize("option", ["master_weights", "stochastic_rounding"])
def test_a_resumed_run_is_bit_identical(tmp_path: Path, option: str) -> None:
    whole = run(tmp_path / "whole", **{option: True})
    again = run(
        tmp_path / "again", str(tmp_path / "whole/checkpoint-6"), **{option: True}
    )
    for a, b in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b)
    losses = [
        [r["loss"] for r in t.state.log_history if "loss" in r] for t in (whole, again)
    ]
    assert losses[0] == losses[1]


def test_master_weights_are_what_is_updated(tmp_path: Path) -> None:
    trainer = run(tmp_path, master_weights=True)
    state = trainer.optimizer.state
    for p in trainer.model.parameters():
        assert torch.equal(p, state[p]["master_param"].to(torch.bfloat16))
        assert state[p]["exp_avg"].dtype == torch.float32


def test_stochastic_rounding_changes_the_run_and_keeps_no_copy(tmp_path: Path) -> None:
    nearest = run(tmp_path / "a")
    random = run(tmp_path / "b", stochastic_rounding=True)
    pairs = zip(nearest.model.parameters(), random.model.parameters(), strict=True)
    assert any(not torch.equal(a, b) for a, b in pairs)
    assert all("master_param" not in s for s in random.optimizer.state.values())
    assert random.optimizer.param_groups[0]["rounding_step"] == 12
