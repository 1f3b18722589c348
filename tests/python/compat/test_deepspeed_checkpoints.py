"""DeepSpeed's checkpoints: those that DeepSpeed 0.19.8 wrote (kept/deepspeed), and
ours."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed_engines as runs
import pytest
import ranks
import torch
from safetensors.torch import load_file

from ctrainer.__main__ import main
from ctrainer.compat import deepspeed
from ctrainer.compat.deepspeed import _files, ds_to_universal, zero_to_fp32

THEIRS = ["0 fp32", "1 fp16", "2 bf16", "2 fp32", "3 fp32", "3 fp32 groups"]
UNIVERSAL = ["2_fp32", "3_fp32"]
OURS = ["0 fp32", "1 fp32", "2 bf16", "3 fp32", "3 fp16", "2 fp32 groups"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def found(folder: Path) -> Any:
    return ranks.told(
        ranks.run(
            folder, "compat.deepspeed_checkpoints",
            kept=str(runs.KEPT), theirs=THEIRS, universal=UNIVERSAL, ours=OURS,
        )
    )[0]  # fmt: skip


def assert_alike(ours: list[Any], theirs: list[Any], near: float) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=near)
        assert mine["lr"] == pytest.approx(other["lr"], rel=1e-12)
        for name in ("boundary", "scale", "skipped", "steps", "micro", "samples"):
            assert mine[name] == other[name]


@pytest.mark.parametrize("name", THEIRS)
def test_training_resumes_from_deepspeeds_checkpoint(found: Any, name: str) -> None:
    state, log = found[name]
    assert state == {"epoch": 3}
    # The losses before and after one update: the bounds of test_deepspeed_engine.
    near = {"fp32": 1e-6, "bf16": 2e-2, "fp16": 3e-3}[runs.CASES[name][1]]
    assert_alike(log, runs.kept(name)[runs.SAVED_AT :], near)


@pytest.mark.parametrize("name", UNIVERSAL)
def test_training_resumes_from_a_universal_checkpoint(found: Any, name: str) -> None:
    theirs = runs.kept(name.replace("_", " "))[runs.SAVED_AT :]
    assert_alike(found[name], theirs, 1e-6)


@pytest.mark.parametrize("name", OURS)
def test_training_resumes_from_ours_in_any_stage(found: Any, name: str) -> None:
    own, again = found[f"ours {name}"]
    assert_alike(again, own, 0.0)
    state, log = found[f"other {name}"]
    assert state == {"epoch": 3}
    assert_alike(log, own, 1e-6)


@pytest.mark.parametrize("name", [name for name in OURS if name in THEIRS])
def test_our_files_have_deepspeeds_names_and_values(
    found: Any, folder: Path, name: str
) -> None:
    del found
    ours, theirs = folder / name.replace(" ", "_"), runs.KEPT / name.replace(" ", "_")
    assert (ours / "latest").read_text() == "global_step4"
    names = [sorted(os.listdir(p / "global_step4")) for p in (ours, theirs)]
    assert names[0] == names[1]
    near = {"rtol": 1e-6, "atol": 1e-7} if "fp32" in name else {"rtol": 0, "atol": 1e-2}
    for file in names[0]:
        mine, other = (
            _files.load(str(p / "global_step4" / file)) for p in (ours, theirs)
        )
        _assert_same(mine, other, near)


# Of the caller, and of torch's class of the optimizer.
_OTHERS = {"ds_config", "foreach", "fused", "capturable", "differentiable"} | {
    "decoupled_weight_decay", "shared_params"
}  # fmt: skip


def _assert_same(ours: Any, theirs: Any, near: dict[str, float]) -> None:
    if type(theirs) in _files._CLASSES:
        assert type(ours) is type(theirs)
        ours, theirs = vars(ours), vars(theirs)
    if isinstance(theirs, Mapping):
        for key in theirs.keys() - _OTHERS:
            _assert_same(ours[key], theirs[key], near)
    elif isinstance(theirs, torch.Tensor):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        torch.testing.assert_close(ours.detach(), theirs.detach(), **near)
    elif isinstance(theirs, list | tuple):
        for pair in zip(ours, theirs, strict=True):
            _assert_same(*pair, near)
    else:
        assert ours == (pytest.approx(theirs) if isinstance(theirs, float) else theirs)


# ---- zero_to_fp32


def wanted(name: str) -> dict[str, torch.Tensor]:
    """What DeepSpeed's own tool has made of the kept checkpoint."""
    found = {}
    for path in (runs.KEPT / name / "universal" / "zero").glob("*/fp32.pt"):
        value = torch.load(path, weights_only=True)
        found[path.parent.name] = value["param"] if isinstance(value, dict) else value
    return found


