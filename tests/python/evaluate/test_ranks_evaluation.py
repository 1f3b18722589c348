"""Evaluation and prediction on two ranks, against one process over the same rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import rank_evaluations
from ranks import run, told

from ctrainer import _C


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return told(run(tmp_path_factory.mktemp("ranks"), "evaluate.ranks"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    import json

    folder = str(tmp_path_factory.mktemp("alone"))
    return json.loads(json.dumps(rank_evaluations.outcomes(folder)))


def differing(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    assert a.keys() == b.keys()
    return [name for name in a if a[name] != b[name]]


def test_every_rank_has_what_one_process_computes(found: Any, alone: Any) -> None:
    assert [differing(rank["outcomes"], alone) for rank in found] == [[], []]


def test_rows_that_a_loader_repeats_are_left_out_of_metrics(found: Any) -> None:
    for rank in found:
        assert [told[0] for told in rank["repeated"]] == [
            list(range(n)) for n in (9, 16, 22, 3)
        ]
        assert [told[1:] for told in rank["repeated"]] == [
            [n, n] for n in (9, 16, 22, 3)
        ]


def test_values_that_do_not_go_together_are_rejected_on_all(found: Any) -> None:
    for rank, other in ((0, 1), (1, 0)):
        assert f"rank {other} has a container" in found[rank]["structure"]
        assert f"rank {other} has a container" in found[rank]["predictions"]
        assert "float" in found[rank]["dtype"]


class Cut:
    """A backend of two ranks; the other one's message is this one's, cut short."""

    rank, world_size = 0, 2

    def __init__(self, missing: int) -> None:
        self.missing = missing

    def begin(
        self, what: str, out: Any, in_: Any, dtype: str, op: str, root: int
    ) -> Any:
        both, own = np.frombuffer(out, "u1"), np.frombuffer(in_, "u1")
        both.reshape(2, -1)[:] = own
        if dtype == "int64":
            both.view("i8")[1] -= self.missing
        return self

    def wait(self) -> None:
        pass


def test_a_message_that_is_cut_short_is_rejected_with_its_rank() -> None:
    value = {"a": np.arange(99.0), "b": [None, np.ones((2, 3), bool)]}
    for missing in range(8, 600, 8):
        group = _C.Communicator(Cut(missing))
        with pytest.raises(ValueError, match="message of rank 1 cannot be read"):
            _C.nested_gather(value, group)
    assert len(_C.nested_gather(value, _C.Communicator(Cut(0)))["a"]) == 198


def test_a_failure_of_one_rank_is_told_to_all(found: Any) -> None:
    assert found[1]["failed"] == "ZeroDivisionError: on purpose"
    assert found[0]["failed"].startswith("RuntimeError: evaluation: rank 1 failed")
    assert found[0]["untold"] == found[0]["failed"]
    assert found[1]["untold"].startswith("TypeError: must be real number, not str")
    assert found[0]["no data"] == "OSError: no more data"
    assert found[0]["no stream"] == "OSError: no more stream"
    assert "rank 0 could not read on" in found[1]["no stream"]
    assert found[1]["no data"].startswith("RuntimeError: evaluation: rank 0 failed")
