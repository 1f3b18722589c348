"""HF's Trainer on 2 ranks that train apart and meet at the ends of blocks."""

import os

import torch
from programs.run import folder, options, rank, tell
from rank_checkpoints import OF_BLOCKS, files, history, make
from rank_checkpoints import weights as digest
from torch import nn

import ctrainer


class Line(nn.Module):
    """Each rank has a target of its own, and all rows are alike."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]) + rank)

    def forward(self, x, labels=None):
        return {"loss": ((x @ self.weight - rank) ** 2).mean()}


rows = [{"x": torch.tensor([0.5, 1.0, -0.25]), "labels": 0.0} for _ in range(64)]


def train(steps, where, resume=None, **blocks):
    args = ctrainer.TrainingArguments(
        f"{folder}/{where}",
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        optim="sgd",
        learning_rate=0.05,
        lr_scheduler_type="constant",
        max_grad_norm=0,
        max_steps=steps,
        per_device_train_batch_size=2,
        ddp_timeout=60,
        save_strategy="steps" if where.startswith("saved") else "no",
        save_steps=4,
        **blocks,
    )
    made = ctrainer.Trainer(Line(), args, train_dataset=rows)
    made.train(resume_from_checkpoint=resume)
    return made


def weights(made):
    return made.model.weight.tolist()


BMUF = {
    "use_bmuf": True,
    "global_sync_iter": 2,
    "warmup_iterations": 1,
    "block_momentum": 0.5,
    "block_lr": 0.7,
}
DILOCO = {"use_diloco": True, "global_sync_iter": 3}
killed = options["killed"]
found = {
    "bmuf": weights(train(6, "plain", **BMUF)),
    "diloco": weights(train(6, "plain", **DILOCO)),
    "within": weights(train(5, "plain", **DILOCO)),
}
half = train(4, "saved", **BMUF)
half._communicator.barrier()
path = f"{folder}/saved/checkpoint-4"
found["files"] = "blocks.pt" in os.listdir(path)
found["resumed"] = weights(train(6, "plain", resume=path, **BMUF))
CODED = {**BMUF, "delta_bits": 4}
train(4, "saved coded", **CODED)._communicator.barrier()
path = f"{folder}/saved coded/checkpoint-4"
found["coded"] = [
    weights(train(6, "plain", **CODED)),
    weights(train(6, "plain", resume=path, **CODED)),
]

# The block that ends at update 4 is on its way in the checkpoint, and at the end.
AWAY = {**BMUF, "global_sync_iter": 4, "overlap_steps": 2}
train(4, "saved away", **AWAY)._communicator.barrier()
path = f"{folder}/saved away/checkpoint-4"
found["away"] = [
    weights(train(6, "plain", **AWAY)),
    weights(train(6, "plain", resume=path, **AWAY)),
]
found["ended away"] = weights(train(5, "plain", **AWAY))

whole = make(f"{folder}/whole", **OF_BLOCKS)
whole.train()
again = make(f"{folder}/again", **OF_BLOCKS)
again.train(resume_from_checkpoint=f"{killed}/checkpoint-4")
for name, made in (("whole", whole), ("again", again)):
    # Norms are each rank's own, and those in a checkpoint the first one's.
    logs = [e for e in history(made) if e["step"] > 4 or e.pop("grad_norm")]
    found[name] = [digest(made), logs, str(made.optimizer.state_dict())]
found["killed files"] = files(killed)
tell(found)
