"""Trainer with DeepSpeed configurations, and with sharded_ddp, on 2 ranks: stages,
offload, precision."""

from __future__ import annotations

from typing import Any

import deepspeed_trainings as runs
import pytest
import ranks


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return ranks.told(ranks.run(tmp_path_factory.mktemp("zero"), "fsdp.deepspeed"))


@pytest.fixture(scope="module")
def wanted() -> dict[str, Any]:
    return {dtype: runs.in_plain_torch(dtype) for dtype in runs.DTYPES}


@pytest.mark.parametrize("name", runs.CASES)
def test_two_ranks_train_as_plain_torch_does_in_one_process(
    found: list[Any], wanted: dict[str, Any], name: str
) -> None:
    stage, _, dtype = runs.CASES[name]
    for rank in found:
        ours, theirs = rank[name], wanted[dtype]
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-6)
        assert ours["norms"] == pytest.approx(theirs["norms"], rel=1e-6)
        assert ours["rates"] == pytest.approx(theirs["rates"], rel=1e-12)
        assert ours["sharded"] == (stage > 0)
        assert (ours["stage"], ours["optimizer"]) == (stage, "AdamW")
        assert len(ours["groups"]) == 1


@pytest.mark.parametrize("name", runs.FAIRSCALE)
def test_sharded_ddp_trains_as_plain_torch_does_in_one_process(
    found: list[Any], wanted: dict[str, Any], name: str
) -> None:
    words, dtype = name.rsplit(" ", 1)
    for rank in found:
        ours, theirs = rank[name], wanted[dtype]
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-6)
        assert ours["norms"] == pytest.approx(theirs["norms"], rel=1e-6)
        assert ours["units"] == (3 if "auto_wrap" in words else 1)
