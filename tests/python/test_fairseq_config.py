"""fairseq's configuration: its options, and the sources it is built from.

Source of the options: fairseq/dataclass/configs.py; of what a Namespace becomes:
fairseq/dataclass/utils.py.
"""

import dataclasses
import importlib.util
import logging
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ctrainer.fairseq.config import (
    II,
    MISSING,
    ChoiceEnum,
    FairseqConfig,
    FairseqDataclass,
    OpenConfig,
    as_config,
    checkpoint_config,
    component_class,
    component_names,
    components,
    register_architecture,
    register_component,
    status,
    to_dict,
    to_yaml,
)
from ctrainer.fairseq.config.trees import known_options
from ctrainer.fairseq.config.values import describe, hints

ROOT = Path(__file__).resolve().parents[2]
SOURCE = {
    "optimization": {"lr": [0.1, 0.05], "max_update": 60},
    "dataset": {"max_tokens": 500},
    "optimizer": {"_name": "adam", "adam_betas": "(0.9, 0.98)"},
    "lr_scheduler": {"_name": "polynomial_decay"},
    "model": {"_name": "mine", "base_layers": 2},
}


def option_lines(prefix: str, cls: type) -> Iterator[str]:
    """The options of a dataclass as tests/python/fairseq_options.txt has them."""
    per_gpu = {"distributed_world_size", "distributed_num_procs", "nprocs_per_node"}
    for option in dataclasses.fields(cls):
        hint = hints(cls)[option.name]
        name = prefix + option.name
        if dataclasses.is_dataclass(hint):
            yield f"{name}:"
            yield from option_lines(f"{name}.", hint)
            continue
        default = option.default
        if option.default_factory is not dataclasses.MISSING:
            default = 1 if option.name in per_gpu else option.default_factory()
        alias = option.metadata.get("argparse_alias")
        const = option.metadata.get("argparse_const")
        line = f"{name} = {default!r}: {describe(hint)}"
        yield line + (f" {alias}" if alias else "") + (f" ?{const}" if const else "")


def test_options_are_fairseqs_in_name_order_type_default_and_alias() -> None:
    theirs = (Path(__file__).with_name("fairseq_options.txt")).read_text()
    theirs = theirs.splitlines()[1:]
    ours = list(option_lines("", FairseqConfig))
    for line in theirs:
        title = line.rstrip(":").split(".")
        if line.endswith(":") and len(title) == 2:
            cls = component_class(*title)
            ours += [line, *option_lines(f"{'.'.join(title)}.", cls)]
    assert len(ours) > 380
    assert ours == theirs


def test_every_option_has_help_but_those_that_refer() -> None:
    groups = [cls for cls in hints(FairseqConfig).values() if isinstance(cls, type)]
    groups += [
        component_class(component, name)
        for component in ("task", "criterion", "optimizer", "lr_scheduler")
        for name in component_names(component)
    ]
    without = [
        option.name
        for cls in groups
        if dataclasses.is_dataclass(cls)
        for option in dataclasses.fields(cls)
        if "help" not in option.metadata and not str(option.default).startswith("${")
    ]
    assert set(without) == {"_name", "debug_param_names"}


