"""Files of one result appear together or not at all; modules in several places."""

from __future__ import annotations

import copy
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fsdp_shards import Job, Unit, nested_job, rank_content, save, values
from fsdp_trees import WIDTH, Scale
from torch import nn

from ctrainer import _C
from ctrainer.checkpoint.disk import write_together
from ctrainer.fsdp import FullyShardedDataParallel as FSDP
from ctrainer.fsdp import (
    consolidate_sharded_model_checkpoints,
    load_shard,
    reshard_checkpoints,
    save_shard,
)

RESULT, BESIDE = "full.safetensors", "full.optimizer.safetensors"


def found_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def consolidate(prefix: str, folder: Path) -> None:
    path = str(folder / RESULT)
    consolidate_sharded_model_checkpoints(prefix, save_path=path, save_optimizer=True)


@pytest.fixture
def shards(tmp_path: Path) -> str:
    (tmp_path / "shards").mkdir()
    return save(nested_job(2), tmp_path / "shards", adam=True)


@pytest.mark.parametrize("earlier", [{}, {RESULT: b"1"}, {RESULT: b"1", BESIDE: b"2"}])
def test_a_model_appears_with_its_optimizer_or_not_at_all(
    shards: str, earlier: dict[str, bytes], tmp_path: Path
) -> None:
    """The second cannot take its place, which is a folder, after the first has."""
    for name, content in earlier.items():
        (tmp_path / name).write_bytes(content)
    if BESIDE not in earlier:
        (tmp_path / BESIDE).mkdir()
        with pytest.raises(IsADirectoryError, match=BESIDE):
            consolidate(shards, tmp_path)
        assert found_in(tmp_path) == earlier
        (tmp_path / BESIDE).rmdir()
    consolidate(shards, tmp_path)
    assert found_in(tmp_path).keys() == {RESULT, BESIDE}


