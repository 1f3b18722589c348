"""What runs show in a terminal and in a file, held against what the runs counted for
themselves: every rate, and every line that was written beside the display."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from fcntl import ioctl
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from draws import EXHAUSTIVE
from places import PYTHONPATH
from ranks import free_port, torchrun
from screen import screen

RUN = Path(__file__).resolve().parent / "terminal_run.py"
STEPS = {"eval_strategy": "steps", "eval_steps": 10}
UNTIL_BEST = {**STEPS, "metric_for_best_model": "loss", "load_best_model_at_end": True}
SAVES = {"save_strategy": "steps", "save_steps": 10}
EPOCHS = {"max_steps": -1, "num_train_epochs": 3}


# Of runs of 30 updates of 10 ms, each with what differs from that.
RATES: dict[str, dict[str, Any]] = {
    "whole": {},
    "epochs": {"rows": 42, "args": EPOCHS},  # the last batch of an epoch has 2 rows
    "accumulated": {"args": {"gradient_accumulation_steps": 2, "max_steps": 15}},
    "stopped": {"stop_at": 25, "args": {"max_steps": 1000}},
    "stopped in its first epoch": {"stop_at": 25, "rows": 400, "args": EPOCHS},
    "stopped early": {
        "patience": 1,
        "args": {**UNTIL_BEST, "save_strategy": "steps", "save_steps": 10},
    },
    "evaluated": {"args": STEPS, "eval_seconds": 0.03},
    "saved": {"args": SAVES},
    "saved and evaluated": {"args": {**STEPS, **SAVES}},
    "slow": {"seconds": 1.3, "args": {"max_steps": 2, "logging_steps": 1}},
    "evaluated at its begin": {"args": {"eval_on_start": True, **STEPS}},
}


class Shown(NamedTuple):
    """What a run wrote to its terminal, its exit code, and what it counted."""

    text: str
    code: int
    report: dict[str, Any]

    @property
    def lines(self) -> list[str]:
        return screen(self.text)


def run(
    folder: Path, options: dict[str, Any], columns: int = 120, ranks: int = 1,
    **environ: str,
) -> Shown:  # fmt: skip
    """A run on a terminal; of several ranks all have it, and rank 0's counts are
    returned."""
    master, slave = pty.openpty()
    ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    job, port = folder.name, free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, RUN, json.dumps({"folder": str(folder), **options})],
            stdin=slave, stdout=slave, stderr=slave,
            env=environment(**environ)
            | (torchrun(rank, ranks, job, port) if ranks > 1 else {}),
        )
        for rank in range(ranks)
    ]  # fmt: skip
    os.close(slave)
    text = b""
    while chunk := _read(master):
        text += chunk
    os.close(master)
    codes = [process.wait(60) for process in processes]
    return Shown(text.decode(), max(codes, key=abs), counts(folder))


def _read(master: int) -> bytes:
    try:
        return os.read(master, 65536)
    except OSError:  # the other end is closed
        return b""


def environment(**changed: str) -> dict[str, str]:
    drop = ("CTRAINER_LOG", "NO_COLOR", "PYTHONUNBUFFERED")
    kept = {k: v for k, v in os.environ.items() if k not in drop}
    own = {"PYTHONPATH": PYTHONPATH, "PYTHONUTF8": "1", "TERM": "xterm"}
    return {**kept, **own, "OMP_NUM_THREADS": "1", **changed}


def counts(folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / "report0.json").read_text())
    return report


def frames(text: str) -> list[str]:
    """Each state of the live line, in order."""
    plain = re.sub(r"\x1b\[\d*m", "", text)
    drawn = re.findall(r"\r([^\r\n\x1b]*?\d+/\d+[^\r\n\x1b]*)\x1b\[K", plain)
    return [line for line in drawn if " eval " not in line]


NUMBER = r"([\d.]+)([kM]?) "


def rate_of(line: str, unit: str) -> float | None:
    """The rate of a live line or summary, a second."""
    if found := re.search(rf"{NUMBER}{unit}/s", line):
        return float(found[1]) * {"": 1, "k": 1e3, "M": 1e6}[found[2]]
    if found := re.search(rf"{NUMBER}s/{unit.removesuffix('s')}", line):
        return 1 / (float(found[1]) * {"": 1, "k": 1e3, "M": 1e6}[found[2]])
    return None


def check(shown: float, count: int, least: float, most: float, what: str) -> None:
    """`count` in between `least` and `most` seconds, as a speed, to 5 %."""
    assert 0.95 * count / most <= shown <= 1.05 * count / least, what


def check_whole_run(
    shown: dict[str, float], report: dict[str, Any], ranks: int
) -> None:
    """Speeds of the run, by the names that they have in the metrics."""
    (begin, begun), (end, ended) = report["begin"], report["end"]
    updates, seconds = report["updates"], (end - begun, ended - begin)
    for name, count in ("samples", ranks * updates[-1][2]), ("steps", len(updates)):
        check(shown[f"train_{name}_per_second"], count, *seconds, name)
    assert 0.95 * seconds[0] <= shown["train_runtime"] <= 1.05 * seconds[1]


def check_frames(text: str, report: dict[str, Any], ranks: int) -> int:
    """Each frame's samples a second, by the updates until then, without evaluations."""
    updates = {step: (times, rows) for times, step, rows in report["updates"]}
    begin, begun = report["begin"]
    checked = 0
    for frame in frames(text):
        step = int(re.search(r"(\d+)/\d+", frame)[1])  # type: ignore[index]
        shown = rate_of(frame, "samples")
        if shown is None or (step == max(updates) and "eta" not in frame):
            continue  # before the second mark; the end, which shows the whole run's
        (called, ended), rows = updates[step]
        pauses = [pause for pause in report["pauses"] if pause[3] <= called]
        least = called - begun - sum(end - begin for _, _, begin, end in pauses)
        most = ended - begin - sum(end - begin for begin, end, _, _ in pauses)
        check(shown, ranks * rows, least, most, frame)
        checked += 1
    return checked


