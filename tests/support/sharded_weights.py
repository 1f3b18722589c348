"""Runs of Trainer over the shards of two ranks, of models that transformers saves under
other names, and what comes back of their weights."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import tiny
import tiny_architectures
import torch
import transformers

import ctrainer
from ctrainer.fsdp import consolidate_sharded_model_checkpoints

MODELS = {
    "ViTForImageClassification": "ViTLayer",
    "MixtralForCausalLM": "MixtralDecoderLayer",
    "Qwen2MoeForCausalLM": "Qwen2MoeDecoderLayer",
}
KINDS = ("FULL_STATE_DICT", "SHARDED_STATE_DICT")
Values = dict[str, torch.Tensor]


class Best(transformers.TrainerCallback):  # type: ignore[misc]
    """The whole weights after each update."""

    def __init__(self) -> None:
        self.seen: dict[int, Values] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen[state.global_step] = kwargs["model"].full_state_dict()


class FirstIsBest(ctrainer.Trainer):
    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        metrics = {"eval_loss": float(self.state.global_step)}
        self.log(metrics)
        return metrics


def rows(name: str) -> list[dict[str, torch.Tensor]]:
    if not name.startswith("ViT"):
        return tiny.tokens(24)
    draw = torch.Generator().manual_seed(1)
    images = torch.randn(24, 3, 32, 32, generator=draw)
    return [{"pixel_values": x, "labels": torch.tensor(1)} for x in images]


def trainer(folder: Path, name: str, kind: str, seed: int, **options: Any) -> Any:
    """Of a model that begins with other weights for each seed."""
    config = {
        "state_dict_type": kind,
        "transformer_layer_cls_to_wrap": MODELS[name],
    }
    data = rows(name)
    return tiny.make(
        FirstIsBest, tiny_architectures.make(name, seed), data, output_dir=str(folder),
        max_steps=3, save_strategy="steps", save_steps=1, learning_rate=1e-2,
        per_device_train_batch_size=2, ddp_timeout=60, fsdp="full_shard auto_wrap",
        train_sampling_strategy="sequential", fsdp_config=config,
        callbacks=[Best()], **{"parts": {"eval_dataset": data[:2]}, **options},
    )  # fmt: skip


def seen(made: Any) -> dict[int, Values]:
    found: list[Best] = [
        c for c in made.callback_handler.callbacks if isinstance(c, Best)
    ]
    return found[0].seen


def differing(found: Values, expected: Values) -> list[str]:
    assert found.keys() == expected.keys()
    return [n for n, v in found.items() if not torch.equal(v, expected[n])]


def round_trip(folder: str, name: str, kind: str) -> dict[str, list[str]]:
    """The names of weights that differ where none may, by what has been read."""
    base, rank = Path(folder) / f"{name}-{kind}", ctrainer.comm.world().rank
    run = trainer(
        base, name, kind, 0, eval_strategy="steps", eval_steps=1,
        load_best_model_at_end=True,
    )  # fmt: skip
    run.train()
    weights = seen(run)
    assert differing(weights[1], weights[2])
    told = {"best": differing(run.model.full_state_dict(), weights[1])}
    resumed = trainer(Path(f"{base}-on"), name, kind, 1)
    resumed.train(resume_from_checkpoint=str(base / "checkpoint-1"))
    for step in (2, 3):
        told[f"resumed {step}"] = differing(seen(resumed)[step], weights[step])
    run.save_model(str(base / "saved"))
    cls = getattr(transformers, name)
    if rank == 0:
        read = cls.from_pretrained(base / "saved").state_dict()
        told["save_model"] = differing(read, weights[1])
        together = base / "together"
        shutil.copytree(base / "saved", together, ignore=_weights)
        consolidate_sharded_model_checkpoints(
            f"{base}/checkpoint-2/shard-", "*.safetensors",
            f"{together}/model.safetensors",
        )  # fmt: skip
        read = cls.from_pretrained(together).state_dict()
        told["consolidated"] = differing(read, weights[2])
        if kind == "FULL_STATE_DICT":
            read = cls.from_pretrained(base / "checkpoint-2").state_dict()
            told["checkpoint"] = differing(read, weights[2])
    ctrainer.comm.world().barrier()
    return told


def _weights(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if name.startswith("model")]
