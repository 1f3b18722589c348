"""`python -m ctrainer replay crash.pt`: the update that failed, once more."""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module
from typing import Any

from ctrainer.adapters import torch_fairseq as tools
from ctrainer.adapters.nan_detector import NanDetector, NonFiniteError

__all__ = ["replay"]


def main(arguments: list[str]) -> int:
    """The command; 0 when the failure was found again."""
    parser = argparse.ArgumentParser(
        prog="python -m ctrainer replay",
        description="Run the update of a crash.pt again.",
    )
    parser.add_argument("crash", help="the file that a failed update has left")
    parser.add_argument(
        "--setup",
        required=True,
        metavar="MODULE:FUNCTION",
        help="called with the run's config, as nested dicts, for one worker; returns "
        "its Trainer",
    )
    return _run(parser.parse_args(arguments))


def replay(crash: str, trainer: Any) -> str:
    """Run forward and backward of the update again and say what went wrong in it.

    The weights, the number of updates and the random numbers are those of the failed
    update. Stops at the first module and tensor that is not finite or raises.

    Raises ValueError where `crash` is no file of a failed update.
    """
    state = tools.load_file(crash)
    if "crash" not in state:
        raise ValueError(f"{crash} is a checkpoint and holds no failed update")
    failed = state["crash"]
    trainer.load_checkpoint(crash, reset_meters=True)
    trainer.reset_dummy_batch(failed["dummy_batch"])
    if failed["rng"] is not None:
        tools.set_rng_state(failed["rng"])
    roots = {"model": trainer.get_model(), "criterion": trainer.get_criterion()}
    detector = NanDetector(roots, stop=True)
    try:
        with detector:
            trainer._repeat_step(failed["samples"])
    except NonFiniteError as error:
        return f"not finite: {error}"
    except Exception as error:
        where = detector.first_raising or "outside of the model and the criterion"
        return f"raised in {where}: {type(error).__name__}: {error}"
    return f"nothing failed this time; then it was {failed['error']}"


def _run(options: argparse.Namespace) -> int:
    module, _, function = options.setup.partition(":")
    if not function:
        raise SystemExit(f"--setup is {options.setup!r}; expected MODULE:FUNCTION")
    if not os.path.isfile(options.crash):
        raise SystemExit(f"there is no file {options.crash}")
    sys.path.insert(0, os.getcwd())
    setup = getattr(import_module(module), function)
    cfg = tools.load_file(options.crash)["cfg"]
    if "distributed_training" in cfg:  # what one worker did is repeated by itself
        cfg["distributed_training"]["distributed_world_size"] = 1
    verdict = replay(options.crash, setup(cfg))
    print(verdict)
    return 1 if verdict.startswith("nothing") else 0
