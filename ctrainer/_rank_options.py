"""How the batches of a run are dealt out to its ranks: accelerator_config, read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# What each setting of accelerate may be; the first is its default.
ACCEPTED: dict[str, tuple[Any, ...]] = {
    "split_batches": (False, True),
    "dispatch_batches": (None, True, False),
    "even_batches": (True, False),
    "use_seedable_sampler": (True,),
    "non_blocking": (False, True),
    "gradient_accumulation_kwargs": (None, {}),
    "use_configured_state": (False,),
}


def as_dict(config: Any) -> dict[str, Any]:
    """accelerator_config, None, a dict or transformers' object, as a dict."""
    if hasattr(config, "to_dict"):
        config = config.to_dict()
    return dict(config or {})


def accepts(config: Any) -> bool:
    """Is every setting one that is honoured?"""
    given = as_dict(config) if not isinstance(config, str) else {config: None}
    return all(
        name in ACCEPTED and value in ACCEPTED[name] for name, value in given.items()
    )


@dataclass(frozen=True, slots=True)
class Dealing:
    """Which of a run's batches this rank gets; the flags are accelerate's."""

    rank: int
    world_size: int
    split_batches: bool
    dispatch_batches: bool | None
    even_batches: bool
    drops_last: bool  # a round that is not whole, where the loader drops its last batch

    @property
    def evaluates(self) -> bool:
        """Each row once, each batch whole; in training only whole rounds count."""
        return not self.drops_last


def dealing(args: Any, training: bool) -> Dealing | None:
    """How `args` say that batches are dealt out; None for a run of one process.

    Every row is evaluated once, so batches are even in training alone.
    """
    if args.world_size == 1:
        return None
    given = {name: values[0] for name, values in ACCEPTED.items()}
    given.update(as_dict(getattr(args, "accelerator_config", None)))
    return Dealing(
        args.process_index, args.world_size, given["split_batches"],
        given["dispatch_batches"], training and given["even_batches"], training,
    )  # fmt: skip
