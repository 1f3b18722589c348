"""Updates of DeepSpeed's engine that the host enqueues without waiting for their norm:
the runs are those in which the host measures first."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import any_gpu
import pytest
import ranks
import torch
from deepspeed_enqueued import LOOKS, SCHEDULES, UPDATES, made, run
from draws import draws
from hypothesis import given, settings
from hypothesis import strategies as st

PLAIN: dict[str, Any] = {
    "stage": 0, "dtype": "fp32", "schedule": "WarmupLR", "clip": 0.5, "passes": 1,
    "optimizer": "AdamW",
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def gpu() -> torch.device:
    return any_gpu.device()


RUNS = st.fixed_dictionaries(
    {
        "stage": st.integers(0, 3),
        "dtype": st.sampled_from(["fp32", "bf16", "fp16"]),
        "schedule": st.sampled_from(
            ["", "WarmupLR", "WarmupDecayLR", "OneCycle", *SCHEDULES]
        ),
        "clip": st.sampled_from([0.0, 0.05, 1.0]),
        "passes": st.integers(1, 2),
        "optimizer": st.sampled_from(["AdamW", "SGD", "Adagrad", "Lion", "torch.Adam"]),
    }
)
AT = st.integers(0, UPDATES - 1)


@settings(max_examples=draws(20, 300), deadline=None)
@given(
    options=RUNS,
    looks=st.dictionaries(AT, st.sampled_from(sorted(LOOKS)), max_size=3),
    bad=st.sets(AT, max_size=3),
)
def test_a_run_is_the_one_in_which_the_host_measures_first(
    options: dict[str, Any], looks: dict[int, str], bad: set[int]
) -> None:
    enqueued, _ = run(True, looks, bad, **options)
    measured, _ = run(False, looks, bad, **options)
    assert str(enqueued) == str(measured)  # NaN equals NaN


@pytest.mark.parametrize("reader", LOOKS)
def test_each_reader_sees_what_was_measured(reader: str) -> None:
    options = PLAIN | {"stage": 3, "passes": 2}
    passes = range(0, 2 * UPDATES, 3)  # the last of an update, and the first
    looks = dict.fromkeys(passes, reader)
    enqueued, _ = run(True, looks, {5, 9}, **options)
    measured, _ = run(False, looks, {5, 9}, **options)
    assert str(enqueued) == str(measured)
    assert len({str(seen) for seen, _ in enqueued[: len(passes)]}) > 1


@pytest.mark.skipif(any_gpu.REAL, reason="a real GPU does not count waits")
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_the_host_waits_for_no_update(stage: int, dtype: str) -> None:
    options = PLAIN | {"stage": stage, "dtype": dtype}
    _, waits = run(True, {}, {3}, **options)
    assert waits[0] > 0
    assert waits[1:] == [0] * (UPDATES - 1)
    assert all(run(False, {}, {3}, **options)[1])


@pytest.mark.skipif(any_gpu.REAL, reason="a real GPU does not count waits")
@pytest.mark.parametrize(
    "changes",
    [
        {"schedule": "of a class of nobody's"},
        {"optimizer": "torch.Adam"},
        {
            "dtype": "fp16",
            "fp16": {"min_loss_scale": 2**13, "hysteresis": 1, "loss_scale_window": 99},
        },
    ],
)
def test_the_host_measures_first_where_it_has_to(changes: dict[str, Any]) -> None:
    _, waits = run(True, {}, set(), **PLAIN | {"stage": 2} | changes)
    assert all(waits)


def test_a_checkpoint_has_the_schedule_of_before_a_skipped_update(
    tmp_path: Path,
) -> None:
    options = PLAIN | {"stage": 3}
    engine = made(**options)
    x, y = (torch.ones(2, n, device=engine.device) for n in (5, 3))
    for factor in (1.0, 1.0, float("nan")):
        engine.backward(engine(x, y * factor))
        engine.step()
    rates = engine.get_lr(), engine.lr_scheduler.last_batch_iteration
    engine.save_checkpoint(str(tmp_path))
    assert engine.get_global_grad_norm() == float("inf")
    assert (engine.get_lr(), engine.lr_scheduler.last_batch_iteration) != rates
    again = made(**options)
    again.load_checkpoint(str(tmp_path))
    assert again.skipped_steps == 1
    assert again.get_lr() == engine.get_lr()
    assert again.lr_scheduler.last_batch_iteration == 1
    assert again.optimizer.state_dict()["state"][0]["step"] == 2


@pytest.mark.skipif(any_gpu.REAL, reason="NCCL needs a GPU for each rank")
def test_ranks_enqueue_what_they_would_have_measured(tmp_path: Path) -> None:
    for rank in ranks.told(ranks.run(tmp_path, "fsdp.deepspeed_enqueued")):
        for name, (same, waits) in rank.items():
            assert same, name
            assert waits[0] > 0, name
            measures = name.startswith("one rank's schedule")
            assert [count > 0 for count in waits[1:]] == [measures] * (UPDATES - 1)


@pytest.mark.parametrize("schedule", ["WarmupLR", "torch"])
def test_an_engine_that_is_dropped_in_an_update_frees_its_optimizer(
    schedule: str,
) -> None:
    engine = made(**PLAIN | {"stage": 3, "schedule": schedule})
    x, y = (torch.ones(2, n, device=engine.device) for n in (5, 3))
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            engine.backward(engine(x, y))
            engine.step()
        optimizer = weakref.ref(engine.optimizer)
        del engine
        assert optimizer() is None
    finally:
        gc.enable()
