"""A model and batches that DeepSpeed's engine has trained (kept/deepspeed), and ours
trains: with a tied, a frozen and a two-dimensional parameter, and a buffer."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

KEPT = Path(__file__).parents[1] / "kept" / "deepspeed"
MICRO_STEPS, SAVED_AT = 12, 8  # passes of a rank, two an update
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        draws = torch.Generator().manual_seed(3)
        self.first = nn.Linear(5, 7)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 7))
        self.frozen = nn.Linear(7, 7, bias=False)
        self.second = nn.Linear(7, 7)
        self.second.weight = self.first_tied = nn.Parameter(torch.empty(7, 7))
        self.head = nn.Linear(7, 3)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=draws) * 0.3)
        self.frozen.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        scale: Any = self.scale
        h = self.frozen(torch.tanh(self.first(x)) * scale.to(x.dtype))
        h = torch.tanh(self.second(h)) @ self.first_tied
        return (self.head(h).float() - y.float()).square().mean()


def batches(dtype: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For two ranks, one after the other."""
    draws = torch.Generator().manual_seed(5)
    return [
        (
            torch.randn(2, 5, generator=draws).to(DTYPES[dtype]),
            torch.randn(2, 3, generator=draws).to(DTYPES[dtype]),
        )
        for _ in range(2 * MICRO_STEPS)
    ]


def configuration(stage: int, dtype: str) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {
                "warmup_max_lr": 1e-2, "warmup_num_steps": 4, "warmup_type": "linear"
            },
        },
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    if dtype == "fp16":
        config["fp16"] = {
            "enabled": True, "initial_scale_power": 18, "loss_scale_window": 1000,
            "hysteresis": 1,
        }  # fmt: skip
    return config


def parameters(model: nn.Module, in_groups: bool) -> list[Any]:
    """Those that train; in groups vectors are not decayed."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if not in_groups:
        return trained
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
    ]


def placed(engine: Any, batch: Any) -> Any:
    """The batch where the engine computes, which moves none."""
    return [tensor.to(engine.device) for tensor in batch]


def train(
    engine: Any, dtype: str, first: int, last: int, of_all: Any = None
) -> list[dict[str, Any]]:
    """The passes [first, last) of this rank, and what the engine says after each."""
    of_all, log = of_all or batches(dtype), []
    for number in range(first, last):
        loss = engine(*placed(engine, of_all[2 * number + engine.global_rank]))
        engine.backward(loss)
        boundary = engine.is_gradient_accumulation_boundary()
        engine.step()
        norm = float(engine.get_global_grad_norm() or 0.0)
        of = engine.optimizer
        scale = getattr(of, "loss_scale", None) or getattr(of, "cur_scale", 1.0)
        log.append(
            {
                "loss": loss.item(), "boundary": boundary, "lr": engine.get_lr(),
                "norm": norm if math.isfinite(norm) else None, "scale": float(scale),
                "skipped": engine.skipped_steps, "steps": engine.global_steps,
                "micro": engine.micro_steps, "samples": engine.global_samples,
            }
        )  # fmt: skip
    return log


def kept(name: str, file: str = "trainings") -> Any:
    return json.loads((KEPT / f"{file}.json").read_text())[name]


# By stage, dtype, and whether the parameters are in groups: what DeepSpeed has trained.
CASES = {
    f"{stage} {dtype}{' groups' * in_groups}": (stage, dtype, in_groups)
    for stage, dtype, in_groups in [
        *[(stage, dtype, False) for dtype in DTYPES for stage in range(4)],
        (2, "fp32", True),
        (3, "fp32", True),
    ]
}


# ---- updates whose gradients are not finite

# By stage and dtype: plain, without bf16's check_grad_overflow, and with an optimizer
# and a scheduler of the caller.
SKIPPING = [
    *[f"{stage} {dtype}" for dtype in DTYPES for stage in range(4)],
    *[f"{stage} bf16 unchecked" for stage in range(4)],
    *("0 fp32 client", "1 fp16 client", "2 fp32 client", "3 bf16 client"),
]


def spoiled(dtype: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The batches, of which drawn ones of each rank have an Inf."""
    draws = torch.Generator().manual_seed(4)
    found = batches(dtype)
    for rank in range(2):
        for number in torch.randperm(MICRO_STEPS, generator=draws)[:2].tolist():
            found[2 * number + rank][0][0, 0] = math.inf
    return found


def skipping(initialize: Any, name: str) -> list[dict[str, Any]]:
    """What the engine that initialize() makes says of a training on these."""
    stage, dtype, *words = name.split()
    config = configuration(int(stage), dtype)
    if dtype == "fp16":  # DeepSpeed's stage 0 begins with another dynamic scale
        config["fp16"] |= {"initial_scale_power": 8, "hysteresis": 2}
        config["fp16"] |= {"loss_scale": 64.0} if stage == "0" else {}
    if words == ["unchecked"]:
        config["bf16"]["check_grad_overflow"] = False
    model, given = Model(), {}
    trained = parameters(model, in_groups=False)
    if words == ["client"]:
        del config["optimizer"], config["scheduler"]
        given["optimizer"] = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
        given["lr_scheduler"] = lambda of: torch.optim.lr_scheduler.LambdaLR(
            of, lambda update: 0.5**update
        )
    engine = initialize(model=model, model_parameters=trained, config=config, **given)[
        0
    ]
    return train(engine, dtype, 0, MICRO_STEPS, spoiled(dtype))
