"""Values of fairseq's options: what is converted, referred to and written."""

from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctrainer.fairseq.config import (
    II,
    ChoiceEnum,
    FairseqConfig,
    FairseqDataclass,
    OpenConfig,
    as_config,
    checkpoint_config,
    component_names,
    components,
    register_architecture,
    register_component,
    to_dict,
)
from ctrainer.fairseq.config.trees import known_options

SOURCE = {
    "optimization": {"lr": [0.1, 0.05], "max_update": 60},
    "dataset": {"max_tokens": 500},
    "optimizer": {"_name": "adam", "adam_betas": "(0.9, 0.98)"},
    "lr_scheduler": {"_name": "polynomial_decay"},
    "model": {"_name": "mine", "base_layers": 2},
}


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
            ("checkpoint.checkpoint_suffix", "", ""),
            ("checkpoint.save_dir", Path("a/b"), "a/b"),
            ("checkpoint.checkpoint_suffix", 3, "3"),
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
            ("common.seed", "x", "must be a whole number in .*, not 'x'"),
            ("common.seed", 1.5, "must be a whole number in .*, not 1.5"),
            ("common.seed", float("nan"), "must be a whole number in .*, not nan"),
            ("common.seed", True, "must be a whole number in .*, not True"),
            ("common.seed", None, "must be a whole number in .*, not None"),
            ("common.fp16", "maybe", "must be true or false, not 'maybe'"),
            ("common.fp16", 1.0, "must be true or false, not 1.0"),
            ("common.min_loss_scale", [1], r"must be a number in .*, not \[1\]"),
            ("common.user_dir", True, "must be text or None, not True"),
            ("common.log_format", "xml", "must be one of json, none, simple, tqdm or"),
            ("optimization.lr", {"a": 1}, "must be a list of numbers in .*, not"),
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

    @pytest.mark.parametrize(
        ("common", "message"),
        [
            ({"seed": II("common.seeds")}, r"\$\{common.seeds\} refers to no option"),
            ({"seed": II("common.seed")}, "in a circle: common.seed -> common.seed"),
            (
                {"seed": II("common.log_interval"), "log_interval": II("common.seed")},
                "in a circle",
            ),
            ({"seed": "${a"}, "cannot be read as a reference"),
            ({"seed": "1${common.log_interval}"}, "cannot be read as a reference"),
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
        assert {"mine", "mine_big"} <= set(component_names("model"))
        assert as_config({"model": "mine_big"}).model == MyModelConfig(
            "mine_big", 2, Inner(), "relu", 1
        )
        with pytest.raises(ValueError, match="'mine_big' is registered already"):
            register_architecture("mine_big", "mine", lambda options: None)
        with pytest.raises(ValueError, match="there is no model 'none'"):
            register_architecture("x", "none", lambda options: None)


class TestRoundTrips:
    def test_dict(self) -> None:
        config = as_config(SOURCE)
        assert as_config(to_dict(config)) == config
        assert to_dict(config)["optimizer"]["_name"] == "adam"

    def test_what_is_written_has_lists_alone(self) -> None:
        source = {
            "optimizer": "adam",
            "lr_scheduler": {"_name": "tri_stage", "phase_ratio": (0.5, 0.5, 0)},
        }
        written = to_dict(as_config(source))
        assert written["optimizer"]["adam_betas"] == [0.9, 0.999]
        assert written["lr_scheduler"]["phase_ratio"] == [0.5, 0.5, 0.0]

    def test_omegaconf_reads_what_we_write(self) -> None:
        omegaconf = pytest.importorskip("omegaconf")
        config = as_config(SOURCE)
        theirs = omegaconf.OmegaConf.create(to_dict(config))
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


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False)
    | st.text(max_size=6) | st.sampled_from(["1,2", "json", "[1", "${", "???", "1e5"]),
    lambda inner: st.lists(inner, max_size=2)
    | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=3,
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(known_options())), VALUES)
def test_any_value_is_rejected_by_name_or_kept_for_good(
    option: str, value: object
) -> None:
    group, name = option.split(".")
    try:
        config = as_config({group: {name: value}})
    except ValueError as error:
        named = name in str(error) or "Cannot combine" in str(error)
    else:
        named = True
        assert as_config(config) == config
        assert as_config(to_dict(config)) == config
    assert named
