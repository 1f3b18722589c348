"""fairseq's call_main() starts the ranks."""

import atexit
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from ctrainer.fairseq import distributed

noted = []


@atexit.register  # before the group is joined, so it runs after the group is left
def note_threads():
    """Write the names of gloo's threads that the end of Python would meet, and whether
    the slow rank has ended."""
    for path in noted:
        names = [each.read_text() for each in Path("/proc/self/task").glob("*/comm")]
        slow = ["slow"] if path.with_name("slow").exists() else []
        path.write_text("".join([*(name for name in names if "gloo" in name), *slow]))


def main(cfg, folder):
    import torch
    import torch.distributed as dist

    total = torch.ones(1) + dist.get_rank()
    dist.all_reduce(total)
    rank = cfg.distributed_training.distributed_rank
    noted.append(Path(folder, f"threads{rank}"))
    open(f"{folder}/{rank}", "w").write(f"{dist.get_backend()} {total.item()}")
    if sys.argv[2] == "fail" and rank == 1:
        raise RuntimeError("rank 1 has had enough")
    dist.barrier()
    if sys.argv[2] == "slow" and rank == 1:
        time.sleep(1)
        Path(folder, "slow").touch()


if __name__ == "__main__":
    group = SimpleNamespace(
        distributed_init_method=None,
        distributed_world_size=2,
        distributed_rank=0,
        distributed_port=-1,
        distributed_no_spawn=False,
        distributed_num_procs=None,
        distributed_backend="nccl",
        device_id=0,
        heartbeat_timeout=60,
    )
    cfg = SimpleNamespace(distributed_training=group, common=SimpleNamespace(cpu=True))
    distributed.call_main(cfg, main, folder=sys.argv[1])
