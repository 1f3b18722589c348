"""Whole float32 weights of DeepSpeed's checkpoints: as calls, and as the command
`ctrainer zero-to-fp32` or `python -m ctrainer.compat.deepspeed.zero_to_fp32`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ctrainer import _C
from ctrainer.compat.deepspeed._files import Checkpoint, Lazy, folder_of, save
from ctrainer.runtime.command_line import HelpFormatter

__all__ = [
    "convert_zero_checkpoint_to_fp32_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_state_dict_from_zero_checkpoint",
    "main",
]

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> Mapping[str, torch.Tensor]:
    """Return the whole weights of a checkpoint in float32, and its buffers.

    Args:
        checkpoint_dir (str): The folder that has the file `latest`.
        tag (str | None, default None): The name of the checkpoint in it; None: that in
            `latest`.
        exclude_frozen_parameters (bool, default False): Leave them out.
        lazy_mode (bool, default False): Return a mapping that reads a tensor where it
            is asked for, each time.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        ValueError: a file that cannot be read, or has objects that are no plain data.

    Source: DeepSpeed 0.19, utils/zero_to_fp32.py.
    """
    weights = _weights_of(checkpoint_dir, tag, exclude_frozen_parameters)
    if lazy_mode:
        return weights
    return _taken(weights, list(weights))


def _weights_of(checkpoint_dir: str, tag: str | None, without_frozen: bool) -> Lazy:
    return Checkpoint(folder_of(checkpoint_dir, tag)).weights(not without_frozen)


def _taken(weights: Lazy, names: list[str]) -> dict[str, torch.Tensor]:
    """The tensors of these names, one for all names of a tied parameter."""
    made = {weights.make[name]: name for name in names}
    tensors = {make: make() for make in made}
    return {name: tensors[weights.make[name]] for name in names}


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str, tag: str | None = None
) -> nn.Module:
    """Load the weights of a checkpoint into a model, which is moved to the CPU; return
    it.

    Args:
        model (nn.Module): The model, not sharded.
        checkpoint_dir (str): The folder that has the file `latest`.
        tag (str | None, default None): The name of the checkpoint in it.

    Raises:
        FileNotFoundError, ValueError: as get_fp32_state_dict_from_zero_checkpoint().
    """
    weights = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    model = model.cpu()
    model.load_state_dict(weights, strict=False)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str,
    output_dir: str,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the whole weights of a checkpoint as files that transformers loads.

    One file after the other is put together, so that its size bounds the memory.

    Args:
        checkpoint_dir (str): The folder that has the file `latest`.
        output_dir (str): The folder to write in, which is made.
        max_shard_size (str | int | None, default '5GB'): Bytes of a file, or as a text
            with KB, MB, GB or TB; None: one file.
        safe_serialization (bool, default False): Write safetensors rather than files of
            torch.save.
        tag (str | None, default None): The name of the checkpoint.
        exclude_frozen_parameters (bool, default False): Leave them out.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        ValueError: as get_fp32_state_dict_from_zero_checkpoint(); another size.
    """
    limit = _bytes_of(max_shard_size)
    weights = _weights_of(checkpoint_dir, tag, exclude_frozen_parameters)
    stem, ending = ("model", "safetensors") if safe_serialization else (
        "pytorch_model", "bin"
    )  # fmt: skip
    files, total = _files_of(weights, limit)
    os.makedirs(output_dir, exist_ok=True)
    place: dict[str, str] = {}
    for number, names in enumerate(files, 1):
        name = f"{stem}.{ending}"
        if len(files) > 1:
            name = f"{stem}-{number:05d}-of-{len(files):05d}.{ending}"
        place |= dict.fromkeys(names, name)
        state, path = _taken(weights, names), os.path.join(output_dir, name)
        if safe_serialization:
            _C.write_safetensors(path, state, {"format": "pt"})
        else:
            save(state, path)
        del state  # before the next one is put together
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": place}
        path = os.path.join(output_dir, f"{stem}.{ending}.index.json")
        with open(path, "w", encoding="utf-8") as file:
            file.write(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _bytes_of(size: str | int | None) -> float:
    if size is None:
        return float("inf")
    found = re.fullmatch(r"(\d+)\s*([KMGT]B)?", str(size).upper())
    if found is None or int(found[1]) == 0:
        raise ValueError(
            f"max_shard_size is {size!r}; expected a number of bytes, or text such as "
            "5GB"
        )
    return float(int(found[1]) * _UNITS.get(found[2], 1))


def _files_of(weights: Lazy, limit: float) -> tuple[list[list[str]], int]:
    """The names of each file, those of one parameter together, and all bytes."""
    same: dict[Any, list[str]] = {}
    for name in weights:
        same.setdefault(weights.make[name], []).append(name)
    files: list[list[str]] = []
    held = total = 0
    for make, names in same.items():
        size = make().nbytes
        if not files or held + size > limit:
            files.append([])
            held = 0
        files[-1] += names
        held, total = held + size, total + size
    return files, total


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit status.

    Args:
        arguments (list[str] | None, default None): Of the command line; None: the
            process's.
    """
    parser = argparse.ArgumentParser(
        prog="ctrainer zero-to-fp32",
        description="Write the whole float32 weights of a checkpoint of DeepSpeed.",
        formatter_class=HelpFormatter,
    )
    parser.add_argument("checkpoint_dir", help="Folder that has the file latest.")
    parser.add_argument("output_dir", help="Folder to write in.")
    parser.add_argument("--max_shard_size", default="5GB", help="Of a file.")
    parser.add_argument(
        "--safe_serialization", action="store_true", help="Write safetensors."
    )
    parser.add_argument("-t", "--tag", help="Name of the checkpoint.")
    parser.add_argument(
        "--exclude_frozen_parameters", action="store_true", help="Leave them out."
    )
    given = parser.parse_args(arguments)
    try:
        convert_zero_checkpoint_to_fp32_state_dict(**vars(given))
    except (ValueError, OSError) as problem:
        parser.exit(1, f"{parser.prog}: {problem}\n")
    print(f"saved to {given.output_dir}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
