"""Scripts drawn over the arguments that change training, each value of an argument as
often as the others."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
import transformers
from both_trainers import Lab, Script, as_array
from dealing import Case, deal
from drawn_overrides import OVERRIDES, Decide
from example_scripts import (
    T5,
    arguments,
    bert,
    blocks,
    classified,
    llama,
    tokenized,
    tokenizer,
)
from tiny import Net, rows
from torch.nn.functional import cross_entropy

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
    "data": ("vectors", "sentences", "sentences", "texts", "pairs"),
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
    "override": (None, *OVERRIDES),
    "decide": (None, None, 1, 2, 3),
    "optim_args": (None, None, 0, 1),
    "accelerator_config": (
        None, None, {"use_seedable_sampler": False}, {"split_batches": True},
        {"even_batches": False}, {"dispatch_batches": True},
    ),
    "rows": ("given", "given", "own"),
    "dataloader_persistent_workers": (False, True),
    "dataloader_prefetch_factor": (None, 3),
    "checkpoint": ("newest", "first"),
    "longer": (0, 0, 2),
    "model_init": (False, False, True),
    "loss": (None, None, None, "function", "function of the count"),
    "logits": (None, None, "argmax"),
    "frozen": (False, False, True),
    "again": (False, False, False, True),
    "greater_is_better": (None, None, True, False),
    "generate": (False, True, True),
    "generation": (
        {"generation_max_length": 6}, {"generation_max_length": 22},
        {"generation_max_length": 7, "generation_num_beams": 2},
    ),
    "keywords": ({}, {"max_length": 9}, {"max_new_tokens": 4}, {"num_beams": 2}),
    "optimizers": (None, None, None, None, None, None, "tuple", "both", "class"),
}  # fmt: skip
SCRIPTS = deal("scripts", AXES, COUNT)
_ELSEWHERE = {
    "data", "own", "length", "left over", "schedule", "eval", "metrics", "several",
    "save", "logging", "stream", "resume", "stop", "override", "decide", "rows",
    "checkpoint", "longer", "model_init", "loss", "logits", "frozen", "again",
    "generate", "generation", "keywords", "optimizers",
}  # fmt: skip
OPTIM_ARGS = {
    "sgd": ("momentum=0.9, nesterov=True", "momentum=0.5,dampening=0.1"),
    "adagrad": ("lr_decay=0.01,eps=1e-3", "weight_decay=0.01"),
    "rmsprop": ("momentum=0.5,alpha=0.9,eps=1e-2", "centered=True,eps=1e-2"),
}


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
        case["data"] != "sentences"
        or case["stream"]
        or case["override"] == "PrepareInputs"  # by the length of the batch
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
    numbered = found.pop("optim_args")
    # Momentum sums up what is rounding alone, such as a key's bias's gradients.
    attends = case["data"] in ("sentences", "pairs")
    if numbered is not None and found["optim"] in OPTIM_ARGS and not attends:
        found["optim_args"] = OPTIM_ARGS[found["optim"]][numbered]
    if not found["dataloader_num_workers"]:
        found.pop("dataloader_prefetch_factor")
        found.pop("dataloader_persistent_workers")
    if case["resume"] != "no":  # transformers' then draw once more
        found.pop("dataloader_persistent_workers", None)
    if found["accelerator_config"] is None:
        found.pop("accelerator_config")
    elif "dispatch_batches" in found["accelerator_config"] and not case["stream"]:
        found.pop("accelerator_config")
    elif found["accelerator_config"] == {"use_seedable_sampler": False}:
        found.pop("dataloader_persistent_workers", None)
    if case["data"] == "pairs":
        found |= {"predict_with_generate": case["generate"], **case["generation"]}
        found |= {"include_for_metrics": [], "neftune_noise_alpha": None}
        # Rounding decides between beams that are as good.
        found |= {"bf16": False, "bf16_full_eval": False}
    if case["again"] or case["checkpoint"] == "first":  # by time, ours by step
        found["save_total_limit"] = None
    if case["loss"] == "function":  # which ignores the count
        found["gradient_accumulation_steps"] = 1
    if case["resume"] != "no" and found["save_only_model"]:
        found["save_only_model"] = False
    if found["metric_for_best_model"] is None:
        found.pop("greater_is_better")
    return found


class Rows:
    """A data set of one's own."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Any:
        return self.rows[i]


def pairs(n: int) -> list[dict[str, Any]]:
    """Inputs of unequal length, targets of one."""
    inputs = tokenized(n)["input_ids"]
    return [{"input_ids": ids, "labels": (ids * 3)[5::-1]} for ids in inputs]


def t5() -> Any:
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**T5))


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
        e = 24 if given["dataloader_drop_last"] or case["data"] == "pairs" else 11
        self.collate: Any = None
        self.words = None
        if case["data"] == "vectors":
            self.make: Any = lambda: Net(0.1)
            self.train, self.eval = rows(n), rows(e)
        elif case["data"] == "sentences":
            self.words = tokenizer()
            self.make = lambda: bert("SequenceClassification", num_labels=3)
            self.train, self.eval = classified(n), classified(e, seed=1)
            if not given["remove_unused_columns"]:
                kept = ["input_ids", "attention_mask", "label"]
                self.train = self.train.select_columns(kept)
                self.eval = self.eval.select_columns(kept)
        elif case["data"] == "pairs":
            self.words, self.make = tokenizer(), t5
            self.train, self.eval = pairs(n), pairs(e)
            with torch.random.fork_rng():
                self.collate = transformers.DataCollatorForSeq2Seq(self.words, t5())
        else:
            self.make, self.collate = llama, transformers.default_data_collator
            self.train, self.eval = blocks(n), blocks(e)
        if case["stream"]:
            if isinstance(self.train, list):
                plain = [
                    {
                        k: v.tolist() if hasattr(v, "tolist") else v
                        for k, v in row.items()
                    }
                    for row in self.train
                ]
                self.train = datasets.Dataset.from_list(plain)
            self.train = self.train.to_iterable_dataset()
        elif case["rows"] == "own" and given["remove_unused_columns"]:
            self.train, self.eval = Rows(self.train), Rows(self.eval)

    def model(self, lab: Lab, frozen: bool) -> Any:
        made = self.make()
        if frozen:
            next(made.parameters()).requires_grad_(False)
        return lab.see(made)


