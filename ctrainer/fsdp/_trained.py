"""A Trainer's model, sharded: which modules become units, and names as before."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ctrainer import _C
from ctrainer.comm import world
from ctrainer.comm.machines import ranks_a_machine
from ctrainer.fsdp import _full, _trainer_files, _units, _values
from ctrainer.fsdp._groups import hybrid_groups
from ctrainer.fsdp._sharded import ShardedModule
from ctrainer.fsdp.flatten import FlattenParamsWrapper
from ctrainer.fsdp.module import FullyShardedDataParallel

if TYPE_CHECKING:
    from ctrainer.arguments.fsdp import Sharding

logger = logging.getLogger("ctrainer.trainer")


class TrainedModel(FullyShardedDataParallel):
    """The outermost unit, with parameters and modules by their names before wrapping.

    named_parameters() gives each parameter's part of the shards, under the names and in
    the order that the parameters had; get_submodule() passes over the wrappers. What
    tells parameters apart by name, such as weight decay, so goes on working.
    """

    _places: dict[str, int]  # in the model as it was

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        places = self.__dict__.get("_places", {})
        found = super().named_parameters(prefix, recurse, remove_duplicate)
        outer = f"{prefix}." if prefix else ""
        last = len(places)
        return iter(
            sorted(found, key=lambda it: places.get(it[0].removeprefix(outer), last))
        )

    def get_submodule(self, target: str) -> nn.Module:
        found: Any = unwrapped(self)
        for word in target.split(".") if target else ():
            found = unwrapped(getattr(found, word))
        return found  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        if name == "generate":
            return self._with_all_values(found)
        return self._save_together if name == "save_pretrained" else found

    def _with_all_values(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """The method as it runs while all parameters are there: one that calls the
        module as often as its data asks for, on each rank."""

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.summon_full_params(writeback=False):
                return method(*args, **kwargs)

        return call

    def _save_together(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        """The module's save_pretrained() on the run's first rank, with all values.
        Collective."""
        first = world().rank == 0
        state = _trainer_files.gather(self, os.fspath(save_directory), first)
        try:
            if first:
                with whole(self, state) as module:
                    return module.save_pretrained(save_directory, *args, **kwargs)
        finally:
            self.communicator.barrier()
        return None


def unwrapped(module: Any) -> Any:
    while isinstance(module, ShardedModule | FlattenParamsWrapper):
        module = module.module
    return module


@contextlib.contextmanager
def whole(model: TrainedModel, state: dict[str, torch.Tensor]) -> Iterator[Any]:
    """The module as it was before it was sharded, with the values of `state`, on this
    rank alone; for what saves it, and not to be called."""
    units, names = model.units(), _full.names_of(model)
    values = [
        (entry, state[names[id(entry.param)][0]])
        for _, group, _ in _full.groups_of(units)
        for entry in group.entries
    ]
    with _full.shown(units, values), without_wrappers(model):
        yield unwrapped(model)


@contextlib.contextmanager
def without_wrappers(model: TrainedModel) -> Iterator[None]:
    """Within it the wrapped module's tree has no wrappers, as before; its tables have
    parts for parameters. For what reads names and dtypes of modules.
    """
    wrapped = [
        (module, name, child)
        for module in model.modules()
        if not isinstance(module, ShardedModule | FlattenParamsWrapper)
        for name, child in module._modules.items()
        if isinstance(child, ShardedModule)
    ]
    for module, name, child in wrapped:
        module._modules[name] = unwrapped(child)
    try:
        yield
    finally:
        for module, name, child in wrapped:
            module._modules[name] = child


def shard(
    model: nn.Module, sharding: Sharding, args: Any, group: _C.Communicator
) -> TrainedModel:
    """`model` in units over the ranks of `group`, computing as args.bf16 and args.fp16
    say. Collective.

    All ranks take rank 0's values, a unit at a time, unless sharding.synchronizes is
    False. A model on the meta device that gets no values so begins with new ones.

    Raises ValueError for a model that cannot be sharded as it is, and for names of
    layers that it has not.
    """
    groups = _groups(sharding, group)
    _ready_dtype(model, args)
    chosen = _units.choose(model, sharding)
    if sharding.recomputes:
        _units.recompute(model, chosen)
    names = [name for name, _ in model.named_parameters()]
    options = _options(sharding, args) | {
        "process_group": groups,
        "param_init_fn": _values.initializer(model),
        "sync_module_states": sharding.synchronizes,
    }

    def wrap(module: nn.Module) -> FullyShardedDataParallel:
        return FullyShardedDataParallel(
            module, execute_sharding_on_init=False, **options
        )

    made = TrainedModel(
        model,
        auto_wrap_policy=lambda module, recurse: id(module) in chosen,
        auto_wrapper_callable=wrap,
        **options,
    )
    made._places = {name: place for place, name in enumerate(names)}
    return made


def begins_anew(model: nn.Module, sharding: Sharding, group: _C.Communicator) -> bool:
    """Whether sharding makes new values: the model is on the meta device on rank 0, or,
    where ranks keep their own, on all.

    Collective. Raises ValueError where some ranks that keep their own have none.
    """
    own = b"1" if _values.is_on_meta(model) else b""
    empty = [told == b"1" for told in group.gather_bytes(own)]
    if sharding.synchronizes:
        return empty[0]
    if any(empty) and not all(empty):
        missing = [rank for rank, none in enumerate(empty) if none]
        raise ValueError(
            f"the model is on the meta device on ranks {missing}, and fsdp_config has "
            "sync_module_states=False: set it to True, so that they get rank 0's "
            "values, or make the model on the CPU"
        )
    return all(empty)


def _groups(sharding: Sharding, group: _C.Communicator) -> Any:
    """Who shares: all, or the ranks of a machine, with the others' as replicas.

    Raises ValueError where machines have not equally many ranks side by side.
    """
    if not sharding.hybrid:
        return group
    each = ranks_a_machine(group)
    if each is None:
        raise ValueError(
            "fsdp: hybrid_shard needs as many ranks on every machine, numbered one "
            "machine after the other; start them so, or use full_shard"
        )
    return group if each == group.world_size else hybrid_groups(each, group)


def _options(sharding: Sharding, args: Any) -> dict[str, Any]:
    """Gradients are reduced, and buffers kept, in float32 whatever computes."""
    compute = "bfloat16" if args.bf16 else "float16" if args.fp16 else "float32"
    return {
        "compute_dtype": compute,
        "buffer_dtype": "float32",
        "fp32_reduce_scatter": True,
        "reshard_after_forward": sharding.reshard_after_forward,
        "on_neuron": False,
        "flatten_parameters": True,
        "use_orig_params": True,
        "return_memory": not args.malloc_tuning,
        "forward_prefetch": sharding.forward_prefetch,
        "backward_prefetch": sharding.backward_prefetch,
        "gather_bits": sharding.gather_bits,
        "reduce_bits": sharding.reduce_bits,
        "error_feedback": sharding.error_feedback,
        "cpu_offload": sharding.cpu_offload,
        **sharding.xla_options,
    }


def _ready_dtype(model: nn.Module, args: Any) -> None:
    """Shards are float32; a model of 16 bits that trains in mixed precision becomes
    so, as accelerate has it."""
    for name, parameter in model.named_parameters():
        if parameter.dtype == torch.float32:
            continue
        if not parameter.is_floating_point() or parameter.element_size() == 1:
            raise ValueError(
                f"parameter {name!r} is {parameter.dtype}, as of a quantized model, "
                "and sharded parameters are float32: load the model without "
                "quantization_config, or train it without fsdp"
            )
        if not (args.bf16 or args.fp16):
            raise ValueError(
                f"parameter {name!r} is {parameter.dtype}, and sharded parameters are "
                "float32: load the model with dtype=torch.float32; with bf16 or fp16 "
                "it computes in 16 bits all the same"
            )
    if any(p.dtype != torch.float32 for p in model.parameters()):
        logger.warning("The parameters become float32, of which each rank has a part.")
        for parameter in model.parameters():
            parameter.data = parameter.data.float()
