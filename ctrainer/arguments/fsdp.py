"""How a run shards its model: by fsdp and fsdp_config, by accelerate launch, by a
DeepSpeed configuration, or by sharded_ddp."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ctrainer.arguments import deepspeed
from ctrainer.arguments.settings import (
    Natural,
    json_value,
    nearest,
    parse_json,
    read,
    reject_unknown,
)

_STRATEGIES = (
    "full_shard",
    "shard_grad_op",
    "no_shard",
    "hybrid_shard",
    "hybrid_shard_zero2",
)
_POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
_PREFETCHES = ("NO_PREFETCH", "BACKWARD_PRE", "BACKWARD_POST")
_STATE_DICTS = ("FULL_STATE_DICT", "SHARDED_STATE_DICT")
_UNSET = ("none", "")  # a launcher's value of an option that is not set
_NO = (*_UNSET, "false", "[]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """The settings of a sharded run, whichever release's names they came under.

    replicates: every rank keeps the whole model, as without sharding (no_shard).
    hybrid: the ranks of a machine, or group_size ranks, are a sharding group, and each
    such group has a replica. layers: class names of the modules that become units,
    None: those that the model names. min_num_params: how many parameters a module needs
    to become a unit, None: units are layers. unnamed_min_num_params: the same where the
    model names no layers. prefetch_numel: no unit is prefetched where one has more
    parameters. saves_full: checkpoints have the whole weights beside the shards.
    gather_bits, reduce_bits: of quantized parameters and gradients, None: not
    quantized. error_feedback: the residual of quantized gradients is added to the next
    gradients. offload_folder: the optimizer's state is in a file there, and so many
    pieces of it, offload_buffers, are in memory at once. shard_folder: the shards are
    in files there, but for those of units that come first and of which a rank has at
    most max_in_memory elements, and are read up to so many units ahead, read_ahead.
    secondary_shards: the ranks of
    a machine, over which parameters stay sharded from the forward to the backward,
    None: they do not. xla_options: arguments of FullyShardedDataParallel that take
    precedence over those of the run.
    """

    reshard_after_forward: bool = True
    replicates: bool = False
    hybrid: bool = False
    group_size: int | None = None
    wraps: bool = True
    layers: tuple[str, ...] | None = None
    min_num_params: int | None = None
    unnamed_min_num_params: int | None = None
    saves_full: bool = True
    recomputes: bool = False
    synchronizes: bool = True
    forward_prefetch: bool | None = None
    backward_prefetch: str | None = "AUTO"
    prefetch_numel: int | None = None
    gather_bits: int | None = None
    reduce_bits: int | None = None
    error_feedback: bool = True
    secondary_shards: int | None = None
    cpu_offload: bool = False
    offload_folder: str | None = None
    offload_buffers: int = 4
    shard_folder: str | None = None
    read_ahead: int = 5
    max_in_memory: int = 0
    xla_options: dict[str, Any] = field(default_factory=dict)


# Keys of fsdp_config without effect, and why.
NO_EFFECT = {
    "version": "both versions' options are supported",
    "limit_all_gathers": "at most one unit is prefetched",
    "use_orig_params": "the optimizer always has parameters by their names",
}
SUPPORTED = (
    "reshard_after_forward",
    "auto_wrap_policy",
    "transformer_layer_cls_to_wrap",
    "min_num_params",
    "state_dict_type",
    "activation_checkpointing",
    "sync_module_states",
    "cpu_ram_efficient_loading",
    "forward_prefetch",
    "backward_prefetch",
    "gather_bits",
    "reduce_bits",
    "error_feedback",
    "secondary_shards",
    "cpu_offload",
    "offload_folder",
    "shard_folder",
    "xla",
    "xla_fsdp_settings",
    "xla_fsdp_grad_ckpt",
)
_REJECTED = {
    "xla_fsdp_v2": "sharding by torch_xla's SPMD compiler; remove it, or set xla",
    "activation_checkpointing_offload": "activations are in host memory already",
    "ignored_modules": "every parameter is sharded; freeze modules instead",
}
# Names of accelerate's variables, after FSDP_, that differ from those of fsdp_config.
_VARIABLES = {
    "offload_params": "cpu_offload",
    "transformer_cls_to_wrap": "transformer_layer_cls_to_wrap",
    "sharding_strategy": "strategy",
}
# Of these, accelerate's plugin also takes those that the arguments leave out.
_FILLED_IN = (
    "cpu_offload",
    "transformer_layer_cls_to_wrap",
    "activation_checkpointing",
    "activation_checkpointing_offload",
    "ignored_modules",
)


def sharding_of(args: Any) -> Sharding | None:
    """How `args`, or else accelerate launch, shard the model; None: not sharded.

    Raises ValueError naming a word or a key that is unknown, rejected or contradicts
    another, or a file that cannot be read.
    """
    words = _words(getattr(args, "fsdp", None))
    fairscale = _fairscale_words(getattr(args, "sharded_ddp", None))
    _check_one_way(words, deepspeed.given_to(args), fairscale)
    zero = deepspeed.config_of(args)
    if zero is not None:
        return of_zero(zero) if zero.stage > 0 else None
    if fairscale:
        return _of_fairscale(fairscale, args.world_size)
    name = "ACCELERATE_USE_FSDP"
    launched = _environment() if _truth(name, os.environ.get(name, "")) else {}
    if words is not None:
        config = _config(getattr(args, "fsdp_config", None))
        _take_older_fields(args, config)
        _take_words(words, config)
        if config.get("min_num_params"):
            launched.pop("transformer_layer_cls_to_wrap", None)
        config = {n: launched[n] for n in _FILLED_IN if n in launched} | config
    elif launched:
        config = launched
    else:
        return None
    try:
        return _read(config)
    except ValueError as error:
        if not launched:
            raise
        raise ValueError(f"{error}; accelerate launch sets FSDP_ variables") from None


def _check_one_way(words: Any, zero: Any, fairscale: list[str]) -> None:
    for flag, given in (("deepspeed", zero), ("fsdp", words is not None)):
        if fairscale and given:
            raise ValueError(
                f"Using --sharded_ddp xxx together with --{flag} is not possible, "
                "deactivate one of those flags."
            )
    if words is not None and zero:
        raise ValueError("fsdp and deepspeed both shard the model; set one")


_LEAST = 100_000  # parameters of a unit, where the model names no layers
_FAIRSCALE = ("simple", "zero_dp_2", "zero_dp_3", "auto_wrap", "offload")


def _fairscale_words(given: Any) -> list[str]:
    """The words of sharded_ddp: True is simple, and cpu_offload is offload."""
    words = _listed(given, "sharded_ddp")
    if words in (["true"], ["false"]):
        return ["simple"] if words == ["true"] else []
    words = ["offload" if word == "cpu_offload" else word for word in words]
    for word in words:
        if word not in _FAIRSCALE:
            raise ValueError(
                f"sharded_ddp may be {', '.join(_FAIRSCALE)} or True, not {word!r}; "
                f"{nearest(word, _FAIRSCALE)}"
            )
    return words


def _of_fairscale(words: list[str], world_size: int) -> Sharding:
    """The options of sharded_ddp. Source: transformers 4.5, training_args.py and
    trainer.py."""
    if words == ["offload"]:
        raise ValueError(
            "`--sharded_ddp offload` can't work on its own. It needs to be added to "
            "`--sharded_ddp zero_dp_2` or `--sharded_ddp zero_dp_3`. For example, "
            '`--sharded_ddp "zero_dp_2 offload"`.'
        )
    if "simple" in words and len(words) > 1:
        raise ValueError(
            "`--sharded_ddp simple` is not compatible with any other option."
        )
    if "zero_dp_2" in words and "zero_dp_3" in words:
        raise ValueError(
            "`--sharded_ddp zero_dp_2` is not compatible with `--sharded_ddp "
            "zero_dp_3`."
        )
    if words == ["auto_wrap"]:
        raise ValueError(
            "`--sharded_ddp auto_wrap` wraps the layers that are sharded; add "
            "zero_dp_2 or zero_dp_3"
        )
    if world_size == 1:
        raise ValueError("Using sharded DDP only works in distributed training.")
    return Sharding(
        reshard_after_forward="zero_dp_3" in words,
        wraps="auto_wrap" in words,
        unnamed_min_num_params=_LEAST,
        cpu_offload="offload" in words,
    )


def of_zero(config: deepspeed.HfDeepSpeedConfig) -> Sharding:
    """What the section zero_optimization means, of stage 0 as of 2."""
    parts = ("offload_optimizer", "offload_param")
    devices = {config.offload_device(part) for part in parts}
    of_state, of_shards = (f"zero_optimization.{part}" for part in parts)
    reduced = config.get_value("communication_data_type") or "fp32"
    computed = "bf16" if config.is_true("bf16.enabled") else "fp16"
    if reduced not in ("fp32", computed):
        raise ValueError(
            f"deepspeed: communication_data_type={reduced!r} is neither fp32 nor what "
            "the layers compute in; set fp32"
        )

    def count(key: str, default: float) -> int:
        value = config.get_value(f"zero_optimization.stage3_{key}", default)
        return int(default if value == "auto" else float(value))

    ahead = count("prefetch_bucket_size", 5e7)
    prefetches = config.stage == 3 and not config.is_false(
        "zero_optimization.overlap_comm"
    )
    shared = int(config.get_value("zero_optimization.mics_shard_size", -1))
    bits = config.is_true("zero_optimization.zero_quantized_gradients")
    secondary = int(config.get_value("zero_optimization.zero_hpz_partition_size", 1))
    return Sharding(
        reshard_after_forward=config.stage == 3,
        hybrid=shared > 0,
        group_size=shared if shared > 0 else None,
        unnamed_min_num_params=max(count("param_persistence_threshold", _LEAST), 1),
        forward_prefetch=prefetches,
        backward_prefetch="BACKWARD_PRE" if prefetches else None,
        prefetch_numel=min(ahead, count("max_live_parameters", 1e9) // 2),
        gather_bits=8
        if config.is_true("zero_optimization.zero_quantized_weights")
        else None,
        reduce_bits=4 if bits else None,
        error_feedback=config.is_true("zero_optimization.zeropp_loco_param"),
        secondary_shards=secondary if secondary > 1 and config.stage == 3 else None,
        cpu_offload=devices != {"none"},
        offload_folder=_nvme_folder(config, parts[0]),
        offload_buffers=config.get_value(f"{of_state}.buffer_count", 4),
        shard_folder=_nvme_folder(config, parts[1]),
        read_ahead=config.get_value(f"{of_shards}.buffer_count", 5),
        max_in_memory=int(config.get_value(f"{of_shards}.max_in_cpu", 1e9)),
        xla_options={} if reduced == "fp32" else {"fp32_reduce_scatter": False},
    )


def _nvme_folder(config: deepspeed.HfDeepSpeedConfig, part: str) -> str | None:
    """Where a part that is offloaded to nvme is; None for another device."""
    if config.offload_device(part) != "nvme":
        return None
    folder: str | None = config.get_value(f"zero_optimization.{part}.nvme_path")
    if folder is None:
        raise ValueError(
            f"deepspeed: zero_optimization.{part}.device is 'nvme'; set nvme_path "
            "beside it to a folder on that drive"
        )
    return folder


def describe_keys() -> str:
    """The keys of fsdp_config, for the documentation."""
    idle = "; ".join(f"{name}: {why}" for name, why in NO_EFFECT.items())
    return f"keys {', '.join(SUPPORTED)}; without effect: {idle}"


# ---- where the settings come from


def _words(fsdp: Any) -> list[str] | None:
    """The words of `fsdp`, [] for True; None where nothing is sharded."""
    words = _listed(fsdp, "fsdp")
    if words in (["true"], ["false"], []):
        return [] if words == ["true"] else None
    known = (*_STRATEGIES, "auto_wrap", "offload")
    for word in words:
        if word not in known:
            raise ValueError(
                f"fsdp may be {', '.join(known)} or True, not {word!r}; "
                f"{nearest(word, known)}"
            )
    return words


def _listed(given: Any, name: str) -> list[str]:
    """The words of a text or a list in lower case; of a truth value, true or none."""
    if given is None or isinstance(given, bool):
        return ["true"] if given else []
    words = given.split() if isinstance(given, str) else read(given, list[Any], name)
    return [str(getattr(word, "value", word)).lower() for word in words]


def _config(given: Any) -> dict[str, Any]:
    """fsdp_config as a dict of its own, without the prefix fsdp_ of its keys."""
    if isinstance(given, str | os.PathLike):
        given = _read_file(os.fspath(given))
    if given is not None and not isinstance(given, Mapping):
        raise ValueError(
            "fsdp_config must be a dict, or the path of a JSON file with one, not "
            f"{given!r}"
        )
    config: dict[str, Any] = {}
    for key, value in json_value(given or {}, "fsdp_config").items():
        name = str(key).removeprefix("fsdp_")
        if name in config and config[name] != value:
            raise ValueError(
                f"fsdp_config has {name}={config[name]!r} and {key}={value!r}; set one"
            )
        config[name] = value
    return config


def _read_file(path: str) -> Any:
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, ValueError) as error:
        raise ValueError(f"fsdp_config: {path!r} cannot be read: {error}") from None
    return parse_json(text, f"fsdp_config: {path!r}")


def _take_older_fields(args: Any, config: dict[str, Any]) -> None:
    for name in ("fsdp_min_num_params", "fsdp_transformer_layer_cls_to_wrap"):
        value = getattr(args, name, None)
        if value:
            config.setdefault(name.removeprefix("fsdp_"), value)


def _take_words(words: list[str], config: dict[str, Any]) -> None:
    strategies = [word for word in words if word in _STRATEGIES]
    if len(strategies) > 1:
        raise ValueError(
            f"fsdp names several strategies, {', '.join(strategies)}; set one"
        )
    if strategies:
        config.setdefault("strategy", strategies[0])
    if "offload" in words:
        config.setdefault("cpu_offload", True)


def _environment() -> dict[str, Any]:
    """accelerate launch's settings, from its variables that begin with FSDP_."""
    config: dict[str, Any] = {}
    for name, value in os.environ.items():
        if name.startswith("FSDP_"):
            key = name.removeprefix("FSDP_").lower()
            config[_VARIABLES.get(key, key)] = value
    config.setdefault("auto_wrap_policy", "NO_WRAP")  # accelerate's default, not HF's
    if config.get("version") == "2":
        config.pop("strategy", None)
    elif str(config.get("strategy")).lower() in ("2", "shard_grad_op"):
        config["reshard_after_forward"] = "false"  # the launcher's default is true
    return config


