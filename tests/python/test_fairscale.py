"""fairscale's names on two ranks, in one run of their processes for all scenarios."""

from pathlib import Path

import fsdp_ranks
import pytest

WORLD = 2
SCENARIOS = "fairscale_scenarios"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    folder: Path = tmp_path_factory.mktemp("fairscale")
    return fsdp_ranks.outcomes(folder, WORLD, SCENARIOS)


@pytest.mark.parametrize("name", fsdp_ranks.scenarios(SCENARIOS))
def test_on_two_ranks(outcomes: list[dict[str, str]], name: str) -> None:
    assert [told[name] for told in outcomes] == [""] * WORLD
