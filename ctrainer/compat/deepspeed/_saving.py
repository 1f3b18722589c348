"""save_checkpoint() and load_checkpoint() of the engine, in DeepSpeed's files."""

from __future__ import annotations

import os
import stat
from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ctrainer.compat.deepspeed._files import (
    FLAT_2,
    FLAT_3,
    MODEL_FILE,
    Checkpoint,
    DynamicLossScaler,
    Lazy,
    LossScaler,
    State,
    fragment_address,
    of_class,
    save,
)
from ctrainer.fsdp import full_params, optim_state

if TYPE_CHECKING:
    from ctrainer.compat.deepspeed._engine import DeepSpeedEngine

# The release whose files these are.
VERSION = "0.19.8"
SCRIPT = """#!/usr/bin/env python
# python zero_to_fp32.py CHECKPOINT_DIR OUTPUT_DIR: the whole float32 weights of a
# checkpoint of DeepSpeed's layout; --help says more.
import sys

from ctrainer.compat.deepspeed.zero_to_fp32 import main

sys.exit(main())
"""
# What a file of the model's state has beside the caller's.
_OURS = frozenset(
    "module buffer_names optimizer param_shapes frozen_param_shapes shared_params "
    "frozen_param_fragments lr_scheduler data_sampler random_ltd skipped_steps "
    "global_steps global_samples dp_world_size mp_world_size ds_config ds_version "
    "checkpoint_parallel_dimensions universal_checkpoint_info".split()
)


def write(
    engine: DeepSpeedEngine, folder: str, client_state: State, frozen: bool
) -> None:
    """This rank's files of a checkpoint. Collective."""
    stage, rank = engine.zero_optimization_stage(), engine.global_rank
    stage = max(stage, 1) if engine._is_sharded else 0
    parts = Parts(engine, stage)
    state = _model_state(engine, parts, frozen)
    taken = sorted(_OURS & client_state.keys())
    if taken:
        raise ValueError(f"client_state has {taken[0]!r}, which the checkpoint has")
    if stage == 3:
        name = f"zero_pp_rank_{rank}_{MODEL_FILE}"
        save(state | client_state, os.path.join(folder, name))
    elif rank == 0:
        save(state | client_state, os.path.join(folder, MODEL_FILE))
    if stage > 0 and engine.optimizer is not None:
        prefix = "bf16_" if engine.bfloat16_enabled() else ""
        name = f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        content = {
            "optimizer_state_dict": parts.state(engine),
            "ds_config": engine.config,
            "ds_version": VERSION,
        }
        save(content, os.path.join(folder, name))


def write_script(folder: str) -> None:
    """The command that makes whole weights of the checkpoints in a folder."""
    path = os.path.join(folder, "zero_to_fp32.py")
    with open(path, "w", encoding="utf-8") as file:
        file.write(SCRIPT)
    os.chmod(path, os.stat(path).st_mode | stat.S_IXUSR)