def test_whole_weights_are_those_of_deepspeeds_tool() -> None:
    wants = wanted("2_fp32")
    for name in UNIVERSAL:
        ours = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(
            str(runs.KEPT / name)
        )
        assert set(ours) | {"second.weight"} == set(wants)  # tied, in stage 3 once
        for key, value in ours.items():
            torch.testing.assert_close(value, wants[key], rtol=1e-6, atol=1e-7)
    assert len(wanted("3_fp32")) == 6
    for key, value in wanted("3_fp32").items():
        assert torch.equal(ours[key].view(-1), value)
    trained = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(
        str(runs.KEPT / "3_fp32"), "global_step4", exclude_frozen_parameters=True,
        lazy_mode=True,
    )  # fmt: skip
    assert set(trained) == set(ours) - {"frozen.weight"}
    assert torch.equal(trained["first.bias"].contiguous(), ours["first.bias"])


def test_a_model_takes_the_whole_weights() -> None:
    model = runs.Model()
    zero_to_fp32.load_state_dict_from_zero_checkpoint(model, str(runs.KEPT / "3_fp32"))
    assert torch.equal(model.head.bias, wanted("3_fp32")["head.bias"])


@pytest.mark.parametrize("safe", [True, False])
def test_the_command_writes_files_that_transformers_loads(
    tmp_path: Path, safe: bool
) -> None:
    of = str(runs.KEPT / "2_fp32")
    arguments = ["zero-to-fp32", of, str(tmp_path / "one"), "--tag", "global_step4"]
    arguments += ["--safe_serialization"] * safe
    assert main(arguments) == 0
    arguments[2] = str(tmp_path / "several")
    assert main([*arguments, "--max_shard_size", "300"]) == 0
    read: Any = load_file if safe else torch.load
    one = read(
        tmp_path / "one" / ("model.safetensors" if safe else "pytorch_model.bin")
    )
    (index,) = (tmp_path / "several").glob("*.index.json")
    places = json.loads(index.read_text())["weight_map"]
    assert len(set(places.values())) > 2
    several = {
        key: read(tmp_path / "several" / place)[key] for key, place in places.items()
    }
    for found in (one, several):
        assert set(found) == set(wanted("2_fp32"))
        for key, value in wanted("2_fp32").items():
            assert torch.equal(found[key], value)
    if not safe:  # tied parameters stay one
        pair = one["first_tied"], one["second.weight"]
        assert pair[0].data_ptr() == pair[1].data_ptr()


def test_the_copy_in_a_folder_of_checkpoints_is_the_command(
    found: Any, folder: Path, tmp_path: Path
) -> None:
    del found
    place = folder / "3_fp32"
    command = [
        sys.executable,
        str(place / "zero_to_fp32.py"),
        str(place),
        str(tmp_path),
    ]
    subprocess.run(
        command, check=True, env=os.environ | {"PYTHONPATH": ranks.PYTHONPATH}
    )
    state = torch.load(tmp_path / "pytorch_model.bin")
    for key, value in wanted("2_fp32").items():
        torch.testing.assert_close(state[key], value, rtol=1e-6, atol=1e-7)


def test_weights_in_the_dtype_of_layers_are_written(found: Any, folder: Path) -> None:
    del found  # the last engine was of 2 fp32 groups, in stage 0
    state = torch.load(folder / "low" / "pytorch_model.bin")
    assert set(state) == set(runs.Model().state_dict())


# ---- universal checkpoints


