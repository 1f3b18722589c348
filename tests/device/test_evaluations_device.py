"""Evaluations on a device: the host enqueues a batch behind the other without waiting
for their results, which are those of an evaluation on the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import any_gpu
import emulated_torch
import pytest
import torch
from draws import draws
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import Net, rows

import ctrainer
from ctrainer.adapters import torch as adapter


@pytest.fixture(scope="module", autouse=True)
def gpu() -> torch.device:
    return any_gpu.device()


class Counted(Net):
    """Its loss takes the count of targets; its outputs are nested, of three dtypes."""

    accepts_loss_kwargs = True
    main_input_name = "x"

    def forward(
        self, x: torch.Tensor, labels: Any = None, num_items_in_batch: Any = None
    ) -> dict[str, Any]:
        x = x.to(self.layers[0].weight.dtype)
        found: dict[str, Any] = super().forward(x, labels)
        y = found["logits"]
        if num_items_in_batch is not None:
            found["loss"] = (y - labels).square().sum() / num_items_in_batch
        outputs = (y, {"half": y.bfloat16(), "signs": (y > 0, [y[:, None] * x])})
        return {**found, "logits": outputs}


def run(folder: Path, on_host: bool, n: int = 22, **options: Any) -> tuple[Any, Any]:
    """Metrics, and what a prediction returns."""
    preprocess = options.pop("preprocess", None)

    def compute(found: Any, compute_result: bool = True) -> dict[str, float]:
        predictions = found.predictions
        while isinstance(predictions, tuple | list):
            predictions = predictions[0]
        sums.append(float(predictions.sum()))
        return {"total": sum(sums)} if compute_result else {}

    sums: list[float] = []
    args = ctrainer.TrainingArguments(
        str(folder), use_cpu=on_host, report_to="none", disable_tqdm=True,
        per_device_eval_batch_size=4, **options,
    )  # fmt: skip
    trainer = ctrainer.Trainer(
        Counted().to(args.device), args, eval_dataset=rows(n), compute_metrics=compute,
        preprocess_logits_for_metrics=preprocess,
    )  # fmt: skip
    metrics = trainer.evaluate()
    sums.clear()
    predicted = trainer.predict(rows(n))
    return [metrics, predicted.metrics], predicted[:2]


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = [value[key] for key in sorted(value)]
    if isinstance(value, tuple | list):
        return [leaf for item in value for leaf in leaves(item)]
    return [value]


def assert_same(one: Any, other: Any) -> None:
    timed = ("_runtime", "_per_second", "_time")
    for a, b in zip(one[0], other[0], strict=True):
        assert a.keys() == b.keys()
        for name in a:
            assert name.endswith(timed) or a[name] == pytest.approx(
                b[name], rel=max(1e-6, any_gpu.LIMIT)
            )
    found, expected = leaves(one[1]), leaves(other[1])
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        any_gpu.assert_same(torch.from_numpy(a), torch.from_numpy(b))


OPTIONS = st.fixed_dictionaries(
    {
        "n": st.sampled_from([3, 4, 22]),
        "eval_accumulation_steps": st.sampled_from([None, 1, 2, 9]),
        "eval_do_concat_batches": st.booleans(),
        "batch_eval_metrics": st.booleans(),
        "include_for_metrics": st.sampled_from([[], ["inputs"], ["inputs", "loss"]]),
        "eval_loss_by_token": st.booleans(),
        "bf16_full_eval": st.booleans(),
        "preprocess": st.sampled_from([None, lambda logits, labels: logits[1]["half"]]),
    }
)


@settings(max_examples=draws(15, 200), deadline=None)
@given(options=OPTIONS)
def test_results_are_those_of_the_host(
    tmp_path_factory: Any, options: dict[str, Any]
) -> None:
    if any_gpu.REAL:
        options |= {"bf16_full_eval": False}  # rounds otherwise
    folder = tmp_path_factory.mktemp("runs")
    assert_same(run(folder, False, **options), run(folder, True, **options))


@pytest.mark.skipif(any_gpu.REAL, reason="a GPU's driver does not count waits")
@pytest.mark.parametrize("steps", [None, 3])
def test_the_host_waits_for_the_last_batches_alone(
    tmp_path: Path, steps: int | None
) -> None:
    found = []
    for n in (40, 120):  # twice 10 and 30 batches
        before = emulated_torch.waits()
        run(tmp_path, False, n=n, eval_accumulation_steps=steps)
        found.append(emulated_torch.waits() - before)
    assert found[1] <= found[0] + 2 * ((steps or 1) + 1)


@pytest.mark.parametrize("fails", [True, False])
def test_without_memory_to_pin_results_come_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    to = torch.Tensor.to
    pinned: list[int] = []

    def copy(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args == ("cpu",) and kwargs == {"non_blocking": True}:
            pinned.append(tensor.nbytes)
            if fails:
                raise RuntimeError("out of memory")
        return to(tensor, *args, **kwargs)

    expected = run(tmp_path, True)
    monkeypatch.setattr(torch.Tensor, "to", copy)
    monkeypatch.setattr(adapter, "_MOST_PINNED", 0)
    monkeypatch.setattr(adapter, "_SMALL", 1 << 20 if fails else 8)
    assert_same(run(tmp_path, False), expected)
    assert (max(pinned) > 8) == fails


@pytest.mark.parametrize("concat", [True, False])
def test_pinned_memory_is_freed_after_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, concat: bool
) -> None:
    """Results that are kept as lists of arrays are copied when nobody else works on
    them: the arrays have the memory of the copies."""
    copied: list[Any] = []
    begin_copy = adapter.begin_copy

    def notes(data: Any) -> Any:
        copied.append(len([leaf for leaf in leaves(data) if leaf is not None]))
        return begin_copy(data)

    monkeypatch.setattr(adapter, "begin_copy", notes)
    run(tmp_path, False, eval_do_concat_batches=concat)
    assert set(copied) == ({6} if concat else {1})  # outputs, labels and the loss
