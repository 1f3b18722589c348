"""train() against transformers' Trainer, both run here: the numbers of every update,
the batches, the events, the log."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import transformers
from tiny import Net, Run, gpt2, llama, rows, run, tokens
from torch import nn
from torch.utils.data import IterableDataset

import ctrainer

# Relative. Their norm is summed in fp32, ours in double, and clipping multiplies by it.
UNCLIPPED, CLIPPED = 1e-6, 1e-3
# Before 5.0, transformers logs losses to four decimals, and norms where it clips.
OLD = transformers.__version__ < "5"
ROUNDED = 5.1e-5 if OLD else 0.0  # absolute


def pair(
    make_model: Callable[[], nn.Module], data: Any, **options: Any
) -> tuple[Run, Run]:
    """The same run on both trainers."""
    theirs = run(transformers.Trainer, make_model(), data, **options)
    return theirs, run(ctrainer.Trainer, make_model(), data, **options)


def assert_equal_runs(theirs: Run, ours: Run, tolerance: float) -> None:
    assert len(theirs.logged("loss")) > 0
    expected = pytest.approx(theirs.logged("loss"), rel=tolerance, abs=ROUNDED)
    assert ours.logged("loss") == expected
    if theirs.logged("grad_norm") or not OLD:
        expected = pytest.approx(theirs.logged("grad_norm"), rel=tolerance)
        assert ours.logged("grad_norm") == expected
    for key in ("learning_rate", "epoch", "step"):
        assert ours.logged(key) == theirs.logged(key)
    assert ours.output.training_loss == pytest.approx(
        theirs.output.training_loss, rel=tolerance
    )
    assert ours.output.global_step == theirs.output.global_step
    assert ours.output.metrics.keys() == theirs.output.metrics.keys()


def assert_equal_weights(theirs: Run, ours: Run, tolerance: float) -> None:
    for mine, other in zip(ours.weights(), theirs.weights(), strict=True):
        torch.testing.assert_close(mine, other, rtol=10 * tolerance, atol=tolerance)


def assert_equal_batches(theirs: Run, ours: Run) -> None:
    assert len(ours.batches) == len(theirs.batches) > 0
    for mine, other in zip(ours.batches, theirs.batches, strict=True):
        assert mine.keys() == other.keys()
        assert all(torch.equal(mine[k], other[k]) for k in mine)


FIFTY = {"max_steps": 50, "num_train_epochs": 99}
OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "sgd": {"optim": "sgd", "learning_rate": 0.01},
    "weight decay": {"weight_decay": 0.1, "learning_rate": 0.01},
    "betas": {"adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-6},
    "cosine": {"lr_scheduler_type": "cosine", "warmup_steps": 5},
    "linear with warm-up": {"warmup_steps": 10, "learning_rate": 0.01},
    "warm-up as a share": {"warmup_steps": 0.2, "learning_rate": 0.01},
    "constant with warm-up": {
        "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 7,
    },
    "constant": {"lr_scheduler_type": "constant"},
}  # fmt: skip


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("name", OPTIONS)
def test_fifty_updates_equal(name: str, accumulation: int) -> None:
    theirs, ours = pair(
        functools.partial(Net, dropout=0.1), rows(), **FIFTY, **OPTIONS[name],
        max_grad_norm=0.0, gradient_accumulation_steps=accumulation,
        dataloader_drop_last=True,
    )  # fmt: skip
    assert_equal_runs(theirs, ours, UNCLIPPED)
    assert_equal_weights(theirs, ours, UNCLIPPED)


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("optim", ["adamw_torch", "sgd"])
def test_fifty_clipped_updates_equal(optim: str, accumulation: int) -> None:
    theirs, ours = pair(
        Net, rows(), **FIFTY, optim=optim, learning_rate=0.01, max_grad_norm=0.5,
        gradient_accumulation_steps=accumulation, dataloader_drop_last=True,
    )  # fmt: skip
    assert theirs.logged("grad_norm")[0] > 0.5
    assert_equal_runs(theirs, ours, CLIPPED)
    assert_equal_weights(theirs, ours, CLIPPED)


@pytest.mark.parametrize("accumulation", [1, 4])
def test_fifty_updates_in_bf16_equal(accumulation: int) -> None:
    theirs, ours = pair(
        Net, rows(), **FIFTY, bf16=True, learning_rate=1e-3,
        gradient_accumulation_steps=accumulation, dataloader_drop_last=True,
    )  # fmt: skip
    assert_equal_runs(theirs, ours, 1e-3)


def test_the_last_incomplete_batch_is_trained_on() -> None:
    theirs, ours = pair(Net, rows(43), num_train_epochs=3, max_grad_norm=0.0)
    assert_equal_runs(theirs, ours, UNCLIPPED)
    assert_equal_batches(theirs, ours)
    assert [len(b["x"]) for b in ours.batches[:6]] == [8, 8, 8, 8, 8, 3]


def test_the_last_update_of_an_epoch_takes_what_is_left() -> None:
    theirs, ours = pair(
        Net, rows(48), num_train_epochs=2, max_grad_norm=0.0,
        gradient_accumulation_steps=4,
    )  # fmt: skip
    assert_equal_runs(theirs, ours, UNCLIPPED)
    assert ours.output.global_step == 4


@pytest.mark.parametrize("epochs", [0.5, 1.5, 2])
def test_parts_of_epochs_end_at_the_same_step(epochs: float) -> None:
    theirs, ours = pair(Net, rows(), num_train_epochs=epochs, max_grad_norm=0.0)
    assert_equal_runs(theirs, ours, UNCLIPPED)
    assert ours.trainer.state.epoch == theirs.trainer.state.epoch


@pytest.mark.parametrize("seed", [{"seed": 1}, {"seed": 1, "data_seed": 9}])
def test_batches_come_in_the_same_order_for_a_seed(seed: dict[str, int]) -> None:
    theirs, ours = pair(Net, rows(), num_train_epochs=3, **seed)
    assert_equal_batches(theirs, ours)


def test_loaders_know_their_lengths(tmp_path: Path) -> None:
    found = []
    for lib in (transformers, ctrainer):
        args = lib.TrainingArguments(
            str(tmp_path), per_device_train_batch_size=3, report_to="none"
        )
        made: Any = lib.Trainer(
            Net(), args, train_dataset=rows(), eval_dataset=rows()[:7]
        )
        loaders = [made.get_train_dataloader(), made.get_eval_dataloader()]
        found.append([(x.total_batch_size, x.total_dataset_length) for x in loaders])
    assert found[0] == found[1]


def test_grouping_by_length_gives_the_same_batches() -> None:
    data = [{"input_ids": [1] * (1 + i * 7 % 13), "labels": i % 2} for i in range(64)]

    def collate(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        length = max(len(e["input_ids"]) for e in examples)
        ids = [e["input_ids"] + [0] * (length - len(e["input_ids"])) for e in examples]
        return {
            "input_ids": torch.tensor(ids),
            "labels": torch.tensor([e["labels"] for e in examples]),
        }

    theirs, ours = pair(
        bert, data, num_train_epochs=2, train_sampling_strategy="group_by_length",
        parts={"data_collator": collate},
    )  # fmt: skip
    assert_equal_batches(theirs, ours)


def test_events_come_in_the_same_order_with_the_same_arguments() -> None:
    theirs, ours = pair(
        Net, rows(40), num_train_epochs=2, gradient_accumulation_steps=2,
        logging_steps=2, eval_strategy="steps", eval_steps=2,
        parts={"eval_dataset": rows(16)},
    )  # fmt: skip
    assert ours.events == theirs.events
    assert {e[0] for e in ours.events} >= {
        "on_init_end", "on_train_begin", "on_epoch_begin", "on_step_begin",
        "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end",
        "on_log", "on_prediction_step", "on_evaluate", "on_epoch_end", "on_train_end",
    }  # fmt: skip


def test_the_log_has_the_same_entries() -> None:
    theirs, ours = pair(
        Net, rows(40), num_train_epochs=2, logging_steps=3, logging_first_step=True,
        eval_strategy="epoch", parts={"eval_dataset": rows(16)},
    )  # fmt: skip
    history = ours.trainer.state.log_history
    reference = theirs.trainer.state.log_history
    assert [list(h) for h in history] == [list(h) for h in reference]
    assert [h["step"] for h in history] == [h["step"] for h in reference]
    assert ours.logged("eval_loss") == pytest.approx(theirs.logged("eval_loss"), 1e-6)


def test_the_log_at_an_epoch_s_end_has_the_last_update_s_learning_rate() -> None:
    theirs, ours = pair(
        Net, rows(), num_train_epochs=3, logging_strategy="epoch", learning_rate=0.01
    )
    assert len(ours.logged("learning_rate")) == 3
    assert ours.logged("learning_rate") == theirs.logged("learning_rate")


def test_a_data_set_of_datasets_loses_the_same_columns() -> None:
    data = datasets.Dataset.from_dict(
        {
            "x": [r["x"].tolist() for r in rows(40)],
            "labels": [float(r["labels"]) for r in rows(40)],
            "note": ["text"] * 40,
        }
    )
    theirs, ours = pair(Net, data, num_train_epochs=2, max_grad_norm=0.0)
    assert_equal_runs(theirs, ours, UNCLIPPED)
    assert_equal_batches(theirs, ours)


class Stream(IterableDataset):
    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return iter(rows(self.n))


def test_a_stream_starts_anew_until_max_steps() -> None:
    theirs, ours = pair(Net, Stream(44), max_steps=20, max_grad_norm=0.0)
    assert_equal_runs(theirs, ours, UNCLIPPED)
    assert_equal_batches(theirs, ours)


def test_at_a_stream_s_end_an_update_takes_what_is_left() -> None:
    """transformers adds the gradients of what is left to the next epoch's."""
    ours = run(
        ctrainer.Trainer, Net(), Stream(44), max_steps=4, gradient_accumulation_steps=4
    )
    assert [len(b["x"]) for b in ours.batches] == [8, 8, 8, 8, 8, 4] * 2
    assert ours.output.global_step == 4


