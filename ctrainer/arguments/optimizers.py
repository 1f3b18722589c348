"""The optimizers of `optim` and `optim_args`, by transformers' names.

A supported name is a line in RECIPES; the name of an optimizer in another package is a
line in PACKAGES.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ctrainer.arguments import deepspeed
from ctrainer.arguments.settings import nearest, read, reject_unknown


@dataclass(frozen=True)
class Package:
    """The package of an optimizer that is not built in: transformers' Trainer makes the
    optimizer from the arguments, and each update calls its own step().

    name: of the distribution that pip installs.
    module: the module to import.
    reason: why the optimizer is not supported, if it is not.
    """

    name: str
    module: str
    reason: str = ""

    @property
    def installed(self) -> bool:
        # Of a module that is loaded without a spec, find_spec() is a ValueError.
        loaded = sys.modules.get(self.module) is not None
        return loaded or importlib.util.find_spec(self.module) is not None


_IN_BACKWARD = "it updates during backward, before gradients are whole and checked"
_OTHER_DEVICE = "it needs a device that is not supported"
_BITSANDBYTES = Package("bitsandbytes", "bitsandbytes")
_GALORE = Package("galore-torch", "galore_torch")
_APOLLO = Package("apollo-torch", "apollo_torch")
_TORCHAO = Package("torchao", "torchao")
_LOMO = Package("lomo-optim", "lomo_optim", _IN_BACKWARD)


@dataclass(frozen=True)
class Recipe:
    """How TrainingArguments make an optimizer of the class `cls` in ctrainer.optim.

    takes: keywords of the constructor beside the learning rate that come from the
        arguments; weight_decay comes with the groups of parameters.
    fixed: keywords that transformers sets in addition.
    elsewhere: the package of the optimizer where it is installed and parameters are not
        in host memory, or nobody says where; None: torch's class of that name, if there
        is one.
    """

    cls: str
    takes: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    third_beta: float | None = None  # default of "beta3" in optim_args
    elsewhere: Package | None = None


_ADAM = ("betas", "eps")
_ADEMAMIX = Recipe("AdEMAMix", _ADAM, third_beta=0.9999, elsewhere=_BITSANDBYTES)
_ADAMW_8BIT = Recipe("AdamW8bit", _ADAM, elsewhere=_BITSANDBYTES)
_ADEMAMIX_8BIT = replace(_ADEMAMIX, cls="AdEMAMix8bit")
_LION = Recipe("Lion", ("betas",), elsewhere=_BITSANDBYTES)
_LION_8BIT = replace(_LION, cls="Lion8bit")

RECIPES = {
    "adafactor": Recipe(
        "Adafactor", fixed={"scale_parameter": False, "relative_step": False}
    ),
    "adagrad": Recipe("Adagrad"),
    "adamw_8bit": _ADAMW_8BIT,
    "adamw_apex_fused": Recipe("AdamW", _ADAM),
    "adamw_bnb_8bit": _ADAMW_8BIT,
    "adamw_compact": Recipe("AdamWCompact", _ADAM),
    "adamw_hf": Recipe("AdamW", _ADAM),
    "adamw_torch": Recipe("AdamW", _ADAM),
    "adamw_torch_fused": Recipe("AdamW", _ADAM),
    "ademamix": _ADEMAMIX,
    "ademamix_8bit": _ADEMAMIX_8BIT,
    "lion_32bit": _LION,
    "lion_8bit": _LION_8BIT,
    "lion_compact": Recipe("LionCompact", ("betas",)),
    "paged_adamw_32bit": Recipe("AdamW", _ADAM, elsewhere=_BITSANDBYTES),
    "paged_adamw_8bit": _ADAMW_8BIT,
    "paged_ademamix_32bit": _ADEMAMIX,
    "paged_ademamix_8bit": _ADEMAMIX_8BIT,
    "paged_lion_32bit": _LION,
    "paged_lion_8bit": _LION_8BIT,
    "rmsprop": Recipe("RMSprop"),
    "rmsprop_bnb": Recipe("RMSprop"),
    "rmsprop_bnb_32bit": Recipe("RMSprop"),
    "schedule_free_adamw": Recipe("AdamWScheduleFree", (*_ADAM, "warmup_steps")),
    "schedule_free_radam": Recipe("RAdamScheduleFree", _ADAM),
    "schedule_free_sgd": Recipe("SGDScheduleFree", ("warmup_steps",)),
    "sgd": Recipe("SGD"),
}


# The packages of optimizers that are not built in.
PACKAGES = {
    "adalomo": _LOMO,
    "adamw_anyprecision": Package("torchdistx", "torchdistx"),
    "adamw_torch_4bit": _TORCHAO,
    "adamw_torch_8bit": _TORCHAO,
    "adamw_torch_npu_fused": Package("torch_npu", "torch_npu", _OTHER_DEVICE),
    "adamw_torch_xla": Package("torch_xla", "torch_xla", _OTHER_DEVICE),
    "apollo_adamw": _APOLLO,
    "apollo_adamw_layerwise": replace(_APOLLO, reason=_IN_BACKWARD),
    "galore_adafactor": _GALORE,
    "galore_adafactor_layerwise": replace(_GALORE, reason=_IN_BACKWARD),
    "galore_adamw": _GALORE,
    "galore_adamw_8bit": _GALORE,
    "galore_adamw_8bit_layerwise": replace(_GALORE, reason=_IN_BACKWARD),
    "galore_adamw_layerwise": replace(_GALORE, reason=_IN_BACKWARD),
    "grokadamw": Package("grokadamw", "grokadamw"),
    "lomo": _LOMO,
    "rmsprop_bnb_8bit": _BITSANDBYTES,
    "stable_adamw": Package("torch-optimi", "optimi"),
}

# Options of constructors that are arguments of their own.
_OWN_ARGUMENTS = {
    "lr": "learning_rate",
    "weight_decay": "weight_decay",
    "beta1": "adam_beta1",
    "beta2": "adam_beta2",
    "betas": "adam_beta1 and adam_beta2",
    "warmup_steps": "warmup_steps",
}
# Options of constructors that may be None.
_OPTIONAL = {"master_weight_bits", "t_alpha", "t_beta3"}
# Options of constructors without effect, or rejected.
_OF_TORCH = {"foreach", "fused", "capturable", "differentiable"}


def supported(name: Any) -> bool:
    """Whether `optim` may be `name`: it is built in, or its package is installed."""
    package = PACKAGES.get(name)
    built_in = name in RECIPES
    return built_in or (
        package is not None and not package.reason and package.installed
    )


def instead(name: Any) -> str:
    """What to do instead of a name that is not supported."""
    own = "make the optimizer and pass optimizers=(optimizer, None)"
    package = PACKAGES.get(name)
    if package is None:
        return own
    if package.reason:
        return f"it is in the package {package.name}, but {package.reason}"
    return f"it is in the package {package.name}: pip install {package.name}"


def _warmup(args: Any) -> float:
    steps = float(args.warmup_steps or 0)
    if 0.0 < steps < 1.0:
        raise ValueError(
            f"warmup_steps={steps:g} is a fraction of the run, and the warm-up of "
            f"optim={args.optim!s} counts updates: set their number"
        )
    return steps


_TAKEN: dict[str, Callable[[Any], Any]] = {
    "betas": lambda args: (args.adam_beta1, args.adam_beta2),
    "eps": lambda args: args.adam_epsilon,
    "warmup_steps": _warmup,
}


_PRECISION = ("master_weights", "stochastic_rounding")


def optimizer_class(
    args: Any, model: Any, adapter: Any
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The class that args.optim names and its keywords but for the parameters.

    model: None where nobody says which parameters it will be given: a package's own
        class where it is installed, as code that asks so does to the class what the
        package needs; else the class for parameters on args.device.
    adapter: of the model's framework.

    Raises:
        ValueError: optim_args has a key that the class lacks or a value of another
            type, or an argument needs a feature that the class lacks.
    """
    zero = deepspeed.config_of(args)
    section = None if zero is None else deepspeed.optimizer_of(zero)
    if section is not None and model is not None:
        return _of_deepspeed(args, *section, adapter, model)
    name = str(getattr(args.optim, "value", args.optim))
    if not supported(name):
        raise ValueError(f"optim={name!r} is not supported: {instead(name)}")
    recipe = RECIPES.get(name)
    if recipe is None or _is_elsewhere(recipe, adapter, model):
        return _of_a_package(args, name, adapter, model)
    if getattr(args, "optim_target_modules", None):
        raise ValueError(
            f"optim_target_modules={args.optim_target_modules!r}: optim={name!r} "
            "updates all modules; only GaLore's and APOLLO's optimizers support it"
        )
    where = args.device if model is None else model
    cls, kwargs = adapter.optimizer_class(recipe.cls, name, where)
    taken = {word: _TAKEN[word](args) for word in recipe.takes}
    precision = _precision_of(args, cls)
    given = checked_options(getattr(args, "optim_args", None), name, cls)
    if recipe.third_beta is not None:
        taken["betas"] += (given.pop("beta3", recipe.third_beta),)
    lr = {"lr": args.learning_rate}
    return cls, {**lr, **taken, **recipe.fixed, **kwargs, **precision, **given}