def test_a_disk_that_fills_with_the_optimizer_leaves_the_earlier_model(
    tmp_path: Path,
) -> None:
    (tmp_path / "shards").mkdir()
    job = Job([Unit("", {"w": values(400, 1000)})], 2)
    prefix = save(job, tmp_path / "shards", adam=True)
    (tmp_path / RESULT).write_bytes(b"earlier")
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # exp_avg is as long as the model, and the names beside it are longer
    consolidate(prefix, tmp_path)
    sizes = [os.path.getsize(tmp_path / name) for name in (RESULT, BESIDE)]
    assert sizes[0] < sizes[1]
    (tmp_path / RESULT).write_bytes(b"earlier")
    (tmp_path / BESIDE).unlink()
    resource.setrlimit(resource.RLIMIT_FSIZE, (sizes[0], hard))
    try:
        with pytest.raises(OSError, match=BESIDE):
            consolidate(prefix, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert found_in(tmp_path) == {RESULT: b"earlier"}


def test_shards_of_another_number_of_ranks_appear_all_or_none(
    shards: str, tmp_path: Path
) -> None:
    new = tmp_path / "new"
    (tmp_path / "new-rank-2-of-3.pth").mkdir()
    (tmp_path / "new-rank-0-of-3.pth").write_bytes(b"earlier")
    with pytest.raises(IsADirectoryError, match=r"new-rank-2-of-3.pth"):
        reshard_checkpoints(shards, world_size=3, save_prefix=str(new))
    assert found_in(tmp_path) == {"new-rank-0-of-3.pth": b"earlier"}


@pytest.mark.parametrize("links", [True, False])
def test_earlier_files_are_taken_back_with_and_without_links(
    links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reject(*unused: object) -> None:
        raise PermissionError("no links here")

    if not links:
        monkeypatch.setattr(os, "link", reject)

    def writer(text: str) -> Callable[[str], None]:
        return lambda path: Path(path).write_text(text) and None

    first, second, third = (str(tmp_path / name) for name in "abc")
    Path(first).write_text("earlier")
    Path(third).mkdir()
    new = {path: writer("new") for path in (first, second, third)}
    with pytest.raises(IsADirectoryError):
        write_together(new, lambda: None)
    assert found_in(tmp_path) == {"a": b"earlier"}
    Path(third).rmdir()
    write_together(new, lambda: None)
    assert found_in(tmp_path) == {"a": b"new", "b": b"new", "c": b"new"}


# ---- keys of their own


@pytest.mark.parametrize("ending", ["pth", "safetensors"])
def test_what_is_saved_beside_a_model_comes_back(
    ending: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = nested_job(2)
    more = {"step": 5, "scheduler": {"last_lr": [0.5], "verbose": None}, "none": None}
    for rank in range(2):
        content = rank_content(job, rank) | more | {"seed": rank}
        save_shard(content, tmp_path / f"old-{rank}.{ending}")
        found = load_shard(tmp_path / f"old-{rank}.{ending}")
        assert {key: found[key] for key in (*more, "seed")} == {**more, "seed": rank}
    paths = reshard_checkpoints(
        str(tmp_path / "old"),
        f"*.{ending}",
        world_size=3,
        save_prefix=f"{tmp_path}/new",
    )
    for path in paths:
        found = load_shard(path)
        assert {key: found.get(key) for key in (*more, "seed")} == {
            **more,
            "seed": None,
        }
    assert "not in the new shards: ['seed']" in caplog.text


def test_a_key_that_the_format_has_and_tensors_elsewhere_are_rejected(
    tmp_path: Path,
) -> None:
    content = rank_content(nested_job(2), 0)
    path = tmp_path / "shard.safetensors"
    with pytest.raises(ValueError, match="'names' is a key of the format"):
        save_shard(content | {"names": []}, path)
    with pytest.raises(ValueError, match=r"shard.safetensors: .* no JSON"):
        save_shard(content | {"rng": torch.get_rng_state()}, path)
    save_shard(content | {"rng": torch.get_rng_state()}, tmp_path / "shard.pth")
    assert load_shard(tmp_path / "shard.pth")["rng"].equal(torch.get_rng_state())


# ---- modules in several places


@pytest.mark.parametrize("layout", [{"flatten_parameters": True}, {}], ids=str)
@pytest.mark.parametrize("unit", [True, False], ids=["a unit", "within a unit"])
def test_a_module_in_two_places_has_both_names_in_every_state(
    unit: bool, layout: dict[str, bool], tmp_path: Path
) -> None:
    def wrap(module: nn.Module) -> FSDP:
        return FSDP(
            module,
            process_group=_C.Communicator(),
            on_neuron=False,
            buffer_dtype=torch.bfloat16,
            **layout,
        )

    twice = nn.Sequential(nn.Linear(WIDTH, WIDTH), Scale())
    plain = nn.Sequential(twice, nn.Linear(WIDTH, WIDTH), twice, nn.LayerNorm(WIDTH))
    body = copy.deepcopy(plain)
    if unit:
        body[0] = body[2] = wrap(body[0])
    model = wrap(body)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, WIDTH)).sum().backward()
    optimizer.step()
    expected = model.full_state_dict()
    content = {
        "model": model.state_dict(),
        "shard_metadata": model.get_shard_metadata(),
        "optimizer": optimizer.state_dict(),
    }
    save_shard(content, tmp_path / "shard.pth")
    full, path = consolidate_sharded_model_checkpoints(
        str(tmp_path / "shard"), save_optimizer=True
    )
    assert full.keys() == expected.keys() == plain.state_dict().keys()
    for name, value in expected.items():
        assert torch.equal(full[name], value)
        assert full[name].dtype == value.dtype == plain.state_dict()[name].dtype
    state = torch.load(path, weights_only=True)["optimizer"]
    assert set(state["state"]) == dict(plain.named_parameters()).keys()
    model.load_full_state_dict(plain.state_dict())
    assert torch.equal(model.full_state_dict()["2.0.weight"], plain[2][0].weight)
    assert len(reshard_checkpoints(
        str(tmp_path / "shard"), world_size=2, save_prefix=str(tmp_path / "new")
    )) == 2  # fmt: skip
