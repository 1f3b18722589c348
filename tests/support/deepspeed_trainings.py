"""Trainings with DeepSpeed configurations, and the same updates in plain torch."""

from __future__ import annotations

import itertools
from typing import Any

import tiny
import torch
from draws import EXHAUSTIVE

import ctrainer
from ctrainer.deepspeed_schedules import WarmupLR
from ctrainer.runtime.torch_process import accelerator

UPDATES, RANKS, ROWS = 6, 2, 2
IN_MEMORY = 1000  # elements of a rank, of the root alone
LR, DECAY, CLIP = 1e-2, 0.1, 0.5
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
OFFLOADS: dict[str, dict[str, Any]] = {
    "none": {},
    "optimizer": {"offload_optimizer": {"device": "cpu", "pin_memory": True}},
    "both": {
        "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}
    },
    "nvme": {
        "offload_optimizer": {
            "device": "nvme", "nvme_path": "/tmp", "buffer_count": 3,
            "pipeline_read": True, "pipeline_write": True, "fast_init": False,
        },
        "offload_param": {"device": "cpu"},
    },
    "nvme shards": {
        "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"},
        "offload_param": {
            "device": "nvme", "nvme_path": "/tmp", "buffer_count": 2, "max_in_cpu": 0,
            "buffer_size": 1e8, "pin_memory": True,
        },
    },
    "older": {"cpu_offload": True, "cpu_offload_params": True},
    "not ahead": {"zero_quantized_weights": False, "overlap_comm": False},
}  # fmt: skip
_ALL = [
    (stage, offload, dtype)
    for stage, offload, dtype in itertools.product((0, 1, 2, 3), OFFLOADS, DTYPES)
    if stage or (offload == "none" and dtype == "fp32")
]
# Every stage with every precision, and every offload; in `make test-all` all together.
_BITS = [(3, offload, "fp32") for offload in ("none", "nvme", "nvme shards")]
_FEW = [*_ALL[::5], *_BITS]
CASES = {" ".join(map(str, case)): case for case in (_ALL if EXHAUSTIVE else _FEW)}


# Words of sharded_ddp, and the dtype.
FAIRSCALE = [
    "simple fp32", "zero_dp_2 fp32", "zero_dp_2 auto_wrap fp32", "zero_dp_3 fp16",
    "zero_dp_3 auto_wrap offload fp32", "zero_dp_2 cpu_offload fp16",
]  # fmt: skip


def configuration(stage: int, offload: str, dtype: str) -> dict[str, Any]:
    return {
        "zero_optimization": {"stage": stage, **OFFLOADS[offload]},
        "optimizer": {
            "type": "AdamW",
            "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto"),
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {
                "warmup_min_lr": "auto", "warmup_max_lr": "auto",
                "warmup_num_steps": "auto", "warmup_type": "linear",
            },
        },
        "fp16": {"enabled": "auto", "initial_scale_power": 8},
        "bf16": {"enabled": "auto"},
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
    }  # fmt: skip


class OneGroup(ctrainer.Trainer):
    """Its optimizer decays all parameters, by a schedule of DeepSpeed's."""

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        return [name for name, _ in model.named_parameters()]

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        self.lr_scheduler = WarmupLR(
            self.optimizer, warmup_num_steps=4, warmup_type="linear"
        )
        return self.lr_scheduler


def trainer(folder: str, name: str, **options: Any) -> Any:
    words, _, dtype = name.rpartition(" ")
    precision: dict[str, Any] = {dtype: True} if dtype != "fp32" else {}
    cls: Any = OneGroup
    if words.split()[0].isdigit():
        stage, offload = words.split(" ", 1)
        cls = ctrainer.Trainer
        shards = {"deepspeed": configuration(int(stage), offload, dtype)}
    else:
        shards = {"sharded_ddp": words}
        if precision:
            precision["loss_scaler"] = {"preset": "static", "loss_scale": 256.0}
    defaults: dict[str, Any] = {
        **shards, "output_dir": folder,
        "max_steps": UPDATES, "per_device_train_batch_size": ROWS,
        "gradient_accumulation_steps": 2, "learning_rate": LR, "warmup_steps": 4,
        "weight_decay": DECAY, "max_grad_norm": CLIP, "ddp_timeout": 60,
        "train_sampling_strategy": "sequential",
    }  # fmt: skip
    return tiny.make(
        cls, tiny.gpt2(), tiny.tokens(96),
        **{**defaults, **precision, **options},
    )  # fmt: skip


