"""A small GPT on several processes, of which each keeps a part of it only.

Every process (rank) has its part of the parameters, of their gradients and of Adam's
state. Layers are brought together where they compute, and given back. Halfway through
the ranks save a checkpoint. One process with the whole model then goes on from it, and
comes to the losses that the ranks come to. Run it, in about a minute:

    torchrun --nproc_per_node 2 examples/sharded_gpt.py
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from code_pairs import standard_library
from pretrain_gpt import GPT, Windows, corpus

import ctrainer
from ctrainer.comm import world

BATCH, PART = 8, 4  # windows of an update over all ranks, and of a pass on one
# What a launcher tells each rank; without it a process is alone.
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
SHARDING = {"transformer_layer_cls_to_wrap": ["Block"],
            "state_dict_type": "SHARDED_STATE_DICT"}  # fmt: skip


def memory(name: str) -> float:
    """A line of this process's status, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{name}:")]
    return float(line.split()[1]) * 1024 / 1e6


def trainer_of(
    options: argparse.Namespace, windows: Windows, ranks: int, sharded: bool
) -> Any:
    """The same windows make an update on any number of ranks."""
    args = ctrainer.TrainingArguments(
        str(options.out), max_steps=options.steps, per_device_train_batch_size=PART,
        gradient_accumulation_steps=BATCH // PART // ranks, learning_rate=1e-3,
        lr_scheduler_type="constant", train_sampling_strategy="sequential",
        save_steps=options.steps // 2, logging_steps=max(1, options.steps // 10),
        report_to="none", disable_tqdm=True, use_cpu=True, malloc_tuning=False,
        save_strategy="steps" if sharded else "no",
        fsdp=sharded, fsdp_config=SHARDING if sharded else None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = GPT(options.block, options.width, options.layers)
    made = ctrainer.Trainer(model, args, train_dataset=windows)
    made.remove_callback(ctrainer.PrinterCallback)
    return made


def trained(options: argparse.Namespace, ranks: int, resume: Any) -> dict[str, Any]:
    """The losses of a run, and the most memory that it has had above its data's."""
    windows = Windows(corpus(options.folder)[0], options.block)
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the most so far
    made = trainer_of(options, windows, ranks, sharded=resume is None)
    size = made.get_num_trainable_parameters()
    made.train(resume_from_checkpoint=resume)
    done = options.steps // 2 if resume else 0
    history = [
        log for log in made.state.log_history if "loss" in log and log["step"] > done
    ]
    return {
        "parameters": size,
        "losses": {str(log["step"]): log["loss"] for log in history},
        "memory": memory("VmHWM") - before,
    }


def alone(options: argparse.Namespace, checkpoint: Path) -> dict[str, Any]:
    """What one process with the whole model makes of the checkpoint, started without a
    launcher's variables."""
    environment = {k: v for k, v in os.environ.items() if k not in LAUNCHED}
    names = ("folder", "out", "steps", "block", "width", "layers")
    sizes = [f"--{name}={getattr(options, name)}" for name in names]
    told = subprocess.run(
        [sys.executable, __file__, *sizes, "--resume", str(checkpoint)],
        env=environment, check=True, stdout=subprocess.PIPE, text=True,
    ).stdout  # fmt: skip
    found: dict[str, Any] = json.loads(told.splitlines()[-1])
    return found


def report(ranks: int, each: dict[str, Any], one: dict[str, Any]) -> None:
    print(f"{each['parameters'] / 1e6:.1f}M parameters")
    for step, loss in each["losses"].items():
        again = one["losses"].get(step)
        aside = "" if again is None else f", resumed by one process: {again:.4f}"
        print(f"step {step}: loss {loss:.4f} on {ranks} ranks{aside}")
    print(f"memory above imports and data: {each['memory']:.0f} MB a rank, "
          f"{one['memory']:.0f} MB with the whole model")  # fmt: skip


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=standard_library())
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--block", type=int, default=64, help="bytes in a window")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--resume", type=Path, help="go on alone from a checkpoint")
    return parser.parse_args()


def run(options: argparse.Namespace) -> None:
    group = world()
    told = group.broadcast_bytes(str(options.out).encode() if group.rank == 0 else None)
    options.out = Path(told.decode())
    each = trained(options, group.world_size, None)
    if group.rank == 0:
        checkpoint = options.out / f"checkpoint-{options.steps // 2}"
        report(group.world_size, each, alone(options, checkpoint))


def main() -> None:
    options = parse_options()
    torch.set_num_threads(1)
    if options.resume:
        print(json.dumps(trained(options, 1, str(options.resume))))
        return
    with tempfile.TemporaryDirectory() as folder:
        options.out = options.out or Path(folder)
        run(options)


if __name__ == "__main__":
    main()
