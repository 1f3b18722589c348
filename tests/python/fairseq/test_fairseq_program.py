"""`fairseq-train` on a language model: it learns, saves, and goes on after a kill."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import fairseq_program as program
import pytest
import torch
from ranks import run_alone

from ctrainer.__main__ import main


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return program.preprocess(tmp_path_factory.mktemp("text"))


def losses(lines: list[Any], tag: str, key: str) -> list[float]:
    return [float(stats[key]) for name, stats in lines if name == tag and key in stats]


def test_a_language_model_learns_and_is_validated_and_saved(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = program.train(
        caplog, program.lm_arguments(data, tmp_path, "--max-epoch", "6")
    )
    valid = losses(lines, "valid", "valid_loss")
    assert len(valid) == 6
    assert valid[-1] < 0.6 * valid[0]
    best = losses(lines, "valid", "valid_best_loss")  # none before the first
    assert best == [min(valid[: i + 1]) for i in range(1, 6)]
    ppl = losses(lines, "valid", "valid_ppl")
    assert ppl == pytest.approx([2**loss for loss in valid], abs=0.02, rel=1e-3)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        *(f"checkpoint{i}.pt" for i in range(1, 7)),
        "checkpoint_best.pt",
        "checkpoint_last.pt",
    ]


def test_numbers_are_logged_every_interval_and_every_epoch(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = program.train(caplog, program.lm_arguments(data, tmp_path))
    updates = losses(lines, "train_inner", "num_updates")
    assert updates == list(range(3, 3 * len(updates) + 1, 3))
    ends = losses(lines, "train", "train_num_updates")
    assert ends == losses(lines, "valid", "valid_num_updates")
    assert len(ends) == 2


def _die_at(update: int, arguments: list[str]) -> str:
    """Run the program in a process that is killed before an update; its output."""
    done = run_alone("fairseq.killed_program", str(update), *arguments)
    assert done.returncode == -signal.SIGKILL, done.stderr
    return done.stdout


def test_a_killed_run_goes_on_with_the_same_numbers(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    every = ["--save-interval-updates", "4", "--dropout", "0.1"]
    whole = program.train(
        caplog, program.lm_arguments(data, tmp_path / "whole", *every)
    )
    arguments = program.lm_arguments(data, tmp_path / "killed", *every)
    before = program.numbers_of_output(_die_at(15, arguments))
    after = program.train(caplog, arguments)
    # The updates that no checkpoint had seen are done twice, with the same numbers.
    position = whole.index(after[0])
    assert 0 < position < len(before)
    assert before == whole[: len(before)]
    assert after == whole[position:]
    weights = [
        torch.load(tmp_path / run / "checkpoint_last.pt", weights_only=True)["model"]
        for run in ("whole", "killed")
    ]
    assert all(torch.equal(weights[0][k], weights[1][k]) for k in weights[0])


@pytest.fixture(scope="module")
def plain_loss(data: Path, tmp_path_factory: pytest.TempPathFactory) -> float:
    """The validation loss of an epoch in float32."""
    folder = tmp_path_factory.mktemp("plain")
    assert main(program.lm_arguments(data, folder, "--max-epoch", "1")) == 0
    state = torch.load(folder / "checkpoint_last.pt", weights_only=True)
    return float(state["extra_state"]["val_loss"])


@pytest.mark.parametrize(
    "options",
    ["--fp16", "--bf16", "--amp", "--memory-efficient-fp16", "--memory-efficient-bf16",
     "--store-ema", "--num-workers 1"],
)  # fmt: skip
def test_every_precision_learns_alike(
    data: Path, tmp_path: Path, plain_loss: float, options: str
) -> None:
    arguments = program.lm_arguments(data, tmp_path, "--max-epoch", "1")
    assert main([*arguments, *options.split()]) == 0
    state = torch.load(tmp_path / "checkpoint_last.pt", weights_only=True)
    found = state["extra_state"]["val_loss"]
    exact = options in ("--store-ema", "--num-workers 1")
    # bfloat16 rounds weights near 1 by 2**-9; ten updates of 0.02 move them by 0.2.
    assert found == (plain_loss if exact else pytest.approx(plain_loss, abs=0.15))


def test_a_finished_run_is_not_trained_further(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = program.lm_arguments(data, tmp_path)
    program.train(caplog, arguments)
    assert program.train(caplog, arguments) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--profile"], "common.profile"),
        (["--best-checkpoint-metric", "bleu"], "validation logs .*loss"),
        (["--valid-subset", "test"], "Dataset not found: test"),
        (["--future-target", "--past-target"], "Unsupported language modeling target"),
    ],
)
def test_what_cannot_be_done_is_said(
    data: Path, tmp_path: Path, options: list[str], message: str
) -> None:
    arguments = program.lm_arguments(data, tmp_path, "--max-epoch", "1", *options)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        main(arguments)


def test_batches_need_a_limit(data: Path, tmp_path: Path) -> None:
    arguments = program.lm_arguments(data, tmp_path)
    at = arguments.index("--max-tokens")
    with pytest.raises(ValueError, match="Must specify batch size"):
        main([*arguments[:at], *arguments[at + 2 :]])


def test_an_option_that_is_misspelt_ends_the_program(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(program.lm_arguments(data, tmp_path, "--decoder-layer", "3"))
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert "ctrainer fairseq-train: error" in message
    assert "did you mean --decoder-layers?" in message
