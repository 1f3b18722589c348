"""Trainings of drawn features whose passes run out of memory at drawn places, and the
same without a failure."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import tiny
import torch
import transformers
from failing_passes import Fails

import ctrainer
from ctrainer.runtime import parts

STEPS, SAVED = 10, 6
FEATURES = {
    "chunked_cross_entropy": True, "gradient_checkpointing": True,
    "label_smoothing_factor": 0.1, "skip_grad_norm_sigmas": 6.0, "ema_decay": 0.9,
    "max_grad_norm": 0.05, "group_by_length": True,
}  # fmt: skip
BATCHES = (
    {"per_device_train_batch_size": 5},
    {"per_device_train_batch_size": 5, "pack_sequences": True},
    {"max_tokens_per_batch": 60},
    {"max_tokens_per_batch": 60, "pack_sequences": True},
)
BMUF = {"use_bmuf": True, "warmup_iterations": 2, "global_sync_iter": 3}


def drawn(seed: int, ranks: int) -> dict[str, Any]:
    """A case: options of the arguments, and of the test."""
    draw = random.Random(seed)
    options: dict[str, Any] = dict(BATCHES[seed % len(BATCHES)])
    options |= {k: v for k, v in FEATURES.items() if draw.random() < 0.4}
    options["gradient_accumulation_steps"] = draw.choice((1, 2, 3))
    options["optim"] = draw.choice(("sgd", "adamw_torch"))
    if ranks > 1 and draw.random() < 0.4:
        options |= BMUF
    if options.pop("group_by_length", False) and "max_tokens_per_batch" not in options:
        options["train_sampling_strategy"] = "group_by_length"
    options["bf16"] = draw.random() < 0.15
    return {
        "options": options, "seed": seed, "adapter": draw.random() < 0.3,
        "resumes": draw.random() < 0.4,
    }  # fmt: skip


def rows() -> list[dict[str, Any]]:
    draw, made = np.random.default_rng(3), []
    for n in draw.integers(3, 16, 150):
        ids = draw.integers(1, 60, n)
        labels = np.where(np.arange(n) < n // 4, -100, ids)
        made.append({"input_ids": ids.tolist(), "labels": labels.tolist()})
    return made


def padded(features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    width = max(len(row["input_ids"]) for row in features)
    filled = {"input_ids": 0, "labels": -100}
    batch = {
        name: torch.tensor(
            [[*row[name], *[fill] * (width - len(row[name]))] for row in features]
        )
        for name, fill in filled.items()
    }
    return {**batch, "attention_mask": (batch["input_ids"] != 0).long()}


class Seen(ctrainer.TrainerCallback):
    """The state of torch's generator after each update."""

    def __init__(self) -> None:
        self.generators: list[int] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.generators.append(int(torch.get_rng_state().long().sum()))


def model_of(case: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=60, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    if not case["adapter"]:
        return model, model.model.layers
    import peft

    kind = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], init_lora_weights=False
    )
    return peft.get_peft_model(model, kind), model.model.layers


def trained(
    folder: str, case: dict[str, Any], fails: Fails | None, last: str | None = None
) -> Any:
    model, layers = model_of(case)
    if fails is not None:
        for layer in layers:
            fails.watch(layer)
    options = {"learning_rate": 0.02, **case["options"]}
    if options["optim"] != "sgd":
        options["learning_rate"] = 1e-3
    args = tiny.arguments(
        output_dir=folder, max_steps=STEPS, seed=case["seed"], save_steps=SAVED,
        save_strategy="steps" if case["resumes"] else "no", auto_find_batch_size=True,
        **options,
    )  # fmt: skip
    packs = options.get("pack_sequences")
    seen = Seen()
    trainer = ctrainer.Trainer(
        model, args, None if packs else padded, train_dataset=rows(), callbacks=[seen]
    )
    trainer.remove_callback(ctrainer.PrinterCallback)
    trainer.train(resume_from_checkpoint=last)
    return trainer, seen.generators


def told_of(
    trainer: Any, generators: list[int], case: dict[str, Any]
) -> dict[str, Any]:
    """Of a resumed run: the log before it is the first rank's, whose norms are its own
    with local steps."""
    begin, log = SAVED * case["resumes"], trainer.state.log_history
    weights = [p.detach() for p in trainer.model.parameters() if p.requires_grad]
    average = trainer.weight_average
    return {
        "losses": [e["loss"] for e in log if "loss" in e],
        "norms": [e["grad_norm"] for e in log if "loss" in e][begin:],
        "rates": [e["learning_rate"] for e in log if "loss" in e],
        "epochs": [e["epoch"] for e in log if "loss" in e],
        "weights": [float(p.double().abs().sum()) for p in weights],
        "average": []
        if average is None
        else [float(v.double().abs().sum()) for v in average.averages.values()],
        "generators": generators[-4:],
    }


def bound(case: dict[str, Any], name: str) -> float:
    """Relative. Adam divides by roots of squares of which few are summed yet, and bf16
    sums the rows of each part in 8 bits."""
    if case["options"]["bf16"]:
        return 0.01
    return 1e-6 if name in ("losses", "norms") else 1e-5


def tokens(hidden: Any) -> int:
    """Of one sequence at most 15."""
    return int(hidden.shape[0] * hidden.shape[1])


def both(folder: str, case: dict[str, Any], rank: int) -> dict[str, Any]:
    parts.GROWTH_INTERVAL = 2
    plain = told_of(*trained(f"{folder}/plain", case, None), case)
    fails = Fails(case["seed"] * 8 + rank, 6, 0.1, 31, size=tokens)
    failing, generators = trained(f"{folder}/failing", case, fails)
    if case["resumes"]:
        last = f"{folder}/failing/checkpoint-{SAVED}"
        before, fails = (
            fails,
            Fails(case["seed"] * 8 + rank + 4, 6, 0.2, 31, size=tokens),
        )
        fails.failed += before.failed
        failing, generators = trained(f"{folder}/resumed", case, fails, last)
    return {
        "plain": plain, "failing": told_of(failing, generators, case),
        "failed": fails.failed, "places": sorted(fails.places), "case": case,
    }  # fmt: skip
