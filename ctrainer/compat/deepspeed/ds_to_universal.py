"""Universal checkpoints of DeepSpeed's checkpoints, which load in DeepSpeed on any
number of ranks: as a call, and as the command `ctrainer ds-to-universal` or
`python -m ctrainer.compat.deepspeed.ds_to_universal`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Iterator
from typing import Any

import torch

from ctrainer.compat.deepspeed._files import (
    Checkpoint,
    State,
    save,
    scalars_of,
    write_latest,
)
from ctrainer.runtime.command_line import HelpFormatter

__all__ = ["convert_zero_checkpoint_to_universal", "main"]

# What rank 0 has of the parameters, which are in files of their own.
_SHARDED = {
    "base_optimizer_state", "param_slice_mappings",
    "single_partition_of_fp32_groups", "fp32_flat_groups",
}  # fmt: skip


def convert_zero_checkpoint_to_universal(input_folder: str, output_folder: str) -> None:
    """Write a checkpoint of DeepSpeed's or of save_checkpoint(), of the stages 1 to 3,
    as a universal one, and name it in `latest_universal` beside it.

    One value of one parameter after the other is put together, so that the largest of
    them bounds the memory.

    Args:
        input_folder (str): The checkpoint: the folder that `latest` names.
        output_folder (str): The folder to write in, which is made. Files of an earlier
            conversion in it are replaced.

    Raises:
        FileNotFoundError: there is no such checkpoint, or it has no files of an
            optimizer of ZeRO, as one of stage 0 in float32.
        ValueError: it is universal already; both folders are the same; a file that
            cannot be read, or has objects that are no plain data; the name of a
            parameter that is no name of a folder.

    Source: DeepSpeed 0.19, checkpoint/ds_to_universal.py.
    """
    found = Checkpoint(input_folder)
    if found.universal:
        raise ValueError(f"{input_folder} is a universal checkpoint already")
    if not found.ranks:
        raise FileNotFoundError(
            f"can't find *_optim_states.pt files in directory '{input_folder}'"
        )
    output_folder = os.path.normpath(output_folder)
    if os.path.realpath(output_folder) == os.path.realpath(input_folder):
        raise ValueError("output_folder is the checkpoint's own: name another one")
    zero = os.path.join(output_folder, "zero")
    shutil.rmtree(zero, ignore_errors=True)
    os.makedirs(zero)
    for name, key, content in _contents(found):
        place = os.path.join(zero, _checked(name))
        os.makedirs(place, exist_ok=True)
        save(content, os.path.join(place, f"{key}.pt"))
    save(_common(found), os.path.join(zero, "optimizer_state.pt"))
    for path in found.model_paths:
        shutil.copy2(path, output_folder)
    root, tag = os.path.split(output_folder)
    write_latest(root, tag, "latest_universal")


def _checked(name: str) -> str:
    if os.path.basename(name) != name or name in ("", ".", ".."):
        raise ValueError(f"the parameter {name!r} is no name of a folder")
    return name


def _contents(found: Checkpoint) -> Iterator[tuple[str, str, Any]]:
    """The parameters' names, and the key and the content of each of their files."""
    for name in found.parameters:
        for key in ("fp32", *found.keys_of(name)):
            value = found.value(name, key)
            is_flat = isinstance(value, torch.Tensor) and value.dim() > 0
            if found.stage == 3:
                if key == "fp32" or is_flat:  # all have the same counts
                    yield name, key, value.view(-1)
            else:
                yield name, key, {"cat_dim": 0, "param": value} if is_flat else value
    if found.stage < 3:
        for name, make in found.weights().make.items():
            if name not in found.parameters:
                yield name, "fp32", {"param": make().float()}


def _common(found: Checkpoint) -> State:
    """What rank 0 has beside parameters."""
    kept = {k: v for k, v in found.common.items() if k not in _SHARDED}
    if found.stage == 3:
        base = kept["optimizer_state_dict"]
        state = {flat: scalars_of(of) for flat, of in base["state"].items()}
        kept["optimizer_state_dict"] = base | {"state": state}
    return kept | {"param_groups": found.param_groups()}


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit status.

    Args:
        arguments (list[str] | None, default None): Of the command line; None: the
            process's.
    """
    parser = argparse.ArgumentParser(
        prog="ctrainer ds-to-universal",
        description="Write a checkpoint of DeepSpeed as a universal one.",
        formatter_class=HelpFormatter,
    )
    parser.add_argument(
        "--input_folder", required=True, help="Folder of the checkpoint."
    )
    parser.add_argument("--output_folder", required=True, help="Folder to write in.")
    for name in ("extract", "merge"):
        parser.add_argument(
            f"--num_{name}_workers", type=int, default=1,
            help="No effect: one process reads and writes a parameter at a time.",
        )  # fmt: skip
    for name, why in {
        "keep_temp_folder": "there is no temporary folder",
        "no_strict": "there are no patterns of names to check",
        "inject_missing_state": "no such state is needed",
    }.items():
        parser.add_argument(f"--{name}", action="store_true", help=f"No effect: {why}.")
    given = parser.parse_args(arguments)
    try:
        convert_zero_checkpoint_to_universal(given.input_folder, given.output_folder)
    except (ValueError, OSError) as problem:
        parser.exit(1, f"{parser.prog}: {problem}\n")
    print(f"saved to {given.output_folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
