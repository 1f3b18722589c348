"""Mistakes with HuggingFace's Trainer: arguments, data, hooks, callbacks, resuming."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import tiny
import torch
from mistakes import mistake
from torch import nn
from torch.utils.data import IterableDataset

from ctrainer import (
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
)


def train(
    cls: type[Trainer] = Trainer, model: Any = None, data: Any = None, **options: Any
) -> Any:
    resume = options.pop("resume", None)
    trainer = make(cls, model, data, **options)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def make(
    cls: type[Trainer] = Trainer, model: Any = None, data: Any = None, **options: Any
) -> Any:
    rows = tiny.rows(8) if data is None else data
    sizes = {"per_device_train_batch_size": 2, "max_steps": 2, "seed": 1}
    return tiny.make(cls, model or tiny.Net(), rows, **{**sizes, **options})


def evaluating(**options: Any) -> dict[str, Any]:
    parts = {"eval_dataset": tiny.rows(4), **options.pop("parts", {})}
    return {"eval_strategy": "steps", "eval_steps": 1, "parts": parts, **options}


# Arguments


@mistake("learning_rate", "'fast'")
def a_learning_rate_of_text() -> object:
    return tiny.arguments(learning_rate="fast")


@mistake("learning_rate", "-0.1")
def a_negative_learning_rate() -> object:
    return tiny.arguments(learning_rate=-0.1)


@mistake("per_device_train_batch_size", "0")
def an_empty_batch() -> object:
    return tiny.arguments(per_device_train_batch_size=0)


@mistake("lerning_rate", "lerning_rate")
def a_misspelt_argument() -> object:
    return tiny.arguments(lerning_rate=1e-4)


@mistake("batch_size", "per_device_train_batch_size")
def a_part_of_an_arguments_name() -> object:
    return tiny.arguments(batch_size=8)


@mistake("lr", "learning_rate")
def another_librarys_name_of_an_argument() -> object:
    return tiny.arguments(lr=1e-4)


@mistake("train_data", "train_dataset")
def a_misspelt_argument_of_the_trainer() -> object:
    return Trainer(model=tiny.Net(), args=tiny.arguments(), train_data=tiny.rows(4))


@mistake("resume_from", "resume_from_checkpoint")
def a_misspelt_argument_of_train() -> object:
    return make().train(resume_from="out")


@mistake("model", "the class Net")
def a_class_in_place_of_a_model() -> object:
    return Trainer(model=tiny.Net, args=tiny.arguments(), train_dataset=[])


@mistake("eval_strategy", "'step'")
def an_unknown_strategy() -> object:
    return tiny.arguments(eval_strategy="step")


@mistake("save_best_limit", "'no'")
def best_checkpoints_without_evaluations() -> object:
    return tiny.arguments(save_best_limit=3)


@mistake("save_best_metrics", "save_best_limit")
def metrics_of_best_checkpoints_without_a_number() -> object:
    return tiny.arguments(save_best_metrics=["loss"], eval_strategy="steps")


@mistake("load_best_model_at_end", "'no'")
def a_best_model_that_is_not_saved() -> object:
    return tiny.arguments(load_best_model_at_end=True, eval_strategy="steps")


@mistake("lr_scheduler_type", "'cosin'")
def a_misspelt_schedule() -> object:
    return tiny.arguments(lr_scheduler_type="cosin")


@mistake("optim", "'adamm'")
def a_misspelt_optimizer() -> object:
    return tiny.arguments(optim="adamm")


@mistake("fp16", "bf16")
def two_precisions() -> object:
    return tiny.arguments(fp16=True, bf16=True)


@mistake("max_steps", "'many'")
def many_steps() -> object:
    return tiny.arguments(max_steps="many")


@mistake("warmup_ratio", "2")
def a_warm_up_longer_than_the_run() -> object:
    return tiny.arguments(warmup_ratio=2.0)


@mistake("report_to", "wanb")
def a_misspelt_tracker() -> object:
    return make(report_to="wanb")


@mistake("fp16", "'maybe'")
def a_truth_value_of_text() -> object:
    return tiny.arguments(fp16="maybe")


@mistake("gradient_accumulation_steps", "0")
def no_accumulation() -> object:
    return tiny.arguments(gradient_accumulation_steps=0)


@mistake("optim_args", "momentun")
def a_misspelt_optimizer_option() -> object:
    return train(optim="sgd", optim_args="momentun=0.9")


@mistake("fsdp", "'full'")
def an_unknown_sharding() -> object:
    return tiny.arguments(fsdp="full")


@mistake("deepspeed", "ds.json")
def a_configuration_of_deepspeed() -> object:
    return tiny.arguments(deepspeed="ds.json")


@mistake("eval_dataset", '"steps"')
def an_evaluation_without_data() -> object:
    return make(eval_strategy="steps")


@mistake("metric_for_best_model", "'eval_f1'")
def a_best_metric_that_nobody_computes() -> object:
    return train(
        **evaluating(
            metric_for_best_model="f1", load_best_model_at_end=True,
            save_strategy="steps", save_steps=1,
        )
    )  # fmt: skip


@mistake("model_init", "optimizers=")
def an_optimizer_beside_model_init() -> object:
    optimizer = torch.optim.SGD(tiny.Net().parameters(), 0.1)
    parts = {"model_init": lambda: tiny.Net(), "optimizers": (optimizer, None)}
    return Trainer(args=tiny.arguments(), **parts)


@mistake("args", "dict")
def arguments_as_a_dict() -> object:
    return Trainer(model=tiny.Net(), args={"output_dir": "out"}, train_dataset=[])


# Data


class Raising:
    """A data set whose second row cannot be read."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Any]:
        row: dict[str, Any] = tiny.rows(8)[index]
        return row if index != 1 else {"x": row["y"]}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(tiny.rows(8))


