"""The files of DeepSpeed's checkpoints: what they hold of whole parameters.

`latest` names a folder beside it. In it are files of the model's state, one or, in
stage 3, one a rank, and of the optimizer's, one a rank:

    [zero_pp_rank_R_]mp_rank_00_model_states.pt
    [bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt

An optimizer's file has, for each group of parameters, this rank's part of a flat
vector of their float32 values and of each of the optimizer's moments. In the stages 1
and 2 the vector is that of all parameters behind each other, cut at the ranks; in stage
3 each parameter is cut at the ranks. A universal checkpoint has a folder `zero` in
place of the optimizer's files, and in it a folder for each parameter.

Files are mapped to memory and read where a parameter is asked for; nothing is unpickled
but plain data and the stand-ins of this module. Source: DeepSpeed 0.19,
runtime/engine.py, runtime/zero, checkpoint/ds_to_universal.py.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from ctrainer import _C
from ctrainer.checkpoint.torch_files import archive_records

State = dict[str, Any]

FLAT_2, FLAT_3 = "single_partition_of_fp32_groups", "fp32_flat_groups"
MODEL_FILE = "mp_rank_00_model_states.pt"


# Stand-ins of what DeepSpeed pickles of its own classes, which have attributes alone;
# the rest of them is rejected by name.
LossScaler: Any = type("LossScaler", (), {})
DynamicLossScaler: Any = type("DynamicLossScaler", (), {})
fragment_address: Any = type("fragment_address", (), {})
_CLASSES = {
    LossScaler: "deepspeed.runtime.fp16.loss_scaler",
    DynamicLossScaler: "deepspeed.runtime.fp16.loss_scaler",
    fragment_address: "deepspeed.utils.tensor_fragment",
}
STAND_INS = [
    *((cls, f"{module}.{cls.__name__}") for cls, module in _CLASSES.items()),
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
]


def of_class(cls: Any, **attributes: Any) -> Any:
    """An object of a stand-in."""
    made = cls()
    vars(made).update(attributes)
    return made


def load(path: str) -> Any:
    """The object in a file of torch.save, mapped to memory.

    Raises ValueError naming a file that differs from its checksums, or the file and the
    first object that is neither plain data nor of STAND_INS.
    """
    _C.archive_index(path, None)
    try:
        with torch.serialization.safe_globals(STAND_INS):  # type: ignore[arg-type]
            return torch.load(path, "cpu", mmap=True, weights_only=True)
    except Exception as problem:
        named = re.search(r"GLOBAL (\S+)|class (\S+)", str(problem))
        what = named and (named[1] or named[2])
        raise ValueError(
            f"{path} has an object of {what}, which is neither plain data nor of "
            f"{', '.join(name for _, name in STAND_INS)}: it is not unpickled"
            if what
            else f"{path} cannot be read: {repr(problem).splitlines()[0]}"
        ) from None


_MISFITS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError)


@contextlib.contextmanager
def _as_one(folder: str) -> Iterator[None]:
    """Raise ValueError for what files lack that are whole in themselves."""
    try:
        yield
    except _MISFITS as problem:
        raise ValueError(
            f"{folder}: its files are not those of one checkpoint of ZeRO: {problem!r}"
        ) from problem


def save(obj: Any, path: str) -> None:
    """Write an object as torch.save does, stand-ins as DeepSpeed's classes."""
    _C.write_archive(
        path, [(n, _renamed(data)) for n, data in archive_records(path, obj)]
    )


def _renamed(record: Any) -> Any:
    """A pickle of protocol 2 names a class in two lines."""
    for cls, module in _CLASSES.items() if isinstance(record, bytes) else ():
        own = f"c{cls.__module__}\n{cls.__name__}\n".encode()
        record = record.replace(own, f"c{module}\n{cls.__name__}\n".encode())
    return record


def folder_of(checkpoint_dir: str, tag: str | None, latest: str = "latest") -> str:
    """The folder of a checkpoint.

    Raises FileNotFoundError where it, or without a tag the file that names it, is
    missing.
    """
    if tag is None:
        path = os.path.join(checkpoint_dir, latest)
        if not os.path.isfile(path):
            raise FileNotFoundError(f"Unable to find 'latest' file at {path}")
        with open(path, encoding="utf-8", errors="replace") as file:
            tag = file.read(1000).strip()
    folder = os.path.join(checkpoint_dir, tag)
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"Directory '{folder}' doesn't exist")
    return folder


