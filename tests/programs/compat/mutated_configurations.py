"""Mutates configurations of DeepSpeed, FSDP and fairscale for as long as one likes, and
prints those that their readers neither read nor reject with a reason:
`python -m programs.compat.mutated_configurations SECONDS [SEED [FOLDER]]`.

An input that reaches lines of the readers that no other has reached is mutated
further. The case that is read is in the file `case` of the folder.
"""

from __future__ import annotations

import base64
import enum
import faulthandler
import json
import logging
import os
import random
import re
import signal
import sys
import tempfile
import time
import traceback
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

_UNUSED: Any = dict.fromkeys(("pandas", "scipy", "sklearn", "torchao"))
sys.modules.update(_UNUSED)

import numpy as np  # noqa: E402
import torch  # noqa: E402

import ctrainer  # noqa: E402
from ctrainer import deepspeed_schedules  # noqa: E402
from ctrainer.arguments import deepspeed, deepspeed_keys, fsdp  # noqa: E402
from ctrainer.arguments.loss_scaler import make_loss_scaler  # noqa: E402
from ctrainer.compat.deepspeed import DeepSpeedConfig, HfDeepSpeedConfig  # noqa: E402

TESTS = Path(__file__).resolve().parents[2]
LIMIT_SECONDS = 20  # of one input
READERS = tuple(
    str(Path(ctrainer.__file__).parent / n) for n in ("arguments", "compat")
)
EXAMPLES = json.loads(
    (TESTS / "python/compat/deepspeed_examples.json").read_text(encoding="utf-8")
)
KEPT = json.loads((TESTS / "kept/deepspeed/configurations.json").read_text())
FSDP = [
    {"transformer_layer_cls_to_wrap": "GPT2Block", "backward_prefetch": "backward_pre",
     "forward_prefetch": "false", "use_orig_params": True, "version": 2},
    {"fsdp_min_num_params": 2000, "fsdp_state_dict_type": "SHARDED_STATE_DICT",
     "fsdp_cpu_ram_efficient_loading": True, "fsdp_sync_module_states": True},
    {"xla": True, "xla_fsdp_settings": {"compute_dtype": "bfloat16",
     "fp32_reduce_scatter": True}, "xla_fsdp_grad_ckpt": True},
    {"gather_bits": 8, "reduce_bits": 4, "error_feedback": False, "cpu_offload": True,
     "secondary_shards": 2, "offload_folder": "/tmp", "strategy": "hybrid_shard",
     "auto_wrap_policy": "NO_WRAP", "activation_checkpointing": True},
]  # fmt: skip
WORDS = [
    "full_shard", "shard_grad_op", "no_shard", "hybrid_shard_zero2", "auto_wrap",
    "offload", "true", "simple", "zero_dp_2", "zero_dp_3", "cpu_offload",
]  # fmt: skip
VARIABLES = [
    "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_DEEPSPEED_CONFIG_FILE",
    "ACCELERATE_DEEPSPEED_ZERO_STAGE", "ACCELERATE_GRADIENT_CLIPPING",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH", "ACCELERATE_USE_FSDP",
    *(f"FSDP_{name.upper()}" for name in fsdp.SUPPORTED),
    *(f"FSDP_{name.upper()}" for name in fsdp._VARIABLES),
]  # fmt: skip
_NAMES = sorted(
    {part for key in deepspeed_keys.KEYS for part in key.split(".")}
    | {*deepspeed_keys._SWITCH, *fsdp.SUPPORTED, *fsdp._REJECTED, "", "lr", "xla"}
)


class Word(str):
    """Text of a class of its own."""


class Member(enum.Enum):
    STAGE, NAME = 2, "cpu"


def _nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = [value] if depth % 2 else {"zero_optimization": value}
    return value