def test_a_data_set_of_datasets_streams() -> None:
    made = datasets.Dataset.from_list(
        [{k: v.tolist() for k, v in r.items()} for r in rows(40)]
    )
    theirs, ours = pair(
        Net, made.to_iterable_dataset(), max_steps=12, max_grad_norm=0.0
    )
    assert_equal_runs(theirs, ours, UNCLIPPED)
    assert_equal_batches(theirs, ours)


# Models of transformers


def bert() -> nn.Module:
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=32, max_position_embeddings=16,
        )
    )  # fmt: skip


def gpt2_told() -> nn.Module:
    """With its loss named: transformers counts the targets of one made from a bare
    configuration without the shift."""
    model = gpt2()
    model.loss_type = "ForCausalLM"
    return model


def t5() -> nn.Module:
    torch.manual_seed(0)
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2,
            decoder_start_token_id=0,
        )
    )  # fmt: skip


def classes(n: int = 32) -> list[dict[str, Any]]:
    return [
        {"input_ids": r["input_ids"], "label": i % 2} for i, r in enumerate(tokens(n))
    ]


MODELS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "bert": (bert, classes()),
    "gpt2": (gpt2_told, tokens()),
    "llama": (llama, tokens()),
    "t5": (t5, tokens()),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers_train_equally(name: str) -> None:
    make_model, data = MODELS[name]
    theirs, ours = pair(
        make_model, data, **FIFTY, learning_rate=1e-3, max_grad_norm=0.0,
        weight_decay=0.01,
    )  # fmt: skip
    assert_equal_runs(theirs, ours, UNCLIPPED)