def in_groups(folder: str, ranks: int) -> Any:
    """A trainer of stage 3 whose parameters so many ranks share."""
    config = configuration(3, "none", "fp32")
    config["zero_optimization"]["mics_shard_size"] = ranks
    return trainer(folder, "3 none fp32", deepspeed=config)


def in_a_file(optimizer: Any) -> int:
    """Elements of the optimizer's state that are in its file."""
    disk = getattr(optimizer, "_disk_state", None)
    if disk is None:
        return 0
    begin = address(disk.memory)
    return sum(
        value.numel()
        for state in optimizer.state.values()
        for value in state.values()
        if 0 <= value.data_ptr() - begin < disk.memory.nbytes
    )


def shards_in_files(model: Any) -> int:
    """Elements of a sharded model's shards that are in files."""
    return sum(
        shard.numel()
        for unit in (model.units() if hasattr(model, "units") else ())
        if unit._shard_file is not None
        for shard in unit.sharded_params
        if 0 <= shard.data_ptr() - address(unit._shard_file) < unit._shard_file.nbytes
    )


def address(memory: Any) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()


def told(made: Any) -> dict[str, Any]:
    logs = [log for log in made.state.log_history if "grad_norm" in log]
    config = made.args.hf_deepspeed_config
    return {
        "losses": [log["loss"] for log in logs],
        "norms": [log["grad_norm"] for log in logs],
        "units": len(made.model.units()) if made.is_fsdp_enabled else 0,
        "shares": made.model.world_size if made.is_fsdp_enabled else 0,
        "rates": [log["learning_rate"] for log in logs],
        "sharded": type(made.model).__name__ == "TrainedModel",
        "stage": None if config is None else config.stage,
        "optimizer": type(made.optimizer).__name__,
        "in a file": in_a_file(made.optimizer),
        "shards in files": shards_in_files(made.model),
        "groups": [len(group["params"]) for group in made.optimizer.param_groups],
    }


def in_plain_torch(dtype: str) -> dict[str, Any]:
    """The same updates in one process: a model of the dtype, float32 copies of its
    parameters that AdamW updates, gradients added in float32, decay of all parameters,
    and DeepSpeed's linear WarmupLR. On a GPU, where torch has one."""
    place = accelerator() or torch.device("cpu")
    low: Any = tiny.gpt2().to(place, DTYPES[dtype]).train()
    master = [p.detach().float().to(place, copy=True) for p in tiny.gpt2().parameters()]
    optimizer = torch.optim.AdamW(master, lr=LR, weight_decay=DECAY)
    batches = iter(torch.utils.data.DataLoader(tiny.tokens(96), ROWS))
    losses, norms, rates = [], [], []
    scale = 256.0 if dtype == "fp16" else 1.0
    for update in range(UPDATES):
        # The least at the first update and, as the schedule counts from the batch that
        # follows it, at the second.
        rate = LR * min(max(update - 1, 0) / 4, 1.0)
        rates.append(rate)
        optimizer.param_groups[0]["lr"] = rate
        total, count = 0.0, 2 * RANKS
        grads = [torch.zeros_like(p) for p in master]
        for batch in itertools.islice(batches, count):
            for of, p in zip(low.parameters(), master, strict=True):
                of.data.copy_(p)
                of.grad = None
            loss = low(**{name: value.to(place) for name, value in batch.items()}).loss
            (loss * scale / 2).backward()
            for grad, of in zip(grads, low.parameters(), strict=True):
                grad += of.grad.float() * 2 / (scale * count)
            total += loss.item() / count
        norm = torch.linalg.vector_norm(torch.stack([g.double().norm() for g in grads]))
        for p, grad in zip(master, grads, strict=True):
            p.grad = grad * min(1.0, CLIP / (norm.item() + 1e-6))
        optimizer.step()
        losses.append(total)
        norms.append(norm.item())
    return {"losses": losses, "norms": norms, "rates": rates}
