"""Scripts drawn over the arguments that change training, each value of an argument as
often as the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import datasets
import numpy as np
import torch
import transformers
from both_trainers import Lab, Script, as_array
from dealing import Case, deal
from example_scripts import arguments, bert, blocks, classified, llama, tokenizer
from tiny import Net, rows

COUNT, STOPS_AT = 200, 3

SCHEDULES: tuple[tuple[str, dict[str, Any] | None], ...] = (
    ("linear", None), ("cosine", None), ("cosine", {"num_cycles": 1.5}),
    ("cosine_with_restarts", {"num_cycles": 2}),
    ("polynomial", {"power": 2.0, "lr_end": 1e-5}), ("constant", None),
    ("constant_with_warmup", None), ("inverse_sqrt", {"timescale": 4}),
    ("warmup_stable_decay", {"num_decay_steps": 2, "min_lr_ratio": 0.2}),
    ("reduce_lr_on_plateau", {"patience": 0, "factor": 0.5}),
    ("cosine_with_min_lr", {"min_lr_rate": 0.1}),
)  # fmt: skip
AXES: dict[str, tuple[Any, ...]] = {
    "data": ("vectors", "sentences", "sentences", "texts"),
    "own": (False, True),  # our names, or transformers' patched
    "per_device_train_batch_size": (2, 3, 4),
    "per_device_eval_batch_size": (3, 4, 8),
    "gradient_accumulation_steps": (1, 1, 2, 3),
    "average_tokens_across_devices": (True, False),
    "length": (("num_train_epochs", 1), ("num_train_epochs", 1.5), ("max_steps", 7),
               ("max_steps", 9), ("num_train_epochs", 2)),
    "left over": (0, 1),  # rows of the last batch
    "dataloader_drop_last": (False, False, True),
    "schedule": SCHEDULES,
    "warmup_steps": (0, 2, 0.3),
    "optim": ("adamw_torch_fused", "adamw_torch", "sgd", "adagrad", "rmsprop",
              "adafactor"),
    "weight_decay": (0.0, 0.1),
    "max_grad_norm": (1.0, 0.0, 0.1),
    "label_smoothing_factor": (0.0, 0.0, 0.1),
    "eval": (("no", None), ("epoch", None), ("steps", 2), ("steps", 0.4),
             ("steps", None)),
    "eval_delay": (0, 0, 2),
    "eval_on_start": (False, False, True),
    "eval_accumulation_steps": (None, 1, 2),
    "eval_do_concat_batches": (True, True, False),
    "include_for_metrics": ([], ["inputs"], ["inputs", "loss"]),
    "batch_eval_metrics": (False, False, True),
    "prediction_loss_only": (False, False, False, True),
    "metrics": (True, True, False),
    "several": (False, False, True),  # data sets to evaluate
    "save": (("no", 500), ("epoch", 500), ("steps", 2), ("steps", 0.4), ("best", 500)),
    "save_total_limit": (None, None, 1, 2),
    "save_only_model": (False, False, False, True),
    "load_best_model_at_end": (False, True),
    "metric_for_best_model": (None, "loss", "eval_size"),
    "logging": (("steps", 1), ("steps", 2), ("steps", 0.3), ("epoch", 500),
                ("no", 500)),
    "logging_first_step": (False, True),
    "logging_nan_inf_filter": (True, False),
    "bf16": (False, False, False, True),
    "bf16_full_eval": (False, False, False, True),
    "gradient_checkpointing": (False, False, True),
    "train_sampling_strategy": ("random", "random", "sequential", "group_by_length"),
    "dataloader_num_workers": (0, 0, 0, 2),
    "stream": (False, False, False, True),
    "neftune_noise_alpha": (None, None, 4.0),
    "include_num_input_tokens_seen": ("no", "all", "non_padding"),
    "remove_unused_columns": (True, True, False),
    "label_names": (None, None, ["labels"]),
    "torch_empty_cache_steps": (None, 2),
    "skip_memory_metrics": (True, True, True, True, True, False),
    "disable_tqdm": (True, True, False),
    "seed": (42, 7),
    "data_seed": (None, None, 3),
    "restore_callback_states_from_checkpoint": (False, True),
    "resume": ("no", "no", "yes", "skip"),
    "stop": (False, False, True),  # early
}  # fmt: skip
SCRIPTS = deal("scripts", AXES, COUNT)
_ELSEWHERE = {
    "data", "own", "length", "left over", "schedule", "eval", "metrics", "several",
    "save", "logging", "stream", "resume", "stop",
}  # fmt: skip


def options(case: Case) -> dict[str, Any]:
    """Arguments that can be together."""
    found = {name: v for name, v in case.values if name not in _ELSEWHERE}
    found |= dict([case["length"]])
    for name in ("eval", "save", "logging"):
        strategy, steps = case[name]
        found |= {f"{name}_strategy": strategy, f"{name}_steps": steps}
    schedule, keywords = case["schedule"]
    found |= {"lr_scheduler_type": schedule, "lr_scheduler_kwargs": keywords}
    if found["eval_strategy"] == "no":
        found |= {"load_best_model_at_end": False, "eval_on_start": False}
        if schedule == "reduce_lr_on_plateau":
            found |= {"lr_scheduler_type": "linear", "lr_scheduler_kwargs": None}
        if found["save_strategy"] == "best":
            found["save_strategy"] = "epoch"
    if schedule == "warmup_stable_decay" or schedule.startswith("cosine_with_min"):
        found["warmup_steps"] = min(found["warmup_steps"], 2)
    if found["metric_for_best_model"] == "eval_size" and (
        not case["metrics"] or found["prediction_loss_only"]
    ):
        found["metric_for_best_model"] = "loss"
    if case["several"] and found["metric_for_best_model"] is not None:
        name = found["metric_for_best_model"].removeprefix("eval_")
        found["metric_for_best_model"] = f"eval_b_{name}"
    if found["save_strategy"] == "best" or case["stop"]:
        fallback = "eval_b_loss" if case["several"] else "loss"
        found["metric_for_best_model"] = found["metric_for_best_model"] or fallback
    if found["load_best_model_at_end"]:
        fallback = "eval_b_loss" if case["several"] else "loss"
        found["metric_for_best_model"] = found["metric_for_best_model"] or fallback
        if found["save_strategy"] != "best":
            for name in ("strategy", "steps"):
                found[f"save_{name}"] = found[f"eval_{name}"]
            if found["save_steps"] is None:
                found |= {"save_steps": 2, "eval_steps": 2}
    if found["eval_steps"] is None and found["eval_strategy"] == "steps":
        if found["logging_strategy"] != "steps":
            found["eval_steps"] = 3
    if case["data"] == "vectors":
        for name in ("gradient_checkpointing", "neftune_noise_alpha"):
            found.pop(name)
        found |= {"label_smoothing_factor": 0.0, "include_num_input_tokens_seen": "no"}
        # transformers asks a model that says no name for its input_ids and its dtype.
        found |= {"include_for_metrics": [], "bf16_full_eval": False}
    if case["data"] == "texts":
        found["gradient_accumulation_steps"] = min(
            found["gradient_accumulation_steps"], 2
        )
    if found["train_sampling_strategy"] == "group_by_length" and (
        case["data"] != "sentences" or case["stream"]
    ):
        found["train_sampling_strategy"] = "random"
    if case["stream"]:
        found["max_steps"] = 7
        found.pop("num_train_epochs", None)
    if found["data_seed"] is None:
        found.pop("data_seed")
    if found["optim"] in ("adagrad", "rmsprop", "adafactor"):
        if case["data"] == "sentences":  # whose keys' biases have gradients of rounding
            found["optim"] = "sgd"
    found["learning_rate"] = {"sgd": 0.05, "rmsprop": 1e-3}.get(found["optim"], 2e-3)
    if found["train_sampling_strategy"] == "group_by_length":
        found |= {"include_for_metrics": [], "eval_do_concat_batches": True}
        found["batch_eval_metrics"] = False
    return found


class Parts:
    """Model, data and collator of a case."""

    def __init__(self, case: Case) -> None:
        given = options(case)
        batch, parts = (
            given["per_device_train_batch_size"],
            given["gradient_accumulation_steps"],
        )
        n = 12 * batch * (parts if case["stream"] else 1)
        # With accumulation our micro-batches weigh by their rows, and theirs alike.
        n += case["left over"] if parts == 1 and not case["stream"] else 0
        e = 24 if given["dataloader_drop_last"] else 11
        self.collate: Any = None
        self.words = None
        if case["data"] == "vectors":
            self.model: Any = Net(0.1)
            self.train, self.eval = rows(n), rows(e)
        elif case["data"] == "sentences":
            self.words = tokenizer()
            self.model = bert("SequenceClassification", num_labels=3)
            self.train, self.eval = classified(n), classified(e, seed=1)
            if not given["remove_unused_columns"]:
                kept = ["input_ids", "attention_mask", "label"]
                self.train = self.train.select_columns(kept)
                self.eval = self.eval.select_columns(kept)
        else:
            self.model, self.collate = llama(), transformers.default_data_collator
            self.train, self.eval = blocks(n), blocks(e)
        if case["stream"]:
            if isinstance(self.train, list):
                plain = [{k: v.tolist() for k, v in row.items()} for row in self.train]
                self.train = datasets.Dataset.from_list(plain)
            self.train = self.train.to_iterable_dataset()


def traits(number: int) -> set[str]:
    """What the permitted differences of the script depend on."""
    case = SCRIPTS[number]
    given = options(case)
    held = {
        "resumed": case["resume"] != "no",
        "own": case["own"],
        "restored": case["resume"] != "no"
        and case["stop"]
        and given["restore_callback_states_from_checkpoint"],
        "empty cache": given["torch_empty_cache_steps"] is not None,
        "tokens": given["include_num_input_tokens_seen"] != "no",
        "full": given["bf16_full_eval"],
        "coarse": given["bf16"] or given["bf16_full_eval"],
        "grouped": given["train_sampling_strategy"] == "group_by_length",
    }
    return {name for name, holds in held.items() if holds}


def size(prediction: Any, compute_result: bool = True) -> dict[str, float]:
    """A metric of all that is given, of one batch or of all of them."""

    def walk(value: Any) -> float:
        if isinstance(value, list | tuple):
            return sum(map(walk, value))
        if isinstance(value, Mapping):
            return sum(map(walk, value.values()))
        return 0.0 if value is None else float(np.abs(as_array(value)).mean())

    given = (
        getattr(prediction, n, None)
        for n in ("predictions", "label_ids", "inputs", "losses")
    )
    return {"size": sum(map(walk, given))} if compute_result else {}


class Stop(transformers.TrainerCallback):  # type: ignore[misc]
    """Ends a run with a checkpoint."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == STOPS_AT:
            control.should_save = control.should_training_stop = True


