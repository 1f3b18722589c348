"""fairseq's metrics: contexts, meters, order, rounding and state.

Source of the rules: fairseq/logging/metrics.py and meters.py.
"""

import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ranks import run_alone

from ctrainer.fairseq import metrics
from ctrainer.fairseq.meters import (
    Meter,
)


@pytest.fixture(autouse=True)
def _fresh_metrics() -> Iterator[None]:
    metrics.reset()
    yield
    metrics.reset()


class TestContexts:
    def test_default_sees_everything(self) -> None:
        metrics.log_scalar("loss", 1.0)
        with metrics.aggregate("train"), metrics.aggregate():
            metrics.log_scalar("loss", 3.0)
        assert metrics.get_smoothed_value("default", "loss") == 2.0

    def test_a_named_context_sees_what_is_logged_inside_it(self) -> None:
        metrics.log_scalar("loss", 1.0)
        with metrics.aggregate("train"):
            metrics.log_scalar("loss", 3.0)
        metrics.log_scalar("loss", 5.0)
        assert metrics.get_smoothed_values("train") == {"loss": 3.0}

    def test_a_name_goes_on_with_its_meters(self) -> None:
        for value in (1.0, 2.0):
            with metrics.aggregate("train"):
                metrics.log_scalar_sum("words", value)
        assert metrics.get_smoothed_value("train", "words") == 3.0

    def test_an_unnamed_context_starts_empty_and_is_forgotten(self) -> None:
        for _ in range(2):
            with metrics.aggregate() as block:
                assert not block
                metrics.log_scalar("loss", 1.0)
                assert block.get_smoothed_values() == {"loss": 1.0}
        assert list(metrics.state_dict()) == ["default"]

    def test_contexts_nest_outermost_first(self) -> None:
        with metrics.aggregate("train") as outer, metrics.aggregate("inner") as inner:
            active = metrics.get_active_aggregators()
        assert active[1] is outer
        assert active[2] is inner
        assert active[0] is metrics.get_meters("default")

    def test_a_name_entered_twice_logs_once_and_stays_until_left_twice(self) -> None:
        with metrics.aggregate("train"):
            with metrics.aggregate("train"):
                metrics.log_scalar_sum("words", 1)
            metrics.log_scalar_sum("words", 1)
        metrics.log_scalar_sum("words", 1)
        assert metrics.get_smoothed_value("train", "words") == 2

    def test_a_new_root_hides_what_is_inside_from_those_around_it(self) -> None:
        with metrics.aggregate("train"):
            with metrics.aggregate("valid", new_root=True):
                metrics.log_scalar("loss", 9.0)
            metrics.log_scalar("loss", 1.0)
        assert metrics.get_smoothed_value("valid", "loss") == 9.0
        assert metrics.get_smoothed_value("train", "loss") == 1.0
        assert metrics.get_smoothed_value("default", "loss") == 1.0

    @pytest.mark.parametrize("new_root", [False, True])
    def test_an_exception_leaves_the_context(self, new_root: bool) -> None:
        """fairseq leaves "train" active for the rest of the process."""
        with pytest.raises(KeyError, match="inside"):
            with metrics.aggregate("train", new_root=new_root):
                raise KeyError("inside")
        active = metrics.get_active_aggregators()
        assert active == [metrics.get_meters("default")]
        metrics.log_scalar("loss", 1.0)
        assert "loss" in active[0]

    def test_it_decorates_functions(self) -> None:
        @metrics.aggregate("train")
        def step() -> None:
            metrics.log_scalar_sum("words", 1)

        step()
        step()
        assert metrics.get_smoothed_value("train", "words") == 2

    def test_contexts_left_in_another_order_close_their_own(self) -> None:
        first, second = metrics.aggregate("a"), metrics.aggregate("b", new_root=True)
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        second.__exit__(None, None, None)
        assert metrics.get_active_aggregators() == [metrics.get_meters("default")]

    def test_default_cannot_be_entered(self) -> None:
        with pytest.raises(ValueError, match="'default' is always active"):
            metrics.aggregate("default").__enter__()

    def test_a_reset_inside_a_context_lasts(self) -> None:
        with metrics.aggregate("train"):
            metrics.log_scalar("loss", 1.0)
            metrics.reset()
            metrics.log_scalar("loss", 2.0)
        assert metrics.get_meters("train") is None
        assert metrics.get_smoothed_values("default") == {"loss": 2.0}
        with metrics.aggregate("train"):
            metrics.log_scalar("loss", 3.0)
        assert len(metrics.get_active_aggregators()) == 1

    def test_unnamed_contexts_leave_no_memory_behind(self) -> None:
        """fairseq keeps a key for each: 98 bytes an update for ever."""

        def run(updates: int) -> None:
            for _ in range(updates):
                with metrics.aggregate():
                    metrics.log_scalar("loss", 1.0)

        run(100)
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        run(2000)
        after, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert after - before < 2000  # less than a byte a context


