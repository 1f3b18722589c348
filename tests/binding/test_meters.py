"""The C half of fairseq's meters: what tests of the metrics do not reach."""

import copy
import gc
import pickle
import sys
import weakref
from collections import OrderedDict

import pytest

from ctrainer import _C
from ctrainer.fairseq import metrics
from ctrainer.fairseq.meters import AverageMeter, MetersDict, SumMeter


@pytest.fixture(autouse=True)
def _fresh_metrics():
    metrics.reset()
    yield
    metrics.reset()


class Noted(AverageMeter):
    """A user's meter, with an attribute and an update() of its own."""

    note = "none"

    def update(self, val, n=1):
        super().update(2 * val, n)


class TestAverageMeter:
    def test_a_deleted_field_is_named_and_nothing_else_changes(self):
        meter = AverageMeter()
        meter.update(3.0)
        del meter.sum
        with pytest.raises(AttributeError, match="sum has been deleted"):
            meter.update(5.0)
        with pytest.raises(AttributeError, match="sum has been deleted"):
            _ = meter.avg
        assert (meter.val, meter.count) == (3.0, 1)

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

    def test_a_wrong_pickle_is_refused(self):
        with pytest.raises(TypeError, match="state is a int; expected a tuple"):
            AverageMeter().__setstate__(5)

    def test_an_update_of_the_users_is_called(self):
        metrics.get_meters("default").add_meter("loss", Noted(), 1)
        metrics.log_scalar("loss", 3.0)
        assert metrics.get_smoothed_value("default", "loss") == 6.0

    def test_a_cycle_through_a_meter_is_collected(self):
        meter = Noted()
        meter.val = [meter]
        seen = weakref.ref(meter)
        del meter
        gc.collect()
        assert seen() is None


class TestMetersDict:
    def test_it_takes_nothing_and_gives_an_ordered_dict(self):
        with pytest.raises(TypeError):
            MetersDict({"a": 1})
        assert type(MetersDict().get_smoothed_values()) is OrderedDict

    def test_a_value_has_to_be_a_priority_and_a_meter(self):
        found = MetersDict()
        with pytest.raises(TypeError, match=r"meters\['a'\] was given a SumMeter"):
            found["a"] = SumMeter()
        with pytest.raises(TypeError):
            found["a"] = ("high", SumMeter())
        assert not found

    def test_what_came_in_by_another_way_is_named(self):
        found = MetersDict()
        found.update({"stray": SumMeter()})
        with pytest.raises(RuntimeError, match="'stray' came into this MetersDict"):
            _ = found.priorities

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

    def test_types_and_meters_are_released(self):
        meter = SumMeter()
        before = sys.getrefcount(MetersDict)
        for _ in range(50):
            found = MetersDict()
            found.add_meter("a", meter, 1)
            found.get_smoothed_values()
        del found
        gc.collect()
        assert sys.getrefcount(MetersDict) == before
        assert sys.getrefcount(meter) == 2


class TestMetricLog:
    def test_its_parts_are_checked(self):
        with pytest.raises(TypeError, match="expected a subclass"):
            _C.MetricLog(SumMeter)
        log = _C.MetricLog(AverageMeter)
        with pytest.raises(TypeError, match="active was given a list"):
            log.active = []
        log.active = {"one": 5}
        with pytest.raises(TypeError, match="aggregator is a int"):
            log.log_scalar("loss", 1.0)

    def test_without_aggregators_nothing_is_logged(self):
        log = _C.MetricLog(AverageMeter)
        assert log.active == {}
        assert log.log_scalar("loss", 1.0) is None

    def test_an_aggregator_may_vanish_while_it_is_logged_into(self):
        class Vanishing(float):
            def __mul__(self, other):
                log.active = {}
                gc.collect()
                return 7.0

        log = _C.MetricLog(AverageMeter)
        log.active = {n: MetersDict() for n in range(3)}
        log.log_scalar("loss", Vanishing(1))
        assert log.active == {}

    def test_every_allocation_may_fail(self):
        testcapi = pytest.importorskip("_testcapi")
        done = False
        for start in range(500):
            metrics.reset()
            testcapi.set_nomemory(start, start + 1)
            try:
                metrics.log_scalar("loss", 2.5, 2, 20, 1)
                metrics.log_scalar("first", 1.5, priority=5)
                values = metrics.get_smoothed_values("default")
                done = list(values.items()) == [("first", 1.5), ("loss", 2.5)]
            except MemoryError:
                done = False
            finally:
                testcapi.remove_mem_hooks()
            if done and start > 100:
                break
        assert done