def pad_wrongly(rows: list[Any]) -> dict[str, Any]:
    return {"x": torch.stack([row["x"][: i + 1] for i, row in enumerate(rows)])}


def forget_the_batch(rows: list[Any]) -> None:
    torch.stack([row["x"] for row in rows])


@mistake("train_dataset", "train_dataset")
def no_training_data() -> object:
    return Trainer(model=tiny.Net(), args=tiny.arguments()).train()


@mistake("training data set", "empty")
def an_empty_data_set() -> object:
    return train(data=[])


@mistake("get_batch_samples", "[8] at entry 0 and [5] at entry 1")
def rows_of_different_lengths() -> object:
    row = {"x": torch.zeros(8), "labels": 0.0}
    return train(data=[row, {**row, "x": torch.zeros(5)}], seed=3)


@mistake("labels", "['logits']")
def rows_without_labels() -> object:
    return train(data=[{"x": torch.zeros(8)}] * 4)


@mistake("Net.forward", "['input']")
def rows_of_other_names() -> object:
    return train(data=[{"input": torch.zeros(8)}] * 4)


@mistake("data_collator", "NoneType")
def a_collator_without_return() -> object:
    return train(parts={"data_collator": forget_the_batch})


@mistake("pad_wrongly", "[1] at entry 0 and [2] at entry 1", "pad_wrongly")
def a_collator_that_raises() -> object:
    return train(parts={"data_collator": pad_wrongly}, remove_unused_columns=False)


def take_wrongly(rows: list[Any]) -> dict[str, Any]:
    return {"x": torch.stack([row["input"] for row in rows])}


@mistake("take_wrongly", "'input'", "take_wrongly")
def a_collator_whose_comprehension_raises() -> object:
    return train(parts={"data_collator": take_wrongly}, remove_unused_columns=False)


@mistake("data_collator", "'pad'")
def a_collator_that_is_a_name() -> object:
    return make(parts={"data_collator": "pad"})


@mistake("data_collator", "NoneType (row 1 of 2 of the batch)")
def a_row_that_is_none() -> object:
    return train(data=[*tiny.rows(5), None, *tiny.rows(2)])


@mistake("data_collator", "a str")
def a_file_in_place_of_rows() -> object:
    return train(data="rows.json")


@mistake("reading row 1", "'y'", "__getitem__")
def a_data_set_that_raises() -> object:
    return train(data=Raising(), max_steps=8)


@mistake("get_batch_samples", "'y'", "__getitem__")
def a_data_set_that_raises_in_a_worker() -> object:
    return train(data=Raising(), max_steps=8, dataloader_num_workers=1)


