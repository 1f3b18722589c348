"""A run whose micro-batches do not fit into the address space that is left."""

import json
import resource
import sys

import torch
from tiny import arguments

import ctrainer

limit, folder = int(sys.argv[1]), sys.argv[2]


class Wide(torch.nn.Module):
    """2 MiB of hidden values a row."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = torch.nn.Linear(64, 4096), torch.nn.Linear(4096, 1)

    def forward(self, x, labels=None):
        hidden = torch.tanh(self.a(x).repeat(1, 8, 1)).mean(1)
        return {"loss": ((self.b(hidden).squeeze(-1) - labels) ** 2).mean()}


torch.manual_seed(1)
data = [{"x": torch.randn(16, 64), "labels": torch.randn(())} for _ in range(64)]
args = arguments(
    output_dir=folder, per_device_train_batch_size=64, max_steps=4, logging_steps=1,
    auto_find_batch_size=True,
)  # fmt: skip
trainer = ctrainer.Trainer(Wide(), args, train_dataset=data)
trainer.remove_callback(ctrainer.PrinterCallback)
if limit:
    with open("/proc/self/status") as file:
        size = next(line for line in file if line.startswith("VmSize"))
    allowed = int(size.split()[1]) * 1024 + limit * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (allowed, allowed))
trainer.train()
losses = [e["loss"] for e in trainer.state.log_history if "loss" in e]
print(json.dumps({"losses": losses, "rows": trainer._parts.rows}))
