"""--split-oom-batches: runs of fairseq's Trainer in which passes fail for want of
memory, at drawn places, equal those in which none does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ranks import run, told

torch = pytest.importorskip("torch")
import fairseq_failing as failing  # noqa: E402
import fairseq_tiny as tiny  # noqa: E402

from ctrainer.runtime import parts  # noqa: E402

SPLITS = {"common__split_oom_batches": True}


@pytest.fixture(autouse=True)
def _apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # crash.pt goes to ./checkpoints
    monkeypatch.setattr(parts, "GROWTH_INTERVAL", parts.GROWTH_INTERVAL)


def same(found: Any, expected: Any) -> None:
    for a, b in zip(found[1:4], expected[1:4], strict=True):
        assert a == pytest.approx(b, rel=1e-9, abs=1e-9)
    assert found[4] == pytest.approx(expected[4], rel=1e-5)
    assert found[0].get_num_updates() == expected[0].get_num_updates()


@pytest.mark.parametrize("kind", ["tokens", "sentences"])
@pytest.mark.parametrize("update_freq", [1, 2, 4])
def test_a_run_with_failures_is_the_run_without(kind: str, update_freq: int) -> None:
    updates = tiny.groups(failing.samples(240), update_freq)
    plain = failing.trained(updates, failing.Failing(), kind)
    draws = failing.Drawn(update_freq, rate=0.4, most=50)
    found = failing.trained(updates, failing.Failing(draws), kind, **SPLITS)
    assert draws.failed == 50
    same(found, plain)


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_what_never_fits_is_split_before_it_fails_again(place: str) -> None:
    updates = tiny.groups(failing.samples(40), 4)
    plain = failing.trained(updates, failing.Failing(), "tokens")
    limited = failing.Failing(lambda at, rows: at == place and rows > 2)
    found = failing.trained(updates, limited, "tokens", **SPLITS)
    same(found, plain)
    assert found[0]._parts.rows == 2
    parts = sum(
        -(-sample["nsentences"] // 2) for update in updates for sample in update
    )
    assert limited.passes == parts + 2  # of 6 rows, and then of 3


def test_by_default_the_sample_is_dropped_and_counted() -> None:
    samples = failing.samples(4)
    found = failing.trained(
        [samples], failing.Failing(lambda *at: at[1] == 6), "tokens"
    )
    kept = [sample for sample in samples if sample["nsentences"] != 6]
    assert found[2] == [sum(sample["ntokens"] for sample in kept)]
    assert found[4]["oom"] == len(samples) - len(kept)


def test_a_single_sentence_that_does_not_fit_is_dropped_and_counted() -> None:
    def fails(place: str, rows: int) -> bool:
        return rows == 1

    one, more = failing.samples(1, rows=1)[0], failing.samples(1)[0]
    found = failing.trained([[one, more]], failing.Failing(fails), "tokens", **SPLITS)
    assert found[2] == [more["ntokens"]]
    assert found[4]["oom"] == 1
    with pytest.raises(RuntimeError, match="out of memory"):
        found[0].train_step([one], raise_oom=True)


def test_a_sample_that_is_dropped_after_all_leaves_nothing_in_gradients() -> None:
    """Its backward pass has failed first, so that some gradients have all of it; then a
    row of it fails in the forward pass, and again. The samples before are lost, too."""
    seen: list[tuple[str, int]] = []

    def fails(place: str, rows: int) -> bool:
        seen.append((place, rows))
        if seen.count(("forward", 1)) > 2:
            return False
        if seen.count(("backward", 3)):  # the part that is well
            return place == "forward"
        return seen.count(("backward", 6)) == 3 and rows == 6

    samples = [sample for sample in failing.samples(10) if sample["nsentences"] == 6]
    found = failing.trained([samples], failing.Failing(fails), "tokens", **SPLITS)
    plain = failing.trained([samples[3:]], failing.Failing(), "tokens")
    assert found[2] == plain[2]
    assert found[3] == pytest.approx(plain[3], rel=1e-9, abs=1e-9)
    assert found[4]["oom"] == 1


def test_random_numbers_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    draws = failing.Drawn(3, rate=0.5, most=1)
    updates = tiny.groups(failing.samples(12), 2)
    model = failing.Failing(draws, dropout=0.5)
    failing.trained(updates, model, "tokens", **SPLITS)
    assert draws.failed == 1
    assert caplog.text.count("the model draws random numbers, as dropout does") == 1


def test_a_criterion_whose_loss_is_no_sum_is_rejected() -> None:
    model = failing.Failing(lambda place, rows: rows > 2)
    with pytest.raises(ValueError, match=r"not the sum of its parts'.*--max-tokens"):
        failing.trained([failing.samples(1)], model, "mean", **SPLITS)


def test_a_run_in_half_precision_is_split_too() -> None:
    options = {"common__fp16": True, "common__fp16_init_scale": 4}
    options |= {"common__fp16_scale_window": None, "common__fp16_scale_tolerance": 0.0}
    options |= {"common__threshold_loss_scale": None, "common__min_loss_scale": 1e-4}
    updates = tiny.groups(failing.samples(40), 2)
    plain = failing.trained(updates, failing.Failing(), "tokens", **options)
    draws = failing.Drawn(5, rate=0.4, most=15)
    found = failing.trained(
        updates, failing.Failing(draws), "tokens", **SPLITS, **options
    )
    assert draws.failed == 15
    # float16 has 11 bits: sums of gradients are rounded after each part
    assert found[3] == pytest.approx(plain[3], rel=2e-2, abs=2e-2)
    assert found[2] == plain[2]


def test_sharded_runs_do_not_go_with_it() -> None:
    with pytest.raises(ValueError, match="split_oom_batches does not go with"):
        tiny.trainer(distributed_training__ddp_backend="fully_sharded", **SPLITS)


@pytest.mark.parametrize("backend", ["pytorch_ddp", "legacy_ddp"])
@pytest.mark.parametrize("update_freq", [1, 3])
def test_ranks_fail_each_at_its_own_times(
    tmp_path: Path, backend: str, update_freq: int
) -> None:
    options = {"backend": backend, "update_freq": update_freq}
    both = told(run(tmp_path, "fairseq.out_of_memory", **options))
    assert [rank["failed"] for rank in both] == [50, 0 if update_freq == 1 else 50]
    for rank in both:
        for plain, found in zip(rank["plain"], rank["failing"], strict=True):
            assert found == pytest.approx(plain, rel=1e-9, abs=1e-9)
    assert both[0]["failing"][2] == both[1]["failing"][2]


def test_the_option_is_one_of_the_command_line() -> None:
    from ctrainer.fairseq.train import parse_args

    given = ["data", "--task", "translation", "--arch", "transformer"]
    assert parse_args([*given, "--split-oom-batches"]).common.split_oom_batches
    assert not parse_args(given).common.split_oom_batches
