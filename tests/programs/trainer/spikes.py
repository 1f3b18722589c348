"""A model whose gradients are the rows, and ranks whose gradients have a spike."""

from typing import Any

import numpy as np
import torch

import ctrainer

RATE = 0.125


class Slope(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def forward(self, slope: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.weight * slope).mean()}


def slopes(rows: Any) -> list[dict[str, torch.Tensor]]:
    return [{"slope": torch.tensor(float(x))} for x in rows]


def arguments_of(package: Any, folder: Any, steps: int, **options: Any) -> Any:
    own = {
        "per_device_train_batch_size": 1, "optim": "sgd", "logging_steps": steps,
        "lr_scheduler_type": "constant", "save_strategy": "no", **options,
    }  # fmt: skip
    return package.TrainingArguments(
        str(folder), max_steps=steps, learning_rate=RATE, max_grad_norm=0.0,
        use_cpu=True, report_to=[], disable_tqdm=True,
        train_sampling_strategy="sequential", **own,
    )  # fmt: skip


if __name__ == "__main__":
    from programs.run import folder, rank, tell, world

    generator = np.random.default_rng(5)
    every = 1.0 + 0.1 * generator.random(world * 120)
    every[2 * 90 + 1] = 30.0
    every[2 * 20] = 30.0  # one of the first, which are never skipped
    args = arguments_of(
        ctrainer, folder, 120, skip_grad_norm_sigmas=6.0, ddp_timeout=60
    )  # fmt: skip
    trainer = ctrainer.Trainer(Slope(), args, train_dataset=slopes(every))
    trainer.train()
    last = trainer.state.log_history[-1]
    tell({
        "rows": every[rank::world].tolist(), "weight": trainer.model.weight.item(),
        "counts": last["spike_steps"],
    })  # fmt: skip
