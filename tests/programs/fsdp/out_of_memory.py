"""Ranks of a sharded Trainer that run out of memory each at its own times and places:
losses, and weights at the end, of their run and of one without."""

import random
from typing import Any

import tiny
import torch
from programs.run import folder, options, rank, tell

import ctrainer
from ctrainer.runtime import parts

parts.GROWTH_INTERVAL = 1
ROWS = {"gpt2": tiny.tokens(46, padded=True), "net": tiny.rows(46)}


class Fails:
    """In the forward or the backward pass of a drawn module, `most` times."""

    def __init__(self, most: int) -> None:
        self.draw, self.left, self.failed = random.Random(17 * rank + 1), most, 0
        self.places: set[str] = set()

    def check(self, place: str, rows: int) -> None:
        if (
            rows < options.get("least", 2)
            or not self.left
            or self.draw.random() > options["rate"]
        ):
            return
        self.left, self.failed = self.left - 1, self.failed + 1
        self.places.add(place)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")

    def watch(self, module: Any) -> None:
        def before(_: Any, args: Any, kwargs: Any = None) -> None:
            if module.training and torch.is_grad_enabled():
                self.check("forward", rows_of(args, kwargs))

        def after(_: Any, args: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if module.training and torch.is_tensor(first) and first.requires_grad:
                rows = len(first)
                first.register_hook(lambda grad: self.check("backward", rows))
                self.check("after", rows)

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after)


def rows_of(args: Any, kwargs: Any) -> int:
    tensors = [t for t in (*args, *(kwargs or {}).values()) if torch.is_tensor(t)]
    return len(tensors[0]) if tensors else 0


def trained(at: str, most: int) -> tuple[Any, Any, list[float], list[float]]:
    torch.manual_seed(3)
    name = options["model"]
    model = tiny.gpt2() if name == "gpt2" else tiny.Net(dropout=0.0)
    fails = Fails(most)
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
    weights = [
        float(x)
        for value in trainer.model.full_state_dict().values()
        for x in value.float().flatten()
    ]
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