class Parts:
    """What this rank's files have of whole parameters, a unit at a time. Collective.

    module: the model's state_dict(), in the dtype that layers compute in; empty tensors
    in stage 3. fragments: frozen parameters, in stage 3 this rank's parts. flats: for
    each group of the optimizer this rank's part of each flat vector, by the key of the
    optimizer's state, and "fp32".
    """

    def __init__(self, engine: DeepSpeedEngine, stage: int) -> None:
        self.stage, self.world = stage, engine.world_size
        self.rank, self.engine = engine.global_rank, engine
        self.module: dict[str, torch.Tensor] = OrderedDict()
        self.fragments: dict[str, torch.Tensor] = OrderedDict()
        self.flats: list[State] = []
        self.shapes: list[dict[str, torch.Size]] = []
        self.frozen: dict[str, torch.Size] = OrderedDict()
        self.shared: dict[str, str] = {}
        if stage == 0:
            self.module = engine.module.state_dict()
            return
        self._place()
        self._take_weights()
        if engine.optimizer is not None:
            self._take_optimizer()

    def _place(self) -> None:
        """Where each parameter is in the flat vectors."""
        of: Any = self.engine.module
        names = full_params.names_of(of)
        entries = {
            names[id(entry.param)][0]: entry
            for entry in full_params.entries_of(of.units())
        }
        optimizer = self.engine.optimizer
        groups = [] if optimizer is None else optimizer.param_groups
        ids = {id(e.param._sharded_param): name for name, e in entries.items()}
        self.places: dict[str, tuple[int, int]] = {}
        self.sizes: list[int] = []
        for number, group in enumerate(groups):
            shapes: dict[str, torch.Size] = OrderedDict()
            at = 0
            for param in group["params"]:
                if param.requires_grad:
                    name = ids[id(param)]
                    shapes[name] = entries[name].param.shape
                    self.places[name] = number, at
                    n = shapes[name].numel()
                    at += -(-n // self.world) if self.stage == 3 else n
            self.shapes.append(shapes)
            self.sizes.append(at)
        for name, entry in entries.items():
            if name not in self.places:
                self.frozen[name] = entry.param.shape
            rest = names[id(entry.param)][1:]
            self.shared.update(dict.fromkeys(rest, name))

    def _own_part(self, name: str) -> tuple[slice, slice]:
        """The places of this rank's elements in its part, and in the parameter."""
        number, at = self.places[name]
        n = self.shapes[number][name].numel()
        if self.stage == 3:
            part = -(-n // self.world)
            begin = min(self.rank * part, n)
            end = min(begin + part, n)
            return slice(at, at + end - begin), slice(begin, end)
        part = self._part_of(number)
        low, high = max(at, self.rank * part), min(at + n, (self.rank + 1) * part)
        high = max(low, high)
        shift = self.rank * part
        return slice(low - shift, high - shift), slice(low - at, high - at)

    def _part_of(self, number: int) -> int:
        """Elements of a rank's part, of which there are an even number."""
        if self.stage == 3:
            return self.sizes[number]
        each = 2 * self.world
        return -(-self.sizes[number] // each) * each // self.world

    def _put(self, name: str, key: str, value: torch.Tensor) -> None:
        number, _ = self.places[name]
        own, whole = self._own_part(name)
        flat = self.flats[number].get(key)
        if flat is None:
            flat = torch.zeros(self._part_of(number), dtype=torch.float32, device="cpu")
            self.flats[number][key] = flat
        flat[own] = value.reshape(-1)[whole].cpu()

    def _take_weights(self) -> None:
        of: Any = self.engine.module
        names = full_params.names_of(of)
        self.flats = [{} for _ in self.sizes]
        for number, size in enumerate(self.sizes):
            if size:
                part = self._part_of(number)
                zeros = torch.zeros(part, dtype=torch.float32, device="cpu")
                self.flats[number]["fp32"] = zeros
        dtype = of.compute_dtype
        for entry, value in full_params.values_of(of.units()):
            name = names[id(entry.param)][0]
            low = value if dtype is None else value.to(dtype)
            if name in self.places:
                self._put(name, "fp32", value)
            else:
                self.fragments[name] = self._fragment(low)
            keeps = self.stage < 3 and self.rank == 0
            empty = torch.empty(0, dtype=low.dtype, device="cpu")
            kept = low.cpu().clone() if keeps else empty
            self.module.update(dict.fromkeys(names[id(entry.param)], kept))
        for name, buffer in full_params.persistent_buffers(of):
            self.module[name] = buffer.detach().cpu()

    def _fragment(self, value: torch.Tensor) -> torch.Tensor:
        if self.stage < 3:
            return value.cpu().clone()
        part = -(-value.numel() // self.world)
        own = torch.zeros(part, dtype=value.dtype, device="cpu")
        flat = value.reshape(-1)[self.rank * part : (self.rank + 1) * part]
        own[: flat.numel()] = flat.cpu()
        return own

    def _take_optimizer(self) -> None:
        """The moments of each group as flat vectors; counts as they are."""
        self.counts: list[State] = [{} for _ in self.sizes]
        for name, key, value in optim_state.whole_values(
            self.engine.module, self.engine.optimizer
        ):
            number, _ = self.places[name]
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                self._put(name, key, value)
            else:
                self.counts[number].setdefault(key, value)

    def _slices(self, shapes: Mapping[str, Any]) -> dict[str, Any]:
        """Where parameters are in this rank's part of a flat vector."""
        own = {name: self._own_part(name)[0] for name in shapes}
        return OrderedDict(
            (n, of_class(fragment_address, numel=at.stop - at.start, start=at.start))
            for n, at in own.items()
            if at.stop > at.start
        )

    def state(self, engine: DeepSpeedEngine) -> State:
        """The content of this rank's file of the optimizer."""
        params = engine.optimizer.param_groups
        groups = [
            {k: v for k, v in group.items() if k != "params"} | {"params": [number]}
            for number, group in enumerate(params)
        ]
        moments = {
            number: counts | {k: v for k, v in flats.items() if k != "fp32"}
            for number, (counts, flats) in enumerate(
                zip(self.counts, self.flats, strict=True)
            )
            if counts or len(flats) > 1
        }
        base = {"state": moments, "param_groups": groups}
        none = torch.zeros(0, device="cpu")
        values = [flats.get("fp32", none) for flats in self.flats]
        common = {
            "loss_scaler": _loss_scaler(engine),
            "zero_stage": self.stage,
            "dynamic_loss_scale": _is_dynamic(engine),
            "overflow": False,
            "ds_version": VERSION,
        }
        if self.stage == 3:
            rest = {"partition_count": self.world, "optimizer_state_dict": base}
            return common | rest | {FLAT_3: values}
        each = range(len(self.sizes))
        padded = [self._part_of(n) * self.world - self.sizes[n] for n in each]
        last = self.rank == self.world - 1
        own = [
            value.numel() - pad * last
            for value, pad in zip(values, padded, strict=True)
        ]
        return common | {
            "base_optimizer_state": base,
            "clip_grad": engine.gradient_clipping(),
            "partition_count": [self.world] * len(self.sizes),
            "group_paddings": [pad * last for pad in padded],
            "param_alignment_paddings": [[0] * len(s) for s in self.shapes],
            "param_slice_mappings": [self._slices(shapes) for shapes in self.shapes],
            FLAT_2: [v[:n].clone() for v, n in zip(values, own, strict=True)],
        }


def _is_dynamic(engine: DeepSpeedEngine) -> bool:
    return engine._scaler is not None and bool(engine._scaler.state_dict()["dynamic"])


def _loss_scaler(engine: DeepSpeedEngine) -> Any:
    state: State = {} if engine._scaler is None else engine._scaler.state_dict()
    if _is_dynamic(engine):
        return of_class(DynamicLossScaler, **state, dtype=torch.float16)
    return of_class(LossScaler, cur_scale=state.get("cur_scale", 1.0), dynamic=False)


def _model_state(engine: DeepSpeedEngine, parts: Parts, frozen: bool) -> State:
    schedule, optimizer = engine.lr_scheduler, engine.optimizer
    zero = parts.stage > 0
    whole = None if zero or optimizer is None else optimizer.state_dict()
    module = parts.module
    if not frozen:
        module = {n: v for n, v in module.items() if n not in parts.frozen}
    buffers = [name for name, _ in full_params.persistent_buffers(engine.module)]
    return {
        "module": module,
        "buffer_names": buffers,
        "optimizer": whole,
        "param_shapes": parts.shapes if zero else None,
        "frozen_param_shapes": parts.frozen if zero and frozen else None,
        "shared_params": parts.shared if zero else None,
        "frozen_param_fragments": parts.fragments if zero and frozen else None,
        "lr_scheduler": None if schedule is None else schedule.state_dict(),
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": engine.skipped_steps,
        "global_steps": engine.global_steps,
        "global_samples": engine.global_samples,
        "dp_world_size": engine.world_size,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": engine.config,
        "ds_version": VERSION,
    }


# ---- loading


def read(
    engine: DeepSpeedEngine, folder: str, strict: bool, optimizer: bool,
    schedule: bool, module_only: bool,
) -> State:  # fmt: skip
    """Load a checkpoint; return what the caller had saved with it."""
    found = Checkpoint(folder)
    of: Any = engine.module
    weights = found.weights()
    if engine._is_sharded:
        of.load_full_state_dict(_with_all_names(of, weights), strict)
    else:
        of.load_state_dict(dict(weights), strict)
    model = found.model
    if not module_only:
        if optimizer and engine.optimizer is not None:
            _read_optimizer(engine, found)
        if schedule and engine.lr_scheduler is not None:
            engine.lr_scheduler.load_state_dict(model["lr_scheduler"])
        engine.global_steps = model["global_steps"]
        engine.skipped_steps = model["skipped_steps"]
        samples = engine.global_steps * engine.train_batch_size()
        engine.global_samples = model.get("global_samples", samples)
        engine.micro_steps = engine.global_steps * engine.gradient_accumulation_steps()
        engine._passes = 0
        engine.zero_grad()  # of passes whose update never came
    return {key: value for key, value in model.items() if key not in _OURS}


def _with_all_names(module: Any, weights: Mapping[str, Any]) -> Mapping[str, Any]:
    """Tied parameters by each of their names, of which a file may have one."""
    make = {name: partial(weights.__getitem__, name) for name in weights}
    for names in full_params.names_of(module).values():
        known = [name for name in names if name in make]
        for name in names if known else ():
            make.setdefault(name, make[known[0]])
    return Lazy(make)


def _read_optimizer(engine: DeepSpeedEngine, found: Checkpoint) -> None:
    of, optimizer = engine.module, engine.optimizer
    full = found.optimizer()
    if full is None:
        full = _by_names(engine, found)
    own = optim_state.shard_full_optim_state_dict(full, of, optim=optimizer)
    optimizer.load_state_dict(own)
    state = found.loss_scaler()
    if engine._scaler is not None and "cur_iter" in state:
        known = engine._scaler.state_dict()
        engine._scaler.load_state_dict({name: state[name] for name in known})
        engine._publish(overflow=False)


def _by_names(engine: DeepSpeedEngine, found: Checkpoint) -> State:
    """The state of torch's optimizer, of stage 0, by the names of parameters."""
    state = found.model.get("optimizer")
    if not isinstance(state, dict) or "param_groups" not in state:
        raise ValueError(
            f"{found.folder}: the optimizer's state of stage 0 with fp16 or bf16 is "
            "not supported: pass load_optimizer_states=False, or save in stage 1"
        )
    named = {id(param): name for name, param in engine.module.named_parameters()}
    groups = engine.optimizer.param_groups
    names = [named[id(param)] for group in groups for param in group["params"]]
    return optim_state.rekeyed(state, dict(enumerate(names)))