def _by_rank(folder: str, pattern: str) -> list[str]:
    """The paths of a kind, by their numbers."""
    found = glob.glob(os.path.join(glob.escape(folder), pattern))
    numbers = re.compile(r"\d+")
    return sorted(found, key=lambda path: [int(n) for n in numbers.findall(path)])


def scalars_of(state: State) -> State:
    """What an optimizer's state has beside tensors of elements."""
    return {
        key: value
        for key, value in state.items()
        if not isinstance(value, torch.Tensor) or value.dim() == 0
    }


def write_latest(folder: str, tag: str, name: str = "latest") -> None:
    """Name the newest checkpoint, at once."""
    path = os.path.join(folder, name)
    with open(f"{path}.tmp", "w", encoding="utf-8") as file:
        file.write(tag)
    os.replace(f"{path}.tmp", path)


class Lazy(Mapping[str, Any]):
    """A mapping whose values are made when they are asked for."""

    def __init__(self, make: Mapping[str, Callable[[], Any]]) -> None:
        self.make = make

    def __getitem__(self, key: str) -> Any:
        return self.make[key]()

    def __iter__(self) -> Iterator[str]:
        return iter(self.make)

    def __len__(self) -> int:
        return len(self.make)


@dataclass
class Flat:
    """A parameter in a flat vector: elements [begin, end) of the parts of ranks."""

    group: int
    shape: torch.Size
    parts: list[tuple[int, int, int]]  # rank, begin, end

    def whole(self, vector: Callable[[int], torch.Tensor]) -> torch.Tensor:
        parts = [vector(rank).detach()[begin:end] for rank, begin, end in self.parts]
        flat = torch.cat(parts) if len(parts) != 1 else parts[0].clone()
        return flat[: self.shape.numel()].view(self.shape)


