"""Trainings of fairseq's Trainer with options drawn together, and the same written out
in torch: what fairseq does in an update, in float32 and in one process."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import fairseq_tiny as tiny
import torch
import transformers
from torch import nn

UPDATES, SAVED, RANKS = 6, 3, 2
RATES = {"adadelta": 1.0, "sgd": 0.1, "nag": 0.05}
EMA_DECAY = 0.7
# Of what is computed in 16 bits.
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp16": {"common__fp16": True},
    "fp16 apart": {"common__fp16": True, "common__fp16_no_flatten_grads": True},
    "fp16 in place": {"common__fp16": True, "common__memory_efficient_fp16": True},
    "bf16": {"common__bf16": True},
    "bf16 in place": {"common__bf16": True, "common__memory_efficient_bf16": True},
    "amp": {"common__amp": True},
}
SCHEDULES = {
    "fixed": {"warmup_updates": 0},
    "inverse_sqrt": {"warmup_updates": 4},
    "polynomial_decay": {"warmup_updates": 2, "total_num_update": 8},
}


@dataclasses.dataclass(frozen=True)
class Drawn:
    backend: str
    zero: str
    precision: str
    optimizer: str
    schedule: str
    accumulates: int
    clip: float
    decay: float
    averages: bool
    tied: bool
    frozen: str
    uneven: bool
    resumes: str
    overflows: bool
    stays: bool  # the trainer that goes on resumes

    @property
    def rate(self) -> float:
        return RATES.get(self.optimizer, 0.02)

    @property
    def resumes_alone(self) -> bool:
        """Whether a process without sharding has the same kind of optimizer: shards
        are updated in place."""
        sharded = self.backend == "fully_sharded"
        return (
            not sharded
            or self.precision in ("fp32", "amp")
            or (self.precision.endswith("in place") and self.in_place)
        )

    @property
    def in_place(self) -> bool:
        return self.optimizer in ("adam", "adamax", "adafactor", "nag")

    @property
    def is_rough(self) -> bool:
        return self.precision not in ("fp32", "amp")


def drawn(number: int) -> Drawn:
    draw = random.Random(number)
    precision = draw.choice(["fp32", "fp32", "fp32", *PRECISIONS])
    return Drawn(
        backend=draw.choice(
            ["pytorch_ddp", "legacy_ddp", "fully_sharded", "fully_sharded"]
        ),
        zero=draw.choice(["none", "none", "os"]),
        precision=precision,
        optimizer=draw.choice(
            ["adam", "adam", "adam", "adafactor", "adagrad", "adadelta", "adamax",
             "nag", "sgd"]
        ),
        schedule=draw.choice(["fixed", "inverse_sqrt", "polynomial_decay"]),
        accumulates=draw.choice([1, 2, 3]),
        clip=draw.choice([0.0, 0.1, 25.0]),
        decay=draw.choice([0.0, 0.1]),
        averages=draw.random() < 0.4,
        tied=draw.random() < 0.3,
        frozen=draw.choice(["", "", "", "embed", "out.bias"]),
        uneven=draw.random() < 0.4,
        resumes=draw.choice(["", "same", "one"]),
        overflows=precision.startswith(("fp16", "amp")) and draw.random() < 0.5,
        stays=draw.random() < 0.5,
    )  # fmt: skip


def model_of(case: Drawn) -> tiny.Model:
    model = tiny.Model()
    if case.tied:
        model.out.weight = model.embed.weight
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not case.frozen or case.frozen not in name)
    return model


def updates_of(case: Drawn) -> list[list[Any]]:
    """The micro-batches of each update, of all ranks in turn. At the end one has none;
    the second of the second update overflows."""
    samples: list[Any] = tiny.batches(UPDATES * RANKS * case.accumulates)
    if case.uneven:
        samples[-1] = {}
    updates = tiny.groups(samples, RANKS * case.accumulates)
    if case.overflows:
        updates[1][1]["factor"] = math.inf
    return updates


def ours(case: Drawn, ranks: int) -> Any:
    sections: dict[str, dict[str, Any]] = {
        "optimizer": {"_name": case.optimizer, "lr": [case.rate],
                      "weight_decay": case.decay},
        "lr_scheduler": {"_name": case.schedule, "lr": [case.rate]},
    }  # fmt: skip
    more: dict[str, dict[str, Any]] = {
        "adam": {"adam_betas": "(0.9, 0.98)", "adam_eps": 1e-6},
        "adamax": {"adamax_betas": "(0.9, 0.98)", "adamax_eps": 1e-6},
        "adafactor": {"scale_parameter": False, "relative_step": False},
        "nag": {"momentum": 0.9},
        "sgd": {"momentum": 0.9},
    }
    sections["optimizer"] |= more.get(case.optimizer, {})
    sections["lr_scheduler"] |= SCHEDULES[case.schedule]
    changes = {f"{group}__{name}": value for group, values in sections.items()
               for name, value in values.items()}  # fmt: skip
    sharded = {
        "distributed_training__distributed_world_size": ranks,
        "distributed_training__ddp_backend": case.backend,
        "distributed_training__zero_sharding": case.zero,
    }
    made = tiny.trainer(
        model_of(case), **changes, optimization__lr=[case.rate],
        optimization__clip_norm=case.clip, common__fp16_init_scale=128,
        optimization__update_freq=[case.accumulates * RANKS // ranks],
        ema__store_ema=case.averages, ema__ema_decay=EMA_DECAY, ema__ema_fp32=True,
        **PRECISIONS[case.precision], **(sharded if ranks > 1 else {}),
    )  # fmt: skip
    made.reset_dummy_batch(tiny.batches(1)[0])
    assert made.optimizer is not None  # made when it is asked for
    return made


def told(made: Any, losses: list[float]) -> dict[str, Any]:
    found = {"loss": losses, "updates": made.get_num_updates()}
    sharded = hasattr(made.model, "get_shard_metadata")
    whole = (made.model if sharded else made.get_model()).state_dict()
    found["weights"] = {k: v.float().tolist() for k, v in whole.items()}
    if made.cfg.ema.store_ema:
        averages = made.ema.get_model().state_dict()
        found["averages"] = {k: v.float().tolist() for k, v in averages.items()}
    return found


def trained(case: Drawn, folder: str, rank: int, ready: Any) -> dict[str, Any]:
    """What a rank tells, or why the options do not go together. ready() returns when
    all ranks have called it."""
    losses: list[float] = []
    path = f"{folder}.pt"
    try:
        made = ours(case, RANKS)
    except (ValueError, RuntimeError) as error:
        return {"rejected": str(error)}
    for number, update in enumerate(updates_of(case)):
        if number == SAVED and case.resumes:
            save(made, path, rank)
            ready()
            if case.resumes == "same":
                if case.stays:
                    made.train_step(update[rank::RANKS])
                else:
                    made = ours(case, RANKS)
                made.load_checkpoint(path)
        losses += loss_of(made.train_step(update[rank::RANKS]))
    return told(made, losses)


def loss_of(output: dict[str, Any] | None) -> list[float]:
    """None: of an update that is skipped."""
    return [] if output is None else [output["loss"]]


def save(made: Any, path: str, rank: int) -> None:
    if made.cfg.distributed_training.zero_sharding == "os":
        made.consolidate_optimizer()
    if rank == 0:
        made.save_checkpoint(path, {"epoch": 1})
    elif hasattr(made.model, "get_shard_metadata"):
        made.state_dict()


def alone(case: Drawn, folder: str) -> dict[str, Any]:
    """One rank that goes on from the checkpoint of two, without sharding."""
    made = ours(case, 1)
    made.load_checkpoint(f"{folder}.pt")
    losses = []
    for update in updates_of(case)[SAVED:]:
        losses += loss_of(made.train_step(update))
    return told(made, losses)


# What fairseq does, written out


def rate_of(case: Drawn, done: int) -> float:
    """The learning rate after `done` updates."""
    rate = case.rate
    if case.schedule == "inverse_sqrt":
        return rate * (done / 4 if done < 4 else math.sqrt(4 / done))
    if case.schedule == "polynomial_decay":
        return rate * (done / 2 if done <= 2 else 1 - (done - 2) / 6)
    return rate


class Adam(torch.optim.Optimizer):
    """Decays first; eps is added to the root that is not corrected."""

    def __init__(self, params: Any, case: Drawn) -> None:
        super().__init__(params, {"lr": case.rate, "decay": case.decay})
        self.is_max = case.optimizer == "adamax"

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state, lr = self.state[p], group["lr"]
                t = state["t"] = state.get("t", 0) + 1
                zeros = torch.zeros_like(p)
                m = state["m"] = 0.9 * state.get("m", zeros) + 0.1 * p.grad
                v = state.get("v", zeros)
                if self.is_max:
                    v, corrected = torch.maximum(0.98 * v, p.grad.abs()), 1.0
                    root = v
                else:
                    v = 0.98 * v + 0.02 * p.grad**2
                    root, corrected = v.sqrt(), math.sqrt(1 - 0.98**t)
                state["v"] = v
                p -= group["decay"] * lr * p
                p -= lr * corrected / (1 - 0.9**t) * m / (root + 1e-6)


class NAG(torch.optim.Optimizer):
    """With the momentum of a changed learning rate corrected."""

    def __init__(self, params: Any, case: Drawn) -> None:
        super().__init__(params, {"lr": case.rate, "decay": case.decay})
        self.before = case.rate

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            lr = group["lr"]
            correct = lr / self.before if self.before > 0 else lr
            for p in group["params"]:
                buf = self.state[p].get("buf", torch.zeros_like(p))
                p *= 1 - lr * group["decay"]
                p += 0.81 * correct * buf - 1.9 * lr * p.grad
                self.state[p]["buf"] = 0.9 * correct * buf - lr * p.grad
            self.before = lr


def optimizer_of(case: Drawn, params: list[nn.Parameter]) -> Any:
    options: dict[str, Any] = {"lr": case.rate, "weight_decay": case.decay}
    if case.optimizer in ("adam", "adamax"):
        return Adam(params, case)
    if case.optimizer == "nag":
        return NAG(params, case)
    if case.optimizer == "adafactor":
        return transformers.Adafactor(
            params, **options, scale_parameter=False, relative_step=False
        )
    if case.optimizer == "sgd":
        return torch.optim.SGD(params, **options, momentum=0.9)
    if case.optimizer == "adagrad":
        return torch.optim.Adagrad(params, **options)
    return torch.optim.Adadelta(params, **options, rho=0.9, eps=1e-6)


def expected(case: Drawn) -> dict[str, Any]:
    model = model_of(case)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = optimizer_of(case, params)
    averages: dict[str, torch.Tensor] = {}  # begin with the weights of one update
    losses = []
    for update in updates_of(case):
        if case.overflows and "factor" in update[1]:
            continue
        parts = [tiny.Criterion()(model, sample) for sample in update if sample]
        size = sum(part[1] for part in parts)
        optimizer.zero_grad()
        (sum(part[0] for part in parts) / size).backward()
        losses.append(sum(part[0].item() for part in parts) / size / math.log(2))
        if case.clip:
            nn.utils.clip_grad_norm_(params, case.clip)
        for group in optimizer.param_groups:
            group["lr"] = rate_of(case, len(losses) - 1)
        optimizer.step()
        for name, value in model.state_dict().items():
            before = averages.get(name, value)
            averages[name] = EMA_DECAY * before + (1 - EMA_DECAY) * value
    found: dict[str, Any] = {"loss": losses, "weights": listed(model.state_dict())}
    if case.averages:
        found["averages"] = listed(averages)
    return found


def listed(values: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {name: value.tolist() for name, value in values.items()}
