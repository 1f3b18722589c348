"""fairseq's metrics: contexts, meters, order, rounding and state.

Source of the rules: fairseq/logging/metrics.py and meters.py.
"""

import copy
import pickle
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from ctrainer.fairseq import meters, metrics
from ctrainer.fairseq.aliases import install_fairseq_aliases, remove_fairseq_aliases
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


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """perf_counter under the test's control."""
    stopped = Clock()
    monkeypatch.setattr("time.perf_counter", stopped)
    return stopped


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

    def test_speed_starts_its_clock_at_the_first_call(self, clock: Clock) -> None:
        metrics.log_speed("wps", 1000.0)
        clock.now += 2.0
        metrics.log_speed("wps", 30.0)
        assert metrics.get_smoothed_value("default", "wps") == 15.0

    def test_durations_are_summed(self, clock: Clock) -> None:
        for seconds in (1.0, 2.0):
            metrics.log_start_time("train_wall", priority=800, round=0)
            clock.now += seconds
            metrics.log_stop_time("train_wall")
            clock.now += 50.0
        assert metrics.get_smoothed_value("default", "train_wall") == 3.0

    def test_durations_with_weights_are_averaged(self, clock: Clock) -> None:
        for seconds in (1.0, 2.0):
            metrics.log_start_time("step")
            clock.now += seconds
            metrics.log_stop_time("step", weight=1)
        assert metrics.get_smoothed_value("default", "step") == 1.5

    def test_a_running_watch_reports_what_has_passed(self, clock: Clock) -> None:
        metrics.log_start_time("wall", priority=790, round=0)
        clock.now += 7.4
        assert metrics.get_smoothed_value("default", "wall") == 7.0

    def test_the_prehook_runs_before_the_clock_is_read(self, clock: Clock) -> None:
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

    def test_only_the_clocks_of_rates_start_anew(self, clock: Clock) -> None:
        """After a restart; fairseq means to, and iterates over names instead."""
        metrics.log_speed("ups", 0.0)
        metrics.log_speed("ups", 500.0)
        metrics.log_scalar("loss", 2.0)
        clock.now += 1000.0
        metrics.reset_time_meters()
        clock.now += 2.0
        metrics.log_speed("ups", 3.0)
        assert metrics.get_smoothed_values("default") == {"loss": 2.0, "ups": 1.5}

    def test_there_may_be_no_rates_to_reset(self) -> None:
        metrics.reset_time_meters("nowhere")
        assert metrics.get_meters("nowhere") is None


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

    def test_times_are_saved_as_what_has_passed(self, clock: Clock) -> None:
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

    def test_a_rate_of_the_oldest_layout_forgets_its_events(self, clock: Clock) -> None:
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

    def test_a_reset_watch_runs(self, clock: Clock) -> None:
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


class TestAliases:
    @pytest.fixture(autouse=True)
    def _clean(self) -> Iterator[None]:
        yield
        remove_fairseq_aliases()

    def test_fairseqs_names_mean_our_modules_when_asked(self) -> None:
        install_fairseq_aliases()
        install_fairseq_aliases()
        from fairseq import logging
        from fairseq.logging import meters as theirs
        from fairseq.logging.metrics import aggregate

        assert aggregate is metrics.aggregate
        assert theirs is meters
        assert logging.progress_bar.__name__ == "ctrainer.fairseq.progress_bar"

    def test_nothing_is_installed_unasked(self) -> None:
        with pytest.raises(ModuleNotFoundError):
            __import__("fairseq")

    def test_they_can_be_taken_back(self) -> None:
        install_fairseq_aliases()
        remove_fairseq_aliases()
        remove_fairseq_aliases()
        assert not [name for name in sys.modules if name.split(".")[0] == "fairseq"]

    def test_an_installed_fairseq_keeps_its_names(
        self, tmp_path: object, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "fairseq").mkdir()
        (tmp_path / "fairseq" / "__init__.py").write_text("")
        monkeypatch.syspath_prepend(str(tmp_path))
        with pytest.raises(RuntimeError, match="fairseq is installed"):
            install_fairseq_aliases()
        assert "fairseq" not in sys.modules


def test_importing_it_loads_no_torch() -> None:
    code = (
        "import sys, ctrainer.fairseq as f; import ctrainer.fairseq.progress_bar\n"
        "f.metrics.log_scalar('a', 1.0); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
