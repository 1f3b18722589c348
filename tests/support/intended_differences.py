"""The differences between both trainers that the page "From transformers' Trainer"
describes: each with its row.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import drawn_scripts
import example_scripts
import transformers
from both_trainers import (
    ABSENT,
    COARSE,
    ROUNDING,
    Difference,
    Script,
    differences,
    run,
)

import ctrainer


def any_values(theirs: Any, ours: Any) -> bool:
    return True


def added(theirs: Any, ours: Any) -> bool:
    return bool(theirs is ABSENT)


def ratio(of: float) -> Callable[[float, float], bool]:
    """Theirs is so many times ours."""
    return lambda theirs, ours: math.isclose(theirs / ours, of, rel_tol=2e-3)


@dataclasses.dataclass(frozen=True)
class Permitted:
    """Differences at these paths, in scripts with the trait, that the row describes;
    `most` in one script."""

    row: str
    paths: str
    trait: str = ""
    holds: Callable[[Any, Any], bool] = any_values
    most: float = math.inf


NUMBERS = (
    r"(loss|grad_norm|clipped_norm|eval_\w+|best_metric|last|shown/\d+.*)$"
    r"|/(weights|optimizer|tensors|optimizer.pt)/"
)
PERMITTED = (
    Permitted(
        "gradient accumulation when `compute_loss` ignores `num_items_in_batch`",
        NUMBERS + r"|README.md/\d+$", "ignores the count",
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
        r"/ctrainer_(manifest|state(_\d+)?)\.json$|/metadata/ctrainer\.(header_)?crc32c$",
        holds=added,
    ),
    Permitted(
        "`fused` in the groups of `optimizer.pt`", r"/param_groups/\d+/fused$",
        holds=lambda theirs, ours: theirs is True and ours is None,
    ),
    Permitted("resuming", r"^/log_history/\d+/loss$", "resumed", most=1),
    Permitted(
        "resuming",
        r"^/(events|files)/.*/loss$"
        r"|/(train_loss|early_stopping_patience_counter)$|^/shown/\d+/[01]$", "resumed",
    ),
    Permitted(
        "`restore_callback_states_from_checkpoint=True`", r"^/callbacks/", "restored"
    ),
    Permitted(
        "a log with losses that are NaN or Inf, with `logging_nan_inf_filter`",
        r"/(train_)?loss$", "not finite",
    ),
    Permitted(
        "random numbers in rows and collators",
        r"/generators/torch$|/rng_state.pth/cpu$"
        r"|^/batches/\w+/\d+/(input_ids|labels)/2$", "random collator",
    ),
    Permitted("`eval_loss`", r"/test_loss$", "seq2seq"),
    Permitted("`eval_loss`", r"_loss$|/best_metric$", "own loader"),
    Permitted(
        "`batch_eval_metrics` with a loader that accelerate has not prepared",
        r"_size$", "own loader", added,
    ),
    Permitted(
        "an evaluation on several ranks",
        r"/((eval|shown)_(loss|size)|best_metric)$|^/batches/evaluation/|^/shown/0$",
        "ranks",
    ),
    Permitted("`local_rank` of the arguments on several ranks",
              r"/training_args.bin/local_rank$", "ranks"),
    Permitted(
        "`num_input_tokens_seen` on several ranks", r"/state/num_input_tokens_seen$",
        "ranks",
    ),
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
        r"^/batches/evaluation/|^/shown/\d+/[01]$", "grouped",
    ),
    Permitted(
        "fields of `ctrainer.TrainingArguments`", r"/training_args\.bin/", "own", added
    ),
)  # fmt: skip

PREDICTION = "on_prediction_step"
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
    "not_finite": {"not finite"},
    "resumed": {"resumed"},
    "lora": {"resumed"},
}


def permits(difference: Difference, traits: set[str]) -> Permitted | None:
    for entry in PERMITTED:
        if entry.trait and entry.trait not in traits:
            continue
        if not re.search(entry.paths, difference.path):
            continue
        if entry.holds(difference.theirs, difference.ours):
            return entry
    return None


def script_of(name: str | int) -> tuple[Script, set[str]]:
    """A script by hand by its name, a drawn one by its number; and its traits."""
    if isinstance(name, int):
        return drawn_scripts.script(name), drawn_scripts.traits(name)
    return example_scripts.SCRIPTS[name], TRAITS.get(name, set())


def compare(
    name: str | int, folder: Path, more: Iterable[str] = ()
) -> tuple[set[str], list[str]]:
    """Run a script, which has more traits, on both trainers: the rows that describe
    what differs, and the differences without one."""
    script, traits = script_of(name)
    traits = {*traits, *more}
    theirs = run(script, folder / "theirs", ours=False, hf=transformers)
    hf = ctrainer if "own" in traits else transformers
    ours = run(script, folder / "ours", ours=True, hf=hf)
    assert len(theirs["events"]) > 20
    if "ranks" in traits:  # whose evaluations may have a round more
        for run_of in (theirs, ours):
            events = run_of["events"]
            run_of["events"] = [e for e in events if e["event"] != PREDICTION]
    times: Counter[Permitted] = Counter()
    silent = []
    rounding = COARSE if "coarse" in traits else ROUNDING
    for difference in differences(theirs, ours, rounding):
        entry = permits(difference, traits)
        if entry is not None:
            times[entry] += 1
        if entry is None or times[entry] > entry.most:
            silent.append(str(difference))
    return {entry.row for entry in times}, silent