class Checkpoint:
    """A checkpoint of any of ZeRO's stages, or a universal one.

    stage: 0 where the optimizer is torch's own. names: of the parameters of each group.
    parameters: the shapes of those that the optimizer has.

    Raises FileNotFoundError for missing files, ValueError for what is not supported.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        with _as_one(folder):
            self._read()

    def _read(self) -> None:
        folder = self.folder
        models = _by_rank(folder, "*_model_states.pt")
        if not models:
            raise FileNotFoundError(f"can't find *_model_states.pt files in {folder}")
        extra = [p for p in models if "mp_rank_00" not in p]
        if extra:
            raise ValueError(
                f"{extra[0]} is of tensor parallelism: layers are not split over ranks"
            )
        self.model_paths = models
        self.models = [load(path) for path in models]
        self.model: State = self.models[0]
        self.universal = os.path.isdir(os.path.join(folder, "zero"))
        paths = _by_rank(folder, "*_optim_states.pt")
        self.ranks = [load(path)["optimizer_state_dict"] for path in paths]
        path = os.path.join(folder, "zero", "optimizer_state.pt")
        self.common: State = (
            load(path) if self.universal else self.ranks[0] if self.ranks else {}
        )
        self.stage = int(self.common.get("zero_stage", 0))
        if self.stage == 3:  # each rank has its part of frozen parameters
            self._check_count("*_model_states.pt", len(models))
        shapes = self.model.get("param_shapes") or []
        shapes = [shapes] if isinstance(shapes, Mapping) else shapes
        self.names = [list(group) for group in shapes]
        self.parameters = {n: s for group in shapes for n, s in group.items()}
        self._group = {n: g for g, names in enumerate(self.names) for n in names}
        self._flat = {} if self.universal or not self.ranks else self._places(shapes)

    def _check_count(self, pattern: str, found: int) -> None:
        """Raise ValueError unless each rank has its file."""
        world = self.common["partition_count"]
        world = max(world) if isinstance(world, list) else world
        if world != found:
            raise ValueError(
                f"Expected {world} of '{pattern}' under '{self.folder}' but "
                f"found {found} files."
            )

    def _places(self, shapes: list[Mapping[str, Any]]) -> dict[str, Flat]:
        self._check_count("*_optim_states.pt", len(self.ranks))
        padded = self.common.get("param_alignment_paddings") or []
        if any(any(group) for group in padded):
            raise ValueError(f"{self.folder}: parameter_alignment is not supported")
        if len(shapes) != len(self._values(0)):
            raise ValueError(
                f"{self.folder} has {len(self._values(0))} flat groups, and names of "
                f"parameters for {len(shapes)}"
            )
        return dict(self._each_place(shapes))

    def _each_place(
        self, shapes: list[Mapping[str, Any]]
    ) -> Iterator[tuple[str, Flat]]:
        world = len(self.ranks)
        for group, named in enumerate(shapes):
            at = 0
            sizes = [self._values(rank)[group].numel() for rank in range(world)]
            for name, shape in named.items():
                n = torch.Size(shape).numel()
                if self.stage == 3:
                    part = -(-n // world)
                    parts = [(rank, at, at + part) for rank in range(world)]
                    at += part
                else:
                    parts = list(_overlaps(sizes, at, at + n))
                    at += n
                yield name, Flat(group, torch.Size(shape), parts)
            if at > (sizes[0] if self.stage == 3 else sum(sizes)):
                raise ValueError(
                    f"{self.folder}: the flat group {group} has fewer elements than "
                    "its parameters"
                )

    def _values(self, rank: int) -> list[torch.Tensor]:
        key = (
            "fp32_flat_groups" if self.stage == 3 else "single_partition_of_fp32_groups"
        )
        found: list[torch.Tensor] = self.ranks[rank][key]
        return found

    def _states(self, rank: int) -> dict[int, State]:
        """The optimizer's state of flat groups, by their numbers."""
        of = self.ranks[rank] if self.ranks else self.common
        key = "optimizer_state_dict" if self.stage == 3 else "base_optimizer_state"
        base = of.get(key) or {}
        if isinstance(base, list):  # elastic
            return dict(enumerate(base))
        found: dict[int, State] = base.get("state", {})
        return found

    # ---- whole parameters

    def weights(self, frozen: bool = True) -> Lazy:
        """Parameters in float32 and buffers, by name.

        frozen: with those that the optimizer has not.
        """
        with _as_one(self.folder):
            return Lazy(self._weights(frozen))

    def _weights(self, frozen: bool) -> Mapping[str, Callable[[], Any]]:
        make: dict[str, Callable[[], Any]] = {}
        module, buffers = self.model["module"], self.model.get("buffer_names")
        if self.stage == 0 and self.parameters:
            raise FileNotFoundError(
                f"can't find *_optim_states.pt files in directory '{self.folder}', "
                "which have the values of parameters"
            )
        if self.stage == 0:
            return {name: partial(self._held, name) for name in module}
        for name in buffers or ():
            make[name] = partial(self._held, name)
        for name, shape in (self.model.get("frozen_param_shapes") or {}).items():
            if frozen:
                make[name] = partial(self._frozen, name, torch.Size(shape))
        for name in self.parameters:
            make[name] = partial(self.value, name, "fp32")
        for name, first in (self.model.get("shared_params") or {}).items():
            if first in make:
                make[name] = make[first]
        if self.stage < 3 and frozen:  # stage 1 has frozen ones here alone
            for name in module:
                make.setdefault(name, partial(self._held, name))
        return make

    def _held(self, name: str) -> torch.Tensor:
        """What the model's file has whole."""
        with _as_one(self.folder):
            return _float(self.model["module"][name])

    def _frozen(self, name: str, shape: torch.Size) -> torch.Tensor:
        of = self.models if self.stage == 3 else self.models[:1]
        with _as_one(self.folder):
            parts = [model["frozen_param_fragments"][name].reshape(-1) for model in of]
            return _float(torch.cat(parts)[: shape.numel()].view(shape))

    def value(self, name: str, key: str) -> Any:
        """A parameter's values ("fp32") or what the optimizer has of it."""
        with _as_one(self.folder):
            return self._value(name, key)

    def _value(self, name: str, key: str) -> Any:
        if self.universal:
            path = os.path.join(self.folder, "zero", name, f"{key}.pt")
            counts = self._counts_of(name)
            if not os.path.lexists(path) and key in counts:
                return counts[key]
            found = load(path)
            with _as_one(path):
                found = found["param"] if isinstance(found, dict) else found
                if isinstance(found, torch.Tensor) and found.dim() > 0:
                    found = found.view(self.parameters[name])  # flat, of stage 3
            return found
        flat = self._flat[name]
        if key == "fp32":
            return flat.whole(lambda rank: self._values(rank)[flat.group])
        of = self._states(0)[flat.group][key]
        if not isinstance(of, torch.Tensor) or of.dim() == 0:
            return of
        return flat.whole(lambda rank: self._states(rank)[flat.group][key].view(-1))

    # ---- the optimizer

    def optimizer(self) -> State | None:
        """The state of an optimizer of whole parameters by their names, as
        ctrainer.fsdp has it; None where there is none."""
        if self.stage == 0:
            return None
        groups = self.param_groups()
        state = {
            name: partial(self._state_of, name, groups) for name in self.parameters
        }
        return {
            "state": Lazy(state),
            "param_groups": [
                {k: v for k, v in group.items() if k not in ("params", "step")}
                | {"params": self._names_in(group, place)}
                for place, group in enumerate(groups)
            ],
        }

    def param_groups(self) -> list[State]:
        """The optimizer's groups, whose params are the numbers of flat groups."""
        key = "optimizer_state_dict" if self.stage == 3 else "base_optimizer_state"
        base = self.common.get(key)
        if "param_groups" in self.common:
            found = self.common["param_groups"]
        elif isinstance(base, Mapping):
            found = base["param_groups"]
        else:
            found = [{"params": [n]} for n in range(len(self.names))]
        return list(found)

    def _names_in(self, group: State, place: int) -> list[str]:
        flats = group.get("params") or [place]
        return [name for flat in flats for name in self.names[flat]]

    def _state_of(self, name: str, groups: list[State]) -> State:
        keys = self.keys_of(name)
        found = {key: self.value(name, key) for key in keys}
        for place, group in enumerate(groups):
            counts = group.get("step") or self.common.get("base_optimizer_state_step")
            if counts and name in self._names_in(group, place):
                found.setdefault("step", counts)
        if isinstance(found.get("step"), int | float):
            found["step"] = torch.tensor(float(found["step"]), device="cpu")
        return found

    def keys_of(self, name: str) -> list[str]:
        """What the optimizer has of a parameter.

        Raises FileNotFoundError where another parameter of its group has more.
        """
        group = self._group[name]
        if not self.universal:
            return list(self._states(0).get(group, {}))
        own, of_group = self._files[name], self._files_of_groups[group]
        counts = self._counts_of(name)
        for key in of_group.keys() - own - counts.keys():
            path = os.path.join(self.folder, "zero", name, f"{key}.pt")
            raise FileNotFoundError(f"{path} is missing: {of_group[key]} has one")
        return list(dict.fromkeys([*counts, *sorted(own)]))

    def _counts_of(self, name: str) -> State:
        """What a universal checkpoint has once for all parameters of the group; its
        vectors are those of rank 0 alone."""
        return scalars_of(self._states(0).get(self._group[name], {}))

    @cached_property
    def _files(self) -> dict[str, set[str]]:
        """The keys of the files of each parameter in a universal checkpoint."""
        folder = os.path.join(glob.escape(self.folder), "zero")
        found = {}
        for name in self.parameters:
            paths = glob.glob(os.path.join(folder, name, "*.pt"))
            found[name] = {os.path.basename(path)[:-3] for path in paths} - {"fp32"}
        return found

    @cached_property
    def _files_of_groups(self) -> list[dict[str, str]]:
        """The same of each group's parameters, and one of these that has the file."""
        return [{k: name for name in n for k in self._files[name]} for n in self.names]

    def loss_scaler(self) -> State:
        """The state of the loss scale, by DeepSpeed's names; {} without."""
        found = self.common.get("loss_scaler")
        return (
            dict(found if isinstance(found, Mapping) else vars(found)) if found else {}
        )


def _float(value: torch.Tensor) -> torch.Tensor:
    value = value.detach()
    return value.float() if value.is_floating_point() else value


def _overlaps(sizes: list[int], begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """What [begin, end) of a vector cut to `sizes` is of each part."""
    at = 0
    for rank, size in enumerate(sizes):
        low, high = max(begin - at, 0), min(end - at, size)
        if low < high:
            yield rank, low, high
        at += size
