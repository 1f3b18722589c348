"""fairseq's programs on a small text, and the numbers that they log."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from ctrainer.__main__ import main

torch.set_num_threads(1)
# What depends on the clock.
TIMES = ("wps", "ups", "wall")


def sentence(generator: random.Random) -> str:
    """Words that follow from the first by a rule."""
    first = generator.randrange(20)
    return " ".join(
        f"w{(first + 3 * i) % 20}" for i in range(generator.randrange(3, 9))
    )


def write_text(folder: Path, lines: int = 160) -> None:
    """train and valid in a folder."""
    generator = random.Random(3)
    for name, count in (("train", lines), ("valid", 24)):
        text = "".join(f"{sentence(generator)}\n" for _ in range(count))
        (folder / name).write_text(text)


def preprocess(folder: Path, *more: str) -> Path:
    """Binarise train and valid of a folder into its `bin`."""
    write_text(folder)
    target = folder / "bin"
    options = ["--trainpref", folder / "train", "--validpref", folder / "valid"]
    given = [*options, "--destdir", target, "--only-source", *more]
    assert main(["fairseq-preprocess", *map(str, given)]) == 0
    return target


def lm_arguments(data: Path, save_dir: Path, *more: str) -> list[str]:
    """A tiny language model; later options win."""
    text = f"""fairseq-train {data} --task language_modeling --save-dir {save_dir}
        --arch transformer_lm_gpt2_tiny --decoder-embed-dim 16 --decoder-layers 1
        --share-decoder-input-output-embed --tokens-per-sample 16
        --sample-break-mode complete --max-tokens 128 --optimizer adam --lr 0.02
        --lr-scheduler inverse_sqrt --warmup-updates 10 --clip-norm 1.0 --max-epoch 2
        --log-format json --log-interval 3 --num-workers 0 --cpu"""
    return [*text.split(), *more]


def train(caplog: pytest.LogCaptureFixture, arguments: list[str]) -> list[Any]:
    """Run the program here; return (tag, numbers) of each line that it logs."""
    caplog.clear()
    with caplog.at_level("INFO"):
        assert main(arguments) == 0
    return numbers([(record.name, record.getMessage()) for record in caplog.records])


def numbers(lines: list[tuple[str, str]]) -> list[Any]:
    """(logger, numbers but the clock's) of the lines of JSON."""
    found = []
    for name, text in lines:
        if text[:1] == "{" and '"epoch"' in text:
            stats = json.loads(text)
            kept = {k: v for k, v in stats.items() if not k.endswith(TIMES)}
            found.append((name, kept))
    return found


def numbers_of_output(text: str) -> list[Any]:
    """The same of a program's standard output."""
    lines = [line.split(" | ", 3) for line in text.splitlines()]
    return numbers([(parts[2], parts[3]) for parts in lines if len(parts) == 4])
