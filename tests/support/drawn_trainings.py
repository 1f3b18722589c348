"""Sharded trainings of options drawn together, and the same in transformers."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from pathlib import Path
from typing import Any

import tiny
import torch
import transformers
from torch import nn

import ctrainer
from ctrainer.callbacks import TrainerCallback

UPDATES, SAVED, RANKS, ROWS, LR = 6, 3, 2, 2, 3e-3
SHARDING = (
    "whole", "full_shard", "shard_grad_op", "by size", "zero 1", "zero 2", "zero 3",
    "simple", "zero_dp_2", "zero_dp_3",
)  # fmt: skip
OFFLOADS = ("none", "none", "cpu", "state", "shards", "all")


@dataclasses.dataclass(frozen=True)
class Drawn:
    sharding: str
    offload: str
    optim: str
    precision: str
    accumulates: int
    clip: float
    decay: float
    recomputes: bool
    frozen: str
    prefetches: bool
    averages: bool
    resumes: str
    length: int
    evaluates: bool  # before training
    stays: bool  # the trainer that is killed resumes

    @property
    def in_files(self) -> bool:
        """Whether anything is: sharding by fairscale's words has no files."""
        named = self.sharding.startswith(("zero ", "full", "shard", "by"))
        return named and self.offload in ("state", "shards", "all")

    @property
    def is_rough(self) -> bool:
        """Whether values are rounded to 16 or 8 bits."""
        return self.precision != "fp32" or "8bit" in self.optim

    @property
    def rough_step(self) -> float:
        """How far rounding may move a weight: RMSprop's first steps are ten rates."""
        return 10 * LR if self.optim == "rmsprop" else LR

    @property
    def resumes_alone(self) -> bool:
        """Whether a rank without sharding resumes: of 8-bit state it has no blocks, and
        the loss scale of a DeepSpeed configuration is that configuration's."""
        scaled = self.precision == "fp16" and self.sharding.startswith("zero ")
        return "8bit" not in self.optim and not scaled


def drawn(number: int) -> Drawn:
    draw = random.Random(number)
    return Drawn(
        sharding=draw.choice(SHARDING),
        offload=draw.choice(OFFLOADS),
        optim=draw.choice(
            ["adamw_torch", "adamw_torch", "adafactor", "sgd", "rmsprop", "adagrad",
             "adamw_bnb_8bit"]
        ),
        precision=draw.choice(["fp32", "fp32", "fp32", "bf16", "fp16"]),
        accumulates=draw.choice([1, 2, 3]),
        clip=draw.choice([0.0, 0.1, 1.0]),
        decay=draw.choice([0.0, 0.1]),
        recomputes=draw.random() < 0.3,
        frozen=draw.choice(["", "", "embed_tokens", "layers.0", "norm"]),
        prefetches=draw.random() < 0.5,
        averages=draw.random() < 0.3,
        resumes=draw.choice(["", "same", "one"]),
        length=draw.choice([8, 12]),
        evaluates=draw.random() < 0.5,
        stays=draw.random() < 0.5,
    )  # fmt: skip


def model_of(case: Drawn) -> nn.Module:
    model = tiny.llama()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not case.frozen or case.frozen not in name)
    return model


def options_of(case: Drawn) -> dict[str, Any]:
    """Of both trainers."""
    return {
        "max_steps": UPDATES, "learning_rate": LR, "optim": case.optim,
        "gradient_accumulation_steps": case.accumulates, "max_grad_norm": case.clip,
        "weight_decay": case.decay, "gradient_checkpointing": case.recomputes,
        "train_sampling_strategy": "sequential", "eval_strategy": "steps",
        "eval_steps": SAVED,
    }  # fmt: skip


def sharding_of(case: Drawn, folder: str) -> dict[str, Any]:
    words = case.sharding.split()
    if words[0] == "zero":
        section: dict[str, Any] = {"stage": int(words[1])}
        places = {"cpu": ("cpu", "cpu"), "state": ("nvme", "none"),
                  "shards": ("none", "nvme"), "all": ("nvme", "nvme")}  # fmt: skip
        for name, place in zip(
            ("optimizer", "param"), places.get(case.offload, ()), strict=False
        ):
            section[f"offload_{name}"] = {"device": place}
            if place == "nvme":
                section[f"offload_{name}"]["nvme_path"] = folder
        if section.get("offload_param", {}).get("device") == "nvme":
            section["offload_param"]["max_in_cpu"] = 0
        section["overlap_comm"] = case.prefetches
        return {"deepspeed": {
            "zero_optimization": section,
            "fp16": {"enabled": "auto", "initial_scale_power": 8},
            "bf16": {"enabled": "auto"}, "gradient_clipping": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
        }}  # fmt: skip
    offload = " offload" if case.offload == "cpu" else ""
    if case.sharding.startswith(("simple", "zero_dp")):
        wraps = " auto_wrap" if case.sharding == "zero_dp_3" else ""
        offload = offload if wraps else ""
        return {"sharded_ddp": case.sharding + wraps + offload}
    if case.sharding == "whole":
        return {}
    config: dict[str, Any] = {"forward_prefetch": case.prefetches}
    config["backward_prefetch"] = "backward_pre" if case.prefetches else "no_prefetch"
    if case.offload in ("state", "all"):
        config["offload_folder"] = folder
    if case.offload in ("shards", "all"):
        config["shard_folder"] = folder
    strategy = f"{case.sharding} auto_wrap"
    if case.sharding == "by size":
        strategy, config["min_num_params"] = "full_shard", 600
    return {"fsdp": strategy + offload, "fsdp_config": config}