# ---- reading the settings


def _read(config: dict[str, Any]) -> Sharding:
    _check_keys(config)
    strategy = _strategy(config)
    xla = _flag(config, "xla", False)
    recomputes = _flag(config, "activation_checkpointing", False)
    xla_recomputes = _flag(config, "xla_fsdp_grad_ckpt", False)
    settings = config.get("xla_fsdp_settings") or {}
    if (xla_recomputes or settings) and not xla:
        raise ValueError(
            "fsdp_config: xla_fsdp_settings and xla_fsdp_grad_ckpt need xla=True"
        )
    folder = read(config.get("offload_folder"), str | None, "offload_folder")
    shards = read(config.get("shard_folder"), str | None, "shard_folder")
    synchronizes = _flag(config, "sync_module_states", True)
    if _flag(config, "cpu_ram_efficient_loading", False) and not synchronizes:
        raise ValueError(
            "fsdp_config: with cpu_ram_efficient_loading only rank 0 has values; set "
            "sync_module_states to True, which broadcasts them"
        )
    return Sharding(
        **_units(config),
        reshard_after_forward=strategy not in ("shard_grad_op", "hybrid_shard_zero2"),
        replicates=strategy == "no_shard",
        hybrid=strategy.startswith("hybrid"),
        saves_full=_word(config, "state_dict_type", _STATE_DICTS) == _STATE_DICTS[0],
        recomputes=recomputes or xla_recomputes,
        synchronizes=synchronizes,
        forward_prefetch=_forward_prefetch(config),
        backward_prefetch=_backward_prefetch(config),
        gather_bits=_bits(config, "gather_bits"),
        reduce_bits=_bits(config, "reduce_bits"),
        error_feedback=_flag(config, "error_feedback", True),
        secondary_shards=_count(config, "secondary_shards") or None,
        cpu_offload=_flag(config, "cpu_offload", False) or folder is not None,
        offload_folder=folder,
        shard_folder=shards,
        xla_options=_xla_options(settings),
    )


