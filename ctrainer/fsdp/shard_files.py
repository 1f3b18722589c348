"""A rank's own shard file: written and read back."""

from __future__ import annotations

import os
from typing import Any

from ctrainer.checkpoint.files import unchanged
from ctrainer.fsdp import _files
from ctrainer.fsdp._shards import read_shard
from ctrainer.fsdp._stored import Item, Stored


def save_shard(content: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Write what one rank has to save, whole or not at all.

    Args:
        content: {"model": module.state_dict(), "shard_metadata":
            module.get_shard_metadata()}, and "optimizer": optimizer.state_dict() if
            it is to be saved. What is under other keys, such as a step, is saved, too.
        path: ".safetensors", with all that is no tensor as JSON in the metadata, or
            else torch.save's format; both hold plain types only, so that they can be
            read with weights_only=True.

    Raises:
        ValueError: something is neither a tensor nor JSON; or a key of its own is
            "names", or has tensors, and the file is to be a safetensors file.
        OSError: of the disk; what was at path is still there then.
    """
    made = {key: _map(_files.item_of, value) for key, value in content.items()}
    _files.write_shard(os.fspath(path), made)


def load_shard(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a file of `save_shard`, or of torch.save with the same keys, onto the CPU.

    Raises:
        ValueError: it is damaged or no shard file; the text names it.
    """
    with unchanged(path):
        shard = read_shard(os.fspath(path))
        content = {"model": shard.model, "shard_metadata": shard.metadata, **shard.more}
        if shard.optimizer is not None:
            content["optimizer"] = shard.optimizer
        return tensors_of(content)


def tensors_of(content: dict[str, Any]) -> dict[str, Any]:
    """The content of a shard with what lies in files read into memory."""
    return {key: _map(_tensor, value) for key, value in content.items()}


def _tensor(value: Any) -> Any:
    item = _files.item_of(value) if isinstance(value, Stored) else value
    return _files.tensor_of(item) if isinstance(item, Item) else value


def _map(change: Any, value: Any) -> Any:
    """`change` of everything below dicts and lists."""
    if isinstance(value, dict):
        return {key: _map(change, v) for key, v in value.items()}
    if isinstance(value, list):
        return [_map(change, v) for v in value]
    return change(value)