_VALUES: list[Callable[[], Any]] = [
    *(lambda v=v: v for v in (
        None, True, False, 0, 1, 2, 3, -1, -2, 8, 64, 1e400, -1e400, float("nan"),
        0.5, -0.0, 5e-324, 1e308, 5e8, 1e14, 2**31, 2**62, 2**63 - 1, 2**63, -(2**63),
        10**400,
        "", " ", "auto", "AUTO", "none", "None", "cpu", "nvme", "true", "no", "nan",
        "inf", "1e3", "0x10", "1_000", "٣", "\0", "\ud800", "é" * 3, "{", "{}", ".",
        "/", "AdamW", "Adam", "SGD", "Lamb", "WarmupLR", "OneCycle", "WarmupDecayLR",
        "fp16", "bf16", "fp32", "1" * 5000, "[" * 5000, b"x", 1 + 2j, (), (1, 2),
    )),
    list, dict, lambda: [[]], lambda: [0] * 999, lambda: {"enabled": True},
    lambda: {1: 2}, lambda: {None: 1}, lambda: {"enabled": False}, set, object,
    lambda: np.float32(1), lambda: np.int64(2), lambda: np.array([1, 2]),
    lambda: torch.tensor(1.0), lambda: torch.ones(2), lambda: Decimal("1.5"),
    lambda: Word("cpu"), lambda: Member.STAGE, lambda: Member.NAME,
    lambda: Path("/tmp"), lambda: _nested(300), lambda: _nested(301),
    lambda: types.MappingProxyType({"stage": 2}), lambda: np.bool_(True),
]  # fmt: skip


_DEEP = b'{"a":' * 600 + b"1" + b"}" * 600

# ---- cases


@dataclass(frozen=True)
class Case:
    """kind: the reader. content: what it is given, as a value or as bytes. form: how: a
    dict, a text, a file or base64. options: arguments beside it."""

    kind: str
    content: Any
    form: str = "dict"
    options: dict[str, Any] = field(default_factory=dict)


def first_cases() -> list[Case]:
    configs = [example["config"] for example in EXAMPLES]
    configs += [case["given"] for case in KEPT["configs"]]
    return [
        *(Case("deepspeed", config) for config in configs),
        *(Case("fsdp", config, options={"fsdp": "full_shard auto_wrap"})
          for config in FSDP),
        *(Case("sharded_ddp", word) for word in WORDS),
        *(Case("environment", {name: value}) for name in VARIABLES
          for value in ("true", "2", "none")),
    ]  # fmt: skip


class Mutator:
    def __init__(self, seed: Any) -> None:
        self.draw = random.Random(seed)

    def value(self) -> Any:
        return self.draw.choice(_VALUES)()

    def changed(self, value: Any, other: Any) -> Any:
        """A value with a change somewhere in it; other: of another case."""
        draw = self.draw
        if isinstance(value, dict) and value and draw.random() < 0.85:
            name = draw.choice(list(value))
            how = draw.randrange(8)
            if how == 0:
                return {k: v for k, v in value.items() if k is not name}
            if how == 1:
                return {**value, draw.choice(_NAMES): self.value()}
            if how == 2 and isinstance(other, dict) and other:
                return {**value, **dict([draw.choice(list(other.items()))])}
            if how == 3:
                new = draw.choice([draw.choice(_NAMES), str(name)[:-1], Word(name), 3])
                return {(new if k is name else k): v for k, v in value.items()}
            return {**value, name: self.changed(value[name], other)}
        if isinstance(value, list) and value and draw.random() < 0.5:
            place = draw.randrange(len(value))
            new = self.changed(value[place], other)
            return [*value[:place], new, *value[place + draw.randrange(2) :]]
        if isinstance(value, str) and draw.random() < 0.5:
            return self.text(value)
        return self.value()

    def text(self, text: str) -> str:
        draw = self.draw
        place = draw.randrange(len(text) + 1)
        put = draw.choice([" ", ",", "_", "é", *WORDS, text[:place], text.upper()])
        return text[:place] + put + text[place + draw.randrange(3) :]

    def data(self, data: bytes) -> bytes:
        draw = self.draw
        for _ in range(draw.randrange(1, 4)):
            place = draw.randrange(len(data) + 1)
            put = draw.choice(
                [b"", draw.randbytes(2), data[place : place + 40], b'"', b"{", b"\xff",
                 b"\xef\xbb\xbf", b"\xff\xfe", b"NaN", b"-Infinity", b"1e999",
                 b"\\u0000", b"\\ud800", b"[" * 100_000, _DEEP, b"9" * 5000,
                 b'"fp16": {},', b"null", b","]
            )  # fmt: skip
            data = data[:place] + put + data[place + draw.randrange(6) :]
        return data

    def case(self, known: list[Case]) -> Case:
        draw = self.draw
        case, other = draw.choice(known), draw.choice(known)
        content = case.content
        options = dict(case.options)
        if draw.random() < 0.1:
            content = other.content
        if isinstance(content, bytes):
            content = self.data(content)
        for _ in range(draw.choice([0, 1, 1, 1, 2, 4])):
            if not isinstance(content, bytes):
                content = self.changed(content, other.content)
        if draw.random() < 0.3:
            name, values = draw.choice(list(_OPTIONS[case.kind].items()) or [("", [0])])
            if name:
                options[name] = draw.choice([*values, self.value()])
        form = draw.choice(["dict", "dict", case.form, "text", "file", "base64"])
        if form != "dict" and not isinstance(content, bytes):
            with_bytes = _as_bytes(content)
            form = "dict" if with_bytes is None else form
            if with_bytes is not None and draw.random() < 0.6:
                content = self.data(with_bytes)
        return replace(case, content=content, form=form, options=options)


