"""fairseq's configuration: its options, and the sources it is built from.

Source of the options: fairseq/dataclass/configs.py; of what a Namespace becomes:
fairseq/dataclass/utils.py.
"""

import dataclasses
import logging
import os
import runpy
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

import pytest
import torch
from places import ROOT
from ranks import run_alone

from ctrainer.arguments.settings import describe, hints
from ctrainer.fairseq.config import (
    MISSING,
    FairseqConfig,
    as_config,
    component_class,
    component_names,
    to_dict,
)
from ctrainer.fairseq.config.root import COMPONENTS
from ctrainer.fairseq.config.trees import known_options
from ctrainer.fairseq.lr_scheduler import build_lr_scheduler

SOURCE = {
    "optimization": {"lr": [0.1, 0.05], "max_update": 60},
    "dataset": {"max_tokens": 500},
    "optimizer": {"_name": "adam", "adam_betas": "(0.9, 0.98)"},
    "lr_scheduler": {"_name": "polynomial_decay"},
    "model": {"_name": "mine", "base_layers": 2},
}


def option_lines(prefix: str, cls: type) -> Iterator[str]:
    """The options of a dataclass as fairseq_options.txt has them."""
    per_gpu = {"distributed_world_size", "distributed_num_procs", "nprocs_per_node"}
    for option in dataclasses.fields(cls):
        hint = get_type_hints(cls)[option.name]  # without ranges
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


OWN = [
    "common.split_oom_batches = False: true or false",
    "bmuf.delta_bits = 32: a whole number",
    "distributed_training.gather_bits = 32: a whole number",
    "distributed_training.reduce_bits = 32: a whole number",
]


def test_options_are_fairseqs_in_name_order_type_default_and_alias() -> None:
    theirs = (Path(__file__).with_name("fairseq_options.txt")).read_text()
    theirs = theirs.splitlines()[1:]
    ours = list(option_lines("", FairseqConfig))
    for line in theirs:
        title = line.rstrip(":").split(".")
        if line.endswith(":") and len(title) == 2:
            cls = component_class(*title)
            ours += [line, *option_lines(f"{'.'.join(title)}.", cls)]
    assert len(ours) > 310
    own = {*OWN, "generation = {'print_alignment': None}: anything"}
    assert [line for line in ours if line not in own] == theirs
    assert set(OWN) < set(ours)


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
    assert set(without) == {"_name"}


def test_importing_it_loads_no_torch_and_no_omegaconf() -> None:
    frameworks = ("torch", "omegaconf")
    done = run_alone("loaded", "ctrainer.fairseq.config", "--", *frameworks)
    done.check_returncode()
    assert done.stdout.strip() == "[]"


def test_importing_counts_no_devices_and_reads_no_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert as_config().distributed_training.device_id == 3


def test_document_is_current() -> None:
    # In a process of its own: other tests register components.
    program = ROOT / "docs" / "make_fairseq_config.py"
    done = subprocess.run(
        [sys.executable, program, "--check"], cwd=ROOT, timeout=200, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0


def test_the_table_of_what_is_supported_names_options() -> None:
    table = runpy.run_path(str(ROOT / "docs" / "fairseq_config_status.py"))
    supported, rejected = table["SUPPORTED"], table["REJECTED"]
    named = {*supported, *rejected}
    of_components = {name for name in named if name.count(".") == 2}
    assert named - of_components <= set(known_options())
    for component, name, option in (text.split(".") for text in of_components):
        assert option in hints(component_class(component, name))
    assert not supported.keys() & rejected.keys()
    assert table["SUPPORTED_COMPONENTS"].keys() <= set(COMPONENTS)


class Optimizer:
    """torch's under fairseq's interface."""

    def __init__(self) -> None:
        self.optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.0)
        self.lr_scheduler = SimpleNamespace(state_dict=dict)

    def get_lr(self) -> float:
        return self.optimizer.param_groups[0]["lr"]

    def set_lr(self, lr: float) -> None:
        self.optimizer.param_groups[0]["lr"] = lr


@pytest.mark.parametrize("name", component_names("lr_scheduler"))
def test_each_schedule_is_built_from_its_group(name: str) -> None:
    options = {"triangular": {"max_lr": 0.5}, "tri_stage": {"decay_steps": 3}}
    source = {
        "lr_scheduler": {"_name": name, **options.get(name, {})},
        "optimization": {"lr": [0.25], "max_update": 60},
    }
    cfg = as_config(source).lr_scheduler
    scheduler = build_lr_scheduler(name, cfg, Optimizer())
    assert {key: cfg[key] for key in scheduler._settings} == scheduler._settings


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

    def test_a_yaml_file_that_pyyaml_has_loaded(self) -> None:
        yaml = pytest.importorskip("yaml")
        text = "optimization: {lr: [1e-3]}\ncommon: {seed: 3, fp16: false}\n"
        read = as_config(yaml.safe_load(text + "task: language_modeling\n"))
        assert read.optimization.lr == [1e-3]  # text to YAML 1.1
        assert (read.common.seed, read.common.fp16) == (3, False)
        assert read.task._name == "language_modeling"

    def test_groups_of_programs_that_are_not_here_are_left_out(self) -> None:
        source = {"common_eval": {"quiet": True}, "eval_lm": {}, "interactive": {}}
        kept = {"generation": {"beam": 3}}
        assert as_config({**source, **kept}).generation.beam == 3
        assert to_dict(as_config())["generation"] == {"print_alignment": None}

    @pytest.mark.parametrize("source", [3, [1], "a.yaml", FairseqConfig])
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
