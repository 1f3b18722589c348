"""What a program that ranks.run starts as the ranks of a run knows of itself."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

if os.environ.get("CTRAINER_TEST_ON_DEVICE") == "1":
    import on_device

    on_device.emulate()

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
folder: str = sys.argv[1]
options: dict[str, Any] = json.loads(sys.argv[2])


def tell(value: Any) -> None:
    """Hand a JSON value to the test; the last one counts."""
    with open(f"{folder}/told{rank}.json", "w") as file:
        json.dump(value, file)


def join_gloo(seconds: float = 60.0) -> None:
    """Join the ranks as a gloo group of torch.distributed. It is left at the end:
    gloo's threads may otherwise find the process half taken down."""
    import atexit
    from datetime import timedelta

    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world,
        timeout=timedelta(seconds=seconds),
    )  # fmt: skip
    atexit.register(dist.destroy_process_group)
