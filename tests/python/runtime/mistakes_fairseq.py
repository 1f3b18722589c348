"""Mistakes with fairseq's Trainer."""

from __future__ import annotations

from typing import Any

import fairseq_tiny as tiny
import torch
from mistakes import mistake


class LossAlone(tiny.Task):
    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().train_step(*args, **kwargs)[0]


class CriterionWithoutReturn(tiny.Criterion):
    def forward(self, model: Any, sample: Any) -> Any:
        super().forward(model, sample)


class RaisingCriterion(tiny.Criterion):
    def forward(self, model: Any, sample: Any) -> Any:
        return super().forward(model, {"words": sample["source"]})


class TextLogs(tiny.Criterion):
    def forward(self, model: Any, sample: Any) -> Any:
        loss, _, output = super().forward(model, sample)
        return loss, "many", output


def step(sample: Any = None, **parts: Any) -> object:
    trainer = tiny.trainer(**parts)
    return trainer.train_step([tiny.batches(1)[0] if sample is None else sample])


@mistake("clip_norm", "-1.0")
def a_negative_norm() -> object:
    return tiny.trainer(optimization__clip_norm=-1.0)


@mistake("seed", "'seven'")
def a_seed_of_text() -> object:
    return tiny.trainer(common__seed="seven")


@mistake("optimizer", "'adamm'")
def a_misspelt_optimizer_of_fairseq() -> object:
    return step(optimizer___name="adamm")


@mistake("lr_scheduler", "'inverse_square'")
def a_misspelt_schedule_of_fairseq() -> object:
    return step(lr_scheduler___name="inverse_square")


@mistake("adam_betas", "'0.9'")
def betas_of_one_number() -> object:
    return step(optimizer__adam_betas="0.9")


@mistake("train_step", "Tensor", "train_step")
def a_task_that_returns_the_loss_alone() -> object:
    return step(task=LossAlone())


@mistake("CriterionWithoutReturn.forward", "None", "forward")
def a_criterion_without_return() -> object:
    return step(criterion=CriterionWithoutReturn())


@mistake("RaisingCriterion.forward", "'source'", "forward")
def a_criterion_that_raises() -> object:
    return step(criterion=RaisingCriterion())


@mistake("RaisingCriterion.forward", "'source'", "forward")
def a_criterion_that_raises_in_validation() -> object:
    trainer = tiny.trainer(criterion=RaisingCriterion())
    return trainer.valid_step(tiny.batches(1)[0])


@mistake("sample_size", "'many'")
def a_sample_size_of_text() -> object:
    return step(criterion=TextLogs())


@mistake("(embed)", "words int64 [2, 5]")
def a_word_beyond_the_dictionary() -> object:
    sample = tiny.batches(1)[0]
    return step({**sample, "words": sample["words"] + 20})


@mistake("criterion (Criterion)", "1 NaN")
def a_loss_that_is_no_number() -> object:
    return step({**tiny.batches(1)[0], "factor": torch.tensor(float("nan"))})


@mistake("train_step", "no samples")
def an_update_without_samples() -> object:
    return tiny.trainer().train_step([])


@mistake("dummy", "None")
def an_empty_sample() -> object:
    return step({})


@mistake("fp16", "AMP")
def two_precisions_of_fairseq() -> object:
    return tiny.trainer(common__fp16=True, common__amp=True)
