"""fairseq's command line: how options are spelt and what they mean.

Source of the spelling: fairseq/options.py and gen_parser_from_dataclass of
fairseq/dataclass/utils.py.
"""

from argparse import ArgumentParser, Namespace
from dataclasses import dataclass, field

import pytest

from ctrainer.fairseq.config import (
    FairseqDataclass,
    add_options,
    as_config,
    components,
    opt,
    parse_training_args,
    register_architecture,
    register_component,
    training_parser,
)


@dataclass
class Inner(FairseqDataclass):
    width: int = opt(8, "Width.")


@dataclass
class LMConfig(FairseqDataclass):
    depth: int = opt(2, "Layers.")
    tied: bool = opt(True, "Tie.")
    inner: Inner = field(default_factory=Inner)
    max_tokens: int | None = opt(None, "Also an option of the data.")


def complete(options: Namespace) -> None:
    options.depth = getattr(options, "depth", 24)


@pytest.fixture(autouse=True)
def _models(monkeypatch: pytest.MonkeyPatch) -> None:
    classes = {name: dict(known) for name, known in components._classes.items()}
    monkeypatch.setattr(components, "_classes", classes)
    monkeypatch.setattr(components, "_architectures", {})
    register_component("model", "lm", LMConfig)
    register_architecture("lm_big", "lm", complete)


def parse(line: str, **chosen: str | None) -> object:
    return parse_training_args(line.split(), **chosen)


def error_of(line: str, capsys: pytest.CaptureFixture) -> str:
    with pytest.raises(SystemExit) as caught:
        parse(line)
    assert caught.value.code == 2
    usage, message = capsys.readouterr().err.split("\n", 1)
    assert usage.endswith("[options] [data]")
    return message


