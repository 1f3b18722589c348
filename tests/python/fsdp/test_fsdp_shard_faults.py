"""What the consolidate command says to who gives it the wrong files, and what a full
disk or a killed process leaves."""

from __future__ import annotations

import resource
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp_shards import Job, Unit, nested_job, save, values, whole
from ranks import run_alone

from ctrainer import __main__
from ctrainer.fsdp import (
    consolidate_sharded_model_checkpoints,
    load_shard,
    reshard_checkpoints,
    save_shard,
)

Capture = pytest.CaptureFixture[str]


def rejection(capsys: Capture, *arguments: object) -> str:
    """What the command writes to stderr when it rejects."""
    with pytest.raises(SystemExit) as left:
        __main__.main(["consolidate", "--ckpt_prefix", *map(str, arguments)])
    assert left.value.code == 1
    return capsys.readouterr().err


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def as_safetensors(folder: Path) -> None:
    for path in folder.glob("*.pth"):
        save_shard(load_shard(path), path.with_suffix(".safetensors"))
        path.unlink()


# First a disk with room for half of the file, then one that kills who overfills it.


@pytest.mark.parametrize("ending", ["pth", "safetensors"])
def test_a_full_disk_and_a_killed_command_leave_nothing_half_written(
    ending: str, tmp_path: Path
) -> None:
    job = Job([Unit("", {"w": values(400, 1000)})], 2)
    prefix, result = save(job, tmp_path), tmp_path / f"ckpt.{ending}"
    shards = contents(tmp_path)
    done = run_alone("fsdp.disk_too_small", prefix, str(result), "800000")
    assert done.stdout == "1\n"
    assert f"{result}" in done.stderr
    assert "File too large" in done.stderr
    assert done.returncode == -signal.SIGXFSZ
    assert not result.exists()
    (left,) = contents(tmp_path).keys() - shards.keys()  # of the one that was killed
    assert left.startswith(result.name)
    assert left.endswith(".ctrainer-saving")
    full, _ = consolidate_sharded_model_checkpoints(prefix, "*", str(result))
    assert torch.equal(full["w"], whole(job)["w"])
    assert contents(tmp_path).keys() == shards.keys() | {result.name}


def test_a_full_disk_leaves_the_earlier_shards_of_another_number_of_ranks(
    tmp_path: Path,
) -> None:
    job = Job([Unit("", {"w": values(400, 1000)})], 2)
    prefix, new = save(job, tmp_path), tmp_path / "new"
    (tmp_path / "new-rank-0-of-3.pth").write_bytes(b"earlier")
    before = contents(tmp_path)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, hard))
    try:
        with pytest.raises(OSError, match=r"new-rank-0-of-3.pth"):
            reshard_checkpoints(prefix, world_size=3, save_prefix=str(new))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert contents(tmp_path) == before


def test_who_gives_a_wrong_place_is_told_what_is_there(
    tmp_path: Path, capsys: Capture
) -> None:
    prefix = save(nested_job(2), tmp_path)
    assert f"There is no folder {tmp_path}/no" in rejection(capsys, f"{tmp_path}/no/c")
    assert f"{tmp_path} is a folder: let ckpt_prefix end with '/'" in rejection(
        capsys, tmp_path
    )
    assert f"folder {tmp_path} begins with 'model'" in rejection(
        capsys, tmp_path / "model"
    )
    as_safetensors(tmp_path)
    said = rejection(capsys, prefix)
    assert "['ckpt-rank-0-of-2.safetensors', 'ckpt-rank-1-of-2.safetensors']" in said
    assert "ckpt_suffix" in said


def test_saves_of_different_numbers_of_ranks_are_told_apart(
    tmp_path: Path, capsys: Capture
) -> None:
    prefix = save(nested_job(2), tmp_path)
    save(nested_job(4), tmp_path)
    said = rejection(capsys, prefix)
    assert f"of 2 ranks {prefix}-rank-1-of-2.pth" in said
    assert f"of 4 ranks {prefix}-rank-3-of-4.pth" in said
    assert "match the files of one save" in said
    full, _ = consolidate_sharded_model_checkpoints(prefix, "*-of-4.pth")
    assert torch.equal(full["embed.weight"], whole(nested_job(4))["embed.weight"])


def test_two_saves_under_one_prefix_are_named(tmp_path: Path, capsys: Capture) -> None:
    prefix = save(nested_job(2), tmp_path)
    for path in list(tmp_path.iterdir()):
        shutil.copy(path, tmp_path / path.name.replace("ckpt", "ckpt-20"))
    said = rejection(capsys, prefix)
    assert "Of the same rank are" in said
    for name in ("ckpt-20-rank-0", "ckpt-20-rank-1", "ckpt-rank-0", "ckpt-rank-1"):
        assert f"{tmp_path}/{name}-of-2.pth" in said


