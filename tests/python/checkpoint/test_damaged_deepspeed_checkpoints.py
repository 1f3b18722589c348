"""Damaged checkpoints of DeepSpeed: a file is read right or named, as the files of
a Trainer are."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import deepspeed_engines as runs
import pytest
from draws import draws
from test_damaged_checkpoints import Swapped, same

from ctrainer.compat.deepspeed import _files, ds_to_universal, zero_to_fp32

SEED = 30_000
# The checkpoint, the part of it that is damaged, and another checkpoint's.
CASES = {
    "2": ("2_fp32", "global_step4", "2_bf16/global_step4"),
    "3": ("3_fp32", "global_step4", "3_fp32_groups/global_step4"),
    "universal": ("3_fp32", "universal", "2_fp32/universal"),
    "parameter": (
        *("2_fp32", "universal/zero/first.weight"),
        "2_fp32/universal/zero/head.weight",
    ),
    "parameter of 3": (
        *("3_fp32", "universal/zero/head.weight"),
        "3_fp32/universal/zero/first.weight",
    ),
}


def read(folder: str) -> Any:
    """Weights, and the optimizer's state where there is one."""
    found = _files.Checkpoint(folder)
    state = found.optimizer() or {"state": {}, "param_groups": []}
    weights = found.weights()
    return [
        {name: weights[name].clone() for name in weights},
        {name: dict(state["state"][name]) for name in state["state"]},
        state["param_groups"],
    ]


@pytest.mark.parametrize("name", CASES)
def test_a_damaged_file_of_deepspeed_is_read_right_or_named(
    name: str, tmp_path: Path
) -> None:
    root, part, other = CASES[name]
    shutil.copytree(runs.KEPT / root, tmp_path / "ck")
    donor = tmp_path / "donor"
    donor.mkdir()
    for path in (runs.KEPT / other).glob("*.pt"):
        shutil.copy(path, donor)
    damaged = tmp_path / "ck" / part
    top = tmp_path / "ck" / part.split("/")[0]
    names = sorted(p.name for p in damaged.iterdir() if p.is_file())
    folders = [path for path in damaged.iterdir() if path.is_dir()]
    for path in folders:  # a Judge removes folders
        path.rename(tmp_path / path.name)

    def read_all(_: Path) -> Any:
        for path in folders:
            (damaged / path.name).symlink_to(tmp_path / path.name)
        return read(str(top))

    judge = Swapped(damaged, donor, names, read_all, same)
    for seed in range(SEED, SEED + draws(20, 2_000)):
        judge.run(seed)
    assert judge.counts["rejected"] > judge.counts["right"]


def test_damages_reach_the_commands(tmp_path: Path) -> None:
    shutil.copytree(runs.KEPT / "2_fp32", tmp_path / "ck")
    path = tmp_path / "ck/global_step4/mp_rank_00_model_states.pt"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=path.name):
        zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "ck"))
    with pytest.raises(ValueError, match=path.name):
        ds_to_universal.convert_zero_checkpoint_to_universal(
            str(path.parent), str(tmp_path / "universal")
        )
    (tmp_path / "ck/latest").write_bytes(b"\xff\xfe")
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "ck"))


@pytest.mark.parametrize(
    ("folder", "part", "told"),
    [
        ("3_fp32/global_step4", "zero_pp_rank_1_mp_rank_00_model_states.pt", "found 1"),
        ("3_fp32/universal", "zero_pp_rank_1_mp_rank_00_model_states.pt", "found 1"),
        ("2_fp32/universal", "zero/first.weight/step.pt", "step.pt is missing"),
        ("3_fp32/universal", "zero/head.bias/exp_avg.pt", "exp_avg.pt is missing"),
    ],
)
def test_a_file_that_is_missing_is_told(
    folder: str, part: str, told: str, tmp_path: Path
) -> None:
    """A rank's part of frozen parameters, or one of the files of a parameter."""
    shutil.copytree(runs.KEPT / folder, tmp_path / "ck")
    assert read(str(tmp_path / "ck"))[2]
    (tmp_path / "ck" / part).unlink()
    with pytest.raises((FileNotFoundError, ValueError), match=told):
        read(str(tmp_path / "ck"))
