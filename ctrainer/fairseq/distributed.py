"""Start of the processes of a run, and their rendezvous: fairseq's distributed init.

Source: fairseq, fairseq/distributed/utils.py: infer_init_method, distributed_init and
call_main, and the group `distributed_training` of its config.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import Any

__all__ = [
    "call_main",
    "distributed_init",
    "distributed_main",
    "infer_init_method",
    "is_master",
]

logger = logging.getLogger(__name__)


def is_master(cfg: Any) -> bool:
    """Return whether this is the process of rank 0.

    Args:
        cfg: The group distributed_training.
    """
    return (cfg.distributed_rank or 0) == 0


def infer_init_method(cfg: Any, force_distributed: bool = False) -> None:
    """Fill in how the processes find each other, unless cfg says it.

    In this order: the variables MASTER_ADDR, MASTER_PORT, WORLD_SIZE and RANK, as
    torchrun sets them; SLURM's, where distributed_port is above 0; a free port of this
    machine, where the world size is above 1 or force_distributed is set. Else cfg stays
    as it is: one process trains.

    Args:
        cfg: The group distributed_training, whose distributed_init_method, _rank,
            _world_size, _no_spawn and device_id are set.
        force_distributed (bool, default False): Make a group of one process, too.

    Raises:
        ValueError: SLURM's variables contradict cfg; the message names both.
    """
    if cfg.distributed_init_method is not None:
        return
    names = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
    if all(name in os.environ for name in names):
        _from_environment(cfg)
    elif cfg.distributed_port > 0 and "SLURM_STEP_NODELIST" in os.environ:
        _from_slurm(cfg)
    elif cfg.distributed_world_size > 1 or force_distributed:
        cfg.distributed_init_method = f"tcp://localhost:{_free_port()}"
        cfg.distributed_num_procs = cfg.distributed_world_size


def _from_environment(cfg: Any) -> None:
    cfg.distributed_init_method = "env://"
    cfg.distributed_world_size = int(os.environ["WORLD_SIZE"])
    cfg.distributed_rank = int(os.environ["RANK"])
    cfg.device_id = int(os.environ.get("LOCAL_RANK", cfg.device_id))
    cfg.distributed_no_spawn = True  # torchrun has started one process a rank


def _free_port() -> int:
    with socket.create_server(("localhost", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _from_slurm(cfg: Any) -> None:
    nodes = os.environ["SLURM_STEP_NODELIST"]
    hosts = subprocess.check_output(
        ["scontrol", "show", "hostnames", nodes], text=True, timeout=60
    )
    cfg.distributed_init_method = f"tcp://{hosts.split()[0]}:{cfg.distributed_port}"
    node_count, tasks = (int(os.environ[f"SLURM_{n}"]) for n in ("NNODES", "NTASKS"))
    if tasks == node_count:  # a task a node: the others are started here
        each, rest = divmod(cfg.distributed_world_size, node_count)
        if rest:
            raise ValueError(
                f"distributed_world_size is {cfg.distributed_world_size}: no multiple "
                f"of SLURM's {node_count} nodes, of which each has one task"
            )
        cfg.distributed_num_procs = each
        cfg.distributed_rank = int(os.environ["SLURM_NODEID"]) * each
        return
    if tasks != cfg.distributed_world_size:
        raise ValueError(
            f"distributed_world_size is {cfg.distributed_world_size}, and SLURM has "
            f"started {tasks} tasks; expected one a worker, or one a node"
        )
    cfg.distributed_no_spawn = True
    cfg.distributed_rank = int(os.environ["SLURM_PROCID"])
    cfg.device_id = int(os.environ["SLURM_LOCALID"])


def distributed_init(cfg: Any) -> int:
    """Join the group of processes that a whole config describes; return the rank.

    Does nothing but set the rank where torch.distributed is initialised already. The
    backend nccl means gloo where the run is on the CPU. Processes but the first log
    warnings only.

    Args:
        cfg: A FairseqConfig; heartbeat_timeout above 0 is the seconds after which a
            collective gives up on the others, else half an hour.

    Raises:
        ValueError: distributed_init_method is None: call infer_init_method() first.
    """
    from ctrainer.comm import processes

    group = cfg.distributed_training
    if processes.is_initialized():
        logger.warning("Distributed is already initialized, cannot initialize twice!")
    elif group.distributed_init_method is None:
        raise ValueError(
            "distributed_training.distributed_init_method is None: call "
            "infer_init_method(cfg.distributed_training) first, or give the address, "
            "such as tcp://host:port"
        )
    on_gpus = processes.gpus() > 0 and not cfg.common.cpu
    logger.info(
        "distributed init (rank %s): %s",
        group.distributed_rank,
        group.distributed_init_method,
    )
    group.distributed_rank = processes.join(
        processes.backend_for(group.distributed_backend, on_gpus),
        group.distributed_init_method,
        group.distributed_rank,
        group.distributed_world_size,
        group.heartbeat_timeout
        if group.heartbeat_timeout > 0
        else processes.DEFAULT_TIMEOUT_SECONDS,
    )
    logging.getLogger().setLevel(logging.INFO if is_master(group) else logging.WARNING)
    rank: int = group.distributed_rank
    return rank


def distributed_main(
    i: int, main: Callable[..., Any], cfg: Any, kwargs: dict[str, Any]
) -> Any:
    """Run main(cfg, **kwargs) as process i of this machine within the group, and return
    its result.

    Args:
        i (int): From 0.
        main (Callable[..., Any]): The program.
        cfg: A FairseqConfig.
        kwargs (dict[str, Any]): May hold start_rank, the rank of this machine's first
            process, and after_distributed_init_fn, called with cfg, which it may
            replace.
    """
    from ctrainer.comm import processes

    group, found = cfg.distributed_training, processes.is_initialized()
    group.device_id = i
    if processes.gpus() > 0 and not cfg.common.cpu:
        processes.use_gpu(i)
    if group.distributed_rank is None:  # started by call_main
        group.distributed_rank = kwargs.pop("start_rank", 0) + i
    group.distributed_rank = distributed_init(cfg)
    after = kwargs.pop("after_distributed_init_fn", None)
    if after:
        cfg = after(cfg)
    try:
        result = main(cfg, **kwargs)
        processes.wait_for_all()
    except Exception:
        # Others fail of this one's end, and may be the first that their parent sees.
        print(
            f"rank {group.distributed_rank}: {traceback.format_exc()}", file=sys.stderr
        )
        raise
    if not found:  # one that fails ends first, so that its own exception is seen
        processes.leave()
    return result


def call_main(cfg: Any, main: Callable[..., Any], **kwargs: Any) -> Any:
    """Run main(cfg, **kwargs) in every process of the run that starts from here.

    Processes are started where cfg.distributed_training asks for several and none has
    been started yet; when one fails the others are ended. main has to be importable by
    its name then.

    Args:
        cfg: A FairseqConfig.
        main (Callable[..., Any]): The program.
        **kwargs: Of main.

    Returns:
        What main returns where it runs in this process, else None.
    """
    from ctrainer.comm import processes

    group = cfg.distributed_training
    if group.distributed_init_method is None:
        infer_init_method(group)
    if group.distributed_init_method is None:
        return main(cfg, **kwargs)
    if group.distributed_no_spawn:
        return distributed_main(group.device_id, main, cfg, kwargs)
    kwargs["start_rank"] = group.distributed_rank or 0
    group.distributed_rank = None  # each process has its own
    count = group.distributed_num_procs or group.distributed_world_size
    processes.start(
        distributed_main,
        (main, cfg, kwargs),
        min(count, group.distributed_world_size),
    )
    return None


# fairseq has a package of this name, and all of this in its module `utils`.
sys.modules[f"{__name__}.utils"] = sys.modules[__name__]
