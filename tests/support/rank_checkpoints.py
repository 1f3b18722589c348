"""A training for tests of checkpoints on several ranks."""

from __future__ import annotations

import hashlib
import os
import time
from typing import Any

import torch
from torch import nn

import ctrainer

Arguments = ctrainer.TrainingArguments


class Net(nn.Module):
    """A regression with dropout, whose generator therefore matters."""

    main_input_name = "x"

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) / 4

    def floating_point_ops(self, inputs: Any) -> float:
        return 1000.0

    def forward(self, x: torch.Tensor, labels: Any = None) -> dict[str, torch.Tensor]:
        y = self.layers(x).squeeze(-1)
        return {"loss": nn.functional.mse_loss(y, labels), "logits": y}


def rows(n: int) -> list[dict[str, torch.Tensor]]:
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(5))
    return [{"x": x[i], "labels": x[i].sum()} for i in range(n)]


def make(folder: str, cls: type = ctrainer.Trainer, **options: Any) -> Any:
    args = Arguments(
        folder,
        **{
            "use_cpu": True, "report_to": "none", "disable_tqdm": True,
            "ddp_timeout": 60, "per_device_train_batch_size": 4, "max_steps": 6,
            "logging_steps": 3, "save_steps": 2, "learning_rate": 1e-2,
            "include_num_input_tokens_seen": "all", **options,
        },
    )  # fmt: skip
    return cls(Net(), args, train_dataset=rows(38), eval_dataset=rows(10))


# Ranks that train apart by AdamW, and meet after every third update.
OF_BLOCKS: dict[str, Any] = {
    "use_bmuf": True, "global_sync_iter": 3, "warmup_iterations": 1,
    "block_momentum": 0.5, "max_steps": 8, "logging_steps": 1, "save_steps": 4,
}  # fmt: skip


def wait_for(checkpoint: str) -> None:
    """Return when the checkpoint, which ranks write in the background, is whole."""
    end = time.monotonic() + 60
    while not os.path.exists(checkpoint):
        assert time.monotonic() < end, f"{checkpoint} was not saved"
        time.sleep(0.01)


def weights(trainer: Any) -> str:
    digest = hashlib.sha256()
    for parameter in trainer.model.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    return digest.hexdigest()


def history(trainer: Any) -> list[dict[str, Any]]:
    timed = ("runtime", "per_second")
    return [
        {k: v for k, v in entry.items() if not k.endswith(timed)}
        for entry in trainer.state.log_history
    ]


def files(folder: str) -> dict[str, list[str]]:
    return {
        name: sorted(os.listdir(os.path.join(folder, name)))
        for name in sorted(os.listdir(folder))
        if os.path.isdir(os.path.join(folder, name))
    }
