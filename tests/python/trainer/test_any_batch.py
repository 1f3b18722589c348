"""Whatever a collator gives and the hooks accept is trained, evaluated and predicted
on: the same numbers as with the dict of the same tensors."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

import tiny  # noqa: E402
import torch  # noqa: E402

import ctrainer  # noqa: E402

Pair = collections.namedtuple("Pair", "input_ids labels")


@dataclasses.dataclass
class Data:
    input_ids: torch.Tensor
    labels: torch.Tensor


class Opaque:
    """Has neither a length nor entries."""

    def __init__(self, batch: dict[str, torch.Tensor]) -> None:
        self._batch = batch

    def tensors(self) -> dict[str, torch.Tensor]:
        return self._batch


class Indexed(Opaque):
    """Takes any key that it knows, and has its own way to reject another."""

    def __getitem__(self, name: str) -> torch.Tensor:
        raise RuntimeError(f"asked for {name!r}")


def stacked(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


# Collators, and the way from their batches to the model's keywords.
KINDS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "dict": (stacked, dict),
    "list of rows": (list, stacked),
    "tuple": (
        lambda rows: tuple(stacked(rows).values()),
        lambda b: {"input_ids": b[0], "labels": b[1]},
    ),
    "list of tensors": (
        lambda rows: list(stacked(rows).values()),
        lambda b: {"input_ids": b[0], "labels": b[1]},
    ),
    "named tuple": (lambda rows: Pair(**stacked(rows)), lambda b: b._asdict()),
    "dataclass": (lambda rows: Data(**stacked(rows)), dataclasses.asdict),
    "encoding": (
        lambda rows: transformers.BatchEncoding(stacked(rows)),
        lambda b: dict(b.items()),
    ),
    "tensor": (
        lambda rows: torch.stack([*stacked(rows).values()]),
        lambda b: {"input_ids": b[0], "labels": b[1]},
    ),
    "object": (lambda rows: Opaque(stacked(rows)), lambda b: b.tensors()),
    "own entries": (lambda rows: Indexed(stacked(rows)), lambda b: b.tensors()),
    "None": (lambda rows: KEPT.append(stacked(rows)), lambda b: KEPT.pop(0)),
}
KEPT: list[dict[str, torch.Tensor]] = []


class Unpacks(ctrainer.Trainer):
    kind = "dict"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.synced: list[tuple[bool, bool]] = []

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        state = self.accelerator.gradient_state
        self.synced.append((self.accelerator.sync_gradients, state.sync_gradients))
        outputs = model(**KINDS[self.kind][1](inputs))
        return (outputs.loss, outputs) if return_outputs else outputs.loss


def run(kind: str) -> tuple[Any, list[Any]]:
    KEPT.clear()
    cls = type("Unpacks", (Unpacks,), {"kind": kind})
    trainer = tiny.make(
        cls, tiny.gpt2(), tiny.tokens(18), per_device_train_batch_size=2,
        gradient_accumulation_steps=4, num_train_epochs=1, remove_unused_columns=False,
        include_num_input_tokens_seen="all", per_device_eval_batch_size=2,
        parts={"data_collator": KINDS[kind][0]},
    )  # fmt: skip
    trainer.train()
    measured = trainer.evaluate(tiny.tokens(6))
    predicted = trainer.predict(tiny.tokens(6))
    weights = [p.detach().clone() for p in trainer.model.parameters()]
    losses = [h["loss"] for h in trainer.state.log_history if "loss" in h]
    numbers = [*losses, measured["eval_loss"], predicted.metrics["test_loss"]]
    numbers.append(torch.from_numpy(predicted.predictions))
    return trainer, [*numbers, *weights]


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_any_kind_gives_the_numbers_of_a_dict(kind: str) -> None:
    expected, found = run("dict")[1], run(kind)[1]
    assert len(found) == len(expected)
    for mine, other in zip(found, expected, strict=True):
        assert torch.equal(torch.as_tensor(mine), torch.as_tensor(other))


@pytest.mark.parametrize("kind", ["dict", "object"])
def test_gradients_are_synchronized_in_the_last_micro_batch_only(kind: str) -> None:
    trainer, _ = run(kind)
    once = [False, False, False, True]
    expected = [*once, *once, True] + [True] * 6  # 9 micro-batches; evaluations
    assert trainer.synced == [(value, value) for value in expected]


@pytest.mark.parametrize("which", ["train", "eval"])
def test_a_stream_without_a_length_has_no_sampler(which: str) -> None:
    trainer = run("dict")[0]
    sampler = getattr(trainer, f"_get_{which}_sampler")
    assert sampler(iter([])) is None
    assert len(sampler(tiny.tokens(6))) == 6


def test_no_data_set_to_evaluate_has_no_sampler() -> None:
    assert run("dict")[0]._get_eval_sampler(None) is None


MAPPINGS = ("dict", "encoding")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in MAPPINGS])
def test_a_batch_that_no_hook_unpacks_is_rejected_by_its_type(kind: str) -> None:
    trainer = tiny.make(
        ctrainer.Trainer, tiny.gpt2(), tiny.tokens(4), remove_unused_columns=False,
        parts={"data_collator": KINDS[kind][0]},
    )  # fmt: skip
    with pytest.raises(TypeError, match="compute_loss expects a batch that maps"):
        trainer.train()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in MAPPINGS])
def test_inputs_for_metrics_are_rejected_where_they_have_no_names(kind: str) -> None:
    KEPT.clear()
    cls = type("Unpacks", (Unpacks,), {"kind": kind})
    trainer = tiny.make(
        cls, tiny.gpt2(), tiny.tokens(4), remove_unused_columns=False,
        include_for_metrics=["inputs"],
        parts={
            "data_collator": KINDS[kind][0],
            "compute_metrics": lambda prediction: {},
        },
    )  # fmt: skip
    with pytest.raises(TypeError, match="include_for_metrics has 'inputs'"):
        trainer.evaluate(tiny.tokens(4))
