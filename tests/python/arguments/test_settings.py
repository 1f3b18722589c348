"""Settings are read by their types: text is converted as transformers' own command line
does, and what means nothing is rejected by field, value and type."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import pickle
import random
import re
import typing
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator
from enum import Enum
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draws import draws
from places import ROOT

from ctrainer import BMUF, EarlyStoppingCallback
from ctrainer.arguments.checks import read_table
from ctrainer.arguments.fsdp import sharding_of
from ctrainer.arguments.optimizers import parse_options
from ctrainer.arguments.settings import hints, read
from ctrainer.arguments.table import check_environment
from ctrainer.fairseq.config import FairseqBMUFConfig, as_config
from ctrainer.fairseq.config.trees import groups, known_options
from ctrainer.fsdp import FullyShardedDataParallel
from ctrainer.schedules import get_scheduler
from ctrainer.training_args import Seq2SeqTrainingArguments, TrainingArguments, adopt


class Word(Enum):
    STEPS = "steps"
    THREE = 3


# Values of every kind that files, command lines and scripts bring along.
TEXTS = (
    "1", "0", "3", "-1", "100.0", "0.5", "5e-5", "1e3", "1_000", " 7 ", "nan", "inf",
    "-inf", "0x10", "true", "False", "yes", "no", "on", "off", "t", "n", "None", "null",
    "", "steps", "epoch", "best", "linear", "cosin", "adamw_torch", "info", "INFO",
    "nccl", "fork", "all", "/tmp/x", "a,b", "[1]", "{", "2",
)  # fmt: skip
OTHERS = (
    True, False, 0, 1, 2, 7, -1, -100, 10**12, 10**400, 100.0, 0.5, 1.5, 5e-5, -0.5,
    math.nan, math.inf, -math.inf, np.float32(0.5), np.float64(2.0), np.int64(4),
    np.bool_(True), np.array(3), np.ones(2), torch.tensor(0.25), torch.ones(2), None,
    Path("/tmp/x"), Word.STEPS, Word.THREE, [], ["a"], ("labels",), [1], {}, {"a": 1},
    b"x", object, 1j, Fraction(1, 2),
)  # fmt: skip


def drawn(cases: list[Any], small: int) -> list[Any]:
    """Some of the cases in `make test`, in an order of their own; else all."""
    random.Random(8).shuffle(cases)
    return cases[: draws(min(small, len(cases)), len(cases))]


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def outcome(make: Callable[[], Any]) -> Any:
    """What is made, or the error."""
    try:
        with quietly():
            return make()
    except (TypeError, ValueError) as error:
        return error


def meaning(value: Any, hint: Any) -> Any:
    """What a value means by an annotation, by rules of the test's own; Ellipsis where
    it means nothing."""
    if isinstance(value, Enum):
        value = value.value
    if getattr(value, "shape", None) == ():
        value = value.item()
    kinds = set(typing.get_args(hint)) if typing.get_args(hint) else {hint}
    found: Any = ...
    if value is None:
        return None if type(None) in kinds else ...
    if str in kinds and isinstance(value, (str, Path)):
        return str(value)
    if bool in kinds and type(value) in (bool, int) and value in (0, 1):
        found = bool(value)
    elif float in kinds and type(value) in (int, float, Fraction):
        found = ... if value != value else value
    elif int in kinds and type(value) in (int, float, Fraction):
        found = int(value) if abs(value) < math.inf and value % 1 == 0 else ...
    return found


def of_ours(name: str, value: Any) -> Any:
    return getattr(Seq2SeqTrainingArguments("o", **{name: value}), name)


def is_same(one: Any, other: Any) -> bool:
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


def names_it(error: BaseException, name: str, value: Any) -> bool:
    """Does the message name the field, the value and its type?"""
    text = str(error)
    return name in text and repr(value) in text and type(value).__name__ in text


KINDS = typing.get_type_hints(Seq2SeqTrainingArguments)
SCALARS = [
    name
    for name in read_table(Seq2SeqTrainingArguments)
    if {bool, int, float} & {KINDS[name], *typing.get_args(KINDS[name])}
    and not {str} & {*typing.get_args(KINDS[name])}
]
# Fields that are rejected when set, or contradict others: these errors need not tell
# the type of the value.
OF_ITS_OWN = (
    "is not supported", "needs", "exclude", "is an option of", "contradict",
    "compares the micro", "above 1 must be a whole number", "at least 0 and finite",
)  # fmt: skip


class TestTrainingArguments:
    @pytest.mark.parametrize("part", range(4))
    def test_text_means_what_transformers_parser_makes_of_it(self, part: int) -> None:
        """Or is rejected; where their parser rejects, ours may know the same number, or
        YAML's truth value."""
        yaml = pytest.importorskip("yaml")
        hf = pytest.importorskip("transformers", minversion="5.17")
        theirs = {f.name for f in dataclasses.fields(hf.TrainingArguments) if f.init}
        parser = hf.HfArgumentParser(hf.TrainingArguments)
        fields = [name for name in SCALARS if name in theirs]
        cases = drawn([(n, t) for n in fields for t in TEXTS], 1200)[part::4]
        for name, text in cases:
            found = outcome(lambda n=name, t=text: of_ours(n, t))
            expected: Any = ...
            with contextlib.suppress(SystemExit), quietly():
                expected = vars(parser.parse_args([f"--{name}={text}"]))[name]
            if isinstance(found, Exception):
                own = any(words in str(found) for words in OF_ITS_OWN)
                assert name in str(found), (name, text, found)
                assert own or names_it(found, name, text), (name, text, found)
            elif expected is not ...:
                assert is_same(found, expected), (name, text, found, expected)
            elif text in ("None", "null"):
                assert found is None or name == "disable_tqdm", (name, text, found)
            elif isinstance(found, bool):
                assert yaml.safe_load(text) is found, (name, text)
            else:
                assert float(text) == found, (name, text, found)

    @pytest.mark.parametrize("part", range(4))
    def test_other_values_keep_their_meaning_or_are_rejected(self, part: int) -> None:
        cases = drawn([(n, v) for n in SCALARS for v in OTHERS], 1200)[part::4]
        for name, value in cases:
            found = outcome(lambda n=name, v=value: of_ours(n, v))
            expected = meaning(value, KINDS[name])
            default = read_table(Seq2SeqTrainingArguments)[name][0].default
            if isinstance(found, Exception):
                own = any(words in str(found) for words in OF_ITS_OWN)
                assert name in str(found), (name, value, found)
                assert own or names_it(found, name, value), (name, value, found)
            elif value is None:
                assert not default or name in ("logging_steps", "save_steps"), name
            else:
                assert expected is not ..., (name, value, found)
                assert is_same(found, expected), (name, value, found)

    def test_what_transformers_takes_as_its_type_ours_takes_alike(self) -> None:
        """Right types and sentinels; what ours rejects has a reason of its own."""
        hf = pytest.importorskip("transformers", minversion="5.17")
        values = (True, False, -1, 0, 1, 3, 0.25, 2.0, 40, None)
        theirs = {f.name for f in dataclasses.fields(hf.TrainingArguments) if f.init}
        rejected = 0
        for name in (n for n in SCALARS if n in theirs):
            for value in values:
                if meaning(value, KINDS[name]) is ... or (
                    type(value) is bool
                    and (bool not in {KINDS[name], *typing.get_args(KINDS[name])})
                ):
                    continue
                on = {"use_cpu": True} if name.startswith("bf16") else {}
                given = {"output_dir": "o", name: value, **on}
                expected = outcome(
                    lambda n=name, g=given: getattr(hf.TrainingArguments(**g), n)
                )
                if isinstance(expected, Exception):
                    continue
                found = outcome(lambda n=name, v=value: of_ours(n, v))
                if isinstance(found, Exception):
                    rejected += 1
                    assert name in str(found), (name, value, found)
                else:
                    assert found == expected, (name, value, found, expected)
        assert rejected < 60, rejected

    @pytest.mark.parametrize(
        ("name", "value", "kept"),
        [
            ("eval_strategy", False, "no"),
            ("save_strategy", Word.STEPS, "steps"),
            ("include_num_input_tokens_seen", False, "no"),
            ("report_to", None, []),
            ("debug", "", []),
            ("resume_from_checkpoint", True, True),
            ("resume_from_checkpoint", Path("a"), "a"),
            ("label_names", ("labels",), ["labels"]),
            ("optim_target_modules", "all-linear", "all-linear"),
            ("delta_bits", "32", 32),
            ("max_steps", "-1", -1),
            ("lr_scheduler_kwargs", '{"num_cycles": "2"}', {"num_cycles": 2}),
        ],
    )
    def test_forms_that_are_meant(self, name: str, value: Any, kept: Any) -> None:
        assert of_ours(name, value) == kept

    @pytest.mark.parametrize(
        ("name", "value", "text"),
        [
            ("eval_strategy", "step", "did you mean 'steps'"),
            ("lr_scheduler_type", "cosin", "did you mean 'cosine'"),
            ("optim", "adamw_troch", "did you mean 'adamw_torch'"),
            ("log_level", "INFO", "did you mean 'info'"),
            ("label_names", "labels", "a list of texts or None, not 'labels'"),
            ("output_dir", 3, "text or None, not 3"),
            ("run_name", 2024, r"not 2024 \(int\)"),
            ("seed", -1, r"a whole number in \[0, 4294967295\]"),
            ("num_train_epochs", math.inf, "must be at least 0 and finite"),
            ("gradient_checkpointing_kwargs", "kwargs.json", "a dict, or its JSON"),
            ("lr_scheduler_kwargs", "{1", "is not valid JSON"),
        ],
    )
    def test_words_and_texts_are_checked(
        self, name: str, value: Any, text: str
    ) -> None:
        given = {"output_dir": "o"} | {name: value}
        with pytest.raises(ValueError, match=f"{name}.*{text}"):
            TrainingArguments(**given)

    def test_old_names_are_read_too(self) -> None:
        with quietly():
            assert not TrainingArguments("o", no_cuda="false").use_cpu
            assert TrainingArguments("o", warmup_ratio="0.25").warmup_steps == 0.25
            args = TrainingArguments("o", group_by_length="false")
        assert args.train_sampling_strategy == "random"
        with pytest.raises(ValueError, match=r"warmup_ratio must be .* not 'much'"):
            TrainingArguments("o", warmup_ratio="much")


