"""Runs of Trainer with a sharded model that has no values on some ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from torch import nn

import ctrainer
from ctrainer.callbacks import TrainerCallback
from ctrainer.comm import world
from ctrainer.hf import load_on_first_rank

SHARDS = {"state_dict_type": "SHARDED_STATE_DICT"}
MIB = 2**20


def bare() -> nn.Module:
    with torch.device("meta"):
        return tiny.gpt2()


def trainer(folder: str, model: nn.Module, **options: Any) -> Any:
    defaults = {
        "max_steps": 4, "per_device_train_batch_size": 2, "learning_rate": 1e-2,
        "ddp_timeout": 60, "train_sampling_strategy": "sequential", "fsdp": True,
        "malloc_tuning": False,  # which would keep memory
    }  # fmt: skip
    return tiny.make(
        ctrainer.Trainer, model, tiny.tokens(32), output_dir=folder,
        **{**defaults, **options},
    )  # fmt: skip


def losses(made: Any, **how: Any) -> list[float]:
    made.train(**how)
    return [log["loss"] for log in made.state.log_history if "loss" in log]


def of_first_rank(folder: str) -> dict[str, Any]:
    """Losses where every rank has the values, and where rank 0 alone has; and those of
    runs without values that go on from the second one's checkpoints."""
    keeps = {"save_strategy": "steps", "save_steps": 2}
    own = bare() if world().rank else tiny.gpt2()
    config = {**SHARDS, "cpu_ram_efficient_loading": True}
    found = {
        "all": losses(trainer(f"{folder}/all", tiny.gpt2(), **keeps)),
        "one": losses(trainer(f"{folder}/one", own, fsdp_config=config, **keeps)),
    }
    for name in ("all", "one"):  # whole weights and shards; shards alone
        made = trainer(f"{folder}/on-{name}", bare(), fsdp_config=SHARDS)
        checkpoint = f"{folder}/{name}/checkpoint-2"
        found[f"on {name}"] = losses(made, resume_from_checkpoint=checkpoint)[-2:]
    return found


def of_whole_weights(folder: str) -> dict[str, Any]:
    """A model without values goes on from a run that was not sharded."""
    keeps = {"save_strategy": "steps", "save_steps": 2}
    plain = trainer(f"{folder}/plain", tiny.gpt2(), fsdp=None, **keeps)
    made = trainer(f"{folder}/on-plain", bare())
    checkpoint = f"{folder}/plain/checkpoint-2"
    return {
        "plain": losses(plain)[-2:],
        "on": losses(made, resume_from_checkpoint=checkpoint)[-2:],
    }


def anew(folder: str) -> dict[str, Any]:
    """What a model begins with that no rank has values of."""
    made = trainer(f"{folder}/anew", bare(), learning_rate=0.0)
    first = made.evaluate(tiny.tokens(4))["eval_loss"]
    found = losses(made)
    assert first == made.evaluate(tiny.tokens(4))["eval_loss"]
    state = made.model.full_state_dict()
    return {
        "losses": found,
        "std": float(state["transformer.wte.weight"].std()),
        "norms": bool((state["transformer.ln_f.weight"] == 1).all()),
        "sum": sum(float(value.double().sum()) for value in state.values()),
    }


def loaded(folder: str) -> dict[str, Any]:
    """A model of which rank 0 alone reads the file."""
    path = f"{folder}/pretrained"
    if world().rank == 0:
        tiny.gpt2().half().save_pretrained(path)
    model = load_on_first_rank(
        transformers.AutoModelForCausalLM.from_pretrained, path, dtype=torch.float32,
        attn_implementation="eager",
    )  # fmt: skip
    with pytest.raises(OSError if world().rank == 0 else RuntimeError) as failure:
        load_on_first_rank(transformers.AutoModel.from_pretrained, f"{folder}/none")
    return {
        "meta": model.device.type == "meta",
        "looks": [model.config._attn_implementation, str(model.dtype), model.training],
        "losses": losses(trainer(f"{folder}/loaded", model)),
        "failure": bool(re.search("rank 0 could not load", str(failure.value))),
    }


def rejected(folder: str) -> None:
    with pytest.raises(ValueError, match=r"the meta device and has no values\. fsdp"):
        trainer(f"{folder}/rejected", bare(), fsdp=None)
    own = bare() if world().rank else tiny.gpt2()
    made = trainer(f"{folder}/rejected", own, fsdp_config={"sync_module_states": False})
    with pytest.raises(ValueError, match=r"on the meta device on ranks \[1\], and"):
        made.train()


class Stop(TrainerCallback):
    """Tells how much memory sharding took at most, and ends the run."""

    def __init__(self, before: float) -> None:
        self.before = before

    def on_train_begin(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        self.peak = status("VmHWM") - self.before
        control.should_training_stop = True


def status(name: str) -> float:
    """A line of this process's status, in MiB."""
    (line,) = re.findall(rf"{name}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return int(line) / 1024


def memory(folder: str) -> dict[str, float]:
    """MiB that it takes to shard a model of 6 blocks of which rank 0 has the values."""
    sizes = {"n_embd": 384, "n_layer": 6, "n_head": 2}
    with torch.device("cpu" if world().rank == 0 else "meta"):
        model = tiny.gpt2(**sizes)
    whole = sum(p.numel() for p in model.parameters()) * 4 / MIB
    made = trainer(f"{folder}/memory", model)
    del model
    Path("/proc/self/clear_refs").write_text("5")
    stop = Stop(status("VmRSS"))
    made.add_callback(stop)
    made.train()
    return {"whole": whole, "peak": stop.peak, "block": whole / 6}
