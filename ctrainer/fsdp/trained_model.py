"""A Trainer's sharded model: the choice of its units, and its files."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import glob
import logging
import mmap
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ctrainer import _C
from ctrainer.adapters import _saved_names
from ctrainer.adapters._torch_checkpoint import raise_unless_all, weight_files
from ctrainer.checkpoint import CheckpointWriter, Sink
from ctrainer.checkpoint.files import expected_of, unchanged
from ctrainer.checkpoint.torch_files import load_plain
from ctrainer.comm import world
from ctrainer.comm.machines import ranks_a_machine
from ctrainer.comm.run import has_lost_ranks
from ctrainer.fsdp import full_params, initial_values, shard_files
from ctrainer.fsdp.consolidate import (
    consolidate_optimizers,
    consolidate_sharded_model_checkpoints,
    consolidate_sharded_state_dicts,
    one_shard,
)
from ctrainer.fsdp.flatten import FlattenParamsWrapper
from ctrainer.fsdp.module import FullyShardedDataParallel
from ctrainer.fsdp.optim_state import (
    rekeyed,
    shard_full_optim_state_dict,
    sharded_optim_state_dict,
)
from ctrainer.fsdp.options import hybrid_groups
from ctrainer.fsdp.shard_files import (
    Shard,
    add_shard,
    described,
    find_shards,
    read_shard,
    shard_paths,
    tensors_of,
)
from ctrainer.fsdp.sharded import ShardedModule

if TYPE_CHECKING:
    from ctrainer.arguments.fsdp import Sharding


logger = logging.getLogger("ctrainer.trainer")


def choose(model: nn.Module, sharding: Sharding) -> set[int]:
    """The ids of the modules below `model` that become units.

    By the names of their classes, or by the number of their parameters. Never one that
    shares a parameter or a module with a module outside of it.

    Raises ValueError for the name of a class of which the model has no module.
    """
    if not sharding.wraps:
        return set()
    if sharding.min_num_params is not None:
        chosen = _by_size(model, sharding.min_num_params)
    else:
        chosen = _by_class(model, sharding.layers, sharding.unnamed_min_num_params)
    places, children = _places(model), _children(model)
    return {
        id(module)
        for module in chosen
        if not isinstance(module, nn.ModuleList | nn.ModuleDict)
        and all(places[p] == n for p, n in _places(module).items())
        and all(children[m] == n for m, n in _children(module).items())
    }


def _by_class(
    model: nn.Module, layers: tuple[str, ...] | None, otherwise: int | None
) -> list[nn.Module]:
    names = set(layers or getattr(model, "_no_split_modules", None) or ())
    found = [m for m in _below(model) if type(m).__name__ in names]
    missing = names - {type(m).__name__ for m in found}
    if layers and missing:
        there = sorted({type(m).__name__ for m in _below(model)})
        raise ValueError(
            f"fsdp_config: transformer_layer_cls_to_wrap names {sorted(missing)}, of "
            f"which the model has no module; its classes are {', '.join(there)}"
        )
    if not found and otherwise is not None:
        return _by_size(model, otherwise)
    if not found:
        logger.warning(
            "The model names no classes of layers (_no_split_modules): it becomes one "
            "unit, gathered whole. Set transformer_layer_cls_to_wrap or min_num_params "
            "in fsdp_config."
        )
    return found


def _by_size(model: nn.Module, least: int) -> list[nn.Module]:
    """The innermost modules first: what is in a unit does not count for those around.
    Attention of torch reads the weights of what is below it, which stay with it.
    """
    found: list[nn.Module] = []
    if least > 0:
        for child in model.children():
            _add_large(child, least, found)
    return found


def _add_large(module: nn.Module, least: int, found: list[nn.Module]) -> int:
    """Append the units at and below the module; how many parameters are in them."""
    inside = 0
    if not isinstance(module, nn.MultiheadAttention):
        inside = sum(_add_large(child, least, found) for child in module.children())
    count = sum(p.numel() for p in module.parameters())
    if count - inside >= least:
        found.append(module)
        return count
    return inside


def _below(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if module is not model]


def _places(module: nn.Module) -> Counter[nn.Parameter]:
    """In how many places of modules each parameter is, or is read: those of other
    modules are in `_external_params`, as of DeepSpeed's register_external_parameter."""
    return Counter(
        parameter
        for below in module.modules()
        for parameter in (
            *below._parameters.values(),
            *below.__dict__.get("_external_params", {}).values(),
        )
        if parameter is not None
    )


