"""Many parameters of a module as a few flat ones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ctrainer.fsdp.layout import entries_of, flat_group

__all__ = ["FlatParameter", "FlattenParamsWrapper"]

Metadata = tuple[list[str], list[torch.Size], list[int]]


class FlatParameter(nn.Parameter):
    """Parameters side by side in one of one dimension.

    Args:
        params (Sequence[nn.Parameter]): A non-empty list or tuple of parameters of one
            dtype, none of them flat.
        requires_grad (bool, default True): Whether it is trained.

    Raises:
        ValueError: params is empty, or an item is no parameter, or is flat.

    Example:
        >>> import torch
        >>> from ctrainer.fsdp import FlatParameter
        >>> flat = FlatParameter([torch.nn.Parameter(torch.ones(2, 3))])
        >>> flat.shape, [view.shape for view in flat.get_param_views()]
        (torch.Size([6]), [torch.Size([2, 3])])
    """

    _shapes: list[torch.Size]

    def __new__(
        cls, params: Sequence[nn.Parameter], requires_grad: bool = True
    ) -> FlatParameter:
        if not isinstance(params, list | tuple) or len(params) == 0:
            raise ValueError("An non-empty list or tuple argument is needed")
        if not all(isinstance(p, torch.Tensor) for p in params):
            raise ValueError("List items need to be Parameter types")
        if any(isinstance(p, FlatParameter) for p in params):
            raise ValueError("Nesting FlatParameter is not supported")
        data = torch.cat([p.detach().reshape(-1) for p in params])
        made: FlatParameter = super().__new__(cls, data, requires_grad)
        made._shapes = [p.size() for p in params]
        return made

    def __init__(
        self, params: Sequence[nn.Parameter], requires_grad: bool = True
    ) -> None:
        """Everything is made with the tensor."""

    def get_param_views(
        self, external_data: torch.Tensor | None = None
    ) -> Iterator[torch.Tensor]:
        """Yield a view for each parameter, of this tensor or of other data of its
        length.

        Args:
            external_data (torch.Tensor | None, default None): The other data.

        Raises:
            ValueError: it has another number of elements.
        """
        data = self if external_data is None else external_data
        numels = [shape.numel() for shape in self._shapes]
        if data.numel() != sum(numels):
            raise ValueError(
                f"Incorrect numel of supplied data: got {data.numel()} but expected "
                f"{sum(numels)}"
            )
        pieces = torch.split(data, numels)
        return (t.view(s) for t, s in zip(pieces, self._shapes, strict=True))


def replace_by_prefix(state: dict[str, Any], old_prefix: str, new_prefix: str) -> None:
    """Rename the keys that begin with old_prefix, in place and in their order."""
    if old_prefix == new_prefix:
        raise ValueError("old_prefix and new_prefix must be distinct")
    for key in list(state):
        value = state.pop(key)
        old = key.startswith(old_prefix)
        state[new_prefix + key[len(old_prefix) :] if old else key] = value


def _lists_of(
    module: nn.Module, param_list: Sequence[Any] | None
) -> list[list[nn.Parameter]]:
    params = list(module.parameters()) if param_list is None else list(param_list)
    if params and isinstance(params[0], nn.Parameter):
        params = [params]
    return [list(each) for each in params if len(each) > 0]


class FlattenParamsWrapper(nn.Module):
    """A module whose parameters are views of flat ones.

    Args:
        module (nn.Module): What is wrapped; attributes that are not found here are its
            own.
        param_list (Sequence[Any] | None, default None): Which parameters become one
            flat parameter each, a list or a list of lists; None: all of them one.
        flat_param_names (Sequence[str] | None, default None): What follows flat_param_
            in the names of the flat parameters; None: 0 and so on.
        auto_unflatten_state_dict (bool, default True): Let state_dict() have the
            module's own parameters.
        _flatten (bool, default True): False leaves the parameters as they are until
            they are flattened.

    Raises:
        ValueError: names that do not fit, parameters that two flat ones share, and
            those that are flat already.

    Source: fairscale, fairscale/nn/misc/flatten_params_wrapper.py.

    Example:
        >>> import torch
        >>> from ctrainer.compat.fairscale import FlattenParamsWrapper
        >>> flat = FlattenParamsWrapper(torch.nn.Linear(3, 2))
        >>> [(name, p.numel()) for name, p in flat.named_parameters()]
        [('flat_param_0', 8)]
    """

    def __init__(
        self,
        module: nn.Module,
        param_list: Sequence[Any] | None = None,
        flat_param_names: Sequence[str] | None = None,
        auto_unflatten_state_dict: bool = True,
        *,
        _flatten: bool = True,
    ) -> None:
        super().__init__()
        self._fpw_module = module
        self._auto_unflatten_state_dict = auto_unflatten_state_dict
        lists = _lists_of(module, param_list)
        self.num_params_managed = len({p for params in lists for p in params})
        names = self._checked_names(lists, flat_param_names)
        self._groups = [
            flat_group(name, entries_of(self, params))
            for name, params in zip(names, lists, strict=True)
        ]
        self.flat_params: list[Any] = []
        self.flat_param_names = names
        hooked: Any = self  # these two have no types in torch
        hooked._register_state_dict_hook(_strip_prefix)
        hooked._register_load_state_dict_pre_hook(_add_prefix, with_module=True)
        if _flatten:
            self._make_flat()

    def _checked_names(
        self, lists: list[list[nn.Parameter]], names: Sequence[str] | None
    ) -> list[str]:
        if names is None:
            names = [str(i) for i in range(len(lists))]
        if len(lists) != len(names):
            raise ValueError("Names and number of param lists must be equal")
        if len(set(names)) != len(names):
            raise ValueError("Each flat param must be given a unique name")
        managed = sum(len(set(params)) for params in lists)
        if managed != self.num_params_managed:
            raise ValueError(
                f"Incorrect param groups {managed} vs {self.num_params_managed}"
            )
        return [f"flat_param_{name}" for name in names]

    def _make_flat(self) -> None:
        """Let flat parameters take the place of the module's."""
        for name, group in zip(self.flat_param_names, self._groups, strict=True):
            params = [entry.param for entry in group.entries]
            flat = FlatParameter(params, group.requires_grad)
            self.flat_params.append(flat)
            self.register_parameter(name, flat)
            for entry in group.entries:
                for place in entry.places:
                    place.module._parameters.pop(place.name, None)
        self._view_flat_params()

    @property
    def module(self) -> nn.Module:
        """The module that is wrapped."""
        return self._fpw_module

    @property
    def flat_param(self) -> Any:
        """The flat parameter, where there is only one."""
        (flat,) = self.flat_params
        return flat

    def metadata(self, flat_param_idx: int) -> Metadata:
        """Return the names, shapes and numbers of elements of the parameters in a flat
        one, in order.

        Args:
            flat_param_idx (int): Number of the flat parameter, from 0.
        """
        entries = self._groups[flat_param_idx].entries
        names = [entry.places[0].path for entry in entries]
        shapes = [entry.param.size() for entry in entries]
        return names, shapes, [entry.numel for entry in entries]

    def get_param_views(
        self, external_data_list: Sequence[torch.Tensor | None] | None = None
    ) -> Iterator[torch.Tensor]:
        """Yield a view of each parameter, of the flat ones or of other data.

        Args:
            external_data_list (Sequence[torch.Tensor | None] | None, default None): For
                each flat parameter a tensor to view instead, or None.

        Raises:
            ValueError: a list of another length, or a tensor of another number of
                elements.
        """
        data = external_data_list or [None] * len(self.flat_params)
        if len(data) != len(self.flat_params):
            raise ValueError(
                f"Incorrect external data list: {len(data)} vs. {len(self.flat_params)}"
            )
        for flat, other in zip(self.flat_params, data, strict=True):
            yield from flat.get_param_views(other)

    def _set_views(self, views: Iterator[torch.Tensor], as_parameters: bool) -> None:
        entries = [entry for group in self._groups for entry in group.entries]
        for entry, view in zip(entries, views, strict=True):
            value = nn.Parameter(view.detach(), entry.param.requires_grad)
            for place in entry.places:
                place.module.__dict__.pop(place.name, None)
                place.module._parameters.pop(place.name, None)
                if as_parameters:
                    place.module.register_parameter(place.name, value)
                else:
                    object.__setattr__(place.module, place.name, view)

    def _view_flat_params(self) -> None:
        self._set_views(self.get_param_views(), as_parameters=False)

    @contextlib.contextmanager
    def unflatten_params(
        self, flat_params: Sequence[torch.Tensor] | None = None
    ) -> Iterator[None]:
        """Let the module have its own parameters within the block, over the flat ones'
        memory.

        Within another such block it changes nothing, but for other data.

        Args:
            flat_params (Sequence[torch.Tensor] | None, default None): Other data to be
                viewed, a tensor for each flat parameter.

        Yields:
            None.
        """
        was_flat = any(name in self._parameters for name in self.flat_param_names)
        if not self.flat_params or (flat_params is None and not was_flat):
            yield
            return
        self._set_views(self.get_param_views(flat_params), as_parameters=True)
        for name in self.flat_param_names:
            self._parameters.pop(name, None)
        try:
            yield
        finally:
            self._leave_unflattened(was_flat)

    def _leave_unflattened(self, was_flat: bool) -> None:
        if not was_flat:
            self._set_views(self.get_param_views(), as_parameters=True)
        else:
            for name, flat in zip(self.flat_param_names, self.flat_params, strict=True):
                self.register_parameter(name, flat)
            self._view_flat_params()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's own parameters, or the flat ones without
        auto-unflattening.

        Args:
            *args, **kwargs: As torch.nn.Module.state_dict's.
        """
        if not self._auto_unflatten_state_dict:
            return super().state_dict(*args, **kwargs)
        with self.unflatten_params():
            return super().state_dict(*args, **kwargs)

    def flat_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the flat parameters.

        Args:
            *args, **kwargs: As torch.nn.Module.state_dict's.
        """
        return super().state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Any, strict: bool = True, assign: bool = False
    ) -> Any:
        """Load what state_dict() or flat_state_dict() returned; return the missing and
        unexpected keys.

        Args:
            state_dict: Tensors by name.
            strict (bool, default True): Raise RuntimeError for missing and unexpected
                keys.
            assign (bool, default False): Take the tensors themselves; of flat ones
                alone.
        """
        if any(key in state_dict for key in (*self.flat_param_names, "flat_param")):
            state = dict(state_dict)
            if "flat_param" in state:
                state["flat_param_0"] = state.pop("flat_param")
            return super().load_state_dict(state, strict, assign)
        with self.unflatten_params():
            return super().load_state_dict(state_dict, strict)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module and return its output.

        Args:
            *args, **kwargs: Of the module's forward.
        """
        if self.flat_params:
            self._view_flat_params()
        return self._fpw_module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_fpw_module":
                raise
            return getattr(self._fpw_module, name)

    def __getitem__(self, key: int) -> Any:
        return self._fpw_module[key]  # type: ignore[index]


def _strip_prefix(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: object
) -> None:
    replace_by_prefix(state_dict, f"{prefix}_fpw_module.", prefix)


def _add_prefix(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, *unused: object
) -> None:
    replace_by_prefix(state_dict, prefix, f"{prefix}_fpw_module.")
    for key in list(state_dict):  # the flat parameters are the wrapper's own
        name = key.removeprefix(f"{prefix}_fpw_module.")
        is_flat = name.startswith("flat_param_") or name in module._parameters
        if name != key and is_flat:
            state_dict[prefix + name] = state_dict.pop(key)