_OPTIONS: dict[str, dict[str, list[Any]]] = {
    "deepspeed": {
        "fp16": [True], "bf16": [True], "deepspeed_rules": ["v4.5"],
        "fsdp": ["full_shard", ""], "sharded_ddp": ["simple"], "max_grad_norm": [0.3],
        "learning_rate": [1e-3], "save_on_each_node": [True],
    },
    "fsdp": {
        "fsdp": [*WORDS, ["full_shard", "offload"], True, "", []],
        "fsdp_min_num_params": [0, 10],
        "fsdp_transformer_layer_cls_to_wrap": ["GPT2Block", "A,B"],
    },
    "sharded_ddp": {},
    "environment": {"fsdp": ["full_shard"], "deepspeed": [{}]},
}  # fmt: skip


def _as_bytes(content: Any) -> bytes | None:
    if isinstance(content, bytes):
        return content
    try:
        text = json.dumps(content)
    except (TypeError, ValueError, RecursionError):
        return None
    return text.encode("utf-8", "surrogatepass")


def _given(case: Case, folder: Path) -> Any:
    """The content in the form of the case."""
    content = case.content
    if case.form == "dict":
        return content
    data = _as_bytes(content)
    assert data is not None
    if case.form == "file":
        path = folder / "given.json"
        path.write_bytes(data)
        return random.Random(len(data)).choice([path, str(path)])
    if case.form == "base64":
        return base64.urlsafe_b64encode(data).decode()
    return data.decode("utf-8", "replace")


# ---- the readers


_LAYER = torch.nn.Linear(2, 2)


class _Model:
    config = types.SimpleNamespace(hidden_size=16)


def _arguments(**options: Any) -> Any:
    return ctrainer.TrainingArguments("out", use_cpu=True, report_to=[], **options)


def _of_trainer(given: Any, options: dict[str, Any]) -> Any:
    args = _arguments(deepspeed=given, **options)
    config = args.hf_deepspeed_config
    if config is None:
        return None
    again = HfDeepSpeedConfig(config.config).config
    assert repr(again) == repr(config.config), "what was read is read otherwise"
    sharding = fsdp.sharding_of(args)
    config.trainer_config_finalize(args, _Model(), 100)
    optimizer: Any = types.SimpleNamespace(
        defaults={"betas": None},
        param_groups=[{"lr": 0.1, "betas": (0.9, 0.99), "weight_decay": 0.0}],
    )
    if deepspeed.optimizer_of(config) is not None:
        cls, options = ctrainer.Trainer.get_optimizer_cls_and_kwargs(args, _LAYER)
        optimizer = cls(**{"params": _LAYER.parameters(), **options})
    section = config.get_value("scheduler")
    if section is not None:
        deepspeed_schedules.from_config(section, optimizer).step()
    return repr((config.config, sharding))


def _of_a_loop(given: Any) -> Any:
    config = DeepSpeedConfig(given)
    fsdp.of_zero(config.hf)
    config.float16_config.initial_dynamic_scale()
    return make_loss_scaler(deepspeed.loss_scaler_of(config.hf)).scale


def _of_fsdp(given: Any, options: dict[str, Any]) -> Any:
    return repr(fsdp.sharding_of(_arguments(fsdp_config=given, **options)))


def _of_fairscale(given: Any) -> Any:
    args = types.SimpleNamespace(sharded_ddp=given, world_size=2)
    return repr(fsdp.sharding_of(args))


def _of_environment(given: Any, options: dict[str, Any]) -> Any:
    if not isinstance(given, dict):
        given = {"ACCELERATE_DEEPSPEED_CONFIG_FILE": given}
    before = dict(os.environ)
    try:
        for name, value in given.items():
            text = str(value)[:1000].encode("utf-8", "replace").decode()
            name = name if name in VARIABLES else VARIABLES[len(text) % len(VARIABLES)]
            os.environ[name] = text.replace("\0", "0")
        for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"):
            if len(str(given)) % 2:
                os.environ.setdefault(name, "true")
        return repr(fsdp.sharding_of(_arguments(**options)))
    finally:
        os.environ.clear()
        os.environ.update(before)


