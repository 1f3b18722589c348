"""Scripts on transformers' Trainer and on ours: whatever differs has a row in the page
"From transformers' Trainer"."""

from __future__ import annotations

import copy
import dataclasses
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import datasets
import drawn_scripts
import example_scripts
import pytest
import torch
import transformers
from both_trainers import (
    ABSENT,
    COARSE,
    ROUNDING,
    Difference,
    differences,
    run,
)

import ctrainer

PAGE = Path(__file__).parents[2] / "docs/start/from_transformers.md"
torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
datasets.disable_progress_bars()


def any_values(theirs: Any, ours: Any) -> bool:
    return True


def added(theirs: Any, ours: Any) -> bool:
    return bool(theirs is ABSENT)


def ratio(of: float) -> Callable[[float, float], bool]:
    """Theirs is so many times ours."""
    return lambda theirs, ours: theirs / ours == pytest.approx(of, rel=2e-3)


@dataclasses.dataclass(frozen=True)
class Permitted:
    """Differences at these paths, in scripts with the trait, that the row describes."""

    row: str
    paths: str
    trait: str = ""
    holds: Callable[[Any, Any], bool] = any_values


NUMBERS = (
    r"(loss|grad_norm|clipped_norm|eval_\w+|best_metric|shown/\d+.*)$"
    r"|/(weights|optimizer|tensors|optimizer.pt)/"
)
PERMITTED = (
    Permitted(
        "gradient accumulation when `compute_loss` ignores `num_items_in_batch`",
        NUMBERS, "ignores the count",
    ),
    Permitted(
        "loss of a model that shifts its labels, such as a causal language model",
        r"/(loss|eval_loss|train_loss|grad_norm|best_metric)$", "no loss_type",
        ratio(15 / 16),
    ),
    Permitted(
        "loss of a model that shifts its labels, such as a causal language model",
        r"/(weights|optimizer|tensors|optimizer.pt)/|clipped_norm$|/shown/",
        "no loss_type",
    ),
    Permitted(
        "checkpoints",
        r"/ctrainer_(manifest|state)\.json$|/metadata/ctrainer\.(header_)?crc32c$",
        holds=added,
    ),
    Permitted(
        "`fused` in the groups of `optimizer.pt`", r"/param_groups/\d+/fused$",
        holds=lambda theirs, ours: theirs is True and ours is None,
    ),
    Permitted(
        "resuming",
        r"/(loss|train_loss|early_stopping_patience_counter)$|/shown/\d+/1$", "resumed",
    ),
    Permitted(
        "`restore_callback_states_from_checkpoint=True`", r"^/callbacks/", "restored"
    ),
    Permitted(
        "random numbers in rows and collators",
        r"/generators/torch$|/rng_state.pth/cpu$"
        r"|^/batches/\w+/\d+/(input_ids|labels)/2$", "random collator",
    ),
    Permitted("`eval_loss`", r"/test_loss$", "seq2seq"),
    Permitted(
        "the model's generation config in an evaluation that generates",
        r"/generation_config\.json/", "seq2seq",
    ),
    Permitted(
        "`total_flos` in the metrics of `train()` with `disable_tqdm=True`",
        r"/(all|train)_results\.json/total_flos$", holds=added,
    ),
    Permitted(
        "speeds of a run",
        r"/train_tokens_per_second$", "tokens", added,
    ),
    Permitted("`eval_model_preparation_time`", r"/\w+_model_preparation_time$"),
    Permitted("`torch_empty_cache_steps`", r"^/callbacks/", "empty cache"),
    Permitted(
        "`fp16_full_eval`, `bf16_full_eval`", r"^/(weights|optimizer)/", "full"
    ),
    Permitted(
        'an evaluation with `train_sampling_strategy="group_by_length"`',
        r"^/batches/evaluation/|^/shown/[23]/[01]$", "grouped",
    ),
    Permitted(
        "fields of `ctrainer.TrainingArguments`", r"/training_args\.bin/", "own", added
    ),
)  # fmt: skip

TRAITS: dict[str, set[str]] = {
    "clm_gpt2": {"no loss_type"},
    "clm_gpt2_alone": {"no loss_type"},
    "clm_llama": {"tokens"},
    "multi_label": {"ignores the count", "coarse"},
    "token_classification": {"ignores the count"},
    "mlm": {"ignores the count", "random collator"},
    "mlm_of_a_seed": {"ignores the count"},
    "loss_of_old_signature": {"ignores the count"},
    "summarization": {"seq2seq"},
    "translation": {"grouped"},
    "resumed": {"resumed"},
    "lora": {"resumed"},
}


def rows_of_the_page() -> dict[str, str]:
    """What the table says of each row, by its first column."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    cells = [re.split(r"(?<!\\) \| ", line.strip("| ")) for line in lines]
    return {row[0]: " | ".join(row[1:]) for row in cells}


def row_of(difference: Difference, traits: set[str]) -> str | None:
    for entry in PERMITTED:
        if entry.trait and entry.trait not in traits:
            continue
        if not re.search(entry.paths, difference.path):
            continue
        if entry.holds(difference.theirs, difference.ours):
            return entry.row
    return None


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def compare(script: Any, folder: Path, traits: set[str]) -> set[str]:
    """The rows that are needed; fails for a difference without one."""
    theirs = run(script, folder / "theirs", ours=False, hf=transformers)
    hf = ctrainer if "own" in traits else transformers
    ours = run(script, folder / "ours", ours=True, hf=hf)
    assert len(theirs["events"]) > 20
    rounding = COARSE if "coarse" in traits else ROUNDING
    rows, silent = set(), []
    for difference in differences(theirs, ours, rounding):
        row = row_of(difference, traits)
        if row is None:
            silent.append(str(difference))
        else:
            rows.add(row)
    assert not silent, f"{len(silent)} differences:\n" + "\n".join(silent[:20])
    return rows


BY_HAND = (
    "glue", "clm_gpt2", "summarization", "resumed", "callbacks_that_decide", "images",
)  # fmt: skip
DRAWN = (0, 1, 3, 4, 7)  # of the table's first ones
COUNT = 60


def others_exhaustive(each: Iterable[Any], quick: tuple[Any, ...]) -> list[Any]:
    mark = pytest.mark.exhaustive
    return [x if x in quick else pytest.param(x, marks=mark) for x in each]


@pytest.mark.parametrize("name", others_exhaustive(example_scripts.SCRIPTS, BY_HAND))
def test_a_script_by_hand(name: str, tmp_path: Path) -> None:
    if name == "lora":
        pytest.importorskip("peft")
    traits = TRAITS.get(name, set())
    needed = compare(example_scripts.SCRIPTS[name], tmp_path, traits)
    # A script that says that it needs a row does.
    assert {p.row for p in PERMITTED if p.trait in traits - {"coarse", ""}} <= needed


@pytest.mark.parametrize("number", others_exhaustive(range(COUNT), DRAWN))
def test_a_script_of_drawn_arguments(number: int, tmp_path: Path) -> None:
    compare(drawn_scripts.script(number), tmp_path, drawn_scripts.traits(number))


def test_every_permitted_difference_is_a_row_of_the_page() -> None:
    rows = rows_of_the_page()
    assert len(rows) > 30
    assert [p.row for p in PERMITTED if p.row not in rows] == []


def test_drawn_scripts_depend_on_every_trait() -> None:
    drawn = set().union(*map(drawn_scripts.traits, range(COUNT)))
    assert {p.trait for p in PERMITTED} <= {"", *drawn, *set().union(*TRAITS.values())}


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
    assert all(row_of(difference, set()) is None for difference in found)
