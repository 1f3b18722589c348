"""Shard files, of the original and ours: what one rank saved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ctrainer import _C
from ctrainer.checkpoint.files import parse_json
from ctrainer.fsdp._shard_checks import check_metadata, check_optimizer, is_list_of
from ctrainer.fsdp._shard_layout import Part, parts_of
from ctrainer.fsdp._stored import Stored, read_safetensors_index
from ctrainer.fsdp._torch_archive import read_archive

METADATA_KEY = "ctrainer.shard"
MODEL = "model."
OPTIMIZER = "optimizer."
KEYS = (
    "model",
    "shard_metadata",
    "optimizer",
)  # of a shard; what else is there is more
Metadata = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Shard:
    """What one rank saved. `model`, the optimizer's state and `more`, what was saved
    under keys of its own, hold Stored tensors."""

    path: str
    model: dict[str, Stored]
    metadata: Metadata
    optimizer: dict[str, Any] | None
    more: dict[str, Any]

    @property
    def rank(self) -> int:
        return int(self.metadata["rank"])

    @property
    def world_size(self) -> int:
        return int(self.metadata["world_size"])

    def parts(self) -> list[Part]:
        """Every tensor of the unsharded module.

        Raises ValueError, which names the file, where metadata and tensors do not fit.
        """
        try:
            return parts_of(self.model, self.metadata)
        except ValueError as problem:
            raise ValueError(f"{self.path}: {problem}") from None


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
    if not isinstance(model, dict):
        raise ValueError(f"{path}: holds no 'model', which must be a state_dict")
    check_metadata(path, metadata)
    tensors = {name: t for name, t in model.items() if isinstance(t, Stored)}
    more = {key: value for key, value in content.items() if key not in KEYS}
    return Shard(path, tensors, metadata, content.get("optimizer"), more)


def described(path: str) -> tuple[list[str], Metadata]:
    """The names of the tensors of a rank's model in its safetensors file, and the
    metadata; the data is not read."""
    metadata, _ = _C.safetensors_index(path)
    content = _described(path, metadata.get(METADATA_KEY, "null"))
    names = [name.removeprefix(MODEL) for name in content["names"]]
    return names, content["shard_metadata"]


def _described(path: str, text: str) -> dict[str, Any]:
    """What the metadata of a safetensors file says of the shards in it."""
    content = parse_json(text, f"{path}: {METADATA_KEY}")
    if not isinstance(content, dict) or not is_list_of(str, content.get("names")):
        raise ValueError(
            f"{path}: its {METADATA_KEY!r} has no list of 'names'; it is not of a "
            "rank's shards, which ctrainer.fsdp.save_shard writes"
        )
    return content


def _read_safetensors(path: str) -> dict[str, Any]:
    metadata, tensors = read_safetensors_index(path)
    if METADATA_KEY not in metadata:
        return {}
    content = _described(path, metadata[METADATA_KEY])
    content["model"] = {
        name.removeprefix(MODEL): tensor
        for name in content.pop("names")
        if (tensor := tensors.get(name)) is not None
    }
    optimizer = content.get("optimizer")
    if optimizer is not None:
        check_optimizer(path, optimizer)
        optimizer["state"] = {
            int(index): {
                name: tensors.get(f"{OPTIMIZER}{index}.{name}", value)
                for name, value in state.items()
            }
            for index, state in optimizer["state"].items()
        }
    return content
