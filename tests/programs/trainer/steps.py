"""Fine-tune a small model on one thread for as many updates as are asked."""

import gc
import sys

import torch

import ctrainer


class Regression(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = [torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)]
        self.layers = torch.nn.Sequential(*layers)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": ((self.layers(x) - labels) ** 2).mean()}


def main(updates: int, folder: str) -> None:
    torch.set_num_threads(1)
    rows = torch.randn(256, 33)
    ctrainer.Trainer(
        Regression(),
        ctrainer.TrainingArguments(
            folder, max_steps=updates, per_device_train_batch_size=8,
            logging_steps=1000, save_strategy="no", report_to=[], disable_tqdm=True,
        ),
        train_dataset=[{"x": row[:32], "labels": row[32:]} for row in rows],
    ).train()  # fmt: skip


if __name__ == "__main__":
    gc.disable()  # a collection that falls into one run alone is no part of an update
    main(int(sys.argv[1]), sys.argv[2])
