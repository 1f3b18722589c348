"""Sharded modules on several ranks, in one run of their processes for all scenarios."""

from pathlib import Path

import fsdp_ranks
import pytest

WORLD = 2


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    folder: Path = tmp_path_factory.mktemp("fsdp")
    return fsdp_ranks.outcomes(folder, WORLD)


@pytest.mark.parametrize("name", fsdp_ranks.scenarios())
def test_on_two_ranks(outcomes: list[dict[str, str]], name: str) -> None:
    assert [told[name] for told in outcomes] == [""] * WORLD
