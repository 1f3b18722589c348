"""Modules whose gradients are averaged over a process group, by fairseq's names.

Source: fairseq, fairseq/models/distributed_fairseq_model.py and
fairseq/distributed/legacy_distributed_data_parallel.py.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from ctrainer import _C
from ctrainer.bmuf import BMUF
from ctrainer.comm import nccl, parallel, run
from ctrainer.comm.data_parallel import DataParallel, ModuleShown, synchronize
from ctrainer.comm.process_group import shared_communicator

logger = logging.getLogger("ctrainer.fairseq.trainer")

# SlowMo's momentum, by default, of so many workers at most
_SLOW_MOMENTUM = ((16, 0.0), (32, 0.2), (64, 0.5), (math.inf, 0.6))

# Updates between two steps of that momentum, in fairscale
_SLOW_FREQUENCY = 48

# Newer releases call it so, and warn about the older name.
_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)


def wrap(options: Any, module: nn.Module, group: Any, device: Any) -> nn.Module:
    """The module in the wrapper that options.ddp_backend names.

    options: fairseq's group distributed_training; group: the process group; device:
    where the module is. Every rank of the group calls this: parameters and buffers
    become those of rank 0.

    Raises:
        ValueError: there is no such backend, or the hook does not go with it.
    """
    backend = getattr(options, "ddp_backend", "pytorch_ddp")
    hook = getattr(options, "ddp_comm_hook", "none")
    if backend in ("c10d", "pytorch_ddp"):
        return _parallel(options, module, group, device, hook)
    if backend not in ("no_c10d", "legacy_ddp", "slowmo"):
        raise ValueError(f"Unknown --ddp-backend: {backend}")
    if hook != "none":
        raise ValueError(
            f"distributed_training.ddp_comm_hook is {hook!r}: hooks are for "
            f"--ddp-backend=pytorch_ddp, and it is {backend}"
        )
    over = ranks(group, options)
    served = serves(over, device, options)
    if backend == "slowmo":
        momentum = _slow_momentum(options, over.world_size)
        return LocalDistributed(module, over, options.localsgd_frequency, momentum)
    return LegacyDistributed(module, group, over if served else None)


def wrap_apart(options: Any, module: nn.Module, group: Any, device: Any) -> nn.Module:
    """wrap(), but with pytorch_ddp, too, gradients are averaged after the backward
    passes, whose number may differ between ranks.

    Raises:
        ValueError: as wrap(), or an option of pytorch_ddp acts within its passes.
    """
    if getattr(options, "ddp_backend", "pytorch_ddp") not in ("c10d", "pytorch_ddp"):
        return wrap(options, module, group, device)
    for name, without in (("ddp_comm_hook", "none"), ("broadcast_buffers", False)):
        if (value := getattr(options, name, without)) != without:
            raise ValueError(
                f"distributed_training.{name} is {value!r}, and acts within a forward "
                "or backward pass, which split_oom_batches repeats on one rank alone: "
                f"leave out one of both, {name} or split_oom_batches"
            )
    over = ranks(group, options)
    served = serves(over, device, options)
    return LegacyDistributed(module, group, over if served else None)


def _parallel(
    options: Any, module: nn.Module, group: Any, device: Any, hook: str
) -> nn.Module:
    if hook not in ("none", "fp16"):
        raise ValueError(f"Unknown --ddp-comm-hook: {hook}")
    settings: dict[str, Any] = {
        "bucket_cap_mb": getattr(options, "bucket_cap_mb", 25),
        "find_unused_parameters": getattr(options, "find_unused_parameters", False),
        "gradient_as_bucket_view": getattr(options, "gradient_as_bucket_view", False),
    }
    buffers = getattr(options, "broadcast_buffers", False)
    over = ranks(group, options)
    if not serves(over, device, options):
        return _by_torch(module, group, device, hook, {**settings, _BUFFERS: buffers})
    return Distributed(
        module,
        over,
        broadcast_buffers=buffers,
        comm_hook="no" if hook == "none" else hook,
        **settings,
    )


def _by_torch(
    module: nn.Module, group: Any, device: Any, hook: str, settings: dict[str, Any]
) -> nn.Module:
    made = GPUDistributed(
        module, device_ids=[device.index or 0], process_group=group, **settings
    )
    if hook == "fp16":
        made.register_comm_hook(group, default_hooks.fp16_compress_hook)
    return made


def ranks(group: Any, options: Any) -> _C.Communicator:
    """What the processes of a group exchange everything over: the group of the run, in
    shared memory, where it is this process group on one machine; else the process
    group. The first call is a collective.

    options: fairseq's group distributed_training, whose heartbeat_timeout is how long
    ranks wait for each other where the call joins the run.
    """
    if group is not None:
        seconds = getattr(options, "heartbeat_timeout", -1)
        here = run.place()
        same = (here.rank, here.world_size) == (dist.get_rank(group), _size(group))
        if same and here.on_one_machine:
            return run.world(seconds if seconds > 0 else None)
    return shared_communicator(group)


def serves(over: _C.Communicator, device: Any, options: Any) -> bool:
    """Have the group exchange what is on a GPU over NCCL; false, with a warning that
    says why, where it cannot, or options.distributed_backend names another backend. A
    collective."""
    reason = ""
    if device.type != "cpu":
        backend = getattr(options, "distributed_backend", "nccl")
        reason = nccl.why_not_served(over, device, backend)
    if reason:
        logger.warning("what is on the GPUs is not exchanged by ctrainer: %s", reason)
    return not reason


def _size(group: Any) -> int:
    return dist.get_world_size(group)


class _Transparent(ModuleShown):
    """A wrapper that has the state of the module within, too."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)