def script(number: int) -> Script:
    """The script of a number."""
    case = SCRIPTS[number]

    def run(lab: Lab) -> Any:
        given = options(case)
        ignored = {"ignore_data_skip": case["resume"] == "skip"}
        phases = [False] if case["resume"] == "no" else [False, True]
        for resume in phases:
            torch.manual_seed(number)
            parts = Parts(case)
            more: list[Any] = [lab.watch]
            if case["stop"] and given["eval_strategy"] != "no":
                more.append(lab.hf.EarlyStoppingCallback(1, 0.01))
            if len(phases) == 2 and not resume:
                more.append(Stop())
            evaluated = parts.eval
            if case["several"]:
                evaluated = {"a": parts.eval, "b": parts.eval}
            trainer = lab.hf.Trainer(
                lab.see(parts.model), arguments(lab, **given, **ignored), parts.collate,
                parts.train, evaluated, parts.words,
                compute_metrics=size if case["metrics"] else None, callbacks=more,
            )  # fmt: skip
            if case["data"] == "sentences":
                lab.equal_shares(trainer)
            output = trainer.train(resume_from_checkpoint=resume)
            lab.show([output.global_step, output.training_loss])
        lab.show(trainer.evaluate())
        predicted = trainer.predict(parts.eval)
        lab.show([*predicted])
        return trainer

    return run