class TestLogging:
    def test_a_scalar_is_averaged_by_weight(self) -> None:
        metrics.log_scalar("loss", 1.0, weight=3)
        metrics.log_scalar("loss", 5.0, weight=1)
        assert metrics.get_smoothed_value("default", "loss") == 2.0

    def test_weight_zero_reports_the_latest(self) -> None:
        metrics.log_scalar("lr", 0.5, weight=0)
        metrics.log_scalar("lr", 0.25, weight=0)
        assert metrics.get_smoothed_value("default", "lr") == 0.25

    def test_weight_zero_does_not_disturb_a_mean(self) -> None:
        metrics.log_scalar("loss", 1.0)
        metrics.log_scalar("loss", 9.0, weight=0)
        assert metrics.get_smoothed_value("default", "loss") == 1.0

    def test_none_is_left_out(self) -> None:
        metrics.log_scalar("loss", 1.0)
        metrics.log_scalar("loss", None)
        metrics.log_scalar_sum("words", 2)
        metrics.log_scalar_sum("words", None)
        assert metrics.get_smoothed_values("default") == {"loss": 1.0, "words": 2}

    def test_a_derived_value_follows_the_others(self) -> None:
        metrics.log_scalar("loss", 3.0)
        metrics.log_derived("ppl", lambda found: 2 ** found["loss"].avg)
        assert metrics.get_smoothed_value("default", "ppl") == 8.0
        metrics.log_scalar("loss", 1.0)
        assert metrics.get_smoothed_value("default", "ppl") == 4.0

    def test_speed_starts_its_clock_at_the_first_call(self, clock: Any) -> None:
        metrics.log_speed("wps", 1000.0)
        clock.now += 2.0
        metrics.log_speed("wps", 30.0)
        assert metrics.get_smoothed_value("default", "wps") == 15.0

    def test_durations_are_summed(self, clock: Any) -> None:
        for seconds in (1.0, 2.0):
            metrics.log_start_time("train_wall", priority=800, round=0)
            clock.now += seconds
            metrics.log_stop_time("train_wall")
            clock.now += 50.0
        assert metrics.get_smoothed_value("default", "train_wall") == 3.0

    def test_durations_with_weights_are_averaged(self, clock: Any) -> None:
        for seconds in (1.0, 2.0):
            metrics.log_start_time("step")
            clock.now += seconds
            metrics.log_stop_time("step", weight=1)
        assert metrics.get_smoothed_value("default", "step") == 1.5

    def test_a_running_watch_reports_what_has_passed(self, clock: Any) -> None:
        metrics.log_start_time("wall", priority=790, round=0)
        clock.now += 7.4
        assert metrics.get_smoothed_value("default", "wall") == 7.0

    def test_the_prehook_runs_before_the_clock_is_read(self, clock: Any) -> None:
        def wait() -> None:
            clock.now += 4.0

        metrics.log_start_time("step")
        metrics.log_stop_time("step", prehook=wait)
        assert metrics.get_smoothed_value("default", "step") == 4.0

    def test_stopping_what_was_not_started_is_nothing(self) -> None:
        metrics.log_stop_time("never")
        assert metrics.get_meter("default", "never") is None

    def test_tensors_are_joined_and_reported_as_a_list(self) -> None:
        for value in (1.0, 2.0):
            metrics.log_concat_tensor("scores", torch.full((1, 2), value))
        joined = metrics.get_meter("default", "scores").tensor
        assert joined.tolist() == [[1.0, 1.0], [2.0, 2.0]]
        assert metrics.get_smoothed_value("default", "scores") == []

    def test_tensors_are_joined_along_dim(self) -> None:
        for _ in range(2):
            metrics.log_concat_tensor("scores", torch.zeros(2, 3), dim=1)
        assert metrics.get_meter("default", "scores").tensor.shape == (2, 6)

    def test_a_meter_of_the_users_gets_the_arguments(self) -> None:
        metrics.log_custom(LargestMeter, "peak", 3, scale=2)
        metrics.log_custom(LargestMeter, "peak", 1, scale=4)
        assert metrics.get_smoothed_value("default", "peak") == 6

    def test_each_context_has_a_meter_of_its_own(self) -> None:
        with metrics.aggregate("train"):
            metrics.log_custom(LargestMeter, "peak", 1)
        of_train = metrics.get_meter("train", "peak")
        assert of_train is not metrics.get_meter("default", "peak")

    def test_names_with_an_underscore_are_kept_and_not_reported(self) -> None:
        metrics.log_scalar_sum("_counts", 4)
        assert metrics.get_smoothed_values("default") == {}
        assert metrics.get_smoothed_value("default", "_counts") == 4

    def test_rounding(self) -> None:
        metrics.log_scalar("loss", 2.34567, round=3)
        metrics.log_scalar("whole", torch.tensor(2.5), round=0)
        metrics.log_scalar("as_is", 2.34567)
        assert metrics.get_smoothed_values("default") == {
            "loss": 2.346,
            "whole": 2.0,
            "as_is": 2.34567,
        }


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


class TestReading:
    def test_what_is_not_there_is_none_or_a_key_error(self) -> None:
        assert metrics.get_meters("train") is None
        assert metrics.get_meter("train", "loss") is None
        assert metrics.get_meter("default", "loss") is None
        for read in (
            lambda: metrics.get_smoothed_values("train"),
            lambda: metrics.get_smoothed_value("train", "loss"),
            lambda: metrics.get_smoothed_value("default", "loss"),
        ):
            with pytest.raises(KeyError):
                read()

    def test_resetting(self) -> None:
        with metrics.aggregate("train"):
            metrics.log_scalar("loss", 5.0)
            metrics.log_scalar_sum("words", 5)
        metrics.reset_meter("train", "words")
        assert metrics.get_smoothed_values("train") == {"loss": 5.0, "words": 0}
        metrics.reset_meters("train")
        assert metrics.get_smoothed_values("train") == {"loss": None, "words": 0}
        metrics.reset_meters("nowhere")
        metrics.reset_meter("nowhere", "loss")
        assert metrics.get_smoothed_value("default", "words") == 5


def test_importing_it_loads_no_torch() -> None:
    run_alone("fairseq.log_alone").check_returncode()
