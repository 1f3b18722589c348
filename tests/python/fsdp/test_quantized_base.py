"""Layers that are quantized as bitsandbytes' are, below sharded units and in their
shards."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from sharded_trainings import Quantized
from torch import nn

from ctrainer.checkpoint import Sink
from ctrainer.fsdp import FullyShardedDataParallel, trained_model

wrap: Any = partial(
    FullyShardedDataParallel,
    on_neuron=False, flatten_parameters=True, use_orig_params=True,
)  # fmt: skip


def whole() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(Quantized(nn.Linear(6, 5)), nn.Linear(5, 2), nn.BatchNorm1d(2))


class Loading(nn.Sequential):
    """Has a load_state_dict() of its own, with one argument."""

    def load_state_dict(self, state_dict: Any) -> None:  # type: ignore[override]
        super().load_state_dict(state_dict)


def saved(model: Any, folder: Path) -> str:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad])
    trained_model.Shards.of(model, optimizer).save(Sink(folder, None))
    return str(folder)


def test_an_evaluation_packs_no_weight_of_a_sharded_model() -> None:
    x = torch.randn(4, 6)
    expected = whole().eval()(x)
    evaluated = whole().eval()
    assert torch.equal(evaluated(x), expected)
    assert evaluated[0].weight.quant_state.packing_format_for_cpu
    for module in (whole().eval(), evaluated):
        weight = whole()[0].weight
        model = wrap(module)
        assert torch.equal(model(x), expected)
        assert torch.equal(model(x), expected)
        assert torch.equal(model.full_state_dict()["0.weight"], weight)


@pytest.mark.parametrize("units", [1, 2, 0], ids=["alike", "others", "whole"])
def test_shards_are_loaded_into_the_same_base_alone(tmp_path: Path, units: int) -> None:
    trained = whole()
    trained[1].bias.data.fill_(3.0)
    expected = {k: v.clone() for k, v in trained.state_dict().items()}
    folder = saved(wrap(trained), tmp_path)

    def load(module: Any) -> Any:
        if units == 0:
            trained_model.load_into_whole(module, folder)
            return module.state_dict()
        if units == 2:
            module[1] = wrap(module[1])
        model = wrap(module)
        trained_model.load_model(model, folder)
        return model.full_state_dict()

    for kind in (nn.Sequential, Loading):
        for name, value in load(kind(*whole())).items():
            assert torch.equal(expected[name], value), name
    for change in (lambda scales: scales * 2, torch.Tensor.double):
        other = whole()
        state = other[0].weight.quant_state
        state.absmax = change(state.absmax)
        with pytest.raises(ValueError, match=r"0\.weight\.absmax was saved with other"):
            load(other)
    more, fewer = whole(), whole()
    more[2].register_buffer("more", torch.ones(1))
    with pytest.raises(RuntimeError, match=r"Missing key.*2\.more"):
        load(more)
    del fewer[2]._buffers["num_batches_tracked"]
    with pytest.raises(RuntimeError, match=r"Unexpected key.*2\.num_batches_tracked"):
        load(fewer)
