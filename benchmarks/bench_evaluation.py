"""predict() and evaluate() against transformers' Trainer: CPU time, and memory of
predict() on top of the process's own.

2048 rows of 64 x 512 logits in batches of 8, 256 MiB of predictions; of evaluate(), the
loss alone. The two, and a loop written by hand, take turns in one process on one thread
for the time; for the memory each runs in a process of its own. Prints JSON lines.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

ROWS, LENGTH, CLASSES, BATCH = 2048, 64, 512, 8
HIDDEN = 16
LIBRARIES = ("ctrainer", "transformers")


class Tagger(torch.nn.Module):
    """Cheap for the size of its outputs: what is measured is what happens to them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(100, HIDDEN)
        self.out = torch.nn.Linear(HIDDEN, CLASSES)

    def forward(self, input_ids: Any, labels: Any) -> dict[str, Any]:
        logits = self.out(self.embed(input_ids))
        return {"loss": logits.mean(), "logits": logits}


class Tokens(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self, n: int) -> None:
        self.n = n
        self.ids = torch.arange(LENGTH) % 100
        self.labels = torch.arange(LENGTH) % CLASSES

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.ids, "labels": self.labels}


def trainer(library: str, folder: str) -> Any:
    if library == "ctrainer":
        from ctrainer import Trainer, TrainingArguments
    else:
        from transformers import Trainer, TrainingArguments
    torch.manual_seed(0)
    args = TrainingArguments(
        folder,
        per_device_eval_batch_size=BATCH,
        use_cpu=True,
        disable_tqdm=True,
        report_to="none",
    )
    made = Trainer(Tagger(), args)
    for module in sys.modules.get("ctrainer"), sys.modules.get("transformers"):
        if module is not None:
            made.remove_callback(module.PrinterCallback)
    return made


def bare_loop(model: Tagger, data: Tokens) -> None:
    """The floor: the forward, and a copy into an array of the right size."""
    import numpy as np

    rows = np.empty((len(data), LENGTH, CLASSES), np.float32)
    with torch.no_grad():
        for i, batch in enumerate(torch.utils.data.DataLoader(data, BATCH)):
            rows[i * BATCH : (i + 1) * BATCH] = model(**batch)["logits"].numpy()


def bare_losses(model: Tagger, data: Tokens) -> float:
    """The floor of the loss: the forward, and a sum."""
    loader = torch.utils.data.DataLoader(data, BATCH)
    with torch.no_grad():
        return sum(BATCH * model(**batch)["loss"].item() for batch in loader)


def seconds(function: Any, *args: Any) -> float:
    """Of the CPU: another process does not count."""
    start = time.process_time()
    function(*args)
    return time.process_time() - start


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def status_kib(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    raise KeyError(field)


def extra_mib(library: str, rows: int) -> float:
    """Peak memory of one predict() beyond what the process had before."""
    with tempfile.TemporaryDirectory() as folder:
        ready = trainer(library, folder)
        ready.predict(Tokens(4 * BATCH))
        before = status_kib("VmRSS")
        try:
            reset_peak()
            peak = lambda: status_kib("VmHWM")  # noqa: E731
        except OSError:
            peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # noqa: E731
        output = ready.predict(Tokens(rows))
        assert output.predictions.shape == (rows, LENGTH, CLASSES)
        return (peak() - before) / 1024


def measured_memory(library: str, rows: int) -> float:
    command = [sys.executable, __file__, "--memory", library, "--rows", str(rows)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stdout.strip().splitlines()[-1])


def emit(**fields: Any) -> None:
    print(json.dumps({"benchmark": "evaluation", **fields}), flush=True)


def compare(name: str, functions: Any, data: Tokens, rounds: int) -> None:
    """Prints the CPU time of ours beside those of transformers and of a bare loop."""
    for function in functions:
        function(Tokens(4 * BATCH))
    turns = [[seconds(f, data) for f in functions] for _ in range(rounds)]
    mine, *others = map(statistics.median, zip(*turns, strict=True))
    peers = {"transformers": 3.0, "bare loop": None}
    for (peer, goal), other in zip(peers.items(), others, strict=True):
        goal = goal if name.startswith("predict") else None
        emit(
            name=f"{name}, CPU time", unit="s", peer=peer, ours=mine, theirs=other,
            ratio=other / mine, goal=goal,
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", choices=LIBRARIES)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.memory:
        print(extra_mib(options.memory, options.rows))
        return
    data = Tokens(options.rows)
    size = f"{options.rows} rows of {LENGTH} x {CLASSES}, batch {BATCH}"
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = (trainer(library, folder) for library in LIBRARIES)
        for what, loop in (("predict", bare_loop), ("evaluate", bare_losses)):
            run = (
                getattr(ours, what),
                getattr(theirs, what),
                partial(loop, ours.model),
            )
            compare(f"{what}, {size}", run, data, options.rounds)
    memory = {name: measured_memory(name, options.rows) for name in LIBRARIES}
    emit(
        name=f"peak memory of predict, {size}",
        unit="MiB",
        peer="transformers",
        ours=memory["ctrainer"],
        theirs=memory["transformers"],
        ratio=memory["transformers"] / memory["ctrainer"],
        goal=2.0,
    )


if __name__ == "__main__":
    main()
