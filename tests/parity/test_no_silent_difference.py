"""Scripts on transformers' Trainer and on ours: whatever differs has a row in the page
"From transformers' Trainer"."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import datasets
import drawn_scripts
import example_scripts
import pytest
import ranks
import torch
import transformers
from both_trainers import differences, run
from intended_differences import PERMITTED, TRAITS, compare, permits, script_of

PAGE = Path(__file__).parents[2] / "docs/start/from_transformers.md"
torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
datasets.disable_progress_bars()


def rows_of_the_page() -> dict[str, str]:
    """What the table says of each row, by its first column."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    cells = [re.split(r"(?<!\\) \| ", line.strip("| ")) for line in lines]
    return {row[0]: " | ".join(row[1:]) for row in cells}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


BY_HAND = (
    "glue", "clm_gpt2", "summarization", "resumed", "callbacks_that_decide", "images",
)  # fmt: skip
DRAWN = (1, 3, 4, 6, 7)  # of the table's first ones
COUNT = 60
NEEDS = {"lora": "peft", "search": "optuna"}
# transformers cannot resume on ranks of the CPU.
ON_RANKS = ["glue", "weighted_loss", "clm_llama", "callbacks_that_decide", "hooks"]
# With a stream, bfloat16, pairs, and counted tokens.
DRAWN_ON_RANKS = [4, 6, 15, 20]


def others_exhaustive(each: Iterable[Any], quick: tuple[Any, ...]) -> list[Any]:
    mark = pytest.mark.exhaustive
    return [x if x in quick else pytest.param(x, marks=mark) for x in each]


def report(silent: list[str]) -> str:
    return f"{len(silent)} differences without a row:\n" + "\n".join(silent[:20])


@pytest.mark.parametrize("name", others_exhaustive(example_scripts.SCRIPTS, BY_HAND))
def test_a_script_by_hand(name: str, tmp_path: Path) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    rows, silent = compare(name, tmp_path)
    assert not silent, report(silent)
    # A script that says that it needs a row does.
    traits = script_of(name)[1]
    assert {p.row for p in PERMITTED if p.trait in traits} <= rows


@pytest.mark.parametrize("number", others_exhaustive(range(COUNT), DRAWN))
def test_a_script_of_drawn_arguments(number: int, tmp_path: Path) -> None:
    _, silent = compare(number, tmp_path)
    assert not silent, report(silent)


@pytest.mark.exhaustive
def test_scripts_on_two_ranks(tmp_path: Path) -> None:
    names = [*ON_RANKS, *DRAWN_ON_RANKS]
    told: list[Any] = ranks.told(
        ranks.run(tmp_path, "parity.no_silent_difference", names=names)
    )
    for rank in told:
        assert list(rank["silent"]) == [*map(str, names)]
        assert not any(rank["silent"].values()), rank["silent"]
    assert "an evaluation on several ranks" in told[0]["rows"]


def test_every_permitted_difference_is_a_row_of_the_page() -> None:
    rows = rows_of_the_page()
    assert len(rows) > 30
    lines = PAGE.read_text().splitlines()
    times = {row: sum(x.startswith(f"| {row} |") for x in lines) for row in rows}
    assert {row for row, n in times.items() if n > 1} <= {"---"}
    assert [p.row for p in PERMITTED if p.row not in rows] == []


def test_drawn_scripts_depend_on_every_trait() -> None:
    drawn = set().union(*map(drawn_scripts.traits, range(COUNT)))
    by_hand = set().union(*TRAITS.values())
    assert {p.trait for p in PERMITTED} <= {"", "ranks", *drawn, *by_hand}


# ---- What the comparison sees


def shift(found: Any, by: float) -> None:
    name = next(iter(found["weights"]))
    found["weights"][name] = found["weights"][name] + by


def swap(events: list[Any], i: int) -> None:
    events[i], events[i + 1] = events[i + 1], events[i]


PLANTED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "an event more": (lambda r: r["events"].append(r["events"][-1]), "/events/"),
    "events in another order": (lambda r: swap(r["events"], 9), "/events/"),
    "a flag": (
        lambda r: r["events"][7]["control"].update(should_log=True),
        "/events/7/control/should_log",
    ),
    "a field of the state": (
        lambda r: r["events"][7]["state"].update(max_steps=11),
        "/events/7/state/max_steps",
    ),
    "a learning rate in its last digits": (
        lambda r: r["log_history"][0].update(
            learning_rate=r["log_history"][0]["learning_rate"] * (1 + 1e-15)
        ),
        "/log_history/0/learning_rate",
    ),
    "a logged loss": (
        lambda r: r["log_history"][0].update(loss=r["log_history"][0]["loss"] + 1e-3),
        "/log_history/0/loss",
    ),
    "the type of what is logged": (
        lambda r: r["log_history"][0].update(step=1.0), "/log_history/0/step",
    ),
    "a logged name more": (
        lambda r: r["log_history"][0].update(extra=1.0), "/log_history/0/extra",
    ),
    "the order of names in the log": (
        lambda r: r["log_history"][0].update(loss=r["log_history"][0].pop("loss")),
        "/log_history/0/(order)",
    ),
    "NaN in a metric": (
        lambda r: r["log_history"][1].update(loss=float("nan")), "/log_history/1/loss",
    ),
    "a weight": (lambda r: shift(r, 1e-3), "/weights/"),
    "NaN in a weight": (lambda r: shift(r, float("nan")), "/weights/"),
    "batches in another order": (
        lambda r: swap(r["batches"]["training"], 0), "/batches/training/",
    ),
    "a prediction": (lambda r: r["shown"][0].fill(0), "/shown/0"),
    "the dtype of predictions": (
        lambda r: r["shown"].insert(0, r["shown"].pop(0).astype("f8")), "/shown/0",
    ),
    "a file more": (lambda r: r["files"].update({"out/a": b""}), "/files/out/a"),
    "a file that is missing": (
        lambda r: r["files"].pop("out/checkpoint-10/scheduler.pt"), "/files/out/",
    ),
    "a file's content": (
        lambda r: r["files"]["out/checkpoint-10/scheduler.pt"].update(last_epoch=9),
        "/files/out/checkpoint-10/scheduler.pt/last_epoch",
    ),
    "a draw of a generator": (
        lambda r: r["generators"].update(torch=""), "/generators/torch",
    ),
    "a callback more": (lambda r: r["callbacks"].append("Mine"), "/callbacks/"),
    "the optimizer's state": (
        lambda r: r["optimizer"]["state"][0]["exp_avg"].add_(1e-3),
        "/optimizer/state/0/exp_avg",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("planted") / "run"
    return run(example_scripts.contrastive, folder, ours=True, hf=transformers)


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_difference_is_found_and_has_no_row(
    name: str, recorded: dict[str, Any]
) -> None:
    change, path = PLANTED[name]
    changed = copy.deepcopy(recorded)
    change(changed)
    found = [*differences(recorded, changed)]
    assert found
    assert all(difference.path.startswith(path) for difference in found)
    assert all(permits(difference, set()) is None for difference in found)