def check_rates(shown: Shown, ranks: int = 1) -> None:
    report = shown.report
    check_whole_run(report["returned"], report, ranks)
    check_whole_run(report["history"][-1], report, ranks)
    assert check_frames(shown.text, report, ranks) > 0
    (summary,) = [line for line in shown.lines if line.startswith("ctrainer: ")]
    assert summary.startswith(f"ctrainer: {len(report['updates'])} updates in ")
    last = shown.lines[shown.lines.index(summary) - 1]
    metrics = report["returned"]
    for line, unit, name in (
        (last, "samples", "train_samples_per_second"),
        (summary, "samples", "train_samples_per_second"),
        (summary, "updates", "train_steps_per_second"),
    ):
        assert rate_of(line, unit) == pytest.approx(metrics[name], rel=0.01), line


@pytest.mark.parametrize("name", RATES)
def test_every_rate_is_that_of_a_recount(name: str, tmp_path: Path) -> None:
    shown = run(tmp_path, RATES[name], columns=150)
    assert shown.code == 0, shown.text
    check_rates(shown)


@pytest.mark.parametrize("ranks", [2, 3] if EXHAUSTIVE else [2])
def test_rates_of_several_ranks(ranks: int, tmp_path: Path) -> None:
    shown = run(tmp_path, {"rows": 66}, 150, ranks)
    assert shown.code == 0, shown.text
    check_rates(shown, ranks)


@pytest.mark.parametrize("at", [1, 12, 30])
def test_a_resumed_run_counts_its_own_updates(at: int, tmp_path: Path) -> None:
    args = {"save_strategy": "steps", "save_steps": at}
    run(tmp_path, {"stop_at": at, "args": args})
    shown = run(tmp_path, {"resume": True, "args": args}, 150)
    assert shown.code == 0, shown.text
    if at < 30:
        check_rates(shown)
        return
    assert shown.report["returned"]["train_samples_per_second"] == 0  # nothing left
    assert shown.report["returned"]["train_steps_per_second"] == 0


# What a run writes beside the display after each update, with what follows the number
# of the update.
WRITES = {
    "print": [""],
    "stderr": [""],
    "lines": [" a", " b"],
    "unfinished": [" is finished"],
    "log": [""],
    "warning": [""],
    "progress": [],
}
# The lines that the display leaves.
OWN = re.compile(
    r"(ctrainer )?\d+/\d+ +\d+%[^:]*|ctrainer: \d+ updates in .*|eval \d+  loss .*"
    r"|step  epoch .*|( +[\d.e+-]+)+|  WRITES\[kind\]\(.*"
    r"|resumed from step \d+: \S+|"
)


def check_lines(shown: Shown, kinds: list[str], steps: int, ranks: int = 1) -> None:
    """Each line that was written is there, once and alone."""
    path = re.escape(str(RUN))
    lines = [re.sub(rf"^{path}:\d+: UserWarning: ", "", line) for line in shown.lines]
    written = [
        f"{kind} {rank} {step}{end}"
        for rank in range(ranks)
        for step in range(1, steps + 1)
        for kind in kinds
        for end in WRITES[kind]
    ]
    others = [line for line in lines if not OWN.fullmatch(line)]
    assert sorted(others) == sorted(written)
    assert not shown.lines[-1], "the cursor is at the end of a line"


@pytest.mark.parametrize("columns", [30, 80, 150] if EXHAUSTIVE else [30, 80])
@pytest.mark.parametrize("kind", WRITES)
def test_what_is_written_goes_above_the_line(
    kind: str, columns: int, tmp_path: Path
) -> None:
    options = {"writes": [kind], "args": {**STEPS, "max_steps": 12}}
    shown = run(tmp_path, options, columns)
    assert shown.code == 0, shown.text
    check_lines(shown, [kind], 12)
    assert frames(shown.text)


