"""When `fairseq-train` stops, validates and saves."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import fairseq_program as program
import pytest
from places import ROOT

from ctrainer.__main__ import main

Caplog = pytest.LogCaptureFixture


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return program.preprocess(tmp_path_factory.mktemp("text"))  # 10 updates an epoch


def run(caplog: Caplog, data: Path, folder: Path, options: str) -> list[Any]:
    """A run without an end of its own; what it logs."""
    arguments = program.lm_arguments(data, folder, "--max-epoch", "0")
    return program.train(caplog, [*arguments, *options.split()])


def updates(lines: list[Any], tag: str) -> list[int]:
    found = [stats for name, stats in lines if name == tag]
    prefix = "" if tag == "train_inner" else f"{tag}_"
    return [int(stats[f"{prefix}num_updates"]) for stats in found]


@pytest.mark.parametrize(
    ("options", "last", "reason"),
    [
        ("--max-update 7", 7, "num_updates: 7 >= max_update: 7"),
        ("--stop-time-hours 1e-9", 1, "cumulative_training_time"),
        (
            "--lr-scheduler fixed --warmup-updates 0 --force-anneal 2 --lr-shrink 0.5 "
            "--stop-min-lr 0.015",
            20,
            "smaller than or equal to minimum learning rate",
        ),
        ("--max-epoch 1", 10, "done training"),
    ],
)
def test_it_stops_when_told_to(
    data: Path, tmp_path: Path, caplog: Caplog, options: str, last: int, reason: str
) -> None:
    lines = run(caplog, data, tmp_path, options)
    assert updates(lines, "train")[-1] == last
    assert updates(lines, "valid")[-1] == last
    assert reason in caplog.text
    assert (tmp_path / "checkpoint_last.pt").exists()


def test_patience_ends_and_goes_on_counting_after_a_restart(
    data: Path, tmp_path: Path, caplog: Caplog
) -> None:
    # Nothing is learnt, so that no validation is better than the first.
    still = "--lr 1e-30 --patience 3 --dropout 0 --attention-dropout 0"
    lines = run(caplog, data, tmp_path, f"{still} --max-epoch 3")
    assert updates(lines, "valid") == [10, 20, 30]
    assert "early stop" not in caplog.text
    lines = run(caplog, data, tmp_path, f"{still} --max-epoch 9")
    assert updates(lines, "valid") == [40]
    assert "hasn't improved for last 3 runs" in caplog.text


def test_it_validates_and_saves_by_updates(
    data: Path, tmp_path: Path, caplog: Caplog
) -> None:
    options = "--max-update 9 --validate-interval-updates 4 --save-interval-updates 3"
    lines = run(caplog, data, tmp_path, options)
    assert updates(lines, "valid") == [3, 4, 6, 8, 9]
    assert {p.name for p in tmp_path.iterdir()} == {
        "checkpoint_1_3.pt", "checkpoint_1_6.pt", "checkpoint_1_9.pt",
        "checkpoint_best.pt", "checkpoint_last.pt",
    }  # fmt: skip


def test_validation_begins_late_or_never(
    data: Path, tmp_path: Path, caplog: Caplog
) -> None:
    options = "--max-update 20 --validate-interval-updates 5"
    late = run(caplog, data, tmp_path / "a", f"{options} --validate-after-updates 12")
    assert updates(late, "valid") == [15, 20]
    never = run(caplog, data, tmp_path / "b", f"{options} --disable-validation")
    assert updates(never, "valid") == []
    assert not (tmp_path / "b/checkpoint_best.pt").exists()


def test_several_subsets_are_validated_and_the_first_decides(
    data: Path, tmp_path: Path, caplog: Caplog
) -> None:
    copy = shutil.copytree(data, tmp_path / "data")
    for end in ("bin", "idx"):
        shutil.copy(copy / f"train.{end}", copy / f"valid1.{end}")
    arguments = program.lm_arguments(copy, tmp_path / "x", "--max-epoch", "1")
    with pytest.raises(ValueError, match=r"Valid paths \['valid1'\] will be ignored"):
        main(arguments)
    lines = program.train(caplog, [*arguments, "--valid-subset", "valid,valid1"])
    assert updates(lines, "valid") == updates(lines, "valid1") == [10]
    both = program.train(
        caplog, [*arguments, "--save-dir", str(tmp_path / "y"), "--combine-val"]
    )
    sizes = {n: float(s[f"{n}_bsz"]) for n, s in lines if n in ("valid", "valid1")}
    (joined,) = (float(s["valid_wpb"]) for n, s in both if n == "valid")
    assert joined > 0
    assert sizes["valid1"] > 0


def test_a_limit_of_validation_batches_is_kept_to(
    data: Path, tmp_path: Path, caplog: Caplog
) -> None:
    import ctrainer.fairseq.trainer as module

    counted: list[Any] = []
    whole = module.Trainer.valid_step
    module.Trainer.valid_step = lambda self, sample: (  # type: ignore[method-assign]
        counted.append(1), whole(self, sample)
    )  # fmt: skip
    try:
        options = "--max-epoch 1 --batch-size-valid 8 --max-tokens-valid 16"
        more = "--required-batch-size-multiple 1 --max-valid-steps 2"
        run(caplog, data, tmp_path, f"{options} {more}")
    finally:
        module.Trainer.valid_step = whole  # type: ignore[method-assign]
    assert len(counted) == 2


def test_batches_of_an_update_change_with_the_epoch(
    data: Path, tmp_path: Path, caplog: Caplog
) -> None:
    lines = run(caplog, data, tmp_path, "--max-epoch 3 --update-freq 1,2,5")
    assert updates(lines, "train") == [10, 15, 17]


def test_what_was_learnt_is_finetuned_with_a_new_beginning(
    data: Path, tmp_path: Path, caplog: Caplog
) -> None:
    run(caplog, data, tmp_path / "a", "--max-epoch 3")
    first = tmp_path / "a/checkpoint_last.pt"
    lines = run(
        caplog, data, tmp_path / "b", f"--max-epoch 1 --finetune-from-model {first}"
    )
    assert updates(lines, "train") == [10]
    (loss,) = (float(s["train_loss"]) for n, s in lines if n == "train")
    assert loss < 3.5  # 4.4 bits of 21 words, without what is known


def test_tensorboard_gets_the_numbers(
    data: Path, tmp_path: Path, caplog: Caplog
) -> None:
    pytest.importorskip("tensorboardX")
    options = f"--max-epoch 1 --tensorboard-logdir {tmp_path / 'events'}"
    run(caplog, data, tmp_path / "x", options)
    folders = {p.name for p in (tmp_path / "events").iterdir()}
    assert {"train", "train_inner", "valid"} <= folders


def test_two_workers_log_what_one_does_with_two_batches_an_update(
    data: Path, tmp_path: Path, caplog: Caplog
) -> None:
    same = "--max-epoch 1 --dropout 0 --attention-dropout 0".split()
    one = program.train(
        caplog,
        [*program.lm_arguments(data, tmp_path / "one"), *same, "--update-freq", "2"],
    )
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2",
         "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "-m", "ctrainer",
         *program.lm_arguments(data, tmp_path / "two"), *same],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    two = program.numbers_of_output(done.stdout)
    assert [name for name, _ in two] == [name for name, _ in one]
    for (name, ours), (_, theirs) in zip(one, two, strict=True):
        key = "loss" if name == "train_inner" else f"{name}_loss"
        # Workers add the same gradients in another order: a digit of three decimals.
        assert float(theirs[key]) == pytest.approx(float(ours[key]), abs=2e-3)
