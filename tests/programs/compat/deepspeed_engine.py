"""ctrainer.compat.deepspeed's engine and module zero, on 2 ranks."""

import contextlib
from typing import Any

import deepspeed_engines as runs
import torch
from programs.run import tell

from ctrainer.compat import deepspeed
from ctrainer.compat.deepspeed import zero


def made(stage: int, dtype: str, in_groups: bool = False, **options: Any) -> Any:
    model = options.pop("model", None) or runs.Model()
    config = runs.configuration(stage, dtype) | options.pop("config", {})
    options = {"model_parameters": runs.parameters(model, in_groups)} | options
    return deepspeed.initialize(model=model, config=config, **options)[0]


def whole(engine: Any) -> dict[str, Any]:
    """The parameters' values, of this rank where it has them all."""
    of = engine.module
    found = of.full_state_dict() if hasattr(of, "units") else of.state_dict()
    return {name: value.tolist() for name, value in found.items()}


def message(call: Any, *arguments: Any, **options: Any) -> str:
    try:
        call(*arguments, **options)
    except (ValueError, RuntimeError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


results: dict[str, Any] = {}
for name, case in runs.CASES.items():
    results[name] = runs.train(made(*case), case[1], 0, runs.MICRO_STEPS)
for name in runs.SKIPPING:
    results[f"skipping {name}"] = runs.skipping(deepspeed.initialize, name)

# ---- accumulation in no_sync(), and boundaries that the caller sets


def passes(engine: Any, in_block: Any) -> Any:
    own = runs.batches("fp32")[engine.global_rank :: 2][:4]
    with in_block(engine):
        for batch in own[:-1]:
            engine.backward(engine(*runs.placed(engine, batch)))
        reduced = any(param.grad is not None for param in engine.module.parameters())
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(engine(*runs.placed(engine, own[-1])))
    engine.step()
    return engine.get_global_grad_norm(), reduced


for stage in range(4):
    of_four = {"gradient_accumulation_steps": 4}
    engine = made(stage, "fp32", config=of_four)
    results[f"no_sync {stage}"] = passes(engine, lambda of: of.no_sync())
    engine = made(stage, "fp32", config=of_four)
    engine.set_gradient_accumulation_boundary(False)
    results[f"synced {stage}"] = passes(engine, lambda of: contextlib.nullcontext())
engine = made(3, "fp32")
with engine.no_sync():
    results["step in no_sync"] = message(engine.step)

# ---- the arguments of initialize()

model = runs.Model()
given = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
engine = made(
    2, "fp32", model=model, optimizer=given,
    lr_scheduler=lambda of: torch.optim.lr_scheduler.LambdaLR(of, lambda _: 1.0),
)  # fmt: skip
results["own optimizer"] = engine.optimizer is given
runs.train(engine, "fp32", 0, 2)
results["own SGD"] = whole(engine)
engine = made(
    1, "fp32", optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    lr_scheduler=lambda of: torch.optim.lr_scheduler.StepLR(of, 1, 0.5),
)  # fmt: skip
results["scheduler"] = [log["lr"] for log in runs.train(engine, "fp32", 0, 4)]
used = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for param in used.param_groups[0]["params"]:
    used.state[param] = {"momentum_buffer": torch.zeros(1)}
results["optimizer with state"] = message(made, 2, "fp32", optimizer=used)
stranger = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1)
results["optimizer of others"] = message(made, 3, "fp32", optimizer=stranger)
results["mpu"] = message(made, 1, "fp32", mpu=object())
results["mesh_param"] = message(made, 1, "fp32", mesh_param=(1, 2))
results["no model"] = message(deepspeed.initialize, config={"train_batch_size": 2})
results["no config"] = message(deepspeed.initialize, model=runs.Model())
data = [(torch.full((5,), float(i)), torch.zeros(3)) for i in range(10)]
_, _, loader, _ = deepspeed.initialize(
    model=runs.Model(), config=runs.configuration(1, "fp32"), training_data=data
)
results["data"] = sorted(int(row[0]) for x, _ in loader for row in x)
engine = deepspeed.initialize(
    model=runs.Model(), config={"train_batch_size": 2, "zero_optimization": True}
)[0]
results["without optimizer"] = message(engine.backward, torch.zeros(()))

# ---- zero

with zero.Init():
    empty = torch.nn.Sequential(*(torch.nn.Linear(5, 5) for _ in range(3)))
results["on meta"] = all(p.is_meta for p in empty.parameters())
gathered = [*empty[0].parameters(), *empty[1].parameters()]
with zero.GatheredParameters(gathered, modifier_rank=1):
    if engine.global_rank == 1:
        for param in gathered:
            torch.nn.init.constant_(param, 0.25)
engine = made(3, "fp32", model=empty, config={"zero_optimization": {
    "stage": 3, "stage3_param_persistence_threshold": 20}})  # fmt: skip
results["units"] = len(engine.module.units())
found = whole(engine)
results["values of rank 1"] = {str(found[n]) for n in ("0.weight", "1.weight")} == {
    str([[0.25] * 5] * 5)
}
results["new values"] = [found["2.weight"], found["2.bias"]]
model = runs.Model()
engine = made(3, "fp32", model=model)
part = dict(engine.module.named_parameters())["head.weight"]
sizes = [part.numel()]
with zero.GatheredParameters([part, model.first.bias], modifier_rank=1):
    sizes.append(part.numel())
    results["read"] = [part.tolist(), model.first.bias.tolist()]
    if engine.global_rank == 1:
        model.head.weight.data.fill_(2.0)
        model.first.bias.data.fill_(3.0)
results["sizes"] = [*sizes, part.numel()]
with zero.GatheredParameters(part):  # with nothing else of its unit
    results["alone"] = part.numel()
found = whole(engine)
results["written"] = [found["head.weight"], found["first.bias"]]
with zero.GatheredParameters(model.head.bias):
    model.head.bias.data.fill_(7.0)
results["not written"] = whole(engine)["head.bias"]
runs.train(engine, "fp32", 0, 2)  # trains on afterwards


class Reader(torch.nn.Module):
    def __init__(self, of: Any) -> None:
        super().__init__()
        self.own = torch.nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self.own(x) @ weight


class Outer(torch.nn.Module):
    def __init__(self, registers: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.owner = torch.nn.Linear(6, 6)
        self.reader = Reader(self.owner)
        if registers:
            zero.register_external_parameter(self.reader, self.owner.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.reader(self.owner(x), self.owner.weight).square().mean()


def reading(stage: int, registers: bool = True) -> Any:
    config = {"zero_optimization": {"stage": stage}}
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 10
    outer = Outer(registers)
    return outer, made(stage, "fp32", model=outer, config=config)


def read(stage: int) -> Any:
    outer, engine = reading(stage)
    losses = []
    for _ in range(10):
        loss = engine(torch.ones(2, 6, device=engine.device))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, outer, engine


results["external 0"], *_ = read(0)
results["external 3"], outer, engine = read(3)
results["external units without"] = len(reading(3, registers=False)[1].module.units())
results["external late"] = message(
    zero.register_external_parameter, outer.owner, outer.reader.own.weight
)
results["external units"] = len(engine.module.units())
tell(results)