def test_llama_accumulates_equally() -> None:
    theirs, ours = pair(
        llama, tokens(), max_steps=16, learning_rate=1e-3, max_grad_norm=0.0,
        gradient_accumulation_steps=4, per_device_train_batch_size=2,
    )  # fmt: skip
    assert_equal_runs(theirs, ours, UNCLIPPED)


@pytest.mark.parametrize("make_model", [gpt2_told, t5])
def test_label_smoothing_gives_the_same_losses(make_model: Any) -> None:
    data = tokens(padded=True)
    if make_model is t5:
        data = [{**r, "decoder_input_ids": r["input_ids"]} for r in data]
    theirs, ours = pair(
        make_model, data, **FIFTY, label_smoothing_factor=0.1,
        learning_rate=1e-3, max_grad_norm=0.0,
    )  # fmt: skip
    assert_equal_runs(theirs, ours, UNCLIPPED)


def test_counting_tokens_logs_the_same_numbers() -> None:
    theirs, ours = pair(
        llama, tokens(), max_steps=6, include_num_input_tokens_seen="all"
    )
    assert ours.logged("num_input_tokens_seen") == theirs.logged(
        "num_input_tokens_seen"
    )
    assert ours.output.metrics["total_flos"] == theirs.output.metrics["total_flos"] > 0


