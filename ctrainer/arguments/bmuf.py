"""The options of local steps, from TrainingArguments."""

from __future__ import annotations

from typing import Any

# Defaults of the fields, by the algorithm.
_DEFAULTS: dict[str, dict[str, float]] = {
    "use_bmuf": {
        "global_sync_iter": 50,
        "block_lr": 1.0,
        "block_momentum": 0.875,
        "warmup_iterations": 500,
    },
    "use_diloco": {
        "global_sync_iter": 500,
        "block_lr": 0.7,
        "block_momentum": 0.9,
        "warmup_iterations": 0,
    },
}


def way_of(args: Any) -> str | None:
    """ "use_bmuf", "use_diloco" or None, by training arguments.

    Raises ValueError where they contradict each other, or where options of blocks are
    set without either way.
    """
    asked = [way for way in _DEFAULTS if getattr(args, way, False)]
    if len(asked) == 2:
        raise ValueError("use_bmuf and use_diloco are both set; set one")
    given = [n for n in _DEFAULTS["use_bmuf"] if getattr(args, n, None) is not None]
    given += [n for n in ("use_nbm", "average_sync") if getattr(args, n, False)]
    given += ["delta_bits"] if getattr(args, "delta_bits", 32) != 32 else []
    given += ["overlap_steps"] if getattr(args, "overlap_steps", 0) != 0 else []
    if given and not asked:
        raise ValueError(
            f"{given[0]} is an option of local steps: set use_bmuf or use_diloco, too"
        )
    if asked == ["use_diloco"] and args.use_nbm:
        raise ValueError("use_nbm is an option of use_bmuf; use_diloco has its own")
    return asked[0] if asked else None


def options_of(args: Any, way: str) -> dict[str, Any]:
    """The options of ctrainer.BMUF by their names."""
    options = {
        name: default if getattr(args, name) is None else getattr(args, name)
        for name, default in _DEFAULTS[way].items()
    }
    own = ("use_nbm", "average_sync", "delta_bits", "overlap_steps")
    return {**options, **{name: getattr(args, name) for name in own}}
