"""The page for those who come from other ways to shard names all their settings."""

from __future__ import annotations

import inspect
import re

import pytest
from places import ROOT
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy

PAGE = (ROOT / "docs/start/from_sharding.md").read_text()


def section(name: str) -> str:
    return PAGE.split(f"\n## {name}")[1].split("\n## ")[0]


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("torch's FullyShardedDataParallel", FullyShardedDataParallel.__init__),
        ("torch's fully_shard", fully_shard),
    ],
)
def test_every_argument_of_torchs_is_named(name: str, function: object) -> None:
    names = set(inspect.signature(function).parameters) - {"self", "module"}
    assert names
    assert not {n for n in names if f"`{n}`" not in section(name)}


def test_every_flag_of_accelerates_is_named() -> None:
    launch = pytest.importorskip("accelerate.commands.launch")
    flags = re.findall(r'"(--fsdp_\w+)"', inspect.getsource(launch))
    assert flags
    assert not [f for f in flags if f"`{f}`" not in section("accelerate")]


def test_every_variable_of_accelerate_launch_is_named() -> None:
    """By its name, or that of a group of variables, such as FSDP_*."""
    launch = inspect.getsource(pytest.importorskip("accelerate.utils.launch"))
    launch = launch[: launch.index("class PrepareForLaunch")]
    names = set(re.findall(r'(?:environ|env)\["([A-Z]\w+)"\]', launch))
    names |= set(re.findall(r'"((?:ACCELERATE|MASTER|FSDP)_[A-Z]\w*)"', launch))
    assert len(names) > 50
    page = (ROOT / "docs/reference/many_ranks.md").read_text()
    table = page.split("\n## accelerate launch")[1].split("\n## ")[0]
    told = {word.rstrip("*") for word in re.findall(r"`([A-Z]\w+\*?)`", table)}
    groups = tuple(word for word in told if word.endswith("_"))
    ours = {"PYTHONPATH"}  # of Python
    assert not {n for n in names - ours if n not in told and not n.startswith(groups)}


def test_policies_of_torchs_are_taken() -> None:
    from torch import nn

    from ctrainer import _C
    from ctrainer.fsdp import FullyShardedDataParallel as FSDP

    def wrapped(policy: object) -> int:
        model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
        group = _C.Communicator()
        return len(FSDP(model, auto_wrap_policy=policy, process_group=group).units())

    assert wrapped(ModuleWrapPolicy({nn.Linear})) == 3
    with pytest.raises(TypeError, match="auto_wrap_policy must be a function"):
        wrapped(CustomPolicy(lambda module: True))
