"""fairseq's meters: order, rounding, and the state that checkpoints keep.

Source of the rules: fairseq/logging/meters.py.
"""

import copy
import pickle
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from ctrainer.fairseq import metrics
from ctrainer.fairseq.meters import (
    AverageMeter,
    Meter,
    MetersDict,
    StopwatchMeter,
    SumMeter,
    TimeMeter,
    safe_round,
)


@pytest.fixture(autouse=True)
def _fresh_metrics() -> Iterator[None]:
    metrics.reset()
    yield
    metrics.reset()


class LargestMeter(Meter):
    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.value = 0

    def update(self, value: int, scale: int = 1) -> None:
        self.value = max(self.value, value * scale)

    def state_dict(self) -> dict:
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict) -> None:
        self.value = state_dict["value"]

    @property
    def smoothed_value(self) -> int:
        return self.value


class TestMetersDict:
    def test_order_is_by_priority_then_insertion(self) -> None:
        found = MetersDict()
        for key, priority in [("d", 30), ("b", 10), ("c", 10), ("a", 5), ("e", 30)]:
            found.add_meter(key, SumMeter(), priority)
        assert list(found) == ["a", "b", "c", "d", "e"]

    def test_a_key_is_given_once(self) -> None:
        found = MetersDict()
        found.add_meter("loss", SumMeter(), 1)
        with pytest.raises(ValueError, match=r"reassignment.*'loss'"):
            found["loss"] = (1, SumMeter())

    def test_what_is_removed_can_be_added_again(self) -> None:
        found = MetersDict()
        for key in "abc":
            found.add_meter(key, SumMeter(), 1)
        del found["a"]
        found.pop("b")
        found.add_meter("a", SumMeter(), 1)
        assert list(found) == ["c", "a"]
        assert [key for _, key, _, _ in found.state_dict()] == ["c", "a"]
        found.clear()
        assert found.state_dict() == []

    def test_it_copies_and_pickles(self) -> None:
        found = MetersDict()
        found.add_meter("late", SumMeter(round=1), 9)
        found.add_meter("early", AverageMeter(), 1)
        found["early"].update(4.0)
        for twin in (copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
            assert twin.state_dict() == found.state_dict()
            assert twin["early"] is not found["early"]


class TestState:
    def test_layout_is_fairseqs(self) -> None:
        metrics.log_scalar("loss", 3.0, weight=2, priority=20, round=3)
        metrics.log_scalar_sum("words", 7, priority=10)
        metrics.log_derived("ppl", lambda _: 0.0)
        assert metrics.state_dict() == {
            "default": [
                (10, "words", "SumMeter", {"sum": 7, "round": None}),
                (
                    20,
                    "loss",
                    "AverageMeter",
                    {"val": 3.0, "sum": 6.0, "count": 2, "round": 3},
                ),
            ]
        }

    def test_times_are_saved_as_what_has_passed(self, clock: Any) -> None:
        metrics.log_speed("wps", 0.0, round=1)
        clock.now += 4.0
        metrics.log_speed("wps", 8.0)
        metrics.log_start_time("wall", round=0)
        clock.now += 1.0
        metrics.log_stop_time("wall", weight=1)
        saved = {key: state for _, key, _, state in metrics.state_dict()["default"]}
        assert saved == {
            "wps": {"init": 5.0, "n": 8.0, "round": 1},
            "wall": {"sum": 1.0, "n": 1, "round": 0},
        }
        clock.now = 900.0  # another process
        metrics.load_state_dict(metrics.state_dict() | {"default": []})
        meter = TimeMeter()
        meter.load_state_dict(saved["wps"])
        clock.now += 5.0
        assert meter.smoothed_value == 0.8

    def test_a_rate_of_the_oldest_layout_forgets_its_events(self, clock: Any) -> None:
        meter = TimeMeter(round=2)
        meter.load_state_dict({"init": 2.0, "n": 70, "start": 5.0})
        clock.now += 2.0
        meter.update(4)
        assert (meter.elapsed_time, meter.smoothed_value) == (4.0, 1.0)

    def test_what_is_loaded_goes_on(self) -> None:
        with metrics.aggregate("train"):
            metrics.log_scalar("loss", 1.0)
            metrics.log_custom(LargestMeter, "peak", 5)
            metrics.log_concat_tensor("scores", torch.ones(1))
        saved = pickle.loads(pickle.dumps(metrics.state_dict()))
        metrics.reset()
        metrics.load_state_dict(saved)
        with metrics.aggregate("train"):
            metrics.log_scalar("loss", 3.0)
            metrics.log_custom(LargestMeter, "peak", 4)
            metrics.log_concat_tensor("scores", torch.ones(1))
        found = metrics.get_smoothed_values("train")
        assert (found["loss"], found["peak"]) == (2.0, 5)
        assert metrics.get_meter("train", "scores").tensor.shape == (2,)

    def test_an_active_aggregator_goes_on_with_what_is_loaded(self) -> None:
        """fairseq logs on to the old "default", and reads the loaded one."""
        metrics.load_state_dict({"default": [(1, "n", "SumMeter", {"sum": 5})]})
        metrics.log_scalar_sum("n", 1)
        assert metrics.get_smoothed_value("default", "n") == 6

    def test_an_unknown_meter_is_named_and_changes_nothing(self) -> None:
        metrics.log_scalar_sum("n", 1)
        before = metrics.state_dict()
        state = {
            "default": [(1, "n", "SumMeter", {"sum": 5})],
            "train": [(1, "peak", "NowhereMeter", {})],
        }
        with pytest.raises(ValueError, match="'peak' was saved as a NowhereMeter"):
            metrics.load_state_dict(state)
        assert metrics.state_dict() == before


class TestMeters:
    def test_tensors_stay_tensors_until_they_are_read(self) -> None:
        meter = AverageMeter(round=1)
        meter.update(torch.tensor(1.0, dtype=torch.float64))
        meter.update(torch.tensor(2.0))
        assert meter.sum.dtype is torch.float32  # that of the latest
        assert meter.smoothed_value == 1.5

    @pytest.mark.parametrize(
        "number", [2.345, np.float64(2.345), np.array(2.345), torch.tensor(2.345)]
    )
    def test_safe_round_gives_a_number(self, number: object) -> None:
        assert safe_round(number, 1) == 2.3

    @pytest.mark.parametrize("value", ["text", None])
    def test_safe_round_leaves_the_rest(self, value: object) -> None:
        assert safe_round(value, 1) is value

    def test_safe_round_leaves_a_tensor_of_many(self) -> None:
        many = torch.ones(2)
        assert safe_round(many, 1) is many

    def test_a_watch_not_started_shows_nothing(self) -> None:
        meter = StopwatchMeter()
        meter.stop()
        assert (meter.elapsed_time, meter.n, meter.smoothed_value) == (0.0, 0, 0.0)

    def test_a_reset_watch_runs(self, clock: Any) -> None:
        meter = StopwatchMeter()
        meter.reset()
        clock.now += 2.0
        meter.stop(n=4)
        assert (meter.sum, meter.avg) == (2.0, 0.5)

    @pytest.mark.parametrize("use", [Meter.reset, lambda m: m.smoothed_value])
    def test_a_meter_without_its_methods_says_which(self, use: object) -> None:
        class Half(Meter):
            pass

        with pytest.raises(NotImplementedError, match="Half must define"):
            use(Half())


class Noted(AverageMeter):
    """A user's meter, with an attribute and an update() of its own."""

    note = "none"

    def update(self, val, n=1):
        super().update(2 * val, n)


class TestUpdatesAndState:
    def test_what_cannot_be_added_changes_nothing(self):
        meter = AverageMeter()
        meter.update(3.0)
        for value, weight in (("text", 1.5), (1.0, "text"), (1.0, None)):
            with pytest.raises(TypeError):
                meter.update(value, weight)
        assert meter.state_dict() == {"val": 3.0, "sum": 3.0, "count": 1, "round": None}

    @pytest.mark.parametrize("missing", ["val", "sum", "count"])
    def test_a_state_that_lacks_a_field_changes_nothing(self, missing):
        meter = AverageMeter(round=2)
        state = {"val": 1, "sum": 2, "count": 3}
        del state[missing]
        with pytest.raises(KeyError, match=missing):
            meter.load_state_dict(state)
        assert meter.state_dict() == {"val": None, "sum": 0, "count": 0, "round": 2}

    @pytest.mark.parametrize("kind", [AverageMeter, Noted])
    def test_copies_have_its_fields_and_its_attributes(self, kind):
        meter = kind(round=1)
        meter.update(4.0, 3)
        meter.note = "mine"
        for twin in (copy.deepcopy(meter), pickle.loads(pickle.dumps(meter))):
            assert type(twin) is kind
            assert twin.state_dict() == meter.state_dict()
            assert twin.note == "mine"


class TestOrder:
    def test_it_takes_nothing_and_gives_an_ordered_dict(self):
        with pytest.raises(TypeError):
            MetersDict({"a": 1})
        assert type(MetersDict().get_smoothed_values()) is OrderedDict

    def test_a_value_has_to_be_a_priority_and_a_meter(self):
        found = MetersDict()
        with pytest.raises(TypeError, match=r"meters\['a'\] was given a SumMeter"):
            found["a"] = SumMeter()
        assert not found

    @pytest.mark.parametrize("seed", range(20))
    def test_the_order_is_that_of_a_stable_sort(self, seed):
        found, given = MetersDict(), []
        for place in range(12):
            priority = (seed * 7 + place * place * 5) % 6 - 3
            given.append((priority, place, str(place)))
            found.add_meter(str(place), SumMeter(), priority)
        assert found.priorities == sorted(given)
        assert list(found) == [key for _, _, key in sorted(given)]

    def test_removing_and_adding_keeps_the_order(self):
        found = MetersDict()
        for key, priority in (("high", 9), ("mid", 5), ("low", 1)):
            found.add_meter(key, SumMeter(), priority)
        del found["high"]
        found.add_meter("last", SumMeter(), 7)
        found.add_meter("high", SumMeter(), 6)
        assert list(found) == ["low", "mid", "high", "last"]