def traits(number: int) -> set[str]:
    """What the permitted differences of the script depend on."""
    case = SCRIPTS[number]
    given = options(case)
    held = {
        "own loader": case["override"] in ("Loaders", "PreparedLoader"),
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
        "seq2seq": case["data"] == "pairs",
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


def uses_function(case: Case) -> bool:
    return case["loss"] is not None and case["data"] != "pairs"


def loss_of(kind: str) -> Any:
    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        logits = outputs["logits"]
        if logits.ndim == 1:
            total, n = (logits - labels).square().sum(), len(labels)
        else:
            classes = logits.shape[-1]
            total = cross_entropy(
                logits.reshape(-1, classes), labels.reshape(-1), reduction="sum"
            )
            n = int((labels != -100).sum())
        if kind == "function" or num_items_in_batch is None:
            return total / n
        return total / num_items_in_batch

    return loss


def argmax(logits: Any, labels: Any) -> Any:
    while isinstance(logits, tuple):
        logits = logits[0]
    return logits.argmax(-1)


def takes(trainer: Any) -> bool:
    """Does evaluate() take keywords of generate()?"""
    return "gen_kwargs" in inspect.signature(trainer.evaluate).parameters


def any_ratio(given: dict[str, Any]) -> bool:
    """Is there a period that is a part of the run?"""
    found = [given[f"{name}_steps"] for name in ("logging", "eval", "save")]
    return any(steps is not None and steps < 1 for steps in found)


def parts_of_optimizer(kind: str | None, model: Any) -> dict[str, Any]:
    if kind == "class":
        chosen = (torch.optim.RMSprop, {"lr": 1e-3, "momentum": 0.5, "eps": 1e-2})
        return {"optimizer_cls_and_kwargs": chosen}
    if kind is None or model is None:
        return {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    return {"optimizers": (optimizer, schedule if kind == "both" else None)}


def first_checkpoint() -> str:
    found = [*Path("out").glob("checkpoint-*")]
    return str(min(found, key=lambda folder: int(folder.name.split("-")[1])))


def script(number: int) -> Script:
    """The script of a number."""
    case = SCRIPTS[number]

    def run(lab: Lab) -> Any:
        given = options(case)
        ignored = {"ignore_data_skip": case["resume"] == "skip"}
        phases = [False] if case["resume"] == "no" else [False, True]
        generates = case["data"] == "pairs"
        base = lab.hf.Seq2SeqTrainer if generates else lab.hf.Trainer
        if case["override"] is not None:
            parents = OVERRIDES[case["override"]], base
            base = type("Mine", parents, {"lab": lab})
        for resume in phases:
            torch.manual_seed(number)
            parts = Parts(case)
            more: list[Any] = []
            if case["decide"]:
                more.append(Decide(case["decide"]))
            more.append(lab.watch)
            if case["stop"] and given["eval_strategy"] != "no":
                more.append(lab.hf.EarlyStoppingCallback(1, 0.01))
            if len(phases) == 2 and not resume:
                more.append(Stop())
            evaluated = parts.eval
            if case["several"]:
                evaluated = {"a": parts.eval, "b": parts.eval}
            if resume and not any_ratio(given):
                for name in ("max_steps", "num_train_epochs"):
                    if name in given:
                        given[name] += case["longer"]
            cls = "Seq2SeqTrainingArguments" if generates else "TrainingArguments"
            made: dict[str, Any] = {}
            if case["model_init"]:
                made["model_init"] = partial(parts.model, lab, case["frozen"])
            else:
                made["model"] = parts.model(lab, case["frozen"])
            kind = None if generates else case["optimizers"]
            made |= parts_of_optimizer(kind, made.get("model"))
            if uses_function(case):
                made["compute_loss_func"] = loss_of(case["loss"])
            if case["logits"] and not given.get("predict_with_generate"):
                made["preprocess_logits_for_metrics"] = argmax
            trainer = base(
                args=arguments(lab, cls, **given, **ignored),
                data_collator=parts.collate, train_dataset=parts.train,
                eval_dataset=evaluated, processing_class=parts.words,
                compute_metrics=size if case["metrics"] else None, callbacks=more,
                **made,
            )  # fmt: skip
            if case["data"] in ("sentences", "pairs"):
                lab.equal_shares(trainer)
            folder: Any = resume
            if resume and case["checkpoint"] == "first":
                folder = first_checkpoint()
            output = trainer.train(resume_from_checkpoint=folder)
            lab.show([output.global_step, output.training_loss])
        if case["again"]:
            output = trainer.train()
            lab.show([output.global_step, output.training_loss])
        keywords = case["keywords"] if generates and takes(base) else {}
        lab.show(trainer.evaluate(**keywords))
        predicted = trainer.predict(parts.eval, metric_key_prefix="shown", **keywords)
        lab.show([*predicted])
        return trainer

    return run