@pytest.mark.parametrize(
    "environ", [{}, {"NO_COLOR": "1"}, {"PYTHONUNBUFFERED": "1"}, {"TERM": "dumb"}]
)
def test_all_ways_to_write_at_once(environ: dict[str, str], tmp_path: Path) -> None:
    kinds = list(WRITES)
    shown = run(tmp_path, {"writes": kinds, "args": {"max_steps": 5}}, **environ)
    assert shown.code == 0, shown.text
    if environ.get("TERM") != "dumb":
        check_lines(shown, kinds, 5)
        return
    logs = [line for line in shown.lines if re.match(r"20\d\d-\S+Z step=", line)]
    assert len(logs) == 1  # and none of the others' lines before or behind it


@pytest.mark.parametrize("unbuffered", ["", "1"] if EXHAUSTIVE else ["1"])
@pytest.mark.parametrize("kind", ["print", "log", "lines"])
def test_what_several_ranks_write(kind: str, unbuffered: str, tmp_path: Path) -> None:
    options = {"writes": [kind], "args": {"max_steps": 12}}
    shown = run(tmp_path, options, 150, 2, PYTHONUNBUFFERED=unbuffered)
    assert shown.code == 0, shown.text
    check_lines(shown, [kind], 12, ranks=2)


def test_a_run_that_fails_leaves_the_terminal(tmp_path: Path) -> None:
    shown = run(tmp_path, {"fail_at": 28, "writes": ["print"]})
    assert shown.code == 1
    at = shown.lines.index("Traceback (most recent call last):")
    assert re.match(r"ctrainer [12]\d/30 ", shown.lines[at - 1])  # shown last
    assert "ValueError: the callback fails" in shown.lines
    assert not frames(shown.text[shown.text.index("Traceback") :])


@pytest.mark.parametrize("ranks", [1, 2])
def test_ctrl_c_ends_a_run_with_a_line_and_resuming_begins_with_one(
    ranks: int, tmp_path: Path
) -> None:
    shown = run(tmp_path, {"interrupt_at": 25}, 150, ranks)
    assert shown.code == -signal.SIGINT
    at = f"{tmp_path}/checkpoint-25"
    assert [line for line in shown.lines if "25" in line and "/" not in line[:15]] == [
        "Asked to stop: saving a checkpoint of step 25.",
        shown.lines[-3],  # the table
        f"stopped at step 25 of 30; to continue from {at}: "
        "train(resume_from_checkpoint=True)",
    ]
    assert shown.lines[-3].startswith("ctrainer: 25 updates in ")
    assert "Traceback" not in shown.text
    check_whole_run(shown.report["history"][-1], shown.report, ranks)
    check_frames(shown.text, shown.report, ranks)
    shown = run(tmp_path, {"resume": True}, 150, ranks)
    assert shown.code == 0, shown.text
    assert shown.lines[0] == f"resumed from step 25: {at}"
    assert shown.lines[-2].startswith("ctrainer: 5 updates in ")
    assert " from step 25 to 30, " in shown.lines[-2]


@pytest.mark.parametrize("mode", ["json", "plain"])
def test_a_log_says_where_a_run_resumes(mode: str, tmp_path: Path) -> None:
    save = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6}
    run(tmp_path, {"stop_at": 3, "args": save})
    shown = run(tmp_path, {"resume": True, "args": save}, CTRAINER_LOG=mode)
    folder = f"{tmp_path}/checkpoint-3"
    if mode == "plain":
        assert shown.lines[0].endswith(f"Z step=3 resumed_from={folder}")
    else:
        first = json.loads("".join(shown.text.splitlines()[:1]))
        assert (first["step"], first["resumed_from"]) == (3, folder)


def test_later_evaluations_have_a_line_each(tmp_path: Path) -> None:
    shown = run(tmp_path, {"evaluations_after": 2, "eval_seconds": 0.12})
    at = next(i for i, line in enumerate(shown.lines) if line.startswith("ctrainer: "))
    first, second, end = shown.lines[at + 1 :]
    assert first == second == "eval 30  loss 1.000  (0.4 s)"
    assert end == ""
    assert re.search(
        r"\rctrainer 30/30 eval 2/3", re.sub("\x1b\\[\\d+m", "", shown.text)
    )


@pytest.mark.parametrize("name", ["stopped", "epochs", "slow"])
@pytest.mark.parametrize("mode", ["json", "plain"])
def test_rates_in_a_file(mode: str, name: str, tmp_path: Path) -> None:
    given = json.dumps({"folder": str(tmp_path), **RATES[name]})
    done = subprocess.run(
        [sys.executable, RUN, given], capture_output=True, text=True, check=True,
        env=environment(CTRAINER_LOG=mode),
    )  # fmt: skip
    line = [line for line in done.stdout.splitlines() if "train_loss" in line][-1]
    if mode == "json":
        shown = json.loads(line)
    else:
        shown = {k: float(v) for k, v in re.findall(r" (\w+)=(\S+)", line)}
    check_whole_run(shown, counts(tmp_path), 1)