def _children(module: nn.Module) -> Counter[nn.Module]:
    """Of how many modules each module is a child: PEFT's prompts have the base model's
    embeddings as a child of their own."""
    return Counter(
        child
        for below in module.modules()
        for child in below._modules.values()
        if child is not None
    )


def recompute(model: nn.Module, chosen: set[int]) -> None:
    """Let the chosen modules keep their inputs instead of their activations."""
    from ctrainer.fsdp.recompute import checkpoint_wrapper

    for module in model.modules():
        if id(module) in chosen:
            checkpoint_wrapper(module)


# Of other packages, whose update of an element depends on others, which may be on
# another rank. Those of ctrainer.optim have these names, too, and ask the ranks.
_NOT_ELEMENTWISE = frozenset(
    "Adafactor Adalomo APOLLOAdamW Composite GaLoreAdafactor GaLoreAdamW "
    "GaLoreAdamW8bit LAMB LARS Lomo Muon StableAdamW".split()
)


def check_optimizer(optimizer: Any) -> None:
    """Raise ValueError for an optimizer that needs whole parameters."""
    if hasattr(optimizer, "_engine"):
        return
    for cls in type(optimizer).__mro__:
        if cls.__name__ in _NOT_ELEMENTWISE:
            raise ValueError(
                f"fsdp: {cls.__name__} updates elements of a parameter by what the "
                "others are, and each rank has only a part of it; choose an "
                "optimizer such as AdamW, which does not"
            )


# A sharded Trainer's files: shards of checkpoints, and the whole weights.


PREFIX, SUFFIX = "shard-", "[0-9]*-of-*.safetensors"
State = dict[str, Any]


def file_name(rank: int, world_size: int) -> str:
    return f"{PREFIX}{rank:05d}-of-{world_size:05d}.safetensors"


# ---- saving


def is_first_replica(model: Any, world: _C.Communicator) -> bool:
    """Is the rank one of those that save its shards for all that have the same?"""
    return bool(world.rank < model.world_size)


@dataclasses.dataclass
class Shards:
    """A rank's shards and the optimizer's state of them, which a checkpoint gets from
    it where they are wanted."""

    rank: int  # in the sharding group
    world_size: int
    content: State
    is_wanted: bool = True

    @classmethod
    def of(cls, model: Any, optimizer: Any) -> Shards:
        content = {
            "model": model.state_dict(),
            "shard_metadata": model.get_shard_metadata(),
            "optimizer": sharded_optim_state_dict(model, optimizer),
        }
        return cls(model.rank, model.world_size, content)

    def save(self, sink: Sink) -> None:
        add_shard(sink, file_name(self.rank, self.world_size), self.content)


def gather(
    model: Any, folder: str, keep: bool, writer: CheckpointWriter | None = None
) -> dict[str, torch.Tensor]:
    """The unwrapped module's state_dict(), for the ranks that keep it; {} for others.

    Its memory is a file without a name in `folder`, so that the process itself has no
    more of it than one unit at a time; a writer writes it from there, in its own time.
    Collective.
    """
    if not keep:
        for _ in full_params.values_of(model.units()):
            pass
        return {}
    os.makedirs(folder, exist_ok=True)
    entries = full_params.entries_of(model.units())
    nbytes = sum(_aligned(entry.numel * entry.dtype.itemsize) for entry in entries)
    return full_params.state_dict(model, _copier(folder, nbytes, writer))