@pytest.fixture(scope="module")
def universal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the kept checkpoints, whose folders `own` are of our command."""
    place = tmp_path_factory.mktemp("universal")
    for name in ("1_fp16", "2_bf16", "2_fp32", "3_fp32", "3_fp32_groups"):
        shutil.copytree(runs.KEPT / name, place / name)
        of, to = place / name / "global_step4", place / name / "own"
        arguments = ["--input_folder", str(of), "--output_folder", f"{to}/"]
        assert main(["ds-to-universal", *arguments]) == 0
        assert (place / name / "latest_universal").read_text() == "own"
    return place


def _files_in(folder: Path) -> dict[str, Path]:
    return {str(p.relative_to(folder)): p for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("name", UNIVERSAL)
def test_universal_files_are_those_of_deepspeeds_tool(
    universal: Path, name: str
) -> None:
    ours = _files_in(universal / name / "own")
    theirs = _files_in(runs.KEPT / name / "universal")
    assert set(ours) == set(theirs)
    for file, path in theirs.items():
        wanted = _files.load(str(path))
        if file == "zero/optimizer_state.pt" and name == "3_fp32":
            del wanted["fp32_flat_groups"]  # rank 0's shards, which are no common state
            state = wanted["optimizer_state_dict"]["state"]
            state[0] = {"step": state[0]["step"]}
        _assert_same(_files.load(str(ours[file])), wanted, {"rtol": 0, "atol": 0})


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(
    "name", ["1_fp16", "2_bf16", "2_fp32", "3_fp32", "3_fp32_groups"]
)
def test_a_universal_checkpoint_of_two_ranks_trains_on_on_one(
    universal: Path, name: str, stage: int
) -> None:
    _, dtype, in_groups = runs.CASES[name.replace("_", " ")]
    model = runs.Model()
    for param in model.parameters():
        param.data.fill_(0.5)
    config = runs.configuration(stage, dtype) | {
        "gradient_accumulation_steps": 4, "checkpoint": {"load_universal": True}
    }  # fmt: skip
    engine = deepspeed.initialize(
        model=model, model_parameters=runs.parameters(model, in_groups), config=config
    )[0]
    path, state = engine.load_checkpoint(str(universal / name))
    assert (path, state) == (str(universal / name / "own"), {"epoch": 3})
    losses = []
    for batch in runs.batches(dtype)[2 * runs.SAVED_AT :]:
        loss = engine(*runs.placed(engine, batch))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    # Of every two batches the first is that of rank 0, of which the losses are kept.
    kept = runs.kept(name.replace("_", " "))[runs.SAVED_AT :]
    near = {"fp32": 1e-6, "bf16": 2e-2, "fp16": 3e-3}[dtype]
    assert losses[::2] == pytest.approx([log["loss"] for log in kept], rel=near)
    last = kept[-1]
    assert engine.get_lr() == pytest.approx(last["lr"], rel=1e-12)
    assert engine.optimizer.cur_scale == last["scale"]
    assert (engine.global_steps, engine.skipped_steps) == (
        last["steps"], last["skipped"]
    )  # fmt: skip


def test_what_is_no_checkpoint_of_zero_makes_no_universal_one(
    universal: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    convert = ds_to_universal.convert_zero_checkpoint_to_universal
    with pytest.raises(ValueError, match="universal checkpoint already"):
        convert(str(universal / "2_fp32" / "own"), str(tmp_path / "a"))
    with pytest.raises(FileNotFoundError, match=r"can't find \*_optim_states.pt"):
        convert(str(runs.KEPT / "0_fp32" / "global_step4"), str(tmp_path / "a"))
    of = shutil.copytree(runs.KEPT / "2_fp32" / "global_step4", tmp_path / "of")
    with pytest.raises(ValueError, match="name another one"):
        convert(str(of), f"{of}/")
    path = str(of / "mp_rank_00_model_states.pt")
    state = _files.load(path)
    state["param_shapes"][0]["../b"] = state["param_shapes"][0].pop("head.bias")
    _files.save(state, path)
    with pytest.raises(SystemExit):
        main(["ds-to-universal", "--input_folder", str(of), "--output_folder",
              str(tmp_path / "a")])  # fmt: skip
    assert "'../b' is no name of a folder" in capsys.readouterr().err
    assert not (tmp_path / "latest_universal").exists()


# ---- what cannot be read


class Foreign:
    pass


def test_an_object_that_is_no_plain_data_is_rejected_by_name(tmp_path: Path) -> None:
    place = shutil.copytree(runs.KEPT / "2_fp32", tmp_path / "copy")
    path = place / "global_step4" / "mp_rank_00_model_states.pt"
    state = _files.load(str(path))
    for value in (Foreign(), SimpleNamespace(a=1)):
        torch.save(state | {"args": value}, path)
        with pytest.raises(ValueError, match=f"{type(value).__name__}.*not unpickled"):
            zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(place))


def test_missing_files_are_named(tmp_path: Path) -> None:
    get = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint
    with pytest.raises(FileNotFoundError, match="Unable to find 'latest'"):
        get(str(tmp_path))
    place = shutil.copytree(runs.KEPT / "3_fp32", tmp_path / "copy")
    with pytest.raises(FileNotFoundError, match="doesn't exist"):
        get(str(place), "other")
    os.remove(place / "global_step4" / "zero_pp_rank_1_mp_rank_00_optim_states.pt")
    with pytest.raises(ValueError, match=r"Expected 2 of .* found 1 files"):
        get(str(place))
    for kept in ("2_fp32", "3_fp32"):
        place = shutil.copytree(runs.KEPT / kept, tmp_path / kept)
        for path in place.glob("global_step4/*_optim_states.pt"):
            path.unlink()
        with pytest.raises(FileNotFoundError, match=r"can't find \*_optim_states.pt"):
            get(str(place))
    with pytest.raises(ValueError, match="max_shard_size is '5 miles'"):
        zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(
            str(place), str(tmp_path / "out"), "5 miles"
        )
