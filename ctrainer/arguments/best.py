"""The metrics by which save_best_limit keeps checkpoints."""

from __future__ import annotations

from typing import Any


def best_metrics(args: Any) -> dict[str, bool]:
    """By name, as evaluations have it: is a higher value better? Empty without
    save_best_limit.

    Raises ValueError for a metric that occurs twice or has no name.
    """
    if getattr(args, "save_best_limit", None) is None:
        return {}
    own, found = args.metric_for_best_model, {}
    for given in args.save_best_metrics or [own or "loss"]:
        stem, _, way = given.rpartition(":")
        name, known = (stem, way) if way in ("min", "max") else (given, None)
        name = "eval_" + name.removeprefix("eval_")
        if name == "eval_" or name in found:
            raise ValueError(
                f"save_best_metrics={args.save_best_metrics!r} has {given!r}, which "
                "is empty or occurs twice; name each metric once"
            )
        if known is not None:
            found[name] = known == "max"
        elif name == f"eval_{(own or '').removeprefix('eval_')}":
            found[name] = bool(args.greater_is_better)
        else:
            found[name] = not name.endswith("loss")
    return found