def _aligned(nbytes: int) -> int:
    """Up to where an element of any dtype can begin."""
    return -(-nbytes // 8) * 8


def _copier(
    folder: str, nbytes: int, writer: CheckpointWriter | None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Copies tensors, of so many bytes in all, to memory that is a file without a
    name."""
    file = tempfile.TemporaryFile(dir=folder, buffering=0)
    os.posix_fallocate(file.fileno(), 0, max(nbytes, 1))
    memory = mmap.mmap(file.fileno(), max(nbytes, 1))
    if writer is not None:
        writer.share(file.fileno(), memory)
    at = 0

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal at
        begin, at = at, at + _aligned(tensor.nbytes)
        if tensor.numel() == 0:
            return torch.empty_like(tensor, device="cpu")
        host = tensor.detach().cpu().contiguous()
        content = host.reshape(-1).view(torch.uint8).numpy()
        file.seek(begin)  # writing faults no pages in, as the mapping would
        while content.size > 0:
            content = content[file.write(content.data) :]
        # A storage of its own: safetensors' save_model() takes no part of one.
        own = torch.frombuffer(
            memory, dtype=tensor.dtype, count=tensor.numel(), offset=begin
        )
        return own.view(tensor.shape)

    return copy


# ---- loading


def load_model(model: Any, folder: str) -> None:
    """Load this rank's shards, of a checkpoint of any number of ranks and any units.

    Raises RuntimeError where the names or shapes of parameters differ, and ValueError
    where scales of quantized weights do.
    """
    if _same_units(model, folder):
        _load_state(model, folder, _own(model, folder, "model"))
        return
    state = _whole_weights(folder)
    unknown = state.keys() - full_params.empty_state(model).keys()
    for name in _computed(model, folder, state, unknown):
        del state[name]
    model.load_full_state_dict(state)


def _load_state(model: torch.nn.Module, folder: str, state: State) -> None:
    """model.load_state_dict(), but for what modules compute for a state_dict()."""
    try:
        model.load_state_dict(state)
    except RuntimeError:
        found = torch.nn.Module.load_state_dict(model, state, strict=False)
        keys = {shard_files.original_name(key): key for key in state}
        saved = {name: state[key] for name, key in keys.items()}
        unknown = {shard_files.original_name(key) for key in found.unexpected_keys}
        computed = _computed(model, folder, saved, unknown)
        if not computed:
            raise
        left = [key for name, key in keys.items() if name not in computed]
        model.load_state_dict({key: state[key] for key in left})


def _computed(
    model: torch.nn.Module, folder: str, state: State, unknown: set[str]
) -> set[str]:
    """Those of the unknown names under which modules compute tensors for a
    state_dict() that none of them loads, such as the scales of bitsandbytes' weights.

    Raises ValueError where these are not as saved: weights would mean other numbers.
    """
    items = model.state_dict().items() if unknown else ()
    here = {shard_files.original_name(k): v for k, v in items if torch.is_tensor(v)}
    computed = here.keys() & unknown
    for name in sorted(computed):
        own, saved = here[name].cpu(), state[name].cpu()
        if own.dtype != saved.dtype or not torch.equal(own, saved):
            raise ValueError(
                f"{folder}: {name} was saved with other values than the model's, which "
                "cannot be loaded; make the model from the weights and with the "
                "quantization that it was saved with"
            )
    return computed


def load_weights(model: Any, folder: str) -> None:
    """Load this rank's part of whole weights, in transformers' files, which are mapped.

    Raises ValueError naming parameters and buffers that the files lack, under every
    name that they have, or have beyond the model's, and RuntimeError for shapes that
    differ; FileNotFoundError without any file.
    """
    files = weight_files(folder)
    with unchanged(*files):
        _load_mapped(model, folder, files)


def _load_mapped(model: Any, folder: str, files: list[str]) -> None:

    state: State = {}
    for path in files:
        if path.endswith(".safetensors"):
            state |= shard_files.mapped(path)
        else:
            state |= load_plain(path, expected_of(path))
    module, own = unwrapped(model), full_params.empty_state(model)
    with without_wrappers(model):
        layout = _saved_names.layout(module, own, state)
        raise_unless_all(folder, *layout.fit(state))
        state = layout.state(state)
    model.load_full_state_dict(state, strict=False)


def load_into_whole(model: torch.nn.Module, folder: str) -> None:
    """Load the shards of all ranks into a model that is not sharded.

    Raises RuntimeError where names or shapes differ, and ValueError where scales of
    quantized weights do.
    """
    _load_state(model, folder, _whole_weights(folder))


def optimizer_state(model: Any, optimizer: Any, folder: str) -> State | None:
    """What the optimizer's load_state_dict() takes, out of a checkpoint's shards; None
    where they have none. Of a sharded model this rank's part; of None all of it.

    Raises ValueError where the optimizer has parameters that were not saved.
    """
    if model is None:
        return _numbered(_whole_optimizer(folder))
    if not _same_units(model, folder):
        full = _whole_optimizer(folder)
        return full and shard_full_optim_state_dict(full, model, optim=optimizer)
    state: State | None = _own(model, folder, "optimizer")
    if state is None:
        return None
    mine = sharded_optim_state_dict(model, optimizer)["param_groups"]
    saved = state["param_groups"]
    sizes = [[len(group["params"]) for group in groups] for groups in (mine, saved)]
    names = [[group.pop("param_names") for group in groups] for groups in (mine, saved)]
    if names[0] != names[1]:
        raise ValueError(
            f"{folder}: the optimizer was saved with groups of {sizes[1]} parameters, "
            f"and has groups of {sizes[0]}, or others in them; make the same groups, "
            "or start anew from the weights"
        )
    return state


def part_of_whole(model: Any, optimizer: Any, state: State | None) -> State | None:
    """This rank's part of the state of an optimizer of whole parameters, which come in
    the same order."""
    if state is None:
        return None
    names = {id(p): name for name, p in model.named_parameters()}
    params = [p for group in optimizer.param_groups for p in group["params"]]
    own = {number: names[id(p)] for number, p in enumerate(params)}
    return shard_full_optim_state_dict(rekeyed(state, own), model, optim=optimizer)


def average_state(model: Any, average: Any, folder: str, load: Any) -> State | None:
    """What the load_state_dict() of a weight average takes, out of a checkpoint of
    other ranks or units; None where it has none.

    model: sharded, whose part it is; None: the average is of the whole model. load:
    reads an object out of a folder, None where it has not that file.
    """
    saved: State | None = load(folder, "weight_average.pt")
    saved = _whole_average(folder, load) if saved is None else saved
    if saved is None:
        return None
    whole = saved["averages"]
    if model is None:
        own = {name: whole[name] for name in average.averages if name in whole}
    else:
        own = _own_average(model, average, whole)
    return saved | {"averages": own}


def _whole_average(folder: str, load: Any) -> State | None:
    """Rank 0's counts, and the averages of all ranks' shards put together."""
    _, metadata = described(_shard_paths(folder)[0])
    states = [
        load(folder, f"weight_average_{rank}.pt")
        for rank in range(metadata["world_size"])
    ]
    if any(state is None for state in states):
        return None
    averages = [state["averages"] for state in states]
    names = metadata | {"shared_info": {}}  # of which frozen ones are no part
    whole = consolidate_sharded_state_dicts(averages, names)
    return {**states[0], "averages": whole}


def _own_average(model: Any, average: Any, whole: State) -> State:
    """This rank's part of whole averages, by the names that its own have."""
    names = full_params.names_of(model)
    keys = {id(v): key for key, v in model.state_dict(keep_vars=True).items()}
    own = {
        key: whole[shard_files.original_name(key)]
        for key in average.averages
        if shard_files.original_name(key) in whole
    }
    for unit, group, shard in full_params.groups_of(model.units()):
        key = keys[id(shard)]
        if key in average.averages:
            own[key] = torch.zeros_like(average.averages[key])
            full_params.load_group(unit, group, own[key], names, whole)
    return own


def _numbered(full: State | None) -> State | None:
    """A full state as torch has it, whose parameters are numbers."""
    if full is None:
        return None
    names = [name for group in full["param_groups"] for name in group["params"]]
    return rekeyed(full, {name: number for number, name in enumerate(names)})


def _whole_optimizer(folder: str) -> State | None:
    with unchanged(*_shard_paths(folder)):
        shards = _shards(folder)
        if shards[0].optimizer is None:
            return None
        return tensors_of(consolidate_optimizers(shards))


def _pattern(folder: str) -> tuple[str, str]:
    """The prefix and suffix of the shards' names."""
    return os.path.join(glob.escape(folder), PREFIX), SUFFIX


def _whole_weights(folder: str) -> State:
    pattern = _pattern(folder)
    return consolidate_sharded_model_checkpoints(*pattern, save_model=False)[0]


def _shard_paths(folder: str) -> list[str]:
    return shard_paths(*_pattern(folder))


def _shards(folder: str) -> list[Shard]:
    return find_shards(*_pattern(folder))


def _own(model: Any, folder: str, part: str) -> Any:
    """What this rank would have saved under "model" or "optimizer", in memory."""
    path = os.path.join(folder, file_name(model.rank, model.world_size))
    with unchanged(*_shard_paths(folder)):
        if os.path.isfile(path) and _cut_alike(model, path):
            shard = read_shard(path)
            content = {"model": shard.model, "optimizer": shard.optimizer}
        else:
            content = one_shard(_shards(folder), model.rank, model.world_size)
        return tensors_of({part: content.get(part)})[part]


def _cut_alike(model: Any, path: str) -> bool:
    """Were the shards cut as the model's are?"""
    _, saved = described(path)
    own = model.get_shard_metadata()
    return all(
        saved.get(key) == own[key]
        for key in ("world_size", "shard_param_on_dim_0", "shard_size_multiple")
    )


def block_size(folder: str) -> int:
    """That of the checkpoint's shards."""
    _, metadata = described(_shard_paths(folder)[0])
    return int(metadata.get("block_size", 1))


def same_layout(model: Any, folder: str) -> bool:
    """Are the checkpoint's shards those of as many ranks and the same units?"""
    path = os.path.join(folder, file_name(model.rank, model.world_size))
    alike = os.path.isfile(path) and _cut_alike(model, path)
    return alike and _same_units(model, folder)


def _same_units(model: Any, folder: str) -> bool:
    """Have the shards the names that the model's have, and of the same parameters?"""
    names, saved = described(_shard_paths(folder)[0])
    own = shard_files.plain(model.get_shard_metadata())
    return names == list(model.state_dict()) and all(
        saved[key] == own[key] for key in ("shard_info", "flatten_info")
    )


# A Trainer's model, sharded: which modules become units, and names as before.


# Methods of transformers' and sentence-transformers' models that compute.
_COLLECTIVE = ("generate", "encode", "encode_query", "encode_document", "predict",
               "rank")  # fmt: skip


class TrainedModel(FullyShardedDataParallel):
    """The outermost unit, with parameters and modules by their names before wrapping.

    named_parameters() yields each parameter's part of the shards, by the names and in
    the order before wrapping; get_submodule() skips the wrappers. Selections of
    parameters by name, such as for weight decay, stay valid. isinstance() sees the
    wrapped model's class, too: clients ask whether a model is PEFT's or transformers'.
    """

    _places: dict[str, int]  # in the model as it was

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        wrapped = self.__dict__.get("_modules", {}).get("_fsdp_wrapped_module")
        return TrainedModel if wrapped is None else unwrapped(wrapped).__class__

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
        if name in _COLLECTIVE:
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
        state = gather(self, os.fspath(save_directory), first)
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
    units, names = model.units(), full_params.names_of(model)
    values = [
        (entry, state[names[id(entry.param)][0]])
        for entry in full_params.entries_of(units)
    ]
    with full_params.shown(units, values), without_wrappers(model):
        yield unwrapped(model)


@contextlib.contextmanager
def rewritten(model: TrainedModel) -> Iterator[Any]:
    """The module as it was before it was sharded, with all values, on each rank; for
    what loads it, and not to be called. What is written to them is kept. Collective."""
    with model.summon_full_params(), without_wrappers(model):
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


def without_values(model: nn.Module) -> nn.Module:
    """A copy whose parameters are on the meta device."""
    empty = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
        for p in model.parameters()
    }
    return copy.deepcopy(model, dict[int, Any](empty))


def close_groups(model: TrainedModel) -> None:
    """Forget the pass that has failed, with its prefetches, and leave the groups of all
    units, so that no rank waits for this one."""
    model._unit.abandon()
    groups = (
        group
        for unit in model.units()
        for group in (unit.communicator, unit.replicas)
        if group is not None
    )
    for group in {id(group): group for group in groups}.values():
        group.close()


def shard(
    model: nn.Module,
    sharding: Sharding,
    args: Any,
    group: _C.Communicator,
    refilled: bool = False,
    block_size: int | None = None,
    device: torch.device | None = None,
) -> TrainedModel:
    """`model` in units over the ranks of `group`, computing as args.bf16 and args.fp16
    say, cut at multiples of `block_size` elements, each moved to `device`. Collective.

    All ranks take rank 0's values, a unit at a time, unless sharding.synchronizes is
    False. A model on the meta device that gets no values so begins with new ones, or
    with zeros where it is refilled: the caller loads all values.

    Raises ValueError for a model that cannot be sharded as it is, and for names of
    layers that it has not.
    """
    groups = _groups(sharding, group)
    _ready_dtype(model, args)
    chosen = choose(model, sharding)
    if sharding.recomputes:
        recompute(model, chosen)
    names = [name for name, _ in model.named_parameters()]
    options = _options(_within_limit(sharding, model, chosen), args) | {
        "process_group": groups,
        "param_init_fn": initial_values.zeros
        if refilled
        else initial_values.initializer(model),
        "sync_module_states": sharding.synchronizes,
        "block_size": block_size,
        "device_id": device,
    }

    ranks = groups[0] if isinstance(groups, tuple) else groups
    stays = _in_memory(sharding, model, chosen, ranks.world_size)

    def options_of(module: nn.Module) -> dict[str, Any]:
        return options | ({"shard_folder": None} if id(module) in stays else {})

    def wrap(module: nn.Module) -> FullyShardedDataParallel:
        return FullyShardedDataParallel(
            module, execute_sharding_on_init=False, **options_of(module)
        )

    made = TrainedModel(
        model,
        auto_wrap_policy=lambda module, recurse: id(module) in chosen,
        auto_wrapper_callable=wrap,
        **options_of(model),
    )
    made._places = {name: place for place, name in enumerate(names)}
    return made


def _within_limit(sharding: Sharding, model: nn.Module, chosen: set[int]) -> Sharding:
    """Without prefetching where a unit has more parameters than may be prefetched."""
    sizes = [
        sum(p.numel() for p in module.parameters())
        for module in model.modules()
        if id(module) in chosen
    ]
    limit = sharding.prefetch_numel
    if limit is None or max(sizes, default=0) <= limit:
        return sharding
    return dataclasses.replace(sharding, forward_prefetch=False, backward_prefetch=None)


def _in_memory(
    sharding: Sharding, model: nn.Module, chosen: set[int], ranks: int
) -> set[int]:
    """The ids of the units whose shards stay in memory where others are in files: those
    that come first, of which a rank has at most so many elements."""
    left, found = sharding.max_in_memory, set()
    for module, size in own_sizes(model, chosen).items():
        own = -(-size // ranks)
        if own <= left:
            left -= own
            found.add(id(module))
    return found


def own_sizes(model: nn.Module, chosen: set[int]) -> dict[nn.Module, int]:
    """The root and the chosen modules, in the model's order, and how many parameters
    each has beside those of inner ones."""
    taken = set[nn.Parameter]()
    units = [m for m in model.modules() if m is model or id(m) in chosen]
    own = {}
    for module in reversed(units):  # what is in inner units first
        params = [p for p in module.parameters() if p not in taken]
        taken.update(params)
        own[module] = sum(p.numel() for p in params)
    return {module: own[module] for module in units}


def begins_anew(model: nn.Module, sharding: Sharding, group: _C.Communicator) -> bool:
    """Whether sharding makes new values: the model is on the meta device on rank 0, or,
    where ranks keep their own, on all.

    Collective. Raises ValueError where some ranks that keep their own have none.
    """
    own = b"1" if initial_values.is_on_meta(model) else b""
    empty = [answer == b"1" for answer in group.gather_bytes(own)]
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
    """The sharding group: all ranks, or those of a machine, with a replicate group.

    Raises ValueError unless all machines have as many consecutive ranks; but where the
    others have died, those that are left have no more of the model each than before.
    """
    if not sharding.hybrid:
        return group
    each, n = sharding.group_size or ranks_a_machine(group), group.world_size
    if has_lost_ranks():
        each = next(i for i in range(min(each or n, n), n + 1) if n % i == 0)
    if each is None:
        raise ValueError(
            "fsdp: hybrid_shard needs as many ranks on every machine, numbered one "
            "machine after the other; start them so, or use full_shard"
        )
    if n % each:
        raise ValueError(
            f"deepspeed: mics_shard_size={each} does not divide the {n} ranks; set a "
            "size that does"
        )
    return group if each == n else hybrid_groups(each, group)


def _options(sharding: Sharding, args: Any) -> dict[str, Any]:
    """Gradients are reduced in float32 whatever computes, and in mixed precision
    buffers are float32."""
    compute = "bfloat16" if args.bf16 else "float16" if args.fp16 else None
    return {
        "compute_dtype": compute,
        "buffer_dtype": "float32" if compute else None,
        "fp32_reduce_scatter": True,
        "reshard_after_forward": sharding.reshard_after_forward,
        "on_neuron": False,
        "flatten_parameters": True,
        "use_orig_params": True,
        "forward_prefetch": sharding.forward_prefetch,
        "backward_prefetch": sharding.backward_prefetch,
        "gather_bits": sharding.gather_bits,
        "reduce_bits": sharding.reduce_bits,
        "error_feedback": sharding.error_feedback,
        "secondary_shards": sharding.secondary_shards,
        "cpu_offload": sharding.cpu_offload,
        "shard_folder": sharding.shard_folder,
        "read_ahead": sharding.read_ahead,
        **sharding.xla_options,
    }


def _ready_dtype(model: nn.Module, args: Any) -> None:
    """Make the trained bf16 and fp16 parameters of a model that trains in mixed
    precision float32, as accelerate does."""
    narrow = [
        parameter
        for parameter in model.parameters()
        if parameter.requires_grad and parameter.dtype != torch.float32
    ]
    if not narrow or not (args.bf16 or args.fp16):
        return
    logger.warning(
        "The trained parameters become float32, of which each rank has a part."
    )
    for parameter in narrow:
        parameter.data = parameter.data.float()
