"""wrap, enable_wrap and auto_wrap: which modules become units.

Source: fairscale, fairscale/nn/wrap/auto_wrap.py.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

Policy = Callable[..., bool]


@dataclass(frozen=True)
class _Context:
    wrapper_cls: Callable[..., nn.Module]
    options: dict[str, Any]
    policy: Policy


_context: contextvars.ContextVar[_Context | None] = contextvars.ContextVar(
    "ctrainer_enable_wrap", default=None
)


def default_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    unwrapped_params: int,
    module_is_root: bool,
    min_num_params: int = int(1e8),
    force_leaf_modules: Collection[type[nn.Module]] | None = None,
    exclude_wrap_modules: Collection[type[nn.Module]] | None = None,
    skip_params_check_for_root: bool = False,
) -> bool:
    """Return whether to look below a module (recurse) or to wrap it.

    A module is wrapped that has min_num_params or more elements that no inner unit has.

    Args:
        module (nn.Module): The module.
        recurse (bool): Ask whether to look below it.
        unwrapped_params (int): Elements that no inner unit has.
        module_is_root (bool): It is the outermost.
        min_num_params (int, default 100000000): Elements.
        force_leaf_modules (Collection[type[nn.Module]] | None, default None): Classes
            not to look below; None: fairscale's.
        exclude_wrap_modules (Collection[type[nn.Module]] | None, default None): Classes
            not to wrap; None: fairscale's.
        skip_params_check_for_root (bool, default False): Wrap the outermost module
            whatever its size.
    """
    leaves = _FORCE_LEAF if force_leaf_modules is None else force_leaf_modules
    excluded = _EXCLUDE_WRAP if exclude_wrap_modules is None else exclude_wrap_modules
    is_large = unwrapped_params >= min_num_params
    if recurse:
        return is_large and not isinstance(module, tuple(leaves))
    wanted = is_large or (module_is_root and skip_params_check_for_root)
    return wanted and not isinstance(module, tuple(excluded))


_EXCLUDE_WRAP: set[type[nn.Module]] = {nn.ModuleList, nn.ModuleDict}
_FORCE_LEAF: set[type[nn.Module]] = {nn.MultiheadAttention}
default_auto_wrap_policy.EXCLUDE_WRAP_MODULES = _EXCLUDE_WRAP  # type: ignore[attr-defined]
default_auto_wrap_policy.FORCE_LEAF_MODULES = _FORCE_LEAF  # type: ignore[attr-defined]


def config_auto_wrap_policy(
    module: nn.Module, recurse: bool, unwrapped_params: int, module_is_root: bool
) -> bool:
    """Return True for all modules with recurse, else for those with a `wrapper_config`.

    Args:
        module (nn.Module): The module.
        recurse (bool): Ask whether to look below it.
        unwrapped_params, module_is_root (int): Not read.
    """
    del unwrapped_params, module_is_root
    return recurse or hasattr(module, "wrapper_config")


@contextlib.contextmanager
def enable_wrap(
    auto_wrap_policy: Policy | None = None, **wrapper_kwargs: Any
) -> Iterator[None]:
    """Let wrap() and auto_wrap() wrap within the block.

    Args:
        auto_wrap_policy (Policy | None, default None): Of auto_wrap(); None:
            default_auto_wrap_policy.
        **wrapper_kwargs: wrapper_cls, the class to wrap with, and its options.

    Yields:
        None.

    Raises:
        NotImplementedError: inside another such block.
        TypeError: without wrapper_cls.
    """
    if _context.get() is not None:
        raise NotImplementedError("enable_wrap() cannot be entered within another")
    if "wrapper_cls" not in wrapper_kwargs:
        raise TypeError("enable_wrap() needs wrapper_cls, the class to wrap with")
    wrapper = wrapper_kwargs.pop("wrapper_cls")
    policy = auto_wrap_policy or default_auto_wrap_policy
    token = _context.set(_Context(wrapper, wrapper_kwargs, policy))
    try:
        yield
    finally:
        _context.reset(token)


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """Return the module wrapped within enable_wrap(), itself elsewhere.

    Args:
        module (nn.Module): The module.
        **wrap_overrides: Options, which come before module.wrapper_config, and that
            before the block's.
    """
    context = _context.get()
    if context is None:
        return module
    own = getattr(module, "wrapper_config", {})
    return context.wrapper_cls(module, **{**context.options, **own, **wrap_overrides})


def auto_wrap(
    module: nn.Module, auto_wrap_policy: Policy | None = None, **kwargs: Any
) -> nn.Module:
    """Wrap within enable_wrap() what the policy chooses, the inner ones first, and
    return the result; elsewhere return the module.

    Args:
        module (nn.Module): The module, which may be chosen, too.
        auto_wrap_policy (Policy | None, default None): None: the block's.
        **kwargs: Options of units.

    Raises:
        AssertionError: something below is wrapped already.
    """
    context = _context.get()
    if context is None:
        return module
    if isinstance(context.wrapper_cls, type):
        for name, child in module.named_modules():
            if isinstance(child, context.wrapper_cls):
                raise AssertionError(f"{name or 'the module'} is wrapped already")
    return _wrap_below(module, auto_wrap_policy or context.policy, True, kwargs)[0]


def _wrap_below(
    module: nn.Module, policy: Policy, is_root: bool, options: dict[str, Any]
) -> tuple[nn.Module, int]:
    """The module, wrapped or not, and how many of its elements units have now."""
    count = sum(p.numel() for p in module.parameters())
    asked: dict[str, Any] = {"module": module, "module_is_root": is_root}
    if not policy(recurse=True, unwrapped_params=count, **asked):
        return module, 0
    wrapped = 0
    for name, child in module.named_children():
        made, inside = _wrap_below(child, policy, False, options)
        setattr(module, name, made)
        wrapped += inside
    if policy(recurse=False, unwrapped_params=count - wrapped, **asked):
        return wrap(module, **options), count
    return module, wrapped
