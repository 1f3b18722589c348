"""How long until something happens: `import ctrainer` against `import numpy`, and from
the start of the process to the end of the first update of a tiny torch model against
transformers' Trainer. Each in a process of its own, in turns. Prints JSON lines.
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
GOAL_IMPORT = 1.5  # times `import numpy`
GOAL_STEP = 2.0  # seconds


def children_cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def seconds(code: str) -> tuple[float, float]:
    """Wall-clock and CPU time of a Python process that runs the code."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    spent, start = children_cpu(), time.perf_counter()
    subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    return time.perf_counter() - start, children_cpu() - spent


def compare(ours: str, theirs: str, rounds: int) -> list[tuple[float, float]]:
    """(ours, theirs) by the wall's clock and by the CPU's: medians of the turns."""
    times: tuple[list[tuple[float, float]], ...] = ([], [])
    seconds(ours), seconds(theirs)  # files into the page cache, bytecode written
    for _ in range(rounds):
        for kept, code in zip(times, (ours, theirs), strict=True):
            kept.append(seconds(code))
    return [
        (
            statistics.median(t[clock] for t in times[0]),
            statistics.median(t[clock] for t in times[1]),
        )
        for clock in (0, 1)
    ]


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
    pairs = compare("import ctrainer", "import numpy", 3 * options.rounds)
    for clock, (ours, theirs) in zip(("wall", "CPU"), pairs, strict=True):
        goal = {"goal": 1 / GOAL_IMPORT} if clock == "CPU" else {}
        line(f"import, {clock} time", "import numpy", ours, theirs, **goal)
    with tempfile.TemporaryDirectory() as folder:
        codes = [
            TRAINING.format(package=package, folder=folder)
            for package in ("ctrainer", "transformers")
        ]
        pairs = compare(*codes, options.rounds)
    for clock, (ours, theirs) in zip(("wall", "CPU"), pairs, strict=True):
        name = f"process start to the end of the first update, {clock} time"
        line(name, "transformers", ours, theirs)
    # On an idle machine the two clocks agree: importing works on one thread.
    line(name, f"the {GOAL_STEP:g} s allowed", pairs[1][0], GOAL_STEP, goal=1.0)


if __name__ == "__main__":
    main()