def misspelt(name: str, random: random.Random) -> str:
    """A letter left out, doubled or exchanged with the next; or dashes."""
    at = random.randrange(1, len(name) - 1)
    return random.choice(
        [
            name[:at] + name[at + 1 :],
            name[:at] + name[at] + name[at:],
            name[:at] + name[at + 1] + name[at] + name[at + 2 :],
            name.replace("_", "-"),
            name.upper(),
        ]
    )


@dataclasses.dataclass
class UsersArguments(TrainingArguments):
    mine: Any = None
    bf16: bool | None = None
    learning_rate: float | str = "auto"

    def __post_init__(self) -> None:
        self.bf16 = bool(self.bf16)
        super().__post_init__()


class TestNames:
    @pytest.mark.parametrize("cls", [TrainingArguments, Seq2SeqTrainingArguments])
    def test_a_misspelt_keyword_is_told_the_nearest(self, cls: type) -> None:
        chance = random.Random(14)
        names = [f.name for f in dataclasses.fields(cls) if f.init]
        for name in drawn(names * 8, 200):
            wrong = misspelt(name, chance)
            if wrong in names:
                continue
            with pytest.raises(TypeError, match=cls.__name__) as told:
                cls("o", **{wrong: 1})
            assert repr(wrong) in str(told.value)
            assert repr(name) in str(told.value), (wrong, str(told.value))

    def test_a_subclass_has_its_own_names_types_and_defaults(self) -> None:
        args = UsersArguments("o", mine="false")
        assert (args.mine, args.bf16, args.learning_rate) == ("false", False, "auto")
        assert UsersArguments("o", learning_rate=0.5).learning_rate == 0.5
        with pytest.raises(TypeError, match=r"UsersArguments.* did you mean 'mine'"):
            UsersArguments("o", mines=1)
        args.other = "false"  # attributes are the user's
        assert pickle.loads(pickle.dumps(args)).other == "false"
        assert dataclasses.replace(args, fp16="no").mine == "false"

    def test_a_constructor_of_ones_own_takes_what_it_likes(self) -> None:
        class Mine(TrainingArguments):
            def __init__(self, folder: str, **rest: Any) -> None:
                super().__init__(output_dir=folder, seed=rest["start"])

        assert Mine("o", start="7").seed == 7

    def test_values_come_back_from_every_form(self, tmp_path: Path) -> None:
        hf = pytest.importorskip("transformers", minversion="5.17")
        yaml = pytest.importorskip("yaml")
        given = {"learning_rate": 5e-5, "fp16": False, "eval_strategy": "no",
                 "max_steps": 1000, "warmup_steps": 0.5, "seed": 7}  # fmt: skip
        expected = TrainingArguments("o", **given).to_dict()
        texts = {n: str(v) for n, v in given.items()}
        file, lines = tmp_path / "a.json", tmp_path / "a.yaml"
        file.write_text(json.dumps({"output_dir": "o", **texts}))
        lines.write_text("output_dir: o\nlearning_rate: 5e-5\nfp16: 'false'\n"
                         "eval_strategy: no\nmax_steps: 1_000\nwarmup_steps: '.5'\n"
                         "seed: '7'\n")  # fmt: skip
        parser = hf.HfArgumentParser(TrainingArguments)
        flags = [f"--{n}={v}" for n, v in texts.items()]
        made = [
            *parser.parse_dict({"output_dir": "o", **texts}),
            *parser.parse_json_file(str(file)),
            *parser.parse_yaml_file(str(lines)),
            *parser.parse_args_into_dataclasses(["--output_dir=o", *flags]),
            TrainingArguments(**yaml.safe_load(lines.read_text())),
            TrainingArguments(**{**expected, "hub_token": None}),
        ]
        for args in made:
            assert args.to_dict() == expected
            assert pickle.loads(pickle.dumps(args)).to_dict() == expected
            assert dataclasses.replace(args).to_dict() == expected

    def test_signatures_name_the_fields(self) -> None:
        import inspect

        assert "learning_rate" in inspect.signature(TrainingArguments).parameters
        assert "mine" in inspect.signature(UsersArguments).parameters


