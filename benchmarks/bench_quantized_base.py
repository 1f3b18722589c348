"""LoRA on a frozen base in 4 bits, sharded over two ranks, beside torch's FSDP2 with
the base in bfloat16: the memory of a rank, and the losses.

    python benchmarks/bench_quantized_base.py [--steps 12] [--rounds 2]

Needs peft and bitsandbytes. A Llama of 34.1 million parameters, 4 sequences of 128
tokens a rank, adapters of rank 8, one thread a rank; ours is HF's Trainer with `fsdp`
and the base in bitsandbytes' nf4, FSDP2 a bare loop with torch's AdamW. The ways take
turns. The memory is the most that a rank has during training, beside files, above what
it has after the imports; a row has the larger rank's, in the median of the rounds.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import ranks

LENGTH, BATCH, WORLD = 128, 4, 2
LR = 1e-3
WORDS = 64  # of the vocabulary: there is something to learn
PEER = "torch's FSDP2 in bfloat16"


def used() -> float:
    """This process's memory that is not of files, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":") for line in lines)
    return sum(int(fields[k].split()[0]) for k in ("RssAnon", "RssShmem")) / 1024


class Peak(threading.Thread):
    """The most memory, of samples 2 ms apart, from start() to end()."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._most, self._done = 0.0, threading.Event()

    def run(self) -> None:
        while not self._done.wait(0.002):
            self._most = max(self._most, used())

    def end(self) -> float:
        self._done.set()
        self.join()
        return self._most


def save_base(folder: str) -> None:
    import torch
    import transformers

    hf: Any = transformers
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=8192, hidden_size=512, intermediate_size=1408, num_hidden_layers=8,
        num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=256,
        tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    hf.LlamaForCausalLM(config).bfloat16().save_pretrained(folder)


def adapted(folder: str, **options: Any) -> Any:
    """The base with adapters, which every rank and way begins with."""
    import peft
    import torch
    from transformers import LlamaForCausalLM

    base = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options)
    torch.manual_seed(3)
    names = ["q_proj", "v_proj", "up_proj"]
    config = peft.LoraConfig(
        r=8, lora_alpha=16, target_modules=names, task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(base, config)


def rows(steps: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(1)
    return torch.randint(WORDS, (WORLD * BATCH * steps, LENGTH), generator=generator)


def ours(folder: str, steps: int) -> tuple[float, list[float]]:
    import torch
    import transformers

    from ctrainer import Trainer, TrainerCallback, TrainingArguments

    hf: Any = transformers
    before, peak = used(), Peak()

    class Begin(TrainerCallback):
        def on_train_begin(self, *args: Any, **more: Any) -> None:
            peak.start()

    args = TrainingArguments(
        f"{folder}/out", fsdp="full_shard auto_wrap", bf16=True, max_steps=steps,
        fsdp_config={"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
        per_device_train_batch_size=BATCH, learning_rate=LR, logging_steps=1,
        lr_scheduler_type="constant", train_sampling_strategy="sequential",
        report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    quantized = hf.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.bfloat16,
    )  # fmt: skip
    trainer = Trainer(
        adapted(folder, quantization_config=quantized),
        args,
        train_dataset=[{"input_ids": row, "labels": row} for row in rows(steps)],
        callbacks=[Begin()],
    )
    trainer.train()
    most = peak.end()
    logged = trainer.state.log_history
    return most - before, [float(entry["loss"]) for entry in logged if "loss" in entry]


def fsdp2(folder: str, steps: int) -> tuple[float, list[float]]:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    dist.init_process_group("gloo")
    dist.barrier()
    before, peak = used(), Peak()
    model = adapted(folder)
    options: dict[str, Any] = {
        "mesh": init_device_mesh("cpu", (WORLD,)),
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    }
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=0.0)
    losses = []
    peak.start()
    for batches in rows(steps).split(WORLD * BATCH):
        batch = batches.chunk(WORLD)[dist.get_rank()]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().float()
        dist.all_reduce(total)
        losses.append(total.item() / WORLD)
    most = peak.end()
    dist.destroy_process_group()
    return most - before, losses


def rank(way: str, folder: str, steps: int) -> None:
    """Writes what a rank has measured to the folder."""
    import peft  # noqa: F401 (as a user's script has, before the memory is noted)
    import torch
    import transformers

    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what the libraries print
    torch.set_num_threads(1)
    logging: Any = transformers.logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    memory, losses = {"ours": ours, "fsdp2": fsdp2}[way](folder, steps)
    told = {"memory": memory, "losses": losses}
    Path(folder, f"told{os.environ['RANK']}.json").write_text(json.dumps(told))


def measure(way: str, folder: str) -> dict[str, Any]:
    if ranks.start(WORLD, "--way", way, "--folder", folder, OMP_NUM_THREADS="1") != 0:
        raise SystemExit(f"{way} ended with an error")
    told = [json.loads(Path(folder, f"told{r}.json").read_text()) for r in range(WORLD)]
    memory, losses = [each["memory"] for each in told], told[0]["losses"]
    row = {"way": way, "memory_of_ranks": memory, "losses": losses}
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--way", choices=["ours", "fsdp2"], help="of the ranks")
    parser.add_argument("--folder", help="of the ranks")
    given = parser.parse_args()
    if given.way:
        rank(given.way, given.folder, given.steps)
        return
    for package in ("peft", "bitsandbytes"):
        if importlib.util.find_spec(package) is None:
            print(f"nothing is measured: {package} is missing", file=sys.stderr)
            return
    with tempfile.TemporaryDirectory() as folder:
        save_base(folder)
        turns = [
            (measure("ours", folder), measure("fsdp2", folder))
            for _ in range(given.rounds)
        ]
    pairs = zip(turns[0][0]["losses"], turns[0][1]["losses"], strict=True)
    apart = max(abs(a / b - 1) for a, b in pairs)
    if apart > 0.01:
        raise SystemExit(f"losses differ from those of FSDP2 by {apart:.2%}")
    mine, theirs = (
        statistics.median(max(turn[i]["memory_of_ranks"]) for turn in turns)
        for i in range(2)
    )
    name = "LoRA on a Llama of 34.1M parameters in 4 bits, sharded: memory of a rank"
    row = {"name": name, "unit": "MiB", "ours": mine, "peer": PEER, "theirs": theirs}
    print(json.dumps({**row, "ratio": theirs / mine, "goal": 2.0}), flush=True)


if __name__ == "__main__":
    main()
