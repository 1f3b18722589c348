"""What an overridden hook accepts, and the errors of what it returns."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def takes_positional(function: Callable[..., Any], n: int) -> bool:
    """Can `function` be called with n positional arguments?"""
    try:
        inspect.signature(function).bind(*range(n))
    except TypeError:
        return False
    except ValueError:  # no signature to ask
        return True
    return True


# Arguments that transformers passes by position, and their number.
_BY_POSITION = {"training_step": ("num_items_in_batch", 3), "log": ("start_time", 2)}


def taken_keywords(hook: str, method: Callable[..., Any]) -> Any:
    """What accepted_keywords() says of an override; False where it has another name
    for the hook's last argument, which it takes by position."""
    names = accepted_keywords(method)
    last, n = _BY_POSITION.get(hook, ("", 0))
    if n and last not in (names or ()) and takes_positional(method, n):
        return False
    return names


def accepted_keywords(function: Callable[..., Any]) -> frozenset[str] | None:
    """Names that `function` takes as keywords; None when it takes any."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return None
    return frozenset(p.name for p in parameters if p.kind in _KEYWORD)


def definition(owner: Any, name: str) -> str:
    """Class, name, file and line of the method that `owner` has by this name."""
    method = vars(owner).get(name) if hasattr(owner, "__dict__") else None
    cls = next((c for c in type(owner).__mro__ if name in vars(c)), type(owner))
    function = inspect.unwrap(method or vars(cls).get(name) or owner)
    code = getattr(function, "__code__", None)
    place = "" if code is None else f" ({code.co_filename}:{code.co_firstlineno})"
    return f"{cls.__name__}.{name}{place}"


def wrong_return(owner: Any, name: str, value: Any, wanted: str) -> str:
    """What is wrong where a hook has returned something else than it has to."""
    shown = "None" if value is None else f"a {type(value).__name__}"
    lacks = " (is there a `return`?)" if value is None else ""
    return f"{definition(owner, name)} returned {shown}; {wanted}{lacks}"


def no_tensor(trainer: Any, loss: Any) -> str:
    """What is wrong with a loss that has no backward()."""
    wanted = "return the loss, a tensor"
    return wrong_return(trainer, "compute_loss", loss, wanted)


def check_optimizer_made(trainer: Any) -> None:
    """Raise TypeError where create_optimizer has left no optimizer."""
    if trainer.optimizer is None:
        wanted = "set self.optimizer and return it"
        raise TypeError(wrong_return(trainer, "create_optimizer", None, wanted))


def not_named(batch: Any) -> str:
    """What is wrong with a batch that compute_loss cannot pass to a model."""
    return (
        "compute_loss expects a batch that maps the names of the model's arguments "
        f"to tensors, got {type(batch).__name__}; return dicts from the dataset "
        "or the data_collator, or override compute_loss"
    )


def no_loss(model: Any, outputs: Any, inputs: Any) -> str:
    """What is wrong with a model's outputs without a loss."""
    if outputs is None:
        wanted = "return a dict with 'loss', or (loss, ...)"
        return wrong_return(model, "forward", outputs, wanted)
    return (
        f"the model returned no loss, only {list(outputs)}, for the inputs "
        f"{list(inputs)}; give it labels (numbers: the default data_collator leaves "
        "out text), pass compute_loss_func, or override compute_loss"
    )


def rows_by_name(features: list[Any]) -> list[Mapping[str, Any]]:
    """The rows of a batch, mappings or objects with attributes, as mappings."""
    rows = [
        f if isinstance(f, Mapping) else getattr(f, "__dict__", None) for f in features
    ]
    for place, (row, feature) in enumerate(zip(rows, features, strict=True)):
        if not row and not isinstance(feature, Mapping):
            raise TypeError(
                f"the default data_collator needs rows that are dicts, not a "
                f"{type(feature).__name__} (row {place + 1} of {len(rows)} of the "
                "batch); return dicts from the dataset, or pass a data_collator that "
                "makes them"
            )
    return rows  # type: ignore[return-value]
