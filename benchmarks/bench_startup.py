"""How long until something happens: `import ctrainer` against `import numpy`, and from
the start of the process to the end of the first update of a tiny torch model against
transformers' Trainer, a loop of torch with its fused AdamW, and `import torch` alone,
below which no trainer gets; and until that process has ended, which torch's modules
make longer. Each in a process of its own, in turns. Prints JSON lines.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time

TRAINING = """
import torch
import {package} as package

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x, labels):
        return {{"loss": (self.layer(x).squeeze(-1) - labels).square().mean()}}

rows = [{{"x": torch.ones(4), "labels": torch.ones(())}} for _ in range(8)]
args = package.TrainingArguments(
    {folder!r}, max_steps=1, save_strategy="no", report_to="none", disable_tqdm=True,
    use_cpu=True,
)
package.Trainer(Model(), args, train_dataset=rows).train()
"""
LOOP = """
import torch

layer = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
rows = [(torch.ones(4), torch.ones(())) for _ in range(8)]
for x, labels in torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True):
    (layer(x).squeeze(-1) - labels).square().mean().backward()
    torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
    optimizer.step()
"""
CLOCKS = """
import time
print(time.monotonic(), time.process_time())
"""
GOAL_IMPORT = 1.5  # times `import numpy`
GOAL_STEP = 1.5  # seconds


def children_cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def seconds(code: str) -> tuple[float, ...]:
    """Wall-clock and CPU time of a Python process until the code has run, and until the
    process has ended."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installation has bytecode
    spent, start = children_cpu(), time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code + CLOCKS], env=environment, check=True,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    whole = time.monotonic() - start, children_cpu() - spent
    wall, cpu = map(float, done.stdout.split()[-2:])
    return wall - start, cpu, *whole


def compare(codes: list[str], rounds: int) -> list[tuple[float, ...]]:
    """Of each code the four times of seconds(): medians of the turns."""
    times: list[list[tuple[float, ...]]] = [[] for _ in codes]
    for code in codes:
        seconds(code)  # files into the page cache, bytecode written
    for _ in range(rounds):
        for kept, code in zip(times, codes, strict=True):
            kept.append(seconds(code))
    return [tuple(map(statistics.median, zip(*turns, strict=True))) for turns in times]


def line(name: str, peer: str, ours: float, theirs: float, **goal: float) -> None:
    fields = {
        "benchmark": "startup", "name": name, "peer": peer, "ours": ours,
        "theirs": theirs, "unit": "s", "ratio": theirs / ours, **goal,
    }  # fmt: skip
    print(json.dumps(fields), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    ours, theirs = compare(["import ctrainer", "import numpy"], 3 * options.rounds)
    for clock, name in enumerate(("wall", "CPU")):
        goal = {"goal": 1 / GOAL_IMPORT} if name == "CPU" else {}
        line(f"import, {name} time", "import numpy", ours[clock], theirs[clock], **goal)
    with tempfile.TemporaryDirectory() as folder:
        trainers = [
            TRAINING.format(package=package, folder=folder)
            for package in ("ctrainer", "transformers")
        ]
        ours, *others = compare([*trainers, LOOP, "import torch"], options.rounds)
    peers = ("transformers", "loop with torch's fused AdamW", "import torch alone")
    until = "process start to the end of the first update"
    spans = (f"{until}, wall time", f"{until}, CPU time",
             "whole process of one update, wall time",
             "whole process of one update, CPU time")  # fmt: skip
    for i, span in enumerate(spans):
        for peer, theirs in zip(peers, others, strict=True):
            line(span, peer, ours[i], theirs[i])
    # On an idle machine the two clocks agree: importing works on one thread.
    line(spans[1], f"the {GOAL_STEP:g} s allowed", ours[1], GOAL_STEP, goal=1.0)


if __name__ == "__main__":
    main()
