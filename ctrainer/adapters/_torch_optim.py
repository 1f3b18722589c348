"""torch: parameter groups, optimizers and schedules."""

from __future__ import annotations

import itertools
import logging
import re
import sys
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ctrainer import _C
from ctrainer.adapters.parameters import grads_of
from ctrainer.runtime.replaced import original

logger = logging.getLogger("ctrainer.trainer")

_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


def decay_parameter_names(model: nn.Module) -> list[str]:
    """Names of the parameters that weight decay applies to: no biases and nothing in a
    normalisation layer, by type or by name. Source: transformers 5.17, trainer.py,
    get_decay_parameter_names."""
    names = []
    for name, _ in model.named_parameters():
        owner = model.get_submodule(name.rpartition(".")[0])
        if not isinstance(owner, nn.LayerNorm) and not _NO_DECAY.search(name.lower()):
            names.append(name)
    return names


def devices_elsewhere(parameters: Iterable[torch.Tensor]) -> set[str]:
    """Return where parameters are that ctrainer's kernels cannot update.

    Args:
        parameters (Iterable[torch.Tensor]): Of one model.

    Returns:
        Nothing where all are in the host's memory, or on one GPU with the plugin; else
        the devices that have some of them.
    """
    first = {p.device: p for p in parameters}
    if set(first) <= {torch.device("cpu")} or (
        len(first) == 1 and _C.has_kernels(*first.values())
    ):
        return set()
    return {str(device) for device in first}


# DeepSpeed's make no learning rate of anything but their number of batches.
_KNOWN_SCHEDULES = (
    LRScheduler.__module__, "ctrainer.deepspeed_schedules", "ctrainer.schedules",
)  # fmt: skip


def step_undo(scheduler: Any) -> Callable[[], None] | None:
    """What takes the next step of a schedule of torch's or ctrainer's back.

    None where that is not known: for classes of others, and for learning rates that are
    tensors, which a step fills.
    """
    made_of = [scheduler, *getattr(scheduler, "_schedulers", [])]
    known = all(type(s).__module__ in _KNOWN_SCHEDULES for s in made_of)
    groups = scheduler.optimizer.param_groups if known else []
    set_by_step = [
        {name: group[name] for name in ("lr", "momentum", "betas") if name in group}
        for group in groups
    ]
    if not groups or any(isinstance(v["lr"], torch.Tensor) for v in set_by_step):
        return None
    state = scheduler.state_dict()

    def undo() -> None:
        scheduler.load_state_dict(state)
        for group, values in zip(groups, set_by_step, strict=True):
            group.update(values)

    return undo


def embeddings(model: nn.Module) -> list[torch.Tensor]:
    """The tables of the model's embeddings."""
    tables = [m.weight for m in model.modules() if isinstance(m, nn.Embedding)]
    return [getattr(table, "_sharded_param", table) for table in tables]


def optimizer_class(cls: str, name: str, model: Any) -> tuple[Any, dict[str, Any]]:
    """The class `cls`, which optim=name means, and keywords of its own: ours, or
    torch's own where our kernels cannot update all parameters.

    model: whose parameters; or the device of parameters that are not known.
    """
    from ctrainer import optim

    if not isinstance(model, nn.Module):
        model = nn.ParameterList([torch.empty(0, device=model)])
    devices = devices_elsewhere(model.parameters())
    if not devices:
        found = getattr(optim, cls)
        keeps = getattr(found, "takes_keep_32bit", False)
        return found, {"keep_32bit": embeddings(model)} if keeps else {}
    if not hasattr(torch.optim, cls):
        raise ValueError(
            f"optim={name!r} updates parameters in host memory, or on one GPU with the "
            "plugin that pip install 'ctrainer[cuda13]' brings, and the model has some "
            f"on {', '.join(sorted(devices))}, for which torch.optim has no {cls}: "
            "make an optimizer and pass optimizers=(optimizer, None)"
        )
    logger.warning(
        "The model is on %s, where ctrainer has no kernels: torch.optim.%s updates it. "
        "For one GPU, pip install 'ctrainer[cuda13]' brings them.",
        ", ".join(sorted(devices)), cls,
    )  # fmt: skip
    return getattr(torch.optim, cls), {"fused": True} if cls == "AdamW" else {}


def package_optimizer_class(args: Any, model: Any) -> tuple[Any, dict[str, Any]]:
    """The class and the keywords that transformers' Trainer makes of args.optim, whose
    optimizer is in another package."""
    theirs = original("transformers.trainer", "Trainer")
    cls, kwargs = theirs.get_optimizer_cls_and_kwargs(args, model)
    if model is not None and kwargs.get("optim_bits") == 8:
        # As transformers' create_optimizer does after this.
        manager = sys.modules["bitsandbytes"].optim.GlobalOptimManager.get_instance()
        for table in embeddings(model):
            of_table = SimpleNamespace(weight=table)
            manager.register_module_override(of_table, "weight", {"optim_bits": 32})
    return cls, kwargs


def is_metric_scheduler(scheduler: Any) -> bool:
    """Is it stepped with an evaluation's metric instead of once an update?"""
    greedy = getattr(sys.modules.get("transformers.optimization"), "GreedyLR", ())
    return isinstance(scheduler, (ReduceLROnPlateau, greedy))


def grad_norms(optimizer: Any, norm_type: float, by_group: bool) -> list[float]:
    """Norms of the optimizer's gradients on their devices, of each group or one of all;
    waits for them."""
    lists = [grads_of(group) for group in optimizer.param_groups]
    if not by_group:
        lists = [list(itertools.chain.from_iterable(lists))]
    norms = [torch._foreach_norm(grads, norm_type) if grads else [] for grads in lists]
    return [
        torch.stack([n.to(of_list[0].device, torch.float64) for n in of_list])
        .norm(norm_type)
        .item()
        if of_list
        else 0.0
        for of_list in norms
    ]


def layer_norms(optimizer: Any, norm_type: float) -> dict[Any, float]:
    """The norm of the gradient of each of the optimizer's parameters that has one, in
    double; waits for them."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    params = [p for p in params if p.grad is not None]
    if not params:
        return {}
    norms = [
        torch.linalg.vector_norm(p.grad, norm_type, dtype=torch.float64)
        if p.grad.numel() > 0  # as a shard may have
        else p.grad.new_zeros((), dtype=torch.float64)
        for p in params
    ]
    found = torch.stack([n.to(norms[0].device) for n in norms])
    return dict(zip(params, found.tolist(), strict=True))


def clip_grads(optimizer: Any, factors: list[float], limit: float | None) -> None:
    """Multiply each group's gradients by its factor in place, and clip what is then
    further from 0 than limit."""
    for group, factor in zip(optimizer.param_groups, factors, strict=True):
        grads = grads_of(group)
        if grads and factor != 1.0:
            torch._foreach_mul_(grads, factor)
        if grads and limit is not None:
            torch._foreach_clamp_min_(grads, -limit)
            torch._foreach_clamp_max_(grads, limit)
