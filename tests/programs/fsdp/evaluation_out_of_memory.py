"""Ranks of a sharded Trainer whose evaluations run out of memory each at its own times
and places: metrics and predictions, and those of one without failures."""

import time
from typing import Any

import numpy as np
import tiny
import torch
from failing_passes import Fails
from programs.run import options, rank, tell

import ctrainer
from ctrainer.comm import machines, world

if size := options["ranks_a_machine"]:
    world(60)
    machines._this_machine = lambda: f"machine {rank // size}"
ROWS = {"gpt2": tiny.tokens(79, padded=True), "net": tiny.rows(79)}


def metrics(p: Any) -> dict[str, float]:
    return {"mean": float(np.mean(np.asarray(p.predictions, np.float64) ** 3))}


class Broken(ctrainer.Trainer):
    """One rank fails before or after its pass, and not for want of memory."""

    broken, steps = "", 0

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        self.steps += 1
        if self.broken == "before":
            self.fail()
        answer = super().prediction_step(*args, **kwargs)
        if self.broken == "after":
            self.fail()
        return answer

    def fail(self) -> None:
        if self.steps == 3 and rank == 1:
            raise KeyError("broken")


class BrokenBetween(ctrainer.TrainerCallback):
    def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
        if rank == 1:
            raise KeyError("broken")


class Coupled(tiny.Net):
    def forward(self, x: Any, labels: Any = None) -> Any:
        outputs = super().forward(x, labels)
        if labels is not None:
            outputs["loss"] = outputs["loss"] ** 2 * len(x)
        return outputs


def evaluated(case: dict[str, Any], most: int) -> Any:
    torch.manual_seed(3)
    name = case.get("model", "gpt2")
    net = Coupled if case.get("coupled") else tiny.Net
    model = tiny.gpt2() if name == "gpt2" else net()
    fails = Fails(31 * rank + 2, most, case["rate"], case.get("least", 3), True)
    for module in model.transformer.h if name == "gpt2" else model.layers:
        fails.watch(module)
    args = tiny.arguments(
        max_steps=2, fsdp=case["fsdp"], fsdp_config=case["fsdp_config"], seed=5,
        per_device_train_batch_size=4, per_device_eval_batch_size=6,
        auto_find_batch_size=True, optim="sgd", **case.get("more", {}),
    )  # fmt: skip
    rows = ROWS[name]
    trainer = Broken(model, args, train_dataset=rows, compute_metrics=metrics)
    trainer.remove_callback(ctrainer.PrinterCallback)
    trainer.train()
    trainer.broken = case.get("broken", "")
    if trainer.broken == "between":
        trainer.add_callback(BrokenBetween())
    numbers = []
    for by_token in (name == "gpt2", False):
        trainer.args.eval_loss_by_token = by_token
        found = trainer.evaluate(rows)
        kept = ("eval_loss", "eval_mean", "eval_loss_by_token")
        numbers += [found[key] for key in kept if key in found]
    hidden = [{k: v for k, v in row.items() if k != "labels"} for row in rows]
    predictions = trainer.predict(hidden).predictions
    return numbers, predictions, fails, trainer._evaluations.pieces


def both(case: dict[str, Any]) -> dict[str, Any]:
    plain, expected, *_ = evaluated(case, 0)
    failing, predictions, fails, pieces = evaluated(case, case["most"][rank])
    return {
        "plain": plain, "failing": failing, "pieces": pieces, "failed": fails.failed,
        "places": sorted(fails.places), "same_predictions": bool(
            np.allclose(expected, predictions, rtol=1e-5, atol=1e-6)
        ),
    }  # fmt: skip


def error_of(case: dict[str, Any]) -> str:
    began = time.monotonic()
    try:
        evaluated(case, case["most"][rank])
    except Exception as error:
        assert time.monotonic() - began < 60  # no rank has waited in vain
        return f"{type(error).__name__}: {error}"
    return ""


tell([(error_of if case.get("raises") else both)(case) for case in options["cases"]])
