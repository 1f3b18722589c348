"""DeepSpeed's module zero: models made without values, whole parameters for a while,
and parameters that other modules read."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
from torch import nn

from ctrainer import _C
from ctrainer.arguments.deepspeed import HfDeepSpeedConfig
from ctrainer.comm import world
from ctrainer.fsdp import full_params, initial_values

__all__ = [
    "GatheredParameters",
    "Init",
    "register_external_parameter",
    "unregister_external_parameter",
]


class Init:
    """Make the modules of a block on the meta device, where they take no memory.

    initialize() gives each unit values as it shards it: those of the model's
    _init_weights(), as transformers' models have, or of its modules'
    reset_parameters(). Values that constructors set in another way are lost; set them
    in GatheredParameters(..., modifier_rank=0).

    Args:
        module (nn.Module | None, default None): Rejected: initialize() shards a model
            that has values as it is.
        data_parallel_group (default None): Rejected: initialize() shards over all
            ranks.
        mem_efficient_linear (bool, default True): No effect: layers compute as torch
            has them.
        remote_device (str | None, default None): No effect: the configuration of
            initialize() says where shards are.
        pin_memory (bool, default False): No effect: offloaded memory is pinned.
        config_dict_or_path (default None): A configuration, which is checked; without
            stage 3 the block has no effect.
        config (default None): The older name of config_dict_or_path.
        enabled (bool, default True): False: the block has no effect.
        dtype (torch.dtype | None, default None): No effect: parameters have the dtype
            that the block makes them with, and in fp16 and bf16 float32 shards.
        mpu (default None): Rejected: layers are not split.

    Raises:
        ValueError: an argument that is rejected.

    Example:
        >>> import torch
        >>> from ctrainer.compat.deepspeed import zero
        >>> with zero.Init():
        ...     model = torch.nn.Linear(4, 2)
        >>> model.weight.is_meta
        True
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
    ) -> None:
        rejected = {
            "module": (module, "initialize() shards a model that has values as it is"),
            "data_parallel_group": (
                data_parallel_group,
                "initialize() shards over all ranks",
            ),
            "mpu": (mpu, "layers are not split over ranks"),
        }
        for name, (value, why) in rejected.items():
            if value is not None:
                raise ValueError(f"zero.Init: {name} is not supported: {why}")
        given = config_dict_or_path if config is None else config
        stage = 3 if given is None else HfDeepSpeedConfig(given).stage
        self._device = torch.device("meta") if enabled and stage == 3 else None

    def __enter__(self) -> None:
        if self._device is not None:
            self._device.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._device is not None:
            self._device.__exit__(kind, value, trace)


class GatheredParameters:
    """Give parameters all their values within a block. Collective.

    A parameter of a model that initialize() has sharded is gathered, with the unit that
    it is in, and may be read as an attribute of its module or as engine.parameters()
    yields it. One that zero.Init() made without values gets memory on every rank, and
    the values that modifier_rank writes. For other parameters the block has no effect.

    Args:
        params (nn.Parameter | Iterable[nn.Parameter]): One or several, the same on
            every rank.
        modifier_rank (int | None, default None): Whose changes all ranks take at the
            end of the block; None: changes are lost.
        fwd_module (nn.Module | None, default None): Register the parameters as external
            ones of this module.
        enabled (bool, default True): False: the block has no effect.

    Raises:
        ValueError: parameters without values and no modifier_rank; blocks within each
            other whose parameters are in one unit.

    Example:
        >>> import torch
        >>> from ctrainer.compat.deepspeed import zero
        >>> with zero.Init():
        ...     layer = torch.nn.Linear(2, 1, bias=False)
        >>> with zero.GatheredParameters(layer.weight, modifier_rank=0):
        ...     _ = torch.nn.init.ones_(layer.weight)
        >>> layer.weight.tolist()
        [[1.0, 1.0]]
    """

    def __init__(
        self,
        params: Any,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        single = isinstance(params, torch.Tensor) or not isinstance(params, Iterable)
        self._params = [params] if single else list(params)
        self._modifier = modifier_rank
        self._enabled = enabled
        if fwd_module is not None:
            for param in self._params:
                register_external_parameter(fwd_module, param)

    def __enter__(self) -> None:
        if not self._enabled:
            return
        self._empty = [p for p in self._params if p.is_meta]
        if self._empty and self._modifier is None:
            raise ValueError(
                "parameters on the meta device have no values to gather: pass "
                "modifier_rank, whose values all ranks take, or gather them after "
                "initialize()"
            )
        with torch.no_grad():
            for param in self._empty:
                initial_values.move(param)
                param.fill_(float("nan"))  # says that nothing was written
        self._units = _units_of(self._params)
        self._summoned = full_params.summoned(self._units, self._modifier is not None)
        for unit in self._units:
            unit._assert_idle()
        self._summoned.__enter__()
        shown = list(_parts(self._units, self._params))
        self._parts = [(part, part.data) for part, _ in shown]
        for part, whole in shown:
            part.data = whole

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._enabled:
            return
        if self._modifier is not None and kind is None:
            held = [e.param.data for e in full_params.entries_of(self._units)]
            _broadcast([*held, *(p.data for p in self._empty)], self._modifier)
        self._summoned.__exit__(kind, value, trace)
        for part, own in self._parts:
            part.data = own


def _broadcast(tensors: list[torch.Tensor], root: int) -> None:
    """Those of a GPU through the host's memory."""
    pairs = [(tensor, tensor.cpu()) for tensor in tensors]
    _C.broadcast_tensors(world(), [on_host for _, on_host in pairs], root)
    for tensor, on_host in pairs:
        if on_host is not tensor:
            tensor.copy_(on_host)


def _units_of(params: list[Any]) -> list[Any]:
    """The units that parameters, or their parts, are in, each once."""
    found = {id(unit): unit for unit in map(_unit_of, params) if unit is not None}
    return list(found.values())


def _unit_of(param: Any) -> Any:
    unit = getattr(param, "_unit", lambda: None)()
    return None if unit is None else unit.owner()


def _parts(units: list[Any], params: list[Any]) -> Iterable[tuple[Any, torch.Tensor]]:
    """The parts of parameters that are among `params`, with all values of each."""
    given = {id(param) for param in params}
    for entry in full_params.entries_of(units):
        part = entry.param._sharded_param
        if id(part) in given:
            yield part, entry.param.data


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Have a parameter of another module gathered while `module` runs.

    Before initialize(), which then lets the smallest unit around both have the
    parameter.

    Args:
        module (nn.Module): Whose forward() reads the parameter.
        parameter (nn.Parameter): The parameter.

    Raises:
        RuntimeError: no parameter; or it is sharded already, in a unit that is not
            around the module.
    """
    if not isinstance(parameter, nn.Parameter):
        raise RuntimeError("Parameter is not a torch.nn.Parameter")
    unit = _unit_of(parameter)
    if unit is not None and all(module is not below for below in unit.modules()):
        raise RuntimeError(
            "the parameter is in a unit that does not have the module: register it "
            "before initialize()"
        )
    external: Any = module.__dict__.setdefault("_external_params", {})
    external[id(parameter)] = parameter


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Undo register_external_parameter().

    Args:
        module (nn.Module): The module.
        parameter (nn.Parameter): The parameter.

    Raises:
        RuntimeError: no parameter, or one that is not registered.
    """
    if not isinstance(parameter, nn.Parameter):
        raise RuntimeError("Parameter is not a torch.nn.Parameter")
    if module.__dict__.get("_external_params", {}).pop(id(parameter), None) is None:
        raise RuntimeError("Parameter is not a registered external parameter")