def _check_keys(config: dict[str, Any]) -> None:
    for name, why in _REJECTED.items():
        value = config.get(name, False)
        lists = name == "ignored_modules" and str(value).lower() not in _NO
        if lists or (name != "ignored_modules" and _truth(name, value)):
            raise ValueError(f"fsdp_config: {name} is not supported: {why}")
    known = (*SUPPORTED, *NO_EFFECT, *_REJECTED, "strategy")
    reject_unknown("fsdp_config", config, known)


def _strategy(config: dict[str, Any]) -> str:
    """One of _STRATEGIES, as reshard_after_forward or as the word that fsdp names."""
    named, given = config.get("strategy"), config.get("reshard_after_forward")
    if isinstance(named, str) and named.isdigit():  # counted from 1
        named = dict(enumerate(_STRATEGIES, 1)).get(int(named), named)
    if given is None:
        given = "full_shard" if named is None else named
    if str(given).lower() in _STRATEGIES:
        return str(given).lower()
    try:
        resharding = _truth("reshard_after_forward", given)
    except ValueError as error:
        raise ValueError(f"{error}; or one of {', '.join(_STRATEGIES)}") from None
    if named not in (None, "full_shard", "shard_grad_op"):
        return _word({"strategy": named}, "strategy", _STRATEGIES)
    return "full_shard" if resharding else "shard_grad_op"