def test_importing_it_loads_no_torch_and_no_omegaconf() -> None:
    code = (
        "import sys, ctrainer.fairseq.config\n"
        "print([n for n in ('torch', 'omegaconf', 'yaml') if n in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]"


def test_importing_counts_no_devices_and_reads_no_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert as_config().distributed_training.device_id == 3


def test_document_is_current() -> None:
    path = ROOT / "docs" / "make_fairseq_config.py"
    spec = importlib.util.spec_from_file_location("make_fairseq_config", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text() == module.page()


def test_the_table_of_what_is_honoured_names_options() -> None:
    named = {*status.HONOURED, *status.REFUSED}
    assert named <= set(known_options())
    assert not status.HONOURED.keys() & status.REFUSED.keys()


class TestSources:
    @pytest.fixture
    def config(self) -> FairseqConfig:
        return as_config(SOURCE)

    def test_defaults(self) -> None:
        config = as_config()
        assert config.model == MISSING
        assert config.task is None
        assert config.dataset.max_tokens_valid is None
        assert config.optimization.lr == [0.25]

    def test_a_dict(self, config: FairseqConfig) -> None:
        assert config.optimization.lr == [0.1, 0.05]
        assert config.lr_scheduler.total_num_update == 60.0
        assert config.dataset.max_tokens_valid == 500
        assert type(config.optimizer) is component_class("optimizer", "adam")
        assert config.optimizer.lr == [0.1, 0.05]

    def test_its_own_kind_which_is_left_alone(self) -> None:
        given = FairseqConfig()
        given.dataset.max_tokens = 7
        config = as_config(given)
        assert config.dataset.max_tokens_valid == 7
        assert given.dataset.max_tokens_valid == "${dataset.max_tokens}"
        config.optimization.lr.append(1.0)
        assert given.optimization.lr == [0.25]

    def test_an_attribute_that_is_no_option(self) -> None:
        given = FairseqConfig()
        given.dataset.max_token = 7
        with pytest.raises(ValueError, match=r"dataset\.max_token; did you mean"):
            as_config(given)

    def test_a_dataclass_of_another_package(self) -> None:
        @dataclass
        class Optimization:
            lr: Any = 0.5

        @dataclass
        class Theirs:
            optimization: Any = field(default_factory=Optimization)

        assert as_config(Theirs()).optimization.lr == [0.5]

    def test_omegaconf(self, config: FairseqConfig) -> None:
        omegaconf = pytest.importorskip("omegaconf")
        made = omegaconf.OmegaConf.create(
            {**SOURCE, "common": {"seed": "${dataset.max_tokens}", "log_format": "???"}}
        )
        del made.common.log_format
        read = as_config(made)
        assert read.common.seed == 500
        read.common.seed = 1
        assert read.optimization == config.optimization
        assert read.optimizer == config.optimizer

    def test_omegaconf_of_our_dataclasses(self) -> None:
        omegaconf = pytest.importorskip("omegaconf")
        made = omegaconf.OmegaConf.create(to_dict(FairseqConfig()))
        made.common.fp16 = True
        assert as_config(made).distributed_training.fp16 is True

    def test_a_yaml_file(self, config: FairseqConfig, tmp_path: Path) -> None:
        path = tmp_path / "lm.yaml"
        path.write_text(
            "# @package _group_\n"
            "optimization: {lr: [1e-1, 5e-2], max_update: 60}\n"
            "dataset: {max_tokens: 500}\n"
            "optimizer: {_name: adam, adam_betas: '(0.9, 0.98)'}\n"
            "lr_scheduler: polynomial_decay\n"
            "model: {_name: mine, base_layers: 2}\n"
            "hydra: {run: {dir: .}}\n"
        )
        assert as_config(path) == config
        assert as_config(str(path)) == config

    def test_hydras_defaults_are_followed(self, tmp_path: Path) -> None:
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "big.yaml").write_text(
            "_name: lm\nlayers: 24\nheads: 8\n"
        )
        (tmp_path / "base.yaml").write_text("common: {seed: 4, log_interval: 5}\n")
        path = tmp_path / "run.yaml"
        path.write_text(
            "defaults:\n- base\n- _self_\n- model: big\n- task: language_modeling\n"
            "- bpe: null\n"
            "common: {seed: 9}\nmodel: {heads: 2}\n"
        )
        config = as_config(path)
        assert vars(config.model) == {"_name": "lm", "layers": 24, "heads": 2}
        assert (config.common.seed, config.common.log_interval) == (9, 5)
        assert config.task.tokens_per_sample == 1024
        assert config.task.seed == 9

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("- 1", "must hold groups of options"),
            ("a: [", "is not YAML"),
            ("defaults: [3]", "expected 'group: name'"),
            ("defaults: [{dataset: big}]", "and there is no .*big.yaml"),
        ],
    )
    def test_a_file_that_is_none(self, tmp_path: Path, text: str, message: str) -> None:
        path = tmp_path / "bad.yaml"
        path.write_text(text)
        with pytest.raises(ValueError, match=rf"bad\.yaml.* ?{message}"):
            as_config(path)

    def test_an_empty_file_is_the_defaults(self, tmp_path: Path) -> None:
        path = tmp_path / "empty.yaml"
        path.write_text("")
        assert as_config(path) == as_config()

    def test_without_pyyaml_it_says_what_to_install(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from ctrainer.fairseq.config import files

        files._yaml.cache_clear()
        monkeypatch.setitem(sys.modules, "yaml", None)
        path = tmp_path / "x.yaml"
        path.write_text("")
        with pytest.raises(ImportError, match="pip install pyyaml"):
            as_config(path)

    @pytest.mark.parametrize("source", [3, [1], FairseqConfig])
    def test_what_is_no_config(self, source: object) -> None:
        with pytest.raises(TypeError, match="a config is a FairseqConfig"):
            as_config(source)


class TestNamespace:
    """Flat options, as programs for fairseq before Hydra have them."""

    def test_it_warns_as_fairseq_does(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING):
            as_config(Namespace(seed=3))
        assert [record.getMessage() for record in caplog.records] == [
            "argparse.Namespace configuration is deprecated! Automatically converting "
            "to OmegaConf"
        ]

    def test_options_find_their_groups(self) -> None:
        config = as_config(
            Namespace(
                seed=3,
                lr=[0.5],
                max_tokens=9,
                fp16=True,
                optimizer="adam",
                adam_betas="(0.9, 0.98)",
                lr_scheduler="fixed",
                update_freq="1,2",
            )
        )
        assert config.common.seed == 3
        assert config.optimization.update_freq == [1, 2]
        assert config.distributed_training.fp16 is True
        assert config.optimizer.adam_betas == "(0.9, 0.98)"
        assert config.optimizer.lr == [0.5]
        assert config.dataset.max_tokens_valid == 9
        assert config.criterion is None

    def test_a_component_that_is_not_known_takes_all(self) -> None:
        config = as_config(Namespace(arch="mine", width=64, seed=3))
        assert vars(config.model) == {
            "arch": "mine", "width": 64, "seed": 3, "_name": "mine"
        }  # fmt: skip
        assert config.common.seed == 3

    def test_what_nobody_takes_is_said(self, caplog: pytest.LogCaptureFixture) -> None:
        config = as_config(Namespace(max_token=3, task="translation", tokenizer=None))
        assert config.task.max_source_positions == 1024
        (message,) = [
            record.getMessage()
            for record in caplog.records
            if "left out" in record.getMessage()
        ]
        assert "there is no option max_token" in message
        assert "tokenizer" not in message


class TestUnknownOptions:
    @pytest.mark.parametrize(
        ("source", "message"),
        [
            (
                {"dataset": {"max_token": 1}},
                "no option dataset.max_token; did you mean dataset.max_tokens or "
                "dataset.max_tokens_valid?",
            ),
            ({"datset": {}}, "no option datset; did you mean dataset?"),
            (
                {"max_tokens": 1},
                "no option max_tokens; did you mean dataset.max_tokens?",
            ),
            (
                {"dataset": {"lr": 1}},
                "no option dataset.lr; did you mean optimization.lr?",
            ),
            (
                {"optimizer": {"_name": "adam", "adam_beta": 1}},
                "no option optimizer.adam_beta; did you mean optimizer.adam_betas",
            ),
        ],
    )
    def test_they_are_errors_with_the_near_name(
        self, source: dict, message: str
    ) -> None:
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            as_config(source)
        assert message in str(caught.value)

    def test_nothing_near_is_not_guessed(self) -> None:
        with pytest.raises(ValueError, match=r"there is no option common.xyzzy$"):
            as_config({"common": {"xyzzy": 1}})

    def test_they_can_be_left_out_with_a_warning(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        source = {"common": {"seed": 2, "seeed": 3}, "gone": {}}
        config = as_config(source, unknown="warn")
        assert config.common.seed == 2
        (record,) = caplog.records
        assert "common.seeed; did you mean common.seed?" in record.getMessage()
        assert "there is no option gone" in record.getMessage()


class TestValues:
    @pytest.mark.parametrize(
        ("option", "value", "kept"),
        [
            ("common.seed", "7", 7),
            ("common.seed", 7.0, 7),
            ("common.fp16", "true", True),
            ("common.fp16", 0, False),
            ("common.log_format", None, None),
            ("common.min_loss_scale", "1e-3", 0.001),
            ("common.min_loss_scale", 1, 1.0),
            ("optimization.lr", 0.5, [0.5]),
            ("optimization.lr", "0.5,0.25", [0.5, 0.25]),
            ("optimization.lr", (1, 2), [1.0, 2.0]),
            ("optimization.update_freq", "", []),
            ("checkpoint.save_dir", Path("a/b"), "a/b"),
            ("checkpoint.checkpoint_suffix", 3, "3"),
            ("generation.retain_dropout_modules", ["A"], ["A"]),
        ],
    )
    def test_what_loses_nothing_is_converted(
        self, option: str, value: object, kept: object
    ) -> None:
        group, name = option.split(".")
        found = as_config({group: {name: value}})[group][name]
        assert (found, type(found)) == (kept, type(kept))

    @pytest.mark.parametrize(
        ("option", "value", "message"),
        [
            ("common.seed", "x", "must be a whole number, not 'x'"),
            ("common.seed", 1.5, "must be a whole number, not 1.5"),
            ("common.seed", float("nan"), "must be a whole number, not nan"),
            ("common.seed", True, "must be a whole number, not True"),
            ("common.seed", None, "must be a whole number, not None"),
            ("common.fp16", "maybe", "must be true or false, not 'maybe'"),
            ("common.fp16", 1.0, "must be true or false, not 1.0"),
            ("common.min_loss_scale", [1], r"must be a number, not \[1\]"),
            ("common.user_dir", True, "must be text or None, not True"),
            ("common.log_format", "xml", "must be one of json, none, simple, tqdm or"),
            ("optimization.lr", {"a": 1}, "must be a list of numbers, not"),
            ("distributed_training.ddp_backend", "nccl", "must be one of c10d, "),
        ],
    )
    def test_the_rest_is_an_error_that_names_the_option(
        self, option: str, value: object, message: str
    ) -> None:
        group, name = option.split(".")
        with pytest.raises(ValueError, match=f"^{option} {message}"):
            as_config({group: {name: value}})

    def test_an_item_of_a_list_is_named(self) -> None:
        with pytest.raises(ValueError, match=r"^optimization.update_freq\[1\] must be"):
            as_config({"optimization": {"update_freq": [1, "a"]}})

    def test_a_list_of_a_fixed_length(self) -> None:
        group = {"_name": "tri_stage", "phase_ratio": "0.1,0.4,0.5"}
        found = as_config({"lr_scheduler": group}).lr_scheduler.phase_ratio
        assert found == (0.1, 0.4, 0.5)
        group["phase_ratio"] = [0.5, 0.5]
        with pytest.raises(ValueError, match="phase_ratio must be a list of 3 numbers"):
            as_config({"lr_scheduler": group})

    @pytest.mark.parametrize("value", [3, "x", [1]])
    def test_a_group_is_a_group(self, value: object) -> None:
        with pytest.raises(ValueError, match=r"^common must be a group of options"):
            as_config({"common": value})

    def test_memory_efficient_means_fp16(self) -> None:
        common = {"memory_efficient_fp16": "true", "memory_efficient_bf16": False}
        config = as_config({"common": common})
        assert (config.common.fp16, config.common.bf16) == (True, False)
        assert config.distributed_training.fp16 is True

    def test_memory_efficient_means_bf16_and_no_tpu(self) -> None:
        common = as_config({"common": {"memory_efficient_bf16": True}}).common
        assert (common.bf16, common.tpu) == (True, False)

    def test_fp16_and_a_tpu(self) -> None:
        with pytest.raises(ValueError, match="Cannot combine --fp16 and --tpu, use"):
            as_config({"common": {"fp16": True, "tpu": True}})


class TestReferences:
    def test_they_follow_what_they_name(self) -> None:
        config = as_config({"dataset": {"grouped_shuffling": True}})
        assert config.dataset.update_epoch_batch_itr is True
        assert config.bmuf.distributed_world_size == 1

    def test_a_value_that_is_given_wins(self) -> None:
        config = as_config({"dataset": {"batch_size": 4, "batch_size_valid": None}})
        assert config.dataset.batch_size_valid is None

    def test_relative_and_within_a_text(self) -> None:
        checkpoint = {"save_dir": "run-${common.seed}/${.checkpoint_suffix}"}
        checkpoint["checkpoint_suffix"] = "${..common.log_format}"
        common = {"log_format": "json"}
        config = as_config({"checkpoint": checkpoint, "common": common})
        assert config.checkpoint.save_dir == "run-1/json"

    def test_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CT_SEED", "12")
        monkeypatch.delenv("CT_NONE", raising=False)
        common = {"seed": "${oc.env:CT_SEED}", "log_file": "${env:CT_NONE,log.txt}"}
        config = as_config({"common": common})
        assert (config.common.seed, config.common.log_file) == (12, "log.txt")
        with pytest.raises(ValueError, match=r"common.seed: .* no variable CT_NONE"):
            as_config({"common": {"seed": "${oc.env:CT_NONE}"}})

    @pytest.mark.parametrize(
        ("common", "message"),
        [
            ({"seed": II("common.seeds")}, r"\$\{common.seeds\} refers to no option"),
            ({"seed": II("common.seed")}, "in a circle: common.seed -> common.seed"),
            (
                {"seed": II(".log_interval"), "log_interval": II("common.seed")},
                "in a circle",
            ),
            ({"seed": "${a"}, "cannot be read as a reference"),
        ],
    )
    def test_errors_name_the_option(self, common: dict, message: str) -> None:
        with pytest.raises(ValueError, match=f"^common.seed: .*{message}"):
            as_config({"common": common})


@dataclass
class Inner(FairseqDataclass):
    width: int = 8


@dataclass
class MyModelConfig(FairseqDataclass):
    depth: int = 2
    inner: Inner = field(default_factory=Inner)
    activation: ChoiceEnum(["relu", "gelu"]) = "relu"
    seed: int = II("common.seed")


@pytest.fixture
def _my_model(monkeypatch: pytest.MonkeyPatch) -> None:
    classes = {name: dict(known) for name, known in components._classes.items()}
    monkeypatch.setattr(components, "_classes", classes)
    monkeypatch.setattr(components, "_architectures", {})
    register_component("model", "mine", MyModelConfig)


@pytest.mark.usefixtures("_my_model")
class TestComponents:
    def test_a_registered_class_checks_and_completes(self) -> None:
        model = as_config({"model": {"_name": "mine", "inner": {"width": "9"}}}).model
        assert model == MyModelConfig("mine", 2, Inner(None, 9), "relu", 1)
        assert model.activation == "relu"
        with pytest.raises(ValueError, match=r"model.activation must be one of relu"):
            as_config({"model": {"_name": "mine", "activation": "tanh"}})
        with pytest.raises(ValueError, match=r"model.inner.widht; did you mean model"):
            as_config({"model": {"_name": "mine", "inner": {"widht": 1}}})

    def test_a_name_alone_will_do(self) -> None:
        assert as_config({"model": "mine"}).model.depth == 2

    def test_flat_options_reach_groups_within(self) -> None:
        model = as_config(Namespace(arch="mine", depth=3, width=5)).model
        assert (model.depth, model.inner.width) == (3, 5)

    def test_an_instance_keeps_its_class(self) -> None:
        @dataclass
        class Unregistered(FairseqDataclass):
            size: int = 1

        config = as_config({"task": Unregistered(size="4")})
        assert config.task == Unregistered(size=4)
        assert as_config(FairseqConfig(task=Unregistered())).task.size == 1

    def test_an_open_group_reads_by_key_too(self) -> None:
        model = as_config({"model": {"_name": "other", "a": {"b": 1}}}).model
        assert isinstance(model, OpenConfig)
        assert (model["a"], model.get("z", 4), "a" in model) == ({"b": 1}, 4, True)
        assert dict(model) == {"_name": "other", "a": {"b": 1}}
        assert getattr(model, "base_layers", 0) == 0

    def test_what_must_be_given_is_named(self) -> None:
        with pytest.raises(ValueError, match=r"^lr_scheduler.max_lr must be given"):
            as_config({"lr_scheduler": "triangular"})
        group = {"_name": "triangular", "max_lr": 1}
        assert as_config({"lr_scheduler": group}).lr_scheduler.max_lr == 1.0

    @pytest.mark.parametrize(
        ("value", "message"),
        [(3, "model must be a name or"), ({"_name": 3}, "model._name must be text")],
    )
    def test_a_component_is_a_name_or_options(
        self, value: object, message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            as_config({"model": value})

    def test_registering(self) -> None:
        register_component("model", "mine", MyModelConfig)  # again
        with pytest.raises(ValueError, match="model 'mine' is registered already"):
            register_component("model", "mine", Inner)
        with pytest.raises(ValueError, match="'models' is no component; expected one"):
            register_component("models", "mine", MyModelConfig)
        with pytest.raises(ValueError, match="is no dataclass"):
            register_component("model", "new", int)
        register_architecture("mine_big", "mine", lambda options: None)
        assert component_names("model") == ["mine", "mine_big"]
        assert as_config({"model": "mine_big"}).model == MyModelConfig(
            "mine_big", 2, Inner(), "relu", 1
        )
        with pytest.raises(ValueError, match="'mine_big' is registered already"):
            register_architecture("mine_big", "mine", lambda options: None)
        with pytest.raises(ValueError, match="there is no model 'none'"):
            register_architecture("x", "none", lambda options: None)


class TestOverrides:
    def test_they_win_and_are_yaml(self) -> None:
        config = as_config(
            SOURCE,
            overrides=[
                "optimization.lr=[1e-4]",
                "common.log_format=json",
                "optimizer.adam_eps=1e-6",
                "model.deep.er=3",
                "task=translation",
            ],
        )
        assert config.optimizer.adam_eps == 1e-6
        assert config.optimizer._name == "adam"
        assert config.optimization.lr == [0.0001]
        assert config.common.log_format == "json"
        assert config.model.deep == {"er": 3}
        assert config.task.left_pad_source is True

    def test_a_component_named_anew_keeps_its_options(self) -> None:
        source = {"lr_scheduler": {"_name": "fixed", "warmup_updates": 5}}
        config = as_config(source, overrides=["lr_scheduler=inverse_sqrt"])
        assert config.lr_scheduler == component_class("lr_scheduler", "inverse_sqrt")(
            "inverse_sqrt", 5, -1.0, [0.25]
        )

    def test_the_source_stays_as_it_was(self) -> None:
        source = {"common": {"seed": 1}}
        assert as_config(source, overrides=["common.seed=5"]).common.seed == 5
        assert source == {"common": {"seed": 1}}

    @pytest.mark.parametrize("override", ["common.seed", "=3", "common..seed=3"])
    def test_others_are_refused(self, override: str) -> None:
        with pytest.raises(ValueError, match=r"is not group.option=value"):
            as_config(overrides=[override])


class TestRoundTrips:
    def test_dict(self) -> None:
        config = as_config(SOURCE)
        assert as_config(to_dict(config)) == config
        assert to_dict(config)["optimizer"]["_name"] == "adam"

    def test_yaml(self, tmp_path: Path) -> None:
        source = {**SOURCE, "common": {"min_loss_scale": 1e-8}}
        config = as_config(source)
        path = tmp_path / "config.yaml"
        path.write_text(to_yaml(config))
        assert as_config(path) == config

    def test_omegaconf_reads_what_we_write(self) -> None:
        omegaconf = pytest.importorskip("omegaconf")
        config = as_config(SOURCE)
        theirs = omegaconf.OmegaConf.create(to_yaml(config))
        assert as_config(theirs) == config

    def test_a_checkpoints_cfg(self, caplog: pytest.LogCaptureFixture) -> None:
        config = as_config(SOURCE)
        state = {"args": None, "cfg": to_dict(config)}
        assert checkpoint_config(state) == config
        state["cfg"]["common"]["simul_type"] = None  # of another release
        assert checkpoint_config(state) == config
        assert "there is no option common.simul_type" in caplog.text

    def test_a_checkpoints_args(self) -> None:
        state = {"args": Namespace(lr=[0.5], arch="lm"), "model": {}}
        assert checkpoint_config(state).optimization.lr == [0.5]

    def test_a_checkpoint_without_either(self) -> None:
        with pytest.raises(ValueError, match="neither cfg nor args; it holds model"):
            checkpoint_config({"model": {}})


def test_from_namespace_takes_what_is_there() -> None:
    found = Inner.from_namespace(Namespace(width=3, other=1))
    assert found == Inner(None, 3)
    assert Inner.from_namespace(found) is found


def test_groups_read_by_key_too() -> None:
    config = as_config()
    config["common"]["seed"] = 4
    assert config.get("common").seed == 4
    assert "seed" in config.common
    assert dict(config.items())["task"] is None
