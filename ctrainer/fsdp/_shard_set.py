"""The shard files of one save: one of each rank, read as one set."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Sequence

from ctrainer.fsdp._shards import Shard, read_shard
from ctrainer.fsdp._together import SAVING


def find_shards(
    ckpt_prefix: str, ckpt_suffix: str, results: Sequence[str] = ()
) -> list[Shard]:
    """The shards of the files prefix + suffix (a glob pattern), by rank, all there and
    of one save. Of `results`, and of "*_consolidated" files, those that are no shards
    are left out: an earlier call wrote them.

    Raises:
        AssertionError: there are none, or not one of each rank.
        ValueError: a file is damaged, or of another save; the text names it.
    """
    pattern = ckpt_prefix + ckpt_suffix
    paths = shard_paths(ckpt_prefix, ckpt_suffix, results)
    if not paths:
        raise AssertionError(
            f"Cannot find any files matching {pattern}. {_what_is_there(ckpt_prefix)}"
        )
    shards = sorted(map(read_shard, paths), key=lambda shard: shard.rank)
    _check_ranks(shards, pattern)
    for shard in shards[1:]:
        _check_same_save(shards[0], shard)
    return shards


def shard_paths(prefix: str, suffix: str, results: Sequence[str] = ()) -> list[str]:
    """The files that prefix + suffix names, but those of earlier calls."""
    found = sorted(glob.glob(prefix + suffix))
    return [path for path in found if not _is_result(path, results)]


def check_none_is_replaced(shards: Iterable[Shard], results: Iterable[str]) -> None:
    """Shards are read while results are written: raise ValueError where they meet."""
    read = {os.path.realpath(shard.path) for shard in shards}
    for path in results:
        if os.path.realpath(path) in read:
            raise ValueError(
                f"{path} is one of the shards to read and would be replaced; give "
                "another save_path"
            )


def _is_result(path: str, results: Sequence[str]) -> bool:
    """Was it written by an earlier call, or left by one that was killed?"""
    if path.endswith(SAVING):
        return True
    stem = os.path.splitext(path)[0].removesuffix(".optimizer")
    named = os.path.realpath(path) in map(os.path.realpath, results)
    return stem.endswith("_consolidated") or (named and not _is_shard(path))


def _is_shard(path: str) -> bool:
    try:
        read_shard(path)
    except (ValueError, OSError):
        return False
    return True


def _what_is_there(prefix: str) -> str:
    """For who gave a pattern that matches nothing."""
    folder = os.path.dirname(prefix) or "."
    if os.path.isdir(prefix) and not prefix.endswith(os.sep):
        return f"{prefix} is a folder: let ckpt_prefix end with {os.sep!r}."
    if not os.path.isdir(folder):
        return f"There is no folder {folder}."
    beginning = os.path.basename(prefix)
    names = sorted(n for n in os.listdir(folder) if n.startswith(beginning))
    if not names:
        return f"No name in the folder {folder} begins with {beginning!r}."
    return f"There are {names[:3]}: give a ckpt_suffix that matches the shards."


def _check_ranks(shards: list[Shard], pattern: str) -> None:
    for rank, shard in enumerate(shards):
        if shard.world_size != len(shards):
            raise AssertionError(
                f"Expecting {shard.world_size} files (based on metadata in "
                f"{shard.path}) but got {len(shards)} files. "
                f"{_why_not_one_of_each(shards, pattern)}"
            )
        if shard.rank != rank:
            raise AssertionError(
                f"Expecting rank {shard.rank} for {shard.path} but it is ranked {rank} "
                f"of {len(shards)} files. {_why_not_one_of_each(shards, pattern)}"
            )


def _why_not_one_of_each(shards: list[Shard], pattern: str) -> str:
    found = [shard.rank for shard in shards]
    by_size = {shard.world_size: shard.path for shard in shards}
    one_save = "let ckpt_prefix and ckpt_suffix match the files of one save."
    if len(by_size) > 1:
        examples = " and ".join(f"of {n} ranks {path}" for n, path in by_size.items())
        return f"Matching {pattern} are files of several saves, {examples}: {one_save}"
    twice = [shard.path for shard in shards if found.count(shard.rank) > 1]
    if twice:
        return f"Of the same rank are {twice}: {one_save}"
    missing = sorted(set(range(shards[0].world_size)) - set(found))
    return f"Matching {pattern} are ranks {found}; missing are {missing}."


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
