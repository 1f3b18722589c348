"""`ctrainer replay crash.pt`: an update of fairseq's Trainer that failed, once more.

The file holds the run's configuration, from which task, model and criterion are made as
fairseq-train makes them. It is read as plain data; what the run imported, its
--user-dir, is imported again.
"""

from __future__ import annotations

import os
from typing import Any

from ctrainer.adapters import torch_fairseq as tools
from ctrainer.adapters.nan_detector import NanDetector, NonFiniteError

__all__ = ["replay"]


def replay(crash: str, trainer: Any) -> str:
    """Run forward and backward pass of a failed update again, and return what went
    wrong in it.

    The weights, the number of updates and the random numbers are those of the failed
    update. Stops at the first module and tensor that is not finite or raises.

    Args:
        crash (str): The file of the failed update.
        trainer: A Trainer of the same config.

    Raises:
        ValueError: `crash` is no such file.
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


def run_again(crash: str, setup: Any) -> int:
    """What `ctrainer replay crash.pt` does; 0 when the failure was found again.

    setup: makes the Trainer of the config, as nested dicts; None: as fairseq-train.
    """
    if not os.path.isfile(crash):
        raise SystemExit(f"there is no file {crash}")
    crash = os.path.abspath(crash)
    state = tools.load_file(crash)
    if "crash" not in state:
        raise SystemExit(f"{crash} is a checkpoint and holds no failed update")
    cfg = state["cfg"]
    for group in ("distributed_training", "bmuf"):
        if group in cfg:  # what one worker did is repeated by itself
            cfg[group]["distributed_world_size"] = 1
    if setup is None:
        trainer = _trainer_of_the_run(cfg, state["crash"].get("folder"))
    else:
        trainer = setup(cfg)
    verdict = replay(crash, trainer)
    print(verdict)
    return 1 if verdict.startswith("nothing") else 0


def _trainer_of_the_run(cfg: dict[str, Any], folder: str | None) -> Any:
    """What fairseq-train made of the config, in the folder where it ran, since paths
    may be relative to it."""
    from ctrainer.fairseq import train

    missing = sorted({"common", "task", "model", "criterion"} - cfg.keys())
    if missing or "data" not in cfg["task"]:
        raise SystemExit(
            "the run was no fairseq-train: its config has no "
            f"{', '.join(missing) or 'task.data'}. Give --setup MODULE:FUNCTION, a "
            "function that gets the config and returns the Trainer"
        )
    if folder is not None and os.path.isdir(folder):
        os.chdir(folder)
    return train.trainer_of(cfg)