class Killed(Exception):
    """Ends a run between two updates."""


class Kills(TrainerCallback):
    """Ends the run, by an error or as a callback asks for it."""

    def __init__(self, raises: bool) -> None:
        self.raises = raises

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == SAVED + 1:
            if self.raises:
                raise Killed
            control.should_training_stop = True


def ours(case: Drawn, folder: str, ranks: int, **options: Any) -> Any:
    precision: dict[str, Any] = {}
    if case.precision != "fp32":
        precision[case.precision] = True
    if case.precision == "fp16" and not case.sharding.startswith("zero "):
        precision["loss_scaler"] = {"preset": "static", "loss_scale": 256.0}
    if case.averages:
        precision["ema_decay"] = 0.5
    sharding = sharding_of(case, folder) if ranks > 1 else {}
    return tiny.make(
        ctrainer.Trainer, model_of(case), rows(case), output_dir=folder,
        parts={"eval_dataset": rows(case)[:7]}, ddp_timeout=60,
        per_device_train_batch_size=ROWS * RANKS // ranks,
        **{**options_of(case), **sharding, **precision, **options},
    )  # fmt: skip


def rows(case: Drawn) -> Any:
    return tiny.tokens(UPDATES * RANKS * ROWS * 3, case.length, padded=True)


def told(made: Any) -> dict[str, Any]:
    logs = made.state.log_history
    found = {key: [log[key] for log in logs if key in log]
             for key in ("loss", "grad_norm", "eval_loss")}  # fmt: skip
    full = getattr(made.model, "full_state_dict", made.model.state_dict)
    return {**found, "weights": {k: v.tolist() for k, v in full().items()}}


def trained(case: Drawn, folder: str) -> dict[str, Any]:
    """What two ranks tell, or why the options do not go together."""
    saves = {"save_strategy": "steps", "save_steps": SAVED} if case.resumes else {}
    made = None
    try:
        made = ours(case, folder, RANKS, **saves)
        if case.evaluates:
            made.predict(rows(case)[:3])
        if case.resumes == "same":
            # A failure closes the group of ranks that a sharded model has.
            made.add_callback(Kills(not case.stays or case.sharding == "whole"))
            with contextlib.suppress(Killed):
                made.train()
            if case.stays:
                made.remove_callback(Kills)
            else:
                made = ours(case, folder, RANKS, **saves)
                if case.evaluates:
                    made.predict(rows(case)[:3])
        made.train(resume_from_checkpoint=case.resumes == "same")
    except ValueError as error:
        updates = 0 if made is None else made.state.global_step
        return {"rejected": str(error), "updates": updates}
    return told(made)


def alone(case: Drawn, folder: str) -> dict[str, Any]:
    """One rank that goes on from the checkpoint of two, without sharding."""
    made = ours(case, folder, 1)
    made.train(resume_from_checkpoint=str(Path(folder) / f"checkpoint-{SAVED}"))
    return told(made)


def expected(case: Drawn) -> dict[str, Any]:
    """What transformers' Trainer tells in one process, of float32."""
    options = options_of(case)
    if "8bit" in case.optim:
        options["optim"] = "adamw_torch"
    made = tiny.make(
        transformers.Trainer, model_of(case), rows(case),
        parts={"eval_dataset": rows(case)[:7]},
        per_device_train_batch_size=ROWS * RANKS, per_device_eval_batch_size=16,
        **options,
    )  # fmt: skip
    made.train()
    return told(made)


def apart(one: dict[str, Any], other: dict[str, Any]) -> torch.Tensor:
    """By how much each weight of two models differs."""
    assert one.keys() == other.keys()
    differ = [torch.tensor(one[n]) - torch.tensor(other[n]) for n in one]
    return torch.cat([difference.abs().flatten() for difference in differ])