def _units(config: dict[str, Any]) -> dict[str, Any]:
    """Which modules become units."""
    least, layers = (
        _count(config, "min_num_params"),
        _names(config.get("transformer_layer_cls_to_wrap")),
    )
    policy = _word(config, "auto_wrap_policy", _POLICIES)
    if "auto_wrap_policy" not in config and least:
        if layers:
            raise ValueError(
                "fsdp_config: min_num_params and transformer_layer_cls_to_wrap are two "
                "ways to choose units; set one, or auto_wrap_policy"
            )
        policy = "SIZE_BASED_WRAP"
    if policy == "SIZE_BASED_WRAP":
        return {"min_num_params": least}
    return {"wraps": policy != "NO_WRAP", "layers": layers}


def _forward_prefetch(config: dict[str, Any]) -> bool | None:
    """True, or None: torch's gathers run beside the computation on a GPU without it."""
    return _flag(config, "forward_prefetch", False) or None


def _backward_prefetch(config: dict[str, Any]) -> str | None:
    """Also a member of torch's enum, or its number."""
    given = config.get("backward_prefetch")
    if str(given).lower() in _UNSET:
        return "AUTO"
    word = str(getattr(given, "name", given))
    if word in ("1", "2"):
        return _PREFETCHES[int(word)]
    config = {"backward_prefetch": given and word}
    word = _word(config, "backward_prefetch", _PREFETCHES)
    return None if word == _PREFETCHES[0] else word