@pytest.mark.parametrize("more", [[], ["--optimizer"], ["--world_size", "3"]])
def test_a_shard_of_another_update_is_named(
    more: list[str], tmp_path: Path, capsys: Capture
) -> None:
    """Names and shapes are those of the others; the optimizer's count tells."""
    prefix = save(nested_job(2), tmp_path, adam=True)
    path = tmp_path / "ckpt-rank-1-of-2.pth"
    later = torch.load(path, weights_only=False)
    for state in later["optimizer"]["state"].values():
        state["step"] += 2
    torch.save(later, path)
    said = rejection(capsys, prefix, *more)
    assert f"{path}: " in said
    assert "9.0" in said
    assert "7.0" in said
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("ending", ["pth", "safetensors"])
def test_shards_are_not_replaced_while_they_are_read(
    ending: str, tmp_path: Path, capsys: Capture
) -> None:
    prefix = save(nested_job(2), tmp_path, adam=True)
    if ending == "safetensors":
        as_safetensors(tmp_path)
    before = contents(tmp_path)
    shard = f"{prefix}-rank-0-of-2.{ending}"
    suffix = ("--ckpt_suffix", f"*.{ending}")
    for more in (["--world_size", 2], ["--save_path", shard]):
        said = rejection(capsys, prefix, *suffix, *more)
        assert f"{shard} is one of the shards to read" in said
    assert contents(tmp_path) == before


@pytest.mark.parametrize("ending", ["pth", "safetensors"])
def test_the_command_can_be_repeated_in_its_own_folder(
    ending: str, tmp_path: Path
) -> None:
    save(nested_job(2), tmp_path, adam=True)
    if ending == "safetensors":
        as_safetensors(tmp_path)
    for _ in range(2):
        full, _ = consolidate_sharded_model_checkpoints(
            f"{tmp_path}/",
            f"*.{ending}",
            f"{tmp_path}/model.{ending}",
            save_optimizer=True,
        )
        assert full.keys() == whole(nested_job(2)).keys()


def test_what_is_no_checkpoint_of_shards_is_named(
    tmp_path: Path, capsys: Capture
) -> None:
    prefix, other = save(nested_job(2), tmp_path), tmp_path / "ckpt-x.pth"
    torch.save(torch.nn.Linear(2, 2).state_dict(), other)
    assert f"{other}: holds no 'shard_metadata'" in rejection(capsys, prefix)
    torch.save([1, 2], other, _use_new_zipfile_serialization=False)
    assert f"{other}: is no file of torch.save" in rejection(capsys, prefix)
    other.unlink()
    other.mkdir()
    assert f"cannot read {other}: Is a directory" in rejection(capsys, prefix)
    as_safetensors_of_none = tmp_path / "ckpt.optimizer.safetensors"
    consolidate_sharded_model_checkpoints(
        prefix, "*2.pth", f"{tmp_path}/ckpt.safetensors"
    )
    shutil.move(tmp_path / "ckpt.safetensors", as_safetensors_of_none)
    said = rejection(capsys, prefix, "--ckpt_suffix", "*.safetensors")
    assert f"{as_safetensors_of_none}: holds no 'shard_metadata'" in said


NOTHING_OF_THE_KIND: list[Any] = [None, 3, -1, "x", [], {}, [1, 2]]


def damaged(value: Any) -> Iterator[Any]:
    """Something else in its place; then value with this done to each of its entries,
    or with the entry gone."""
    yield from NOTHING_OF_THE_KIND
    if isinstance(value, dict):
        for key in value:
            yield {k: v for k, v in value.items() if k != key}
            yield from ({**value, key: other} for other in damaged(value[key]))
    elif isinstance(value, list | tuple) and value:
        yield from ([other, *value[1:]] for other in damaged(value[0]))


def problem_with(prefix: str) -> str | None:
    try:
        consolidate_sharded_model_checkpoints(prefix, save_optimizer=True)
    except (AssertionError, ValueError) as problem:
        return str(problem)
    return None  # such as another learning rate


@pytest.mark.parametrize("part", ["shard_metadata", "optimizer"])
@pytest.mark.parametrize("layout", [{}, {"flat": True}], ids=["one_each", "flat"])
def test_whatever_is_wrong_with_the_metadata_the_file_is_named(
    part: str, layout: dict[str, bool], tmp_path: Path
) -> None:
    """Of the only rank, so that no comparison with another finds it first."""
    prefix = save(nested_job(1, **layout), tmp_path, adam=True)
    (path,) = tmp_path.iterdir()
    content = torch.load(path, weights_only=False)
    problems = []
    for wrong in damaged(content[part]):
        torch.save({**content, part: wrong}, path)
        problems.append(problem_with(prefix))
    assert None not in problems[: len(NOTHING_OF_THE_KIND)]
    assert [p for p in problems if p is not None and str(path) not in p] == []