class TestSpelling:
    def test_a_run(self) -> None:
        config = parse(
            "data-bin --arch lm --task language_modeling --tokens-per-sample 64 "
            "--optimizer adam --adam-betas (0.9,0.98) --weight-decay 0.01 "
            "--lr 0.1,0.2 --lr-scheduler inverse_sqrt --warmup-updates 100 "
            "--update-freq 1,2 --max-tokens 512 --ddp-backend legacy_ddp "
            "--no-epoch-checkpoints --fp16 --clip-norm 0.1 --depth 3 --width 4"
        )
        assert config == as_config(
            {
                "task": {
                    "_name": "language_modeling",
                    "data": "data-bin",
                    "tokens_per_sample": 64,
                },
                "model": {
                    "_name": "lm",
                    "depth": 3,
                    "inner": {"width": 4},
                    "max_tokens": 512,
                },
                "criterion": "cross_entropy",
                "optimizer": {
                    "_name": "adam",
                    "adam_betas": "(0.9,0.98)",
                    "weight_decay": 0.01,
                },
                "lr_scheduler": {"_name": "inverse_sqrt", "warmup_updates": 100},
                "optimization": {
                    "lr": [0.1, 0.2],
                    "update_freq": [1, 2],
                    "clip_norm": 0.1,
                },
                "dataset": {"max_tokens": 512},
                "distributed_training": {"ddp_backend": "legacy_ddp"},
                "checkpoint": {"no_epoch_checkpoints": True},
                "common": {"fp16": True},
            }
        )

    def test_components_by_default(self) -> None:
        config = parse("data")
        assert config.task._name == "translation"
        assert config.criterion._name == "cross_entropy"
        assert config.lr_scheduler._name == "fixed"
        assert config.optimizer is None
        assert parse("", task=None, lr_scheduler="step").lr_scheduler._name == "step"

    @pytest.mark.parametrize(
        ("spelt", "group", "name", "value"),
        [
            ("--max-sentences 4", "dataset", "batch_size", 4),
            ("--max-sentences-valid 4", "dataset", "batch_size_valid", 4),
            ("--combine-val", "dataset", "combine_valid_subsets", True),
            ("--nval 3", "dataset", "max_valid_steps", 3),
            ("--local_rank 2", "distributed_training", "device_id", 2),
            ("--save-async", "checkpoint", "write_checkpoints_asynchronously", True),
            ("--stop-min-lr=-1", "optimization", "stop_min_lr", -1.0),
            ("-s en", "task", "source_lang", "en"),
            ("--left-pad-source", "task", "left_pad_source", False),
            ("--eval-bleu-remove-bpe", "task", "eval_bleu_remove_bpe", "@@ "),
            ("--eval-bleu-remove-bpe=_", "task", "eval_bleu_remove_bpe", "_"),
            ("-a lm --tied", "model", "tied", False),
            ("--use-bmuf --block-lr 0.5", "bmuf", "block_lr", 0.5),
            ("--store-ema", "ema", "store_ema", True),
            ("--update-epoch-batch-itr", "dataset", "update_epoch_batch_itr", True),
            (
                "--grouped-shuffling --update-epoch-batch-itr=false",
                "dataset",
                "update_epoch_batch_itr",
                False,
            ),
            ("--debug-param-names", "optimization", "debug_param_names", True),
        ],
    )
    def test_aliases_flags_and_options_without_a_value(
        self, spelt: str, group: str, name: str, value: object
    ) -> None:
        config = parse(f"data {spelt}")
        assert config[group][name] == value

    def test_references_have_no_spelling_of_their_own(self) -> None:
        options = training_parser()._option_string_actions
        assert "--max-tokens-valid" in options
        parser = ArgumentParser()
        add_options(parser, components.component_class("lr_scheduler", "fixed"))
        assert "--warmup-updates" in parser._option_string_actions
        assert "--lr" not in parser._option_string_actions

    def test_a_reference_follows_what_is_given(self) -> None:
        config = parse("data --max-tokens 9 --batch-size 3 --batch-size-valid 4")
        assert config.dataset.max_tokens_valid == 9
        assert config.dataset.batch_size_valid == 4

    def test_an_architecture_completes_what_is_not_given(self) -> None:
        assert parse("data -a lm_big").model.depth == 24
        assert parse("data -a lm_big --depth 3").model.depth == 3

    def test_lists_of_a_fixed_length(self) -> None:
        line = "data --lr-scheduler tri_stage --phase-ratio (0.1,0.4,0.5)"
        assert parse(line).lr_scheduler.phase_ratio == (0.1, 0.4, 0.5)

    def test_the_process_is_the_default(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("sys.argv", ["train", "data", "--seed", "5"])
        assert parse_training_args().common.seed == 5


class TestErrors:
    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("d --max-token 5", "--max-token (did you mean --max-tokens?) 5"),
            ("d --no-save-optimizer", "(did you mean --no-save-optimizer-state?)"),
            (
                "d --update-freq 1,x",
                "update_freq[1] must be a whole number in [1, inf), not 'x'",
            ),
            ("d --seed x", "argument --seed: seed must be a whole number in [0, "),
            ("d --ddp-backend nccl", "invalid choice: 'nccl' (choose from 'c10d'"),
            ("d --optimizer adm", "argument --optimizer: invalid choice: 'adm'"),
            ("d --arch none", "invalid choice: 'none' (choose from 'lm', 'lm_big'"),
            ("", "the following arguments are required: DATA"),
            ("d --lr-scheduler triangular", "arguments are required: --max-lr"),
            ("d --block-lr 1", "unrecognized arguments: --block-lr"),
            ("d --fp16 --tpu", "Cannot combine --fp16 and --tpu, use --bf16 on TPUs"),
        ],
    )
    def test_they_name_the_option(
        self, line: str, message: str, capsys: pytest.CaptureFixture
    ) -> None:
        assert message in error_of(line, capsys)

    def test_help_lists_the_options_of_the_chosen_components(
        self, capsys: pytest.CaptureFixture
    ) -> None:
        with pytest.raises(SystemExit) as caught:
            parse("--arch lm --optimizer nag --help")
        assert caught.value.code == 0
        shown = capsys.readouterr().out
        assert "--momentum" in shown
        assert "--depth" in shown
        assert "Tokens of a batch at most." in shown


class TestModifiedParser:
    def test_defaults_can_be_set(self) -> None:
        def modify(parser: ArgumentParser) -> None:
            parser.set_defaults(seed=11, optimizer="sgd", momentum=0.5)

        config = parse_training_args(["data"], modify_parser=modify)
        assert config.common.seed == 11
        assert config.optimizer.momentum == 0.5

    def test_an_option_that_nothing_takes_is_rejected(
        self, capsys: pytest.CaptureFixture
    ) -> None:
        def modify(parser: ArgumentParser) -> None:
            if "--mine" not in parser._option_string_actions:
                parser.add_argument("--mine")

        with pytest.raises(SystemExit):
            parse_training_args(["data", "--mine", "3"], modify_parser=modify)
        assert "no group and no component has mine" in capsys.readouterr().err
