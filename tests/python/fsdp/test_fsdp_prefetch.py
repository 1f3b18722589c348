"""Units that are gathered ahead, in one run of two ranks for all scenarios."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import scenarios
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch

from ctrainer import _C
from ctrainer.arguments.fsdp import Sharding
from ctrainer.fsdp import FullyShardedDataParallel as FSDP
from ctrainer.fsdp.trained_model import shard

WORLD = 2
SCENARIOS = "fsdp_prefetch_scenarios"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    folder: Path = tmp_path_factory.mktemp("prefetch")
    return scenarios.outcomes(folder, WORLD, SCENARIOS)


@pytest.mark.parametrize("name", scenarios.found_in(SCENARIOS))
def test_on_two_ranks(outcomes: list[dict[str, str]], name: str) -> None:
    assert [told[name] for told in outcomes] == [""] * WORLD


def wrap(**options: Any) -> FSDP:
    group = _C.Communicator()
    return FSDP(nn.Linear(2, 2), process_group=group, on_neuron=False, **options)


def test_torchs_enum_is_taken() -> None:
    model = wrap(backward_prefetch=BackwardPrefetch.BACKWARD_POST)
    assert model.backward_prefetch == "BACKWARD_POST"
    assert (model._unit.backward_pre, model._unit.backward_post) == (False, True)


def test_the_trainers_units_gather_ahead_as_fsdp_config_says() -> None:
    sharding = Sharding(
        min_num_params=1, forward_prefetch=True, backward_prefetch="BACKWARD_PRE"
    )
    args = SimpleNamespace(bf16=False, fp16=False)
    body = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model = shard(body, sharding, args, _C.Communicator())
    told = [(u._unit.forward_prefetch, u._unit.backward_pre) for u in model.units()]
    assert told == [(True, True)] * 3


def test_another_word_is_rejected() -> None:
    with pytest.raises(ValueError, match="backward_prefetch must be BACKWARD_PRE"):
        wrap(backward_prefetch="ALWAYS")
