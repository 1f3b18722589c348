"""EMA and SWA by themselves: the originals' numbers, whole states, clear rejections."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import ctrainer
from ctrainer import _C
from ctrainer.adapters import numpy as numpy_adapter


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.a = nn.Parameter(torch.randn(300, 7, generator=generator).to(dtype))
        self.b = nn.Parameter(torch.randn(5, generator=generator).to(dtype))
        self.norm = nn.BatchNorm1d(3)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.tied = self.a


def move(model: Model, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for tensor in (model.a, model.b, model.norm.running_mean):
            assert tensor is not None
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.add_(noise.to(tensor.dtype))
        assert model.norm.num_batches_tracked is not None
        model.norm.num_batches_tracked += 1


def fairseq_ema(
    model: Model, steps: int, decay: float, start: int, every: int, fp32: bool
) -> dict[str, torch.Tensor]:
    """mul_ and add_ with alpha, as the original has it, but that a 16-bit average is
    rounded once and not after each of the two; a copy before `start`."""

    def wide(x: torch.Tensor) -> torch.Tensor:
        return x.detach().to(torch.float32 if fp32 else x.dtype, copy=True)

    averages = {"a": wide(model.a), "b": wide(model.b)}
    for u in range(1, steps + 1):
        move(model, u)
        if u % every == 0:
            d = decay if u >= start else 0.0
            for name, average in averages.items():
                real = torch.promote_types(average.dtype, torch.float32)
                value = getattr(model, name).detach().to(real)
                averages[name] = (
                    average.to(real).mul(d).add_(value, alpha=1 - d).to(average.dtype)
                )
    return averages


@pytest.mark.parametrize(
    ("dtype", "fp32"),
    [
        (torch.float32, False),
        (torch.float64, False),
        (torch.bfloat16, False),
        (torch.bfloat16, True),
    ],
)
@pytest.mark.parametrize(("start", "every"), [(0, 1), (5, 1), (0, 3)])
def test_ema_follows_fairseqs_formula(
    dtype: torch.dtype, start: int, every: int, fp32: bool
) -> None:
    model = Model(dtype)
    expected = fairseq_ema(copy.deepcopy(model), 30, 0.9, start, every, fp32)
    ema = ctrainer.EMA(model, 0.9, start_update=start, update_freq=every, fp32=fp32)
    for u in range(1, 31):
        move(model, u)
        assert ema.update() == (u % every == 0)
    for name, value in expected.items():
        average = ema.averages[name]
        assert average.dtype == value.dtype
        # Each of three roundings of values below 32 is forgotten by a tenth an
        # average; a 16-bit average may besides fall to the other side once.
        real = torch.promote_types(value.dtype, torch.float32)
        bound = 3 * 10 * 32 * torch.finfo(real).eps
        if real != value.dtype:
            bound += 32 * torch.finfo(value.dtype).eps
        torch.testing.assert_close(average, value, rtol=0, atol=bound)
    assert (ema.core.num_updates, ema.core.n_averaged) == (30, 30 // every)


def test_swa_is_torchs_averaged_model() -> None:
    model = Model(torch.float64)
    mirror = copy.deepcopy(model)
    swa = ctrainer.SWA(model, start_update=10, update_freq=5)
    theirs = AveragedModel(mirror)
    for u in range(1, 41):
        move(model, u)
        move(mirror, u)
        swa.update()
        if u >= 10 and u % 5 == 0:
            theirs.update_parameters(mirror)
    assert swa.core.n_averaged == 7
    torch.testing.assert_close(
        swa.averages["a"], theirs.module.a.detach(), rtol=0, atol=1e-14
    )


def test_buffers_are_averaged_counters_copied_and_frozen_parameters_left_out() -> None:
    model = Model()
    ema = ctrainer.EMA(model, 0.5)
    assert model.norm.running_mean is not None
    before = model.norm.running_mean.clone()
    move(model, 1)
    ema.update()
    names = set(ema.averages)
    assert {"a", "norm.running_mean", "norm.num_batches_tracked"} <= names
    assert not names & {"frozen", "tied"}
    assert ema.averages["norm.num_batches_tracked"] == 1
    half = (before + model.norm.running_mean) / 2
    torch.testing.assert_close(ema.averages["norm.running_mean"], half)


@pytest.mark.parametrize("fp32", [False, True])
def test_applied_gives_the_averages_and_then_the_same_bits_back(fp32: bool) -> None:
    model = Model(torch.bfloat16)
    ema = ctrainer.EMA(model, 0.5, fp32=fp32)
    move(model, 1)
    ema.update()
    live = {k: v.clone() for k, v in model.state_dict().items()}
    averages = {k: v.clone() for k, v in ema.averages.items()}
    address = model.a.data_ptr()
    inside = ema.applied()
    inside.__enter__()
    assert torch.equal(model.a, averages["a"].to(torch.bfloat16))
    error = KeyError("of the body")
    assert not inside.__exit__(KeyError, error, None)
    assert model.a.data_ptr() == address
    for name, value in model.state_dict().items():
        assert torch.equal(value, live[name]), name
    for name, value in ema.averages.items():
        assert torch.equal(value, averages[name]), name


def test_state_goes_round_and_a_wrong_one_changes_nothing() -> None:
    model = Model()
    ema = ctrainer.EMA(model, 0.9)
    for u in range(3):
        move(model, u)
        ema.update()
    state = copy.deepcopy(ema.state_dict())
    other = ctrainer.EMA(Model(), 0.9)
    other.load_state_dict(state)
    assert other.core.num_updates == 3
    assert torch.equal(other.averages["a"], ema.averages["a"])
    for spoil, message in (
        (lambda s: s["averages"].pop("b"), "this average alone"),
        (lambda s: s["averages"].update(c=torch.ones(1)), "the state alone"),
        (lambda s: s["averages"].update(b=torch.ones(6)), r"\(6,\)"),
    ):
        bad = copy.deepcopy(state)
        spoil(bad)
        bad["averages"]["a"] += 1
        with pytest.raises(ValueError, match=message):
            other.load_state_dict(bad)
        assert torch.equal(other.averages["a"], ema.averages["a"])


def test_a_seed_model_is_where_the_average_starts() -> None:
    model, seed = Model(), Model()
    move(seed, 1)
    ema = ctrainer.EMA(model, 1.0, seed_model=seed)
    ema.update()
    assert torch.equal(ema.averages["a"], seed.a)


def test_copy_to_another_model() -> None:
    model, target = Model(), Model()
    ema = ctrainer.EMA(model, 0.5)
    move(model, 1)
    ema.update()
    ema.copy_to(target)
    assert torch.equal(target.a, ema.averages["a"])
    with pytest.raises(ValueError, match="no 'a'"):
        ema.copy_to(nn.Linear(2, 2))


def test_arrays_are_averaged_too() -> None:
    class Line:
        def __init__(self) -> None:
            self.w = numpy_adapter.Parameter(np.zeros(3))

        def parameters(self) -> Any:
            yield self.w

    model = Line()
    ema = ctrainer.EMA(model, 0.75)
    model.w.data += 1.0
    ema.update()
    assert next(iter(ema.averages.values())).tolist() == [0.25] * 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decay": 1.5}, "decay must be in"),
        ({"decay": float("nan")}, "decay must be in"),
        ({"start": -1}, "start must be"),
        ({"every": 0}, "every must be"),
        ({"kind": "mean"}, "'ema' or 'swa'"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _C.WeightAverage([], [], **options)


def test_tensors_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match="1 averages for 2 values"):
        _C.WeightAverage([torch.ones(2), torch.ones(2)], [torch.ones(2)])
    core = _C.WeightAverage([torch.ones(2)], [torch.ones(3)])
    with pytest.raises(ValueError, match=r"averages\[0\].*3 elements"):
        core.update()
    core = _C.WeightAverage([torch.ones(2)], [torch.ones(2, dtype=torch.int64)])
    with pytest.raises(ValueError, match="int64"):
        core.update()
    assert core.num_updates == 0