class TestLaterChanges:
    @pytest.mark.parametrize("kind", ["ours", "transformers"])
    def test_text_that_reads_as_something_else_is_rejected(self, kind: str) -> None:
        hf = pytest.importorskip("transformers", minversion="5.17")
        cls = TrainingArguments if kind == "ours" else hf.TrainingArguments
        for name, value in (
            ("fp16", "false"), ("remove_unused_columns", "no"), ("max_steps", "3"),
            ("learning_rate", "5e-5"), ("learning_rate", math.nan), ("seed", 0.5),
            ("weight_decay", -1.0), ("log_level", "loud"), ("eval_strategy", "stesp"),
        ):  # fmt: skip
            args = cls("o", use_cpu=True)
            adopt(args)
            setattr(args, name, value)
            with pytest.raises(ValueError, match=name):
                adopt(args)

    def test_equal_values_are_left_as_they_are(self) -> None:
        args = TrainingArguments("o")
        args.learning_rate, args.max_steps = np.float64(0.5), 3.0
        assert adopt(args).learning_rate == 0.5


def block_options(cfg: Any) -> Any:
    parameters = [torch.nn.Parameter(torch.ones(3))]
    made = BMUF(cfg, torch.optim.SGD(parameters, lr=0.1))
    names = ("sync_iter", "block_lr", "block_momentum", "warmup_iteration", "use_nbm",
             "average_sync", "delta_bits")  # fmt: skip
    return [getattr(made, name) for name in names]