def outcomes(case: Case, folder: Path) -> list[Any]:
    """What the readers of the kind say: (exception or None, what was read)."""
    given = _given(case, folder)
    calls: list[Callable[[], Any]] = {
        "deepspeed": [
            lambda: _of_trainer(given, case.options), lambda: _of_a_loop(given)
        ],
        "fsdp": [lambda: _of_fsdp(given, case.options)],
        "sharded_ddp": [lambda: _of_fairscale(given)],
        "environment": [lambda: _of_environment(given, case.options)],
    }[case.kind]  # fmt: skip
    found: list[Any] = []
    for call in calls:
        try:
            found.append((None, call()))
        except Exception as error:
            found.append((error, None))
    return found


def check(case: Case, folder: Path) -> None:
    """Raise AssertionError where an outcome is not what is documented."""
    before = repr(case.content)
    found = outcomes(case, folder)
    assert repr(case.content) == before, "the configuration was changed"
    for error, _ in found:
        if error is None:
            continue
        sizes = type(error) is AssertionError and re.search(
            "[Bb]atch|steps", str(error)
        )
        if not sizes and type(error) is not ValueError:
            raise AssertionError(f"{type(error).__name__}: {error}") from error
        named = str(error).lower()
        assert any(word in named for word in _REASONS), f"names nothing: {error}"


_REASONS = {name.lower() for name in _NAMES if len(name) > 2} | {
    "deepspeed", "fsdp", "sharded_ddp", "accelerate", "hidden_size", "zero", "batch",
    "momentum", "betas", "eps", "weight_decay", "schedule", "_lr", "sharded ddp",
    *(name for options in _OPTIONS.values() for name in options),
}  # fmt: skip


# ---- the loop


def reached(run: Callable[[], None]) -> frozenset[tuple[str, int]]:
    """The lines of the readers that a call reaches."""
    lines: set[tuple[str, int]] = set()

    def at_line(frame: Any, event: str, _: Any) -> Any:
        lines.add((frame.f_code.co_filename, frame.f_lineno))
        return at_line

    def at_call(frame: Any, event: str, _: Any) -> Any:
        return at_line if frame.f_code.co_filename.startswith(READERS) else None

    sys.settrace(at_call)
    try:
        run()
    finally:
        sys.settrace(None)
    return frozenset(lines)


def _stop(*_: Any) -> None:
    raise TimeoutError(f"not read within {LIMIT_SECONDS} s of CPU time")


def mutate(seconds: float, seed: int, folder: Path) -> dict[str, Case]:
    """Mutate for so many seconds of CPU time; return the faults found, a case each."""
    known, count = first_cases(), 0
    lines: set[tuple[str, int]] = set()
    faults: dict[str, Case] = {}
    fresh = list(known)
    check(known[0], folder)  # loads what the readers load late
    signal.signal(signal.SIGPROF, _stop)
    begin = time.process_time()
    while fresh or time.process_time() - begin < seconds:
        case = fresh.pop() if fresh else Mutator(f"{seed}:{count}").case(known)
        (folder / "case").write_text(repr(case), errors="backslashreplace")
        faulthandler.dump_traceback_later(100 * LIMIT_SECONDS, exit=True)
        signal.setitimer(signal.ITIMER_PROF, LIMIT_SECONDS)
        try:
            new = reached(partial(check, case, folder)) - lines
        except AssertionError as error:
            said = traceback.format_exception(error, limit=-3)
            where = re.sub(r"\d+|'[^']*'", "_", str(error))[:60]
            if faults.setdefault(where, case) is case:
                print(f"{repr(case)[:2000]}\n{''.join(said)[-3000:]}", flush=True)
            new = frozenset()
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        if new:
            known.append(case)
        lines |= new
        count += 1
    faulthandler.cancel_dump_traceback_later()
    print(
        f"{count} inputs, {len(known)} kept, {len(lines)} lines reached, "
        f"{len(faults)} faults"
    )
    return faults


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    seconds, seed, *place = sys.argv[1:]
    folder = Path(*place or [tempfile.mkdtemp()])
    sys.exit(bool(mutate(float(seconds), int(seed), folder)))
