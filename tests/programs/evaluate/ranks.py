"""Evaluation and prediction on 2 ranks."""

import numpy as np
import rank_evaluations
import torch
from programs.run import folder, rank, tell

from ctrainer import _C

found = {"outcomes": rank_evaluations.outcomes(folder)}
found["repeated"] = rank_evaluations.repeated(folder)
made = rank_evaluations.trainer(
    folder,
    rank_evaluations.Wide(),
    {"remove_unused_columns": False},
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
    assert got["wide"].dtype == torch.bfloat16
    assert got["wide"].tolist() == ([[0, 0, 0, -100]] * 2 + [[1] * 4] * 2)
    assert got["ints"][0].tolist() == [0, 1, 2, 0, 1]
    assert got["none"] is None
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
    plain.predictions
)
assert joined.metrics["test_loss"] == plain.metrics["test_loss"]
assert calls


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


found["no data"] = failure(made.evaluation_loop, Broken(), "Broken")


class Unreadable(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from range(9)
        raise OSError("no more stream")


found["no stream"] = failure(made.evaluate, Unreadable())
tell(found)
