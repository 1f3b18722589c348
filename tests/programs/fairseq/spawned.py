"""fairseq's call_main() starts the ranks."""

import sys
from types import SimpleNamespace

from ctrainer.fairseq import distributed


def main(cfg, folder):
    import torch
    import torch.distributed as dist

    total = torch.ones(1) + dist.get_rank()
    dist.all_reduce(total)
    rank = cfg.distributed_training.distributed_rank
    open(f"{folder}/{rank}", "w").write(f"{dist.get_backend()} {total.item()}")
    if sys.argv[2] == "fail" and rank == 1:
        raise RuntimeError("rank 1 has had enough")
    dist.barrier()


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