def test_adapters_of_peft_train_and_the_rest_stays() -> None:
    peft = pytest.importorskip("peft")

    def adapted() -> nn.Module:
        config = peft.LoraConfig(
            r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
        )
        torch.manual_seed(1)
        return peft.get_peft_model(llama(), config)

    theirs, ours = pair(
        adapted, tokens(), max_steps=10, learning_rate=0.01, max_grad_norm=0.0
    )
    assert_equal_runs(theirs, ours, UNCLIPPED)
    before, after = dict(adapted().named_parameters()), ours.trainer.model
    for name, parameter in after.named_parameters():
        same = torch.equal(parameter, before[name])
        assert same is not parameter.requires_grad, name


# Losses of the user


def absolute(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    error = (outputs["logits"] - labels).abs().sum()
    return error / (
        labels.numel() if num_items_in_batch is None else num_items_in_batch
    )


@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_compute_loss_func_trains_equally(accumulation: int) -> None:
    theirs, ours = pair(
        Net, rows(), **FIFTY, parts={"compute_loss_func": absolute}, max_grad_norm=0.0,
        gradient_accumulation_steps=accumulation,
    )  # fmt: skip
    assert_equal_runs(theirs, ours, UNCLIPPED)


def loss_of(model: nn.Module, inputs: dict[str, Any]) -> tuple[torch.Tensor, Any]:
    labels = inputs.pop("labels")
    outputs = model(**inputs)
    return nn.functional.smooth_l1_loss(outputs["logits"], labels), outputs


class TheirLoss(transformers.Trainer):
    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        loss, outputs = loss_of(model, inputs)
        return (loss, outputs) if return_outputs else loss


class OurLoss(ctrainer.Trainer):
    compute_loss = TheirLoss.compute_loss


class OldLoss(ctrainer.Trainer):
    """As subclasses were written for transformers 4.5."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False
    ) -> Any:
        loss, outputs = loss_of(model, inputs)
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("cls", [OurLoss, OldLoss])
def test_an_overridden_compute_loss_trains_equally(
    cls: type, accumulation: int
) -> None:
    options = {
        **FIFTY, "max_grad_norm": 0.0, "gradient_accumulation_steps": accumulation,
        "dataloader_drop_last": True,
    }  # fmt: skip
    theirs = run(TheirLoss, Net(), rows(), **options)
    assert_equal_runs(theirs, run(cls, Net(), rows(), **options), UNCLIPPED)


def test_arguments_of_transformers_are_taken_as_they_are() -> None:
    from tiny import arguments

    args = arguments(transformers.TrainingArguments, max_steps=12, max_grad_norm=0.0)
    theirs = transformers.Trainer(Net(), args, train_dataset=rows())
    ours = ctrainer.Trainer(Net(), args, train_dataset=rows())
    assert ours.args is args
    theirs.train()
    ours.train()
    losses = [
        [h["loss"] for h in t.state.log_history if "loss" in h] for t in (theirs, ours)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=UNCLIPPED, abs=ROUNDED)
