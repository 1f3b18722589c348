"""Train fairseq's language model on the docstrings of Python's standard library.

fairseq-preprocess binarises the text, fairseq-train trains a transformer with Adam and
inverse_sqrt and validates it on docstrings that it has not seen. A second run of the
same command is killed on the way and started again: every number that it logs is then
compared with those of the first, to the last digit. At the end the model completes a
few sentences.

    python examples/fairseq_lm.py                 about a minute on two cores
    python examples/fairseq_lm.py --workers 2     the same on two workers, by torchrun
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from code_pairs import load_pairs, split, standard_library

from ctrainer.fairseq import checkpoint_utils

ROOT = Path(__file__).resolve().parents[1]
CLOCK = ("wps", "ups", "wall")  # what depends on the machine's speed
BEGINNINGS = ("return the", "create a new", "raise an exception if", "convert a")


def write_text(out: Path, folder: Path) -> None:
    """A docstring a line, its words and marks apart, into train and valid."""
    for name, pairs in zip(
        ("train", "valid"), split(load_pairs(folder, out / "pairs.json")), strict=True
    ):
        lines = (" ".join(words(pair.doc)[:60]) for pair in pairs)
        (out / f"{name}.txt").write_text("".join(f"{line}\n" for line in lines))


def words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9_]+|[^\sa-z0-9_]", text.lower())


def command(name: str, *options: object, workers: int = 1) -> list[str]:
    """A program of fairseq's, in a process of its own or in one a worker."""
    launcher = [sys.executable, "-m"]
    if workers > 1:
        launcher += ["torch.distributed.run", f"--nproc-per-node={workers}"]
        launcher += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "-m"]
    return [*launcher, "ctrainer", f"fairseq-{name}", *map(str, options)]


def environment() -> dict[str, str]:
    """One thread a process: matrices as small as these are not worth two."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def binarise(out: Path) -> Path:
    data = out / "data-bin"
    shutil.rmtree(data, ignore_errors=True)
    texts = ["--trainpref", out / "train.txt", "--validpref", out / "valid.txt"]
    rest = ["--only-source", "--thresholdsrc", 3, "--destdir", data]
    subprocess.run(
        command("preprocess", *texts, *rest), check=True, env=environment(),
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    return data


def training(data: Path, save_dir: Path, options: argparse.Namespace) -> list[str]:
    """The one command line that both runs use."""
    text = f"""{data} --task language_modeling --sample-break-mode complete
        --tokens-per-sample 64 --max-tokens {1024 // options.workers}
        --arch transformer_lm_gpt2_tiny --decoder-embed-dim {options.width}
        --decoder-ffn-embed-dim {4 * options.width} --decoder-attention-heads 4
        --share-decoder-input-output-embed --criterion cross_entropy
        --optimizer adam --adam-betas (0.9,0.98) --lr 0.006 --clip-norm 1.0
        --lr-scheduler inverse_sqrt --warmup-updates 30 --max-epoch {options.epochs}
        --save-interval-updates {options.every} --keep-interval-updates 2
        --log-format json --log-interval 10 --cpu --num-workers 0
        --no-epoch-checkpoints --save-dir {save_dir}"""
    return command("train", *text.split(), workers=options.workers)


def run(arguments: list[str], kill_after: float = float("inf")) -> Any:
    """Run fairseq-train and return what it logged: (logger, updates) -> numbers. After
    that many updates it is killed, all its workers at once."""
    logged: dict[tuple[str, int], dict[str, str]] = {}
    with subprocess.Popen(
        arguments, env=environment(), stdout=subprocess.PIPE, text=True
    ) as process:
        for line in process.stdout or ():
            _, _, name, text = [*line.rstrip().split(" | ", 3), "", "", ""][:4]
            if not text.startswith('{"epoch"'):
                continue
            stats = json.loads(text)
            updates = int(stats.get("num_updates", stats.get(f"{name}_num_updates")))
            kept = {k: v for k, v in stats.items() if not k.endswith(CLOCK)}
            logged[name, updates] = kept
            show(name, stats)
            if updates >= kill_after:
                kill(process.pid)
                break
    if process.returncode not in (0, -signal.SIGKILL):
        raise SystemExit(f"fairseq-train ended with status {process.returncode}")
    return logged


def kill(pid: int) -> None:
    """End a process and those it has started, without a chance to tidy up."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    for one in (pid, *map(int, children)):
        os.kill(one, signal.SIGKILL)


def show(name: str, stats: dict[str, str]) -> None:
    """A line an epoch."""
    if name == "train":
        print(f"  epoch {stats['epoch']}: {stats['train_num_updates']} updates, "
              f"{stats['train_loss']} bits a word, "
              f"{float(stats['train_wps']):,.0f} words/s")  # fmt: skip
    elif name == "valid":
        loss, updates = stats["valid_loss"], stats["valid_num_updates"]
        print(f"  validation after {updates}: {loss} bits, {stats['valid_ppl']} ppl")


def compare(whole: Any, killed: Any, resumed: Any) -> None:
    """Say whether both runs logged the same. Raises SystemExit where they did not."""
    again = killed.keys() & resumed.keys()
    found = {**killed, **resumed}
    wrong = [key for key in whole if found.get(key) != whole[key]]
    wrong += [key for key in again if killed[key] != resumed[key]]
    if wrong or found.keys() != whole.keys():
        raise SystemExit(f"the resumed run logged other numbers: {wrong}")
    numbers = sum(len(stats) for stats in whole.values())
    print(f"{len(whole)} lines with {numbers} numbers are the same in both runs, "
          f"{len(again)} of them logged once more after the kill")  # fmt: skip


@torch.no_grad()
def complete(save_dir: Path, beginning: str, most: int = 16) -> str:
    """Words that the best checkpoint thinks likely, drawn one after another."""
    torch.manual_seed(1)
    path = str(save_dir / "checkpoint_best.pt")
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task([path])
    vocabulary = task.source_dictionary
    ids = vocabulary.encode_line(beginning, add_if_not_exist=False, append_eos=False)
    row = [vocabulary.eos(), *ids.tolist()]
    for _ in range(most):
        logits, _ = model.eval()(torch.tensor([row]))
        logits[..., vocabulary.unk()] = -torch.inf
        row.append(int(torch.multinomial((logits[0, -1] / 0.7).softmax(-1), 1)))
        if row[-1] == vocabulary.eos():
            break
    return vocabulary.string(torch.tensor(row[1:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=standard_library())
    parser.add_argument("--out", type=Path, default=Path("out/fairseq_lm"))
    parser.add_argument("--workers", type=int, default=1, help="processes that train")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--width", type=int, default=96, help="of the model")
    parser.add_argument("--every", type=int, default=60, help="updates a checkpoint")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    write_text(options.out, options.folder)
    data = binarise(options.out)
    folders = [options.out / name for name in ("whole", "killed")]
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    lines = [training(data, folder, options) for folder in folders]
    print("a run that is left alone:")
    whole = run(lines[0])
    middle = max(updates for _, updates in whole) // 2 + options.every // 2
    print(f"the same, killed after update {middle}:")
    killed = run(lines[1], kill_after=middle)
    print("and started again:")
    resumed = run(lines[1])
    compare(whole, killed, resumed)
    for beginning in BEGINNINGS:
        print(f"  {complete(folders[1], beginning)}")


if __name__ == "__main__":
    main()