@mistake("(transformer.wte)", "input_ids int64 [2, 12]")
def a_token_beyond_the_vocabulary() -> object:
    return train(model=tiny.gpt2(vocab_size=30), data=tiny.tokens(4))


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x: Any, labels: Any) -> Any:
        logits = self.layer(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


@mistake("Classifier.forward", "Target 3", "forward")
def a_label_beyond_the_classes() -> object:
    return train(model=Classifier(), data=[{"x": torch.zeros(8), "labels": 3}] * 4)


@mistake("Classifier.forward", "labels float32 [2]", "forward")
def labels_of_classes_that_are_floats() -> object:
    return train(model=Classifier(), data=[{"x": torch.zeros(8), "labels": 1.0}] * 4)


@mistake("max_steps", "it is -1")
def a_stream_without_an_end() -> object:
    return train(data=Stream(), max_steps=-1)


@mistake("data_collator", "tuple")
def rows_that_are_tuples() -> object:
    return train(data=[(torch.zeros(8), 0.0)] * 4)


@mistake("Linear.forward (layers.0)", "x float32 [2, 5]")
def rows_of_another_width() -> object:
    return train(data=[{"x": torch.zeros(5), "labels": 0.0}] * 4)


@mistake("eval_dataset", "'validaton'")
def an_unknown_evaluation_set() -> object:
    trainer = make(parts={"eval_dataset": {"validation": tiny.rows(4)}})
    return trainer.evaluate("validaton")


# Hooks


class WithoutReturn(Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        super().compute_loss(*args, **kwargs)


class StepWithoutReturn(Trainer):
    def training_step(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        super().training_step(*args, **kwargs)


class LossAsNumber(Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        return super().compute_loss(*args, **kwargs).item()


class LossAlone(Trainer):
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        return super().compute_loss(model, inputs)


class BadPrediction(Trainer):
    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        return super().prediction_step(*args, **kwargs)[0]


class BadBatches(Trainer):
    def get_batch_samples(self, iterator: Any, n: int, device: Any = None) -> Any:  # type: ignore[override]
        return [next(iterator) for _ in range(n)]


class WithoutOptimizer(Trainer):
    def create_optimizer(self, model: Any = None) -> Any:
        return None


class WithoutLoader(Trainer):
    def get_train_dataloader(self) -> Any:  # type: ignore[override]
        return None


class RaisingLoss(Trainer):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        return model(**inputs)["los"]


class ForwardWithoutReturn(tiny.Net):
    def forward(self, x: Any, labels: Any = None) -> Any:
        super().forward(x, labels)


class VectorLoss(tiny.Net):
    def forward(self, x: Any, labels: Any = None) -> Any:
        return {"loss": (self.layers(x).squeeze(-1) - labels) ** 2}


class DetachedLoss(tiny.Net):
    def forward(self, x: Any, labels: Any = None) -> Any:
        return {"loss": super().forward(x, labels)["loss"].detach()}


class BareLoss(tiny.Net):
    def forward(self, x: Any, labels: Any = None) -> Any:
        return super().forward(x, labels)["loss"]


class RaisingForward(tiny.Net):
    def forward(self, x: Any, labels: Any = None) -> Any:
        return super().forward(x.view(3, -1), labels)


@mistake("WithoutReturn.compute_loss", "None", "compute_loss")
def compute_loss_without_return() -> object:
    return train(WithoutReturn)


@mistake("StepWithoutReturn.training_step", "None", "training_step")
def training_step_without_return() -> object:
    return train(StepWithoutReturn)


@mistake("ForwardWithoutReturn.forward", "None", "forward")
def forward_without_return() -> object:
    return train(model=ForwardWithoutReturn())


@mistake("VectorLoss.forward", "float32 [2]", "forward")
def a_loss_of_several_elements() -> object:
    return train(model=VectorLoss())


@mistake("DetachedLoss.forward", "float32 []", "forward")
def a_loss_without_gradient() -> object:
    return train(model=DetachedLoss())


@mistake("BareLoss.forward", "0-dim", "forward")
def a_loss_that_stands_alone() -> object:
    return train(model=BareLoss())


@mistake("LossAsNumber.compute_loss", "float", "compute_loss")
def a_loss_that_is_a_number() -> object:
    return train(LossAsNumber)


@mistake("RaisingLoss.compute_loss", "'los'", "compute_loss")
def compute_loss_that_raises() -> object:
    return train(RaisingLoss)


@mistake("RaisingForward.forward", "[3, -1]", "forward")
def forward_that_raises() -> object:
    return train(model=RaisingForward(), gradient_accumulation_steps=2)


@mistake("LossAlone.compute_loss", "Tensor", "compute_loss")
def an_evaluation_without_outputs() -> object:
    return make(LossAlone).evaluate(tiny.rows(4))


@mistake("BadPrediction.prediction_step", "Tensor", "prediction_step")
def a_prediction_that_is_no_tuple() -> object:
    return make(BadPrediction).evaluate(tiny.rows(4))


@mistake("get_batch_samples", "[{")
def batches_without_a_count() -> object:
    return train(BadBatches)


@mistake("create_optimizer", "None", "create_optimizer")
def an_optimizer_that_is_none() -> object:
    return train(WithoutOptimizer)


@mistake("get_train_dataloader", "None", "get_train_dataloader")
def a_loader_that_is_none() -> object:
    return train(WithoutLoader)


def model_init_without_return() -> None:
    tiny.Net()


@mistake("model_init", "None")
def a_model_init_without_return() -> object:
    parts = {"model_init": model_init_without_return, "train_dataset": tiny.rows(4)}
    return Trainer(args=tiny.arguments(), **parts).train()


def metrics_as_number(prediction: Any) -> float:
    return 0.5


def metrics_that_raise(prediction: Any) -> dict[str, float]:
    return {"f1": prediction.f1}


@mistake("compute_metrics", "0.5")
def metrics_that_are_a_number() -> object:
    parts = {"compute_metrics": metrics_as_number, "eval_dataset": tiny.rows(4)}
    return make(parts=parts).evaluate()


def metrics_without_return(prediction: Any) -> None:
    prediction.predictions.mean()


@mistake("compute_metrics", "None")
def metrics_that_are_not_returned() -> object:
    parts = {"compute_metrics": metrics_without_return, "eval_dataset": tiny.rows(4)}
    return make(parts=parts).evaluate()


@mistake("metrics_that_raise", "'f1'", "metrics_that_raise")
def metrics_that_fail_in_a_training() -> object:
    return train(**evaluating(parts={"compute_metrics": metrics_that_raise}))


@mistake("Net.forward", "'text'")
def a_column_that_forward_does_not_take() -> object:
    rows = [{**row, "text": torch.zeros(1)} for row in tiny.rows(4)]
    return train(data=rows, remove_unused_columns=False)


# Callbacks


class RaisingCallback(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        raise ValueError(f"of step {state.global_step}")


class ReadingCallback(TrainerCallback):
    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        print(kwargs["logs"]["accuracy"])


class AnsweringCallback(TrainerCallback):
    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        return "stop"


class NarrowCallback(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any) -> None:  # type: ignore[override]
        self.step = state.global_step


@mistake("RaisingCallback.on_step_end", "step 1", "on_step_end")
def a_callback_that_raises() -> object:
    return train(callbacks=[RaisingCallback()])


@mistake("ReadingCallback.on_log", "'accuracy'", "on_log")
def a_callback_that_reads_what_is_not_logged() -> object:
    return train(callbacks=[ReadingCallback()], logging_steps=1)


@mistake("AnsweringCallback.on_log", "str")
def a_callback_that_answers_by_text() -> object:
    return train(callbacks=[AnsweringCallback()])


@mistake("NarrowCallback.on_step_begin", "4")
def a_callback_with_too_few_parameters() -> object:
    return train(callbacks=[NarrowCallback()])


@mistake("callbacks", "RaisingCallback")
def a_callback_that_is_in_no_list() -> object:
    return Trainer(model=tiny.Net(), args=tiny.arguments(), callbacks=RaisingCallback())


@mistake("callbacks", "<built-in function print>")
def a_function_among_the_callbacks() -> object:
    return train(callbacks=[print])


@mistake("EarlyStoppingCallback", "metric_for_best_model")
def early_stopping_without_a_metric() -> object:
    return train(**evaluating(callbacks=[EarlyStoppingCallback()]))


# Resuming


def saved() -> str:
    trainer = train(save_strategy="steps", save_steps=1)
    return os.path.join(trainer.args.output_dir, "checkpoint-2")


class Wider(tiny.Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers[0] = nn.Linear(9, 16)


@mistake("resume_from_checkpoint", "'nowhere'")
def a_checkpoint_that_is_not_there() -> object:
    return train(resume="nowhere")


@mistake("FOLDER", "holds no weights")
def a_folder_above_the_checkpoints() -> object:
    return train(resume=os.path.dirname(saved()))


@mistake("resume_from_checkpoint", "FOLDER")
def a_folder_without_checkpoints() -> object:
    return train(resume=True)


@mistake("model.safetensors", "bytes")
def a_checkpoint_that_is_cut_off() -> object:
    folder = saved()
    path = os.path.join(folder, "model.safetensors")
    os.truncate(path, os.path.getsize(path) // 2)
    return train(resume=folder, max_steps=4)


@mistake("layers.0.weight", "[16, 9]")
def a_checkpoint_of_another_model() -> object:
    return train(model=Wider(), resume=saved(), max_steps=4)


@mistake("param_groups[0]", "'momentum'")
def a_checkpoint_of_another_optimizer() -> object:
    return train(resume=saved(), max_steps=4, optim="sgd", optim_args="momentum=0.9")
