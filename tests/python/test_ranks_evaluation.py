"""Evaluation and prediction on two ranks, against one process over the same rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import rank_evaluations
from ranks import run_ranks, told

from ctrainer import _C

WORK = """
import numpy as np
import rank_evaluations
import torch
from ctrainer import _C

found = {"outcomes": rank_evaluations.outcomes(folder)}
found["repeated"] = rank_evaluations.repeated(folder)
made = rank_evaluations.trainer(
    folder, rank_evaluations.Wide(), {"remove_unused_columns": False},
    data_collator=rank_evaluations.collate,
)

# what subclasses call
mine = {
    "wide": torch.full((2, 3 + rank), float(rank), dtype=torch.bfloat16),
    "ints": [np.arange(3 - rank, dtype=np.int32)],
    "none": None,
    "pair": rank_evaluations.Pair(torch.tensor(rank), torch.ones(1, dtype=torch.bool)),
    "empty": torch.zeros(rank, 2),
}
for gather in (made.gather_function, made._nested_gather):
    got = gather(mine)
    assert got["wide"].dtype == torch.bfloat16 and got["wide"].tolist() == (
        [[0, 0, 0, -100]] * 2 + [[1] * 4] * 2)
    assert got["ints"][0].tolist() == [0, 1, 2, 0, 1] and got["none"] is None
    assert got["ints"][0].dtype == np.int32
    assert got["pair"].first.tolist() == [0, 1]
    assert got["pair"].second.tolist() == [True, True]
    assert got["empty"].tolist() == [[0, 0]]

def failure(function, *args):
    try:
        function(*args)
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"

found["structure"] = failure(made.gather_function, [mine["pair"]] * (rank + 1))
found["dtype"] = failure(made.gather_function, np.zeros(2, "f4" if rank else "f8"))

class Unlike(rank_evaluations.ctrainer.Trainer):
    def prediction_step(self, *args, **kwargs):
        loss, outputs, labels = super().prediction_step(*args, **kwargs)
        return loss, {"a": outputs} if rank else [outputs] * 2, labels
made.__class__ = Unlike
found["predictions"] = failure(made.predict, range(16))
made.__class__ = rank_evaluations.ctrainer.Trainer

# an own gather_function, as transformers lets one be assigned
calls = []
def gather(value):
    calls.append(value)
    return _C.nested_gather(value, made._communicator)
made.gather_function = gather
joined = made.predict(range(16))
del made.gather_function
plain = made.predict(range(16))
assert rank_evaluations.flat(joined.predictions) == rank_evaluations.flat(
    plain.predictions)
assert joined.metrics["test_loss"] == plain.metrics["test_loss"] and calls

# a rank that fails lets nobody wait, and those that did not fail can go on
class Failing(rank_evaluations.ctrainer.Trainer):
    def prediction_step(self, *args, **kwargs):
        if rank == 1 and self.fails:
            raise ZeroDivisionError("on purpose")
        return super().prediction_step(*args, **kwargs)
made.__class__ = Failing
made.fails = True
found["failed"] = failure(made.evaluate, range(22))
made.fails = False
assert made.evaluate(range(22))["eval_loss"] == found["outcomes"]["uneven"]["eval_loss"]

# nor does one whose batch cannot be told to the others
class Untold(rank_evaluations.ctrainer.Trainer):
    def prediction_step(self, *args, **kwargs):
        loss, outputs, labels = super().prediction_step(*args, **kwargs)
        return "high" if rank == 1 else loss, outputs, labels
made.__class__ = Untold
found["untold"] = failure(made.evaluate, range(22))
made.__class__ = rank_evaluations.ctrainer.Trainer
assert made.evaluate(range(22))["eval_loss"] == found["outcomes"]["uneven"]["eval_loss"]

class Broken(list):
    dataset = ()
    def __iter__(self):
        yield rank_evaluations.collate([1, 2])
        if rank == 0:
            raise OSError("no more data")
        yield rank_evaluations.collate([1, 2])
found["no data"] = failure(made.evaluation_loop, Broken(), 'Broken')

class Unreadable(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from range(9)
        raise OSError("no more stream")
found["no stream"] = failure(made.evaluate, Unreadable())
tell(found)
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return told(run_ranks(tmp_path_factory.mktemp("ranks"), WORK))


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


def test_values_that_do_not_go_together_are_refused_on_all(found: Any) -> None:
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


def test_a_message_that_ends_too_early_is_refused_with_its_rank() -> None:
    value = {"a": np.arange(5.0), "b": [None, np.ones((2, 3), bool)]}
    for missing in range(8, 600, 8):
        group = _C.Communicator(Cut(missing))
        with pytest.raises(ValueError, match="message of rank 1 ends too early"):
            _C.nested_gather(value, group)
    assert len(_C.nested_gather(value, _C.Communicator(Cut(0)))["a"]) == 10


def test_a_failure_of_one_rank_is_told_to_all(found: Any) -> None:
    assert found[1]["failed"] == "ZeroDivisionError: on purpose"
    assert found[0]["failed"].startswith("RuntimeError: evaluation: rank 1 failed")
    assert found[0]["untold"] == found[0]["failed"]
    assert found[1]["untold"].startswith("TypeError: must be real number, not str")
    assert found[0]["no data"] == "OSError: no more data"
    assert found[0]["no stream"] == "OSError: no more stream"
    assert "rank 0 could not read on" in found[1]["no stream"]
    assert found[1]["no data"].startswith("RuntimeError: evaluation: rank 0 failed")