class Distributed(_Transparent, DataParallel):
    """Gradients are averaged while the backward pass runs."""


class GPUDistributed(_Transparent, DistributedDataParallel):
    """torch's wrapper, for modules on a GPU without the plugin or NCCL."""


class _Silent(_Transparent):
    """A wrapper that exchanges nothing in the backward pass."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Nothing: gradients stay each rank's own anyway."""
        yield


class LegacyDistributed(_Silent):
    """Averages gradients when all_reduce_grads() is called, after the backward pass.

    Parameters without a gradient count as zeros, and those marked as an expert's stay
    each rank's own. Nothing is exchanged within a step, so a rank that has to give up a
    sample leaves nobody waiting.
    """

    def __init__(
        self, module: nn.Module, group: Any, over: _C.Communicator | None
    ) -> None:
        """over: the ranks of the process group; None: torch averages."""
        super().__init__(module)
        self._group = group
        self._reducer = None if over is None else _reducer(module, over)
        if over is None:
            _broadcast(module, group)

    @torch.no_grad()
    def all_reduce_grads(self) -> None:
        """Replace every gradient by its mean over the group."""
        if self._reducer is not None:
            self._reducer.reduce()
            return
        for parameter in _exchanged(self.module).values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.div_(_size(self._group))
            dist.all_reduce(parameter.grad, group=self._group)


def _reducer(module: nn.Module, ranks: _C.Communicator) -> _C.GradReducer:
    synchronize(module, ranks)
    named = _exchanged(module)
    return _C.GradReducer(
        ranks,
        list(named.values()),
        list(named),
        parallel.allocate,
        gradient_as_bucket_view=False,
    )


def _exchanged(module: nn.Module) -> dict[str, nn.Parameter]:
    """All but the experts', which stay each rank's own."""
    named = parallel.trainable(module)
    return {n: p for n, p in named.items() if not hasattr(p, "expert")}


class LocalDistributed(_Silent):
    """Leaves every rank to its own updates, and averages the parameters after every
    `frequency` of them: SlowMo over local SGD.

    With a momentum above 0 every 48th average moves the model through it (BMUF.slowmo);
    the first of these blocks begins with the average of the models after the first
    update.

    Source: Wang et al., "SlowMo: Improving Communication-Efficient Distributed SGD with
    Slow Momentum", 2020; fairscale, SlowMoDistributedDataParallel.
    """

    def __init__(
        self,
        module: nn.Module,
        over: _C.Communicator,
        frequency: int,
        momentum: float = 0.0,
    ) -> None:
        super().__init__(module)
        self._group = over
        self._frequency = frequency
        self._momentum = momentum
        self._averages: BMUF | None = None
        self._slow: BMUF | None = None
        self._saved: dict[str, Any] = {}
        synchronize(module, self._group)

    def blocks_state_dict(self) -> dict[str, Any]:
        """What all ranks have alike: the updates, and with a momentum of the averages
        the model and the momentum of the last block."""
        if self._averages is None:
            return self._saved
        state: dict[str, Any] = {"num_updates": self._averages.get_num_updates()}
        if self._slow is not None:
            state["slow"] = self._slow.blocks_state_dict()
        return state

    def load_blocks_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a blocks_state_dict(); with an empty dict begin anew."""
        self._averages = self._slow = None
        self._saved = state_dict

    def perform_slowmo(self, optimizer: Any, fp32_params: Any = None) -> None:
        """Average what the optimizer has updated, if the turn has come.

        Its float32 copies of bf16 and fp16 parameters are averaged where it has any;
        fp32_params, fairseq's list of them, has the same tensors.
        """
        averages = self._averages
        if averages is None or averages.updated is not optimizer:
            averages = self._averages = self._begin(optimizer)
        update = averages.get_num_updates() + 1
        if self._slow is not None:
            self._slow.step()
        if self._slow is not None and update % _SLOW_FREQUENCY == 0:
            averages.set_num_updates(update)  # synchronized
        else:
            averages.step()

    def _begin(self, optimizer: Any) -> BMUF:
        updated = _Updated(optimizer)
        saved, self._saved = self._saved, {}
        averages = self._averaging(updated, self._frequency)
        averages.set_num_updates(saved.get("num_updates", 0))
        if self._momentum > 0:
            if "slow" not in saved:
                self._averaging(updated, every=1).step()
            self._slow = BMUF.slowmo(
                updated, self._group, every=_SLOW_FREQUENCY, momentum=self._momentum
            )
            self._slow.load_blocks_state_dict(
                {"num_updates": averages.get_num_updates(), **saved.get("slow", {})}
            )
        return averages

    def _averaging(self, updated: _Updated, every: int) -> BMUF:
        options = SimpleNamespace(
            global_sync_iter=every, block_momentum=0, warmup_iterations=0
        )
        return BMUF(options, updated, self._group)


def _slow_momentum(options: Any, workers: int) -> float:
    given = getattr(options, "slowmo_momentum", None)
    if given is None:
        return next(m for most, m in _SLOW_MOMENTUM if workers <= most)
    return float(given)


class _Updated:
    """The interface of an optimizer for one whose updates are made elsewhere."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = self.updated = optimizer

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        return self.optimizer.state

    def get_lr(self) -> float:
        return float(self.param_groups[0]["lr"])

    def step(self) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}


@torch.no_grad()
def _broadcast(module: nn.Module, group: Any) -> None:
    """Give all ranks the parameters and buffers of the first."""
    for value in module.state_dict(keep_vars=True).values():
        dist.broadcast(value, dist.get_global_rank(group, 0), group=group)