BLOCKS = {
    f.name: typing.get_type_hints(FairseqBMUFConfig)[f.name]
    for f in dataclasses.fields(FairseqBMUFConfig)
    if f.name not in ("_name", "distributed_world_size")
}


class TestBMUF:
    def test_each_form_of_a_configuration_says_the_same(self) -> None:
        omegaconf = pytest.importorskip("omegaconf")
        simple = [v for v in (*TEXTS, *OTHERS) if type(v) in (str, int, float, bool)]
        simple = [v for v in simple if v not in ("", "{") and abs(hash(v)) < 2**62]
        for name, value in drawn([(n, v) for n in BLOCKS for v in simple], 120):
            forms = [{name: value}, Namespace(**{name: value}, other="ignored")]
            if not (isinstance(value, float) and value != value):
                forms.append(omegaconf.OmegaConf.create({name: value}))
            told = [outcome(lambda c=cfg: block_options(c)) for cfg in forms]
            texts = [str(made) for made in told]
            assert texts == texts[:1] * len(texts), (name, value, texts)
            if isinstance(told[0], Exception):
                assert name in texts[0], (name, value, texts[0])
                whole = value == value and isinstance(value, float) and value % 1 == 0
                shown = str(int(value)) if whole else str(value).strip()
                assert shown in texts[0] or "must be finite" in texts[0]
            elif not isinstance(value, str):
                expected = outcome(lambda n=name, v=value: block_options(
                    dataclasses.replace(FairseqBMUFConfig(distributed_world_size=1),
                                        **{n: v})))  # fmt: skip
                assert told[0] == expected

    @pytest.mark.parametrize("name", BLOCKS)
    def test_a_misspelt_name_is_told_the_nearest(self, name: str) -> None:
        chance = random.Random(name)
        for _ in range(10):
            wrong = misspelt(name, chance)
            if wrong != name:
                with pytest.raises(ValueError, match=f"{wrong}.*{name}"):
                    block_options({wrong: 1})

    @pytest.mark.parametrize("name", ["global_sync_iter", "block_lr", "block_momentum",
                                      "warmup_iterations", "delta_bits"])  # fmt: skip
    @pytest.mark.parametrize("value", [math.nan, -1, -3.5, math.inf])
    def test_no_value_out_of_range_passes(self, name: str, value: float) -> None:
        for cfg in ({name: value}, Namespace(**{name: value})):
            with pytest.raises(ValueError, match=name):
                block_options(cfg)

    @pytest.mark.parametrize("cfg", [None, 5, "block_lr=1", [1], FairseqBMUFConfig])
    def test_what_holds_no_options_is_a_type_error(self, cfg: Any) -> None:
        with pytest.raises(TypeError, match="a dict or an object with attributes"):
            block_options(cfg)


