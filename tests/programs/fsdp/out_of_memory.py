"""Ranks of a Trainer, sharded or with an empty `fsdp`, that run out of memory each at
its own times and places: losses, and weights at the end, of their run and of one
without."""

from typing import Any

import tiny
import torch
from failing_passes import Fails
from programs.run import folder, options, rank, tell

import ctrainer
from ctrainer.comm import machines, world
from ctrainer.runtime import parts

if size := options.get("ranks_a_machine"):
    world(60)
    machines._this_machine = lambda: f"machine {rank // size}"
parts.GROWTH_INTERVAL = 1
ROWS = {"gpt2": tiny.tokens(46, padded=True), "net": tiny.rows(46)}


def trained(at: str, most: int) -> tuple[Any, Any, list[float], list[float]]:
    torch.manual_seed(3)
    name = options["model"]
    model = tiny.gpt2() if name == "gpt2" else tiny.Net(dropout=0.0)
    fails = Fails(17 * rank + 1, most, options["rate"], options.get("least", 2))
    if most:
        inner = model.transformer.h if name == "gpt2" else model.layers
        for module in (*inner, *(block.mlp for block in inner if name == "gpt2")):
            fails.watch(module)
    args = tiny.arguments(
        output_dir=f"{folder}/{at}", max_steps=options["steps"], seed=5,
        per_device_train_batch_size=5, learning_rate=0.1, optim="sgd", logging_steps=1,
        gradient_accumulation_steps=options["accumulation"], fsdp=options["fsdp"],
        fsdp_config=options["fsdp_config"], auto_find_batch_size=True,
        dataloader_drop_last=False,
    )  # fmt: skip
    trainer = ctrainer.Trainer(model, args, train_dataset=ROWS[name])
    trainer.remove_callback(ctrainer.PrinterCallback)
    trainer.train()
    losses = [e["loss"] for e in trainer.state.log_history if "loss" in e]
    whole = (
        trainer.model.full_state_dict()
        if options["fsdp"]
        else trainer.model.state_dict()
    )
    weights = [float(x) for value in whole.values() for x in value.float().flatten()]
    return trainer, fails, losses, weights


class Coupled(tiny.Net):
    def forward(self, x: Any, labels: Any = None) -> Any:
        outputs = super().forward(x, labels)
        return {**outputs, "loss": outputs["loss"] ** 2 * len(x)}


if options.get("coupled"):
    tiny.Net = Coupled  # type: ignore[misc]
found: dict[str, Any] = {"plain": None, "failing": None, "error": None}
if not options.get("raises"):
    found["plain"] = trained("plain", 0)[2:]
try:
    _, fails, *found["failing"] = trained("failing", options["most"][rank])
    found |= {"failed": fails.failed, "places": sorted(fails.places)}
except Exception as error:
    if not options.get("raises"):
        raise
    found["error"] = f"{type(error).__name__}: {error}"
tell(found)
