"""Shard files, of the original and ours: one of each rank, read as one set."""

from __future__ import annotations

import glob
import json
import os
from dataclasses import dataclass
from typing import Any

from ctrainer import _C
from ctrainer.fsdp._stored import Stored, read_safetensors_index
from ctrainer.fsdp._torch_archive import read_archive

METADATA_KEY = "ctrainer.shard"
MODEL = "model."
OPTIMIZER = "optimizer."
Metadata = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Shard:
    """What one rank saved. `model` and the optimizer's state hold Stored tensors."""

    path: str
    model: dict[str, Stored]
    metadata: Metadata
    optimizer: dict[str, Any] | None

    @property
    def rank(self) -> int:
        return int(self.metadata["rank"])

    @property
    def world_size(self) -> int:
        return int(self.metadata["world_size"])


def read_shard(path: str) -> Shard:
    """Read one shard file; its data is checked and stays in the file.

    Raises:
        ValueError: it is damaged or no shard file; the text names it.
    """
    if path.endswith(".safetensors"):
        content = _read_safetensors(path)
    else:
        content = read_archive(path)
    if not isinstance(content, dict) or "shard_metadata" not in content:
        raise ValueError(
            f"{path}: holds no 'shard_metadata'; every rank has to save {{'model': "
            "module.state_dict(), 'shard_metadata': module.get_shard_metadata()}"
        )
    model, metadata = content.get("model"), content["shard_metadata"]
    _check(path, model, metadata)
    assert model is not None
    tensors = {name: t for name, t in model.items() if isinstance(t, Stored)}
    return Shard(path, tensors, metadata, content.get("optimizer"))


def _check(path: str, model: Any, metadata: Any) -> None:
    if not isinstance(model, dict):
        raise ValueError(f"{path}: holds no 'model', which must be a state_dict")
    needed = ("shard_info", "flatten_info", "buffer_info", "world_size", "rank")
    for key in needed:
        if not isinstance(metadata, dict) or key not in metadata:
            raise ValueError(f"{path}: its shard_metadata has no {key!r}")


def described(path: str) -> tuple[list[str], Metadata]:
    """The names of the tensors of a rank's model in its safetensors file, and the
    metadata; the data is not read."""
    metadata, _ = _C.safetensors_index(path)
    content = json.loads(metadata[METADATA_KEY])
    names = [name.removeprefix(MODEL) for name in content["names"]]
    return names, content["shard_metadata"]


def _read_safetensors(path: str) -> dict[str, Any]:
    metadata, tensors = read_safetensors_index(path)
    if METADATA_KEY not in metadata:
        return {}
    content: dict[str, Any] = json.loads(metadata[METADATA_KEY])
    content["model"] = {
        name.removeprefix(MODEL): tensor
        for name in content.pop("names")
        if (tensor := tensors.get(name)) is not None
    }
    optimizer = content.get("optimizer")
    if optimizer is not None:
        optimizer["state"] = {
            int(index): {
                name: tensors.get(f"{OPTIMIZER}{index}.{name}", value)
                for name, value in state.items()
            }
            for index, state in optimizer["state"].items()
        }
    return content


def find_shards(ckpt_prefix: str, ckpt_suffix: str, leave_out: str = "") -> list[Shard]:
    """The shards of the files prefix + suffix (a glob pattern), by rank, all there and
    of one save.

    Raises:
        AssertionError: there are none, or not one of each rank.
        ValueError: a file is damaged, or of another save; the text names it.
    """
    pattern = ckpt_prefix + ckpt_suffix
    paths = [p for p in sorted(glob.glob(pattern)) if not _is_result(p, leave_out)]
    if not paths:
        raise AssertionError(f"Cannot find any files matching {pattern}.")
    shards = sorted(map(read_shard, paths), key=lambda shard: shard.rank)
    _check_ranks(shards, pattern)
    for shard in shards[1:]:
        _check_same_save(shards[0], shard)
    return shards


def _is_result(path: str, leave_out: str) -> bool:
    """Was it written by an earlier call?"""
    return os.path.splitext(path)[0].endswith("_consolidated") or bool(
        leave_out and os.path.abspath(path) == os.path.abspath(leave_out)
    )


def _check_ranks(shards: list[Shard], pattern: str) -> None:
    found = [shard.rank for shard in shards]
    for rank, shard in enumerate(shards):
        if shard.world_size != len(shards):
            missing = sorted(set(range(shard.world_size)) - set(found))
            raise AssertionError(
                f"Expecting {shard.world_size} files (based on metadata in "
                f"{shard.path}) but got {len(shards)} files. Matching {pattern} are "
                f"ranks {found}; missing are {missing}."
            )
        if shard.rank != rank:
            twice = [s.path for s in shards if found.count(s.rank) > 1]
            raise AssertionError(
                f"Expecting rank {shard.rank} for {shard.path} but it is ranked {rank} "
                f"of {len(shards)} files. Of the same rank are {twice}."
            )


_OF_THE_SAVE = ("shard_info", "flatten_info", "buffer_info", "shared_info")


def _check_same_save(first: Shard, other: Shard) -> None:
    for key in _OF_THE_SAVE:
        a, b = first.metadata.get(key, {}), other.metadata.get(key, {})
        if a != b:
            names = sorted(set(a) ^ set(b)) or [n for n in a if a[n] != b[n]]
            raise ValueError(
                f"{other.path}: its {key} is not that of {first.path}, see "
                f"{names[0]!r}; they are of different models or saves"
            )
    if first.model.keys() != other.model.keys():
        name = sorted(first.model.keys() ^ other.model.keys())[0]
        raise ValueError(
            f"{other.path} and {first.path}: only one of them has the tensor {name!r}"
        )
    for name, mine in first.model.items():
        theirs = other.model[name]
        if (mine.tag, mine.shape) != (theirs.tag, theirs.shape):
            raise ValueError(
                f"{other.path}: tensor {name!r} is {theirs.tag} of shape "
                f"{theirs.shape}, in {first.path} {mine.tag} of shape {mine.shape}"
            )