# Keys of fsdp_config with values that are meant, as Python and as text.
SHARDING = {
    "reshard_after_forward": (True, False, "full_shard"),
    "auto_wrap_policy": ("TRANSFORMER_BASED_WRAP", "NO_WRAP", "SIZE_BASED_WRAP"),
    "transformer_layer_cls_to_wrap": ("Block", "A,B"),
    "min_num_params": (0, 7, 10**8),
    "state_dict_type": ("FULL_STATE_DICT", "SHARDED_STATE_DICT"),
    "activation_checkpointing": (True, False),
    "sync_module_states": (True, False),
    "cpu_ram_efficient_loading": (True, False),
    "forward_prefetch": (True, False),
    "backward_prefetch": ("NO_PREFETCH", "BACKWARD_PRE", "BACKWARD_POST"),
    "gather_bits": (8, 4, 32),
    "reduce_bits": (8, 4, 32),
    "error_feedback": (True, False),
    "secondary_shards": (2, 0),
    "cpu_offload": (True, False),
}


def sharding(config: Any) -> Any:
    return outcome(lambda: sharding_of(Namespace(fsdp=True, fsdp_config=config)))


class TestSharding:
    @pytest.mark.parametrize("name", SHARDING)
    def test_prefixes_text_and_files_say_the_same(
        self, name: str, tmp_path: Path
    ) -> None:
        file = tmp_path / "fsdp.json"
        for value in SHARDING[name]:
            file.write_text(json.dumps({name: str(value)}))
            said = [
                {name: value}, {f"fsdp_{name}": value}, {name: str(value)},
                {name: str(value).lower() if "BASED" not in str(value) else value},
                file,
            ]  # fmt: skip
            if name == "transformer_layer_cls_to_wrap":
                said.pop(3)
            made = [str(sharding(config)) for config in said]
            assert made == made[:1] * len(made)

    @pytest.mark.parametrize("name", SHARDING)
    def test_the_variables_of_accelerate_say_the_same(
        self, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        written = {
            "cpu_offload": "OFFLOAD_PARAMS",
            "transformer_layer_cls_to_wrap": "TRANSFORMER_CLS_TO_WRAP",
        }
        variable = f"FSDP_{written.get(name, name.upper())}"
        monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
        for value in SHARDING[name]:
            monkeypatch.setenv(variable, str(value))
            heard = outcome(lambda: sharding_of(Namespace(fsdp=None)))
            expected = sharding({"auto_wrap_policy": "NO_WRAP"} | {name: value})
            assert str(heard) == str(expected)
        for value in ("perhaps-not", "-3", "nan"):
            monkeypatch.setenv(variable, value)
            heard = outcome(lambda: sharding_of(Namespace(fsdp=None)))
            assert name.endswith("wrap") or name in str(heard), (value, heard)

    @pytest.mark.parametrize("name", SHARDING)
    def test_what_means_nothing_is_named(self, name: str) -> None:
        for value in (2.5, math.nan, -3, [1], {"a": 1}, "perhaps", b"x", object()):
            if (name, value) == ("transformer_layer_cls_to_wrap", "perhaps"):
                continue  # any class may be called so
            made = sharding({name: value})
            assert isinstance(made, ValueError), (name, value, made)
            assert name in str(made), (value, made)

    @pytest.mark.parametrize("name", SHARDING)
    def test_a_misspelt_name_is_told_the_nearest(self, name: str) -> None:
        chance = random.Random(name)
        for _ in range(10):
            wrong = misspelt(name, chance)
            if wrong != name:
                assert name in str(sharding({wrong: 1})), (wrong, sharding({wrong: 1}))

    @pytest.mark.parametrize(
        "name", ["reshard_after_forward", "flatten_parameters", "cpu_offload"]
    )
    def test_text_is_no_truth_value_of_a_module(self, name: str) -> None:
        with pytest.raises(ValueError, match=f"{name} must be True or False, not 'fal"):
            FullyShardedDataParallel(torch.nn.Linear(2, 2), **{name: "false"})

    def test_one_setting_twice_has_to_agree(self) -> None:
        both = {"min_num_params": 3, "fsdp_min_num_params": 4}
        with pytest.raises(ValueError, match=r"min_num_params=3 and .*=4; set one"):
            TrainingArguments("o", fsdp=True, fsdp_config=both)

    @pytest.mark.parametrize("fsdp", [5, 0.5, "full_shards", {"full_shard": 1}])
    def test_words_are_checked(self, fsdp: Any) -> None:
        with pytest.raises(ValueError, match="fsdp"):
            TrainingArguments("o", fsdp=fsdp)


def accelerate_utils() -> Any:
    return pytest.importorskip("accelerate.utils")


def takes_anything(option: str) -> bool:
    group, name = option.split(".")
    return hints(groups()[group])[name] is Any


class TestFairseq:
    def test_numbers_are_numbers_and_nan_is_none(self) -> None:
        """Every option of the groups, with values of every kind: as fairseq's schema
        has it, or an error that names it, its value and the type."""
        cases = [(o, v) for o in sorted(known_options()) for v in (*TEXTS, *OTHERS)]
        for option, value in drawn(cases, 600):
            group, name = option.split(".")
            made = outcome(lambda g=group, n=name, v=value: as_config({g: {n: v}}))
            if isinstance(made, Exception):
                own = "Cannot combine" in str(made)
                assert own or name in str(made), (option, value, made)
            else:
                kept = getattr(getattr(made, group), name)
                assert takes_anything(option) or kept == kept, (option, value)
                if isinstance(kept, bool):
                    text = str(value).lower()
                    no = ("false", "0", "no", "off", "n")
                    yes = ("true", "1", "yes", "on", "t")
                    assert text in (yes if kept else no), (option, value)


class TestEnvironment:
    @pytest.mark.parametrize("name", ["MEGATRON_LM", "PARALLELISM_CONFIG"])
    def test_another_engine_is_rejected(
        self, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        variable = f"ACCELERATE_USE_{name}"
        for word in ("true", "1", "yes"):
            monkeypatch.setenv(variable, word)
            with pytest.raises(RuntimeError, match=f"{variable} is set"):
                TrainingArguments("o")
        for word in ("", "false", "0"):
            monkeypatch.setenv(variable, word)
            TrainingArguments("o")
        monkeypatch.setenv(variable, "ture")
        with pytest.raises(ValueError, match=f"{variable} must be true or false"):
            TrainingArguments("o")

    def test_compiling_as_accelerate_launch_was_told(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "NO")
        assert not TrainingArguments("o").torch_compile
        monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
        monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", "default")
        args = TrainingArguments("o")
        assert args.torch_compile
        assert (args.torch_compile_backend, args.torch_compile_mode) == (
            "inductor",
            "default",
        )
        given = TrainingArguments("o", torch_compile_backend="eager")
        plugin = accelerate_utils().TorchDynamoPlugin(backend="eager", mode=None)
        assert (given.torch_compile_backend, given.torch_compile_mode) == (
            plugin.backend.value.lower(),
            plugin.mode,
        )
        monkeypatch.setenv("ACCELERATE_DYNAMO_USE_DYNAMIC", "True")
        for own in ({}, {"torch_compile": True}):
            with pytest.raises(ValueError, match="DYNAMO_USE_DYNAMIC is set"):
                TrainingArguments("o", **own)

    @pytest.mark.parametrize("backend", ["no", "eager"])
    @pytest.mark.parametrize("given", [{}, {"torch_compile_mode": "max-autotune"}])
    def test_arguments_that_compile_have_the_launched_mode_and_their_own_backend(
        self, backend: str, given: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", backend)
        monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", "reduce-overhead")
        args = TrainingArguments("o", torch_compile=True, **given)
        plugin = accelerate_utils().TorchDynamoPlugin(
            backend="inductor", mode=given.get("torch_compile_mode")
        )
        found = (args.torch_compile_backend, args.torch_compile_mode)
        assert found == (plugin.backend.value.lower(), plugin.mode)

    def test_another_device_of_accelerate_is_an_error(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("cpu", "cpu:0", ""):
            monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", name)
            assert TrainingArguments("o", use_cpu=True).device.type == "cpu"
        monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "meta")
        with pytest.raises(ValueError, match="ACCELERATE_TORCH_DEVICE=meta is not the"):
            _ = TrainingArguments("o", use_cpu=True).device

    def test_a_variable_nearly_called_as_ours_is_told(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CTRAINER_NUM_THREAD", "2")
        with pytest.warns(UserWarning, match="NUM_THREAD has .* mean 'NUM_THREADS'"):
            TrainingArguments("o")

    def test_no_variable_that_the_sources_read_is_told(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sources = [*ROOT.glob("c*/**/*.py"), *ROOT.glob("csrc/**/*.[ch]"),
                   *ROOT.glob("cuda/**/*"), ROOT / "setup.py"]  # fmt: skip
        text = "".join(path.read_text() for path in sources if path.is_file())
        read_there = set(re.findall(r"\"(CTRAINER_[A-Z_]+)\"", text))
        assert {"CTRAINER_ISA", "CTRAINER_FSDP_POISON"} < read_there
        for name in read_there:
            monkeypatch.setenv(name, "0")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            check_environment()


# Of transformers, with the counts of steps that get_scheduler() takes by themselves.
OPTIONS_OF_SCHEDULES = {
    "cosine": ["num_cycles"],
    "cosine_with_restarts": ["num_cycles"],
    "polynomial": ["power", "lr_end"],
    "inverse_sqrt": ["timescale"],
    "cosine_with_min_lr": ["num_cycles", "min_lr", "min_lr_rate"],
    "cosine_warmup_with_min_lr": [
        "num_cycles", "min_lr", "min_lr_rate", "warmup_lr_rate",
    ],
    "warmup_stable_decay": [
        "num_decay_steps", "num_stable_steps", "warmup_type", "decay_type",
        "min_lr_ratio", "num_cycles",
    ],
}  # fmt: skip


class TestSchedules:
    def test_early_stopping_reads_its_options(self) -> None:
        assert EarlyStoppingCallback("3", "0.5").early_stopping_patience == 3
        for given in ({"early_stopping_patience": 0.5},
                      {"early_stopping_threshold": math.nan}):  # fmt: skip
            with pytest.raises(ValueError, match=f"{next(iter(given))} must be"):
                EarlyStoppingCallback(**given)

    @pytest.mark.parametrize("name", ["reduce_lr_on_plateau", "greedy"])
    def test_keywords_are_read(self, name: str) -> None:
        parameters = [torch.nn.Parameter(torch.ones(3))]
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        made = get_scheduler(name, optimizer, None, None, {"factor": "0.5"})
        assert made.factor == 0.5
        for given, text in (
            ({"factr": 0.5}, "has no 'factr'; did you mean 'factor'"),
            ({"factor": "half"}, "factor must be a number"),
            ({"factor": math.nan}, "factor must be a number"),
            ({"patience": True}, "patience must be a number"),
        ):
            with pytest.raises(ValueError, match=f"{name}.*{text}"):
                get_scheduler(name, optimizer, None, None, given)

    def test_a_transformers_without_a_schedule_is_named(self, monkeypatch) -> None:
        monkeypatch.delattr("transformers.optimization.GreedyLR")  # as in 4.57
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1)
        with pytest.raises(ImportError, match=r"'greedy'.* pip install -U"):
            get_scheduler("greedy", optimizer, None, None)

    @pytest.mark.parametrize("name", OPTIONS_OF_SCHEDULES)
    def test_names_and_truth_values_are_checked_for_every_schedule(
        self, name: str
    ) -> None:
        chance = random.Random(name)
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1)
        for option in OPTIONS_OF_SCHEDULES[name]:
            for _ in range(draws(4, 40)):
                wrong = misspelt(option, chance)
                if wrong != option:
                    told = f"{wrong}.*did you mean '{option}'"
                    with pytest.raises(ValueError, match=told):
                        get_scheduler(name, optimizer, 1, 9, {wrong: 1})
            for value in (True, np.bool_(False)):
                with pytest.raises(ValueError, match=f"{option} is {value}; expected"):
                    get_scheduler(name, optimizer, 1, 9, {option: value})

    def test_text_in_a_dict_is_what_it_means(self) -> None:
        given = {"num_cycles": "2", "decay_type": "linear", "x": "nan", "y": "false"}
        args = TrainingArguments("o", lr_scheduler_kwargs=given)
        assert args.lr_scheduler_kwargs == {**given, "num_cycles": 2, "y": False}
        args = TrainingArguments(
            "o", gradient_checkpointing_kwargs={"use_reentrant": "false"}
        )
        assert args.gradient_checkpointing_kwargs == {"use_reentrant": False}


class TestOnce:
    """A name that stands twice: files and texts would keep the last."""

    def test_json(self, tmp_path: Path) -> None:
        text = '{"num_cycles": 1, "num_cycles": 2}'
        with pytest.raises(ValueError, match=r"lr_scheduler_kw.*num_cycles' occurs"):
            TrainingArguments("o", lr_scheduler_kwargs=text)
        file = tmp_path / "a.json"
        file.write_text('{"version": 1, "version": 2}')
        with pytest.raises(ValueError, match=r"fsdp_config: .*a\.json.*'version'"):
            TrainingArguments("o", fsdp=True, fsdp_config=str(file))
        file.write_text('{"even_batches": true, "even_batches": false}')
        with pytest.raises(ValueError, match=r"accelerator_config: .*a\.json.*occurs"):
            TrainingArguments("o", accelerator_config=file)
        file.write_text("[" * 100_000)
        with pytest.raises(ValueError, match=r"a\.json' is not valid JSON"):
            TrainingArguments("o", accelerator_config=file)

    def test_optim_args(self) -> None:
        assert parse_options("a=1,b=2") == {"a": "1", "b": "2"}
        with pytest.raises(ValueError, match="optim_args has 'a' twice"):
            parse_options("a=1,a=2")


class TestReader:
    @pytest.mark.parametrize(
        ("value", "hint", "expected"),
        [
            (Path("a"), str, "a"), (["1", 2.0], list[int], [1, 2]),
            (None, int | None, None),
            ("null", float | None, None), ("none", str | None, "none"),
            ({"a": "1"}, dict[str, int], {"a": 1}), ("true", str | bool, "true"),
        ],
    )  # fmt: skip
    def test_what_is_converted(self, value: Any, hint: Any, expected: Any) -> None:
        assert read(value, hint, "x") == expected

    @pytest.mark.parametrize(
        ("value", "hint"),
        [
            (True, int), (True, float), (math.nan, float), ("nan", float), (1, str),
            ("a", list[str]), (0.0, bool), ("", int), (None, int), (10.5, int),
            ("1,2", list[int]), ([None], list[int]), (np.ones(2), float),
        ],
    )  # fmt: skip
    def test_what_is_rejected(self, value: Any, hint: Any) -> None:
        with pytest.raises(ValueError, match=r"^x(\[0\])? must be"):
            read(value, hint, "x")


def test_objects_of_a_class_are_taken_as_they_are_and_nothing_else() -> None:
    for value, kind in ((Path("a"), Path), (slice(1), slice), (range(2), range | None)):
        assert read(value, kind, "field") is value
        with pytest.raises(ValueError, match="field must be a"):
            read("a", kind, "field")
    with pytest.raises(TypeError, match=r"field is annotated .* cannot be checked"):
        read(print, Callable[[int], int], "field")