def class_of_deepspeed(
    name: str, params: dict[str, Any], adapter: Any, model: Any
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The class that a DeepSpeed configuration names, and its keywords."""
    try:
        cls, kwargs = adapter.optimizer_class(name, name, model)
    except AttributeError:
        raise ValueError(
            f"deepspeed: optimizer.type={name!r} is not in ctrainer.optim; leave the "
            "section out, and set optim"
        ) from None
    known = set(inspect.signature(cls).parameters) - _OF_TORCH - {"params", "precision"}
    reject_unknown(f"deepspeed: optimizer.params of {name}", params, sorted(known))
    return cls, {**kwargs, **params}


def _of_deepspeed(
    args: Any, name: str, params: dict[str, Any], adapter: Any, model: Any
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The optimizer of a DeepSpeed configuration: one group of all parameters, which
    weight decay applies to alike."""
    cls, kwargs = class_of_deepspeed(name, params, adapter, model)
    trained = [p for p in model.parameters() if p.requires_grad]
    return cls, {**_precision_of(args, cls), **kwargs, "params": trained}


def _is_elsewhere(recipe: Recipe, adapter: Any, model: Any) -> bool:
    if recipe.elsewhere is None or not recipe.elsewhere.installed:
        return False
    return model is None or bool(adapter.devices_elsewhere(model.parameters()))


def _precision_of(args: Any, cls: Callable[..., Any]) -> dict[str, bool]:
    precision = {n: True for n in _PRECISION if getattr(args, n, False)}
    if precision and not getattr(cls, "_native_step", False):
        raise ValueError(
            f"{next(iter(precision))}=True needs an optimizer of ctrainer's, which "
            "updates parameters in host memory, or on a GPU with the plugin "
            f"ctrainer._cuda; got {cls.__module__}.{cls.__name__}"
        )
    return precision


def _of_a_package(
    args: Any, name: str, adapter: Any, model: Any
) -> tuple[Callable[..., Any], dict[str, Any]]:
    cls, kwargs = adapter.package_optimizer_class(args, model)
    _precision_of(args, cls)
    known = {k for group in kwargs.get("params", ()) for k in group} | kwargs.keys()
    known -= _OWN_ARGUMENTS.keys() | {"params"}
    if name in RECIPES and RECIPES[name].third_beta is not None:
        known.add("beta3")
    for key in parse_options(args.optim_args).keys() - known:
        raise ValueError(_rejection(key, name, sorted(known)))
    return cls, kwargs


def checked_options(
    text: str | None, name: str, cls: Callable[..., Any]
) -> dict[str, Any]:
    """The options of optim_args for the constructor `cls`; raises like
    optimizer_class()."""
    found = inspect.signature(cls).parameters.values()
    defaults = {p.name: p.default for p in found if p.kind is not p.VAR_KEYWORD}
    defaults |= getattr(cls, "precision_defaults", {})
    if RECIPES[name].third_beta is not None:
        defaults["beta3"] = RECIPES[name].third_beta
    known = defaults.keys() - _OWN_ARGUMENTS.keys() - _OF_TORCH - {"params"}
    options = parse_options(text)
    for key in options.keys() - known:
        raise ValueError(_rejection(key, name, sorted(known)))
    kinds = {
        k: bool if isinstance(defaults[k], bool)
        else float | None if k in _OPTIONAL else float
        for k in options
    }  # fmt: skip
    return {k: read(v, kinds[k], f"optim_args: {k}") for k, v in options.items()}


def _rejection(key: str, name: str, known: list[str]) -> str:
    if key in _OWN_ARGUMENTS:
        return f"optim_args has {key!r}: that is the argument {_OWN_ARGUMENTS[key]}"
    hint = nearest(key, known)
    return f"optim_args has {key!r}, which optim={name!r} does not have; {hint}"


def parse_options(text: str | None) -> dict[str, str]:
    """The words of `optim_args`, "name=value,name=value"."""
    options: dict[str, str] = {}
    for item in filter(None, (text or "").replace(" ", "").split(",")):
        name, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"optim_args must be name=value pairs, got {item!r}")
        if name in options:
            raise ValueError(f"optim_args has {name!r} twice; set it once")
        options[name] = value
    return options
