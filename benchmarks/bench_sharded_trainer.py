"""HF's Trainer on two ranks: sharded and copied, by us and by transformers.

    python benchmarks/bench_sharded_trainer.py [--steps 20] [--only ours ...]

Each way runs alone, in two new processes of one thread each: transformers' GPT-2 of
random weights (4 layers of width 256, 2048 tokens), 8 sequences of 64 tokens a rank,
AdamW, gradients clipped to 1, a unit a layer. The processor time is that of a step of
train(), its median on rank 0, which other programs disturb least. Losses have to agree.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import tempfile
import time
from typing import Any

import ranks

RANKS, BATCH, LENGTH, VOCABULARY = 2, 8, 64, 2048
PEERS = {
    "copied": "ours, a model a rank",
    "fsdp": "transformers, torch's FSDP",
    "ddp": "transformers, torch's DDP",
}
WAYS = ("ours", *PEERS)
GOALS = {"copied": 0.9, "fsdp": 1.0}
IDLE_STEPS = 3  # in which state is made and memory faulted in


def made_model(options: Any) -> Any:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=options.width, n_head=4,
            n_layer=options.layers, bos_token_id=0, eos_token_id=0, **drop,
        )
    )  # fmt: skip


def rows(n: int) -> list[dict[str, Any]]:
    import torch

    ids = torch.randint(
        VOCABULARY, (n, LENGTH), generator=torch.Generator().manual_seed(1)
    )
    labels = ids.clone()
    labels[:, 0] = -100  # nothing predicts it, and transformers would count it
    return [{"input_ids": ids[i], "labels": labels[i]} for i in range(n)]


def trained(way: str, options: Any, folder: str) -> dict[str, Any]:
    """Milliseconds of processor time of a step, and the losses."""
    import torch

    torch.set_num_threads(1)
    if way in ("fsdp", "ddp"):
        import transformers as library
    else:
        import ctrainer as library  # type: ignore[no-redef]
    spent: list[float] = []

    class Clock(library.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_begin(self, *unused: Any, **named: Any) -> None:
            self.began = time.process_time()

        def on_step_end(self, *unused: Any, **named: Any) -> None:
            spent.append(time.process_time() - self.began)

    sharding = {} if way in ("copied", "ddp") else {
        "fsdp": True if way == "ours" else "full_shard auto_wrap",
        "fsdp_config": {"transformer_layer_cls_to_wrap": ["GPT2Block"]},
    }  # fmt: skip
    args = library.TrainingArguments(
        folder, max_steps=options.steps + IDLE_STEPS, use_cpu=True, logging_steps=1,
        per_device_train_batch_size=BATCH, save_strategy="no", report_to="none",
        disable_tqdm=True, learning_rate=1e-3, **sharding,
    )  # fmt: skip
    trainer = library.Trainer(
        made_model(options), args, train_dataset=rows(RANKS * BATCH * 4),
        callbacks=[Clock()],
    )  # fmt: skip
    trainer.remove_callback(library.PrinterCallback)
    trainer.train()
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    return {
        "cpu": statistics.median(spent[IDLE_STEPS:]) * 1000,
        "least": min(spent[IDLE_STEPS:]) * 1000,
        "losses": losses,
    }


def be_rank(options: Any) -> None:
    logging.disable(logging.WARNING)
    (way,) = options.only
    with tempfile.TemporaryDirectory() as folder:
        told = trained(way, options, folder)
    if os.environ["RANK"] == "0":
        with open(options.tell, "w", encoding="utf-8") as file:
            json.dump(told, file)


def measure(way: str, options: Any) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile("r", encoding="utf-8") as file:
        own = "--only", way, "--tell", file.name
        if ranks.start(RANKS, *own, OMP_NUM_THREADS="1") != 0:
            raise SystemExit(f"{way} failed")
        told: dict[str, Any] = json.load(file)
        return told


def parsed() -> Any:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--only", nargs="*", default=WAYS, choices=WAYS)
    parser.add_argument("--tell", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = parsed()
    if "RANK" in os.environ:
        be_rank(options)
        return
    found = {way: measure(way, options) for way in options.only}
    for way, told in found.items():
        print(json.dumps({"way": way, **told}), flush=True)
    ours = found.pop("ours", None)
    for way, theirs in found.items() if ours else ():
        pairs = zip(ours["losses"], theirs["losses"], strict=True)
        apart = max(abs(a - b) for a, b in pairs)
        if apart > 1e-3:
            raise SystemExit(f"losses differ from those of {way} by {apart}")
        row = {
            "name": "GPT-2 of 3.7M parameters in Trainer on 2 ranks, sharded: "
            "processor time of a step",
            "unit": "ms", "ours": ours["cpu"], "peer": PEERS[way],
            "theirs": theirs["cpu"], "ratio": theirs["cpu"] / ours["cpu"],
            "goal": GOALS.get(way),
        }  # fmt: skip
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