def _bits(config: dict[str, Any], name: str) -> int | None:
    """8 or 4; None for 32, 0 and nothing."""
    given = config.get(name)
    word = str(given).lower()
    if word in ("none", "", "0", "32"):
        return None
    if word not in ("8", "4"):
        raise ValueError(f"fsdp_config: {name} must be 8, 4 or 32, not {given!r}")
    return int(word)


def _count(config: dict[str, Any], name: str) -> int:
    value = config.get(name)
    if str(value).lower() in _UNSET:
        return 0
    return int(read(value, Natural, f"fsdp_config: {name}"))


def _names(given: Any) -> tuple[str, ...] | None:
    if not given:
        return None
    names = given.split(",") if isinstance(given, str) else given
    found = read(names, list[str], "fsdp_config: transformer_layer_cls_to_wrap")
    return tuple(name.strip() for name in found)


def _word(config: dict[str, Any], name: str, words: tuple[str, ...]) -> str:
    """A word in any case, the first one by default."""
    given = config.get(name)
    if str(given).lower() in _UNSET:
        return words[0]
    if isinstance(given, str):
        given = given.upper() if words[0].isupper() else given.lower()
    return str(read(given, Literal[words], f"fsdp_config: {name}"))


def _flag(config: dict[str, Any], name: str, default: bool) -> bool:
    return _truth(name, config.get(name, default))


def _truth(name: str, value: Any) -> bool:
    if str(value).lower() in _UNSET:
        return False
    return bool(read(value, bool, name))


_OPTIONS: dict[str, type] = {
    "compute_dtype": str,
    "buffer_dtype": str,
    "fp32_reduce_scatter": bool,
    "reshard_after_forward": bool,
    "disable_reshard_on_root": bool,
    "watch_released": bool,
}
_OPTIONS_WITHOUT_EFFECT = frozenset(
    """
    optimization_barrier_in_forward optimization_barrier_in_backward
    mark_step_on_finalization sync_on_finalization pin_layout_in_collective_ops
    flatten_parameters coalesce_all_gather_ops reduce_scatter_bucket_size_mb
    execute_sharding_on_init
    """.split()
)


def _xla_options(settings: Any) -> dict[str, Any]:
    """xla_fsdp_settings as arguments of FullyShardedDataParallel."""
    if not isinstance(settings, Mapping):
        raise ValueError(f"fsdp_config: xla_fsdp_settings must be a dict: {settings!r}")
    for name, value in settings.items():
        idle = name in _OPTIONS_WITHOUT_EFFECT or not value
        if name not in _OPTIONS and not idle:
            raise ValueError(
                f"fsdp_config: xla_fsdp_settings has {name}={value!r}; supported are "
                f"{', '.join(_OPTIONS)}"
            )
    return {
        name: read(value, _OPTIONS[name], f"xla_fsdp_settings of fsdp_config: {name}")
        for name, value in settings.items()
        if name in _OPTIONS
    }
