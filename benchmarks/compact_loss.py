"""A small GPT-2 with compact state: its loss beside five seeds of float32, its bytes
and its time.

Tokens are of a language without meaning, the same in every run: two tokens leave four
for the next, of fixed probabilities. Each seed draws the first weights and the batches.
Every way makes the same updates of the same batches from the same weights; the loss is
that of one set of other sentences at the end. State is what the optimizer keeps for a
parameter, without the parameter; the time is an update's of MiniLM's parameters without
clipping, on one thread, the median of its CPU time. All ways take turns. Prints a row
of JSON for each way. Needs torch and transformers.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from bench_optimizers import parameters_of
from transformers import GPT2Config, GPT2LMHeadModel

from ctrainer import _C, optim

TOKENS, LENGTH, BATCH = 64, 64, 16
LR, WARMUP = 3e-3, 20


def sentences(n: int, seed: int) -> torch.Tensor:
    """n sentences of the language: a token depends on the last, and the one before."""
    of_language = torch.Generator().manual_seed(0)
    following = torch.randint(TOKENS, (4, TOKENS, 4), generator=of_language)
    chances = torch.tensor([0.55, 0.25, 0.15, 0.05])
    generator = torch.Generator().manual_seed(seed)
    made = torch.randint(TOKENS, (n, 2), generator=generator)
    for _ in range(LENGTH - 2):
        choice = torch.multinomial(chances, n, True, generator=generator)
        found = following[made[:, -2] % 4, made[:, -1], choice]
        made = torch.cat([made, found[:, None]], dim=1)
    return made


def model(seed: int) -> Any:
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=TOKENS, n_positions=LENGTH, n_embd=128, n_layer=2, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def in_float32(params: Any) -> Any:
    return optim.AdamW(params, lr=LR)


# The dtype of the parameters and the optimizer.
WAYS: dict[str, tuple[torch.dtype, Callable[[Any], Any]]] = {
    "AdamW, float32": (torch.float32, in_float32),
    "AdamWCompact, bfloat16": (
        torch.bfloat16,
        lambda params: optim.AdamWCompact(params, lr=LR),
    ),
    "AdamWCompact without corrections, bfloat16": (
        torch.bfloat16,
        lambda params: optim.AdamWCompact(params, lr=LR, master_weight_bits=None),
    ),
    "AdamW8bit with master weights, bfloat16": (
        torch.bfloat16,
        lambda params: optim.AdamW8bit(params, lr=LR, master_weights=True),
    ),
    "AdamW8bit, float32": (
        torch.float32,
        lambda params: optim.AdamW8bit(params, lr=LR),
    ),
    "AdamW with master weights, bfloat16": (
        torch.bfloat16,
        lambda params: optim.AdamW(params, lr=LR, master_weights=True),
    ),
    "AdamWCompact, float32": (
        torch.float32,
        lambda params: optim.AdamWCompact(params, lr=LR),
    ),
}


def train(way: str, seed: int, updates: int) -> tuple[float, float]:
    """The loss at the end, and the bytes of state a parameter."""
    dtype, make = WAYS[way]
    trained = model(seed).to(dtype)
    optimizer = make(trained.parameters())
    batches = sentences(BATCH * updates, seed + 1).split(BATCH)
    for step, batch in enumerate(batches):
        done = step / updates
        factor = min(1.0, (step + 1) / WARMUP) * (1 + math.cos(math.pi * done)) / 2
        optimizer.param_groups[0]["lr"] = LR * factor
        trained(input_ids=batch, labels=batch).loss.backward()
        optimizer.step(max_norm=1.0, zero_grads=True)
    with torch.no_grad():
        held = sentences(256, -1)
        loss = trained(input_ids=held, labels=held).loss.item()
    values = [v for state in optimizer.state.values() for v in state.values()]
    tensors = {v.data_ptr(): v for v in values if isinstance(v, torch.Tensor)}
    elements = sum(p.numel() for p in trained.parameters())
    return loss, sum(t.nbytes for t in tensors.values()) / elements


def times(ways: list[str], rounds: int) -> dict[str, float]:
    """The median seconds of an update."""
    found: dict[str, list[float]] = {way: [] for way in ways}
    steps = {}
    for way in ways:
        dtype, make = WAYS[way]
        steps[way] = make(parameters_of(dtype)).step
    for _ in range(rounds + 1):
        for way, step in steps.items():
            before = time.thread_time()
            step()
            found[way].append(time.thread_time() - before)
    return {way: statistics.median(all_of[1:]) for way, all_of in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS))
    args = parser.parse_args()
    _C.set_num_threads(1)
    torch.set_num_threads(1)
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in args.only}
    for seed in range(args.seeds):
        for way in args.only:
            found[way].append(train(way, seed, args.updates))
    seconds = times(args.only, args.rounds)
    for way, rows in found.items():
        losses, state = zip(*rows, strict=True)
        row = {
            "way": way,
            "losses": [round(loss, 4) for loss in losses],
            "mean": round(statistics.mean(losses), 4),
            "state_bytes": round(state[0], 2),
            "ms": round(1000 * seconds[way], 1),
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
