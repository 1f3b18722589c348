"""fairscale's names, and torch's for optimizer states, on two ranks: in one run of
their processes for all scenarios."""

from pathlib import Path

import pytest
import scenarios
from fairscale_scenarios import (
    scenario_apply_has_whole_parameters_and_keeps_what_is_changed,
)
from rank_threads import on_ranks

WORLD = 2
SCENARIOS = (
    "fairscale_scenarios",
    "fairscale_sharing_scenarios",
    "sharded_gradients_scenarios",
    "fsdp_state_scenarios",
)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    folder: Path = tmp_path_factory.mktemp("fairscale")
    return scenarios.outcomes(folder, WORLD, *SCENARIOS)


@pytest.mark.parametrize("name", scenarios.found_in(*SCENARIOS))
def test_on_two_ranks(outcomes: list[dict[str, str]], name: str) -> None:
    assert [told[name] for told in outcomes] == [""] * WORLD


def test_apply_on_one_rank() -> None:
    on_ranks(1, scenario_apply_has_whole_parameters_and_keeps_what_is_changed)
