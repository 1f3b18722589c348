"""TrainingArguments: transformers' API, and nothing silently ignored."""

import contextlib
import copy
import dataclasses
import importlib.util
import itertools
import json
import logging
import pickle
import re
import warnings
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from places import ROOT
from ranks import run_alone, torchrun

from ctrainer.adapters import torch_fairseq
from ctrainer.arguments import table
from ctrainer.arguments.older_fields import ALIASES, OlderFields, default_of
from ctrainer.training_args import (
    IntervalStrategy,
    OptimizerNames,
    ParallelMode,
    SchedulerType,
    Seq2SeqTrainingArguments,
    TrainingArguments,
    adopt,
    set_log_level,
)

# Field and a value that is not its default, for every alias.
OLD_VALUES = {
    "evaluation_strategy": "epoch",
    "per_gpu_train_batch_size": 3,
    "per_gpu_eval_batch_size": 5,
    "warmup_ratio": 0.25,
    "no_cuda": True,
    "group_by_length": True,
    "include_inputs_for_metrics": True,
    "include_tokens_per_second": True,
    "push_to_hub_model_id": "me/model",
    "push_to_hub_token": "secret",
    "torchdynamo": "eager",
}


@dataclasses.dataclass
class UsersArguments(TrainingArguments):
    mine: int = 3


@pytest.fixture
def hf():
    return pytest.importorskip("transformers", minversion="5.17")


def init_fields(cls: type) -> list[dataclasses.Field]:
    return [f for f in dataclasses.fields(cls) if f.init]


class TestAgainstTransformers:
    def test_names_and_order_are_the_same(self, hf) -> None:
        ours = [f.name for f in init_fields(TrainingArguments) if not f.kw_only]
        assert ours == [f.name for f in init_fields(hf.TrainingArguments)]

    def test_defaults_are_the_same(self, hf) -> None:
        for field in init_fields(hf.TrainingArguments):
            ours = default_of(TrainingArguments, field.name)
            theirs = default_of(hf.TrainingArguments, field.name)
            assert (type(ours), ours) == (type(theirs), theirs), field.name

    def test_seq2seq_adds_the_same_fields(self, hf) -> None:
        def added(cls, base):
            known = {f.name for f in dataclasses.fields(base)}
            return [
                (f.name, f.default) for f in init_fields(cls) if f.name not in known
            ]

        assert added(Seq2SeqTrainingArguments, TrainingArguments) == added(
            hf.Seq2SeqTrainingArguments, hf.TrainingArguments
        )

    def test_public_names_are_all_there(self, hf) -> None:
        theirs = {n for n in dir(hf.TrainingArguments) if not n.startswith("_")}
        fields = {f.name for f in dataclasses.fields(hf.TrainingArguments)}
        missing = {
            name for name in theirs - fields if not hasattr(TrainingArguments, name)
        }
        # Names that its class body happens to leave behind.
        left = {"default_optim", "is_torch_greater_or_equal_than_2_8"}
        assert missing <= left, missing - left

    @pytest.mark.parametrize(
        "given",
        [
            {},
            {"eval_strategy": "steps"},
            {"eval_strategy": "steps", "eval_steps": 0.25, "logging_steps": 0.5},
            {"logging_steps": 10.0, "save_steps": 20.0, "save_strategy": "steps"},
            {
                "load_best_model_at_end": True,
                "save_strategy": "best",
                "eval_strategy": "steps",
            },
            {
                "load_best_model_at_end": True,
                "eval_strategy": "epoch",
                "save_strategy": "epoch",
                "metric_for_best_model": "accuracy",
            },
            {"report_to": "none"},
            {"lr_scheduler_kwargs": '{"num_cycles": "2", "x": "0.5", "y": "true"}'},
            {"include_num_input_tokens_seen": True},
            {"torch_compile_mode": "default"},
            {"use_cpu": True},
            {"lr_scheduler_type": "cosine", "warmup_steps": 0.1},
        ],
    )
    def test_values_become_the_same(self, hf, given, tmp_path) -> None:
        ours = TrainingArguments(tmp_path, **given)
        theirs = hf.TrainingArguments(str(tmp_path), **given)
        same = [f.name for f in init_fields(hf.TrainingArguments)]
        same.remove("accelerator_config")  # an object of accelerate there
        same.remove("fsdp_config")  # filled with sharding's defaults there
        for name in same:
            assert getattr(ours, name) == getattr(theirs, name), name
        for total in (1, 99, 1000):
            assert ours.get_warmup_steps(total) == theirs.get_warmup_steps(total)
        assert ours.train_batch_size == theirs.train_batch_size
        assert ours.get_process_log_level() == theirs.get_process_log_level()

    @pytest.mark.parametrize(
        "given",
        [
            {"logging_steps": 0},
            {"logging_steps": 1.5},
            {"save_steps": 2.5},
            {"eval_strategy": "steps", "eval_steps": 7.5},
            {"eval_strategy": "steps", "logging_steps": 0, "logging_strategy": "no"},
            {"load_best_model_at_end": True},
            {
                "load_best_model_at_end": True,
                "eval_strategy": "steps",
                "eval_steps": 300,
            },
            {
                "load_best_model_at_end": True,
                "eval_strategy": "steps",
                "eval_steps": 0.3,
                "save_steps": 0.5,
            },
            {"fp16": True, "bf16": True},
            {"fp16_full_eval": True, "bf16_full_eval": True, "use_cpu": True},
            {"warmup_steps": -1},
            {"dataloader_prefetch_factor": 2},
            {"torch_empty_cache_steps": 0},
            {"eval_strategy": "sometimes"},
            {"optim": "no_such"},
        ],
    )
    def test_contradictions_are_rejected_by_both(self, hf, given, tmp_path) -> None:
        with pytest.raises(ValueError, match=r"."):
            hf.TrainingArguments(str(tmp_path), **given)
        with pytest.raises(ValueError, match="|".join(given)):
            TrainingArguments(tmp_path, **given)

    def test_the_best_model_needs_a_checkpoint_at_evaluations(self, tmp_path) -> None:
        """Both are counts of updates or both shares of the run, one a multiple of the
        other. (transformers takes a whole number of shares, too: 2 and 0.5.)"""
        steps = ("0.05", "0.1", "0.3", "0.5", "0.9", "1", "2", "3", "4", "6")
        for saved, evaluated in itertools.product(map(Fraction, steps), repeat=2):
            whole = saved % evaluated == 0 and (saved < 1) == (evaluated < 1)
            rejected = pytest.raises(ValueError, match="a multiple of eval_steps")
            with contextlib.nullcontext() if whole else rejected:
                TrainingArguments(
                    tmp_path, load_best_model_at_end=True, eval_strategy="steps",
                    save_steps=float(saved), eval_steps=float(evaluated),
                )  # fmt: skip

    def test_set_methods_have_the_same_signatures_and_effects(
        self, hf, tmp_path
    ) -> None:
        import inspect

        names = [n for n in dir(hf.TrainingArguments) if n.startswith("set_")]
        assert len(names) == 9
        for name in names:
            ours = inspect.signature(getattr(TrainingArguments, name)).parameters
            theirs = inspect.signature(getattr(hf.TrainingArguments, name)).parameters
            assert [(p.name, p.default) for p in ours.values()] == [
                (p.name, p.default) for p in theirs.values()
            ]
            given = {"model_id": "m"} if name == "set_push_to_hub" else {}
            a = TrainingArguments(tmp_path)
            b = hf.TrainingArguments(str(tmp_path))
            assert getattr(a, name)(**given) is a
            getattr(b, name)(**given)
            for field in ("learning_rate", "do_train", "do_predict", "data_seed"):
                assert getattr(a, field) == getattr(b, field)
            differing = {
                f.name
                for f in init_fields(hf.TrainingArguments)
                if getattr(a, f.name) != getattr(b, f.name)
            }
            assert differing <= {"accelerator_config", "fsdp_config", "eval_delay"}

    def test_hf_argument_parser_reads_a_users_subclass(self, hf) -> None:
        parser = hf.HfArgumentParser(UsersArguments)
        with pytest.warns(FutureWarning, match="evaluation_strategy"):
            (args,) = parser.parse_args_into_dataclasses(
                "--output_dir o --mine 4 --evaluation_strategy epoch --bf16 "
                "--no_remove_unused_columns --save_steps 0.5 --label_names a b "
                "--nonfinite_policy stop".split()
            )
        assert (args.mine, args.eval_strategy, args.bf16) == (4, "epoch", True)
        assert (args.remove_unused_columns, args.save_steps) == (False, 0.5)
        assert (args.label_names, args.nonfinite_policy) == (["a", "b"], "stop")


class TestTable:
    def test_no_field_has_two_statuses(self) -> None:
        groups = [
            table.RECORDED,
            table.WITHOUT_EFFECT,
            table.REJECTED,
            table.LIMITED,
        ]
        names = [name for group in groups for name in group]
        assert len(names) == len(set(names))
        fields = {f.name for f in dataclasses.fields(Seq2SeqTrainingArguments)}
        assert set(names) | set(ALIASES) <= fields
        assert not set(names) & set(ALIASES)

    @pytest.mark.parametrize("name", table.REJECTED)
    def test_what_is_rejected_raises_with_a_reason(self, name: str, tmp_path) -> None:
        default = default_of(Seq2SeqTrainingArguments, name)
        assert not default, "the check relies on it"
        values = {bool: True, int: 2, str: "x"}
        value = 8 if name == "tpu_num_cores" else values.get(type(default), "x")
        with pytest.raises(ValueError, match=f"^{name}=.* is not supported: ."):
            Seq2SeqTrainingArguments(tmp_path, **{name: value})

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("optim", "lomo"),
            ("train_sampling_strategy", "batch_rebalance"),
            ("half_precision_backend", "apex"),
            ("fp16_backend", "apex"),
            ("include_num_input_tokens_seen", "some"),
        ],
    )
    def test_values_that_are_not_supported_raise(self, name, value, tmp_path) -> None:
        with pytest.raises(ValueError, match=f"^{name}=.* is not supported; "):
            TrainingArguments(tmp_path, **{name: value})

    @pytest.mark.parametrize(
        ("config", "text"),
        [
            ({"use_seedable_sampler": "never"}, "use_seedable_sampler must be true or"),
            ({"even_batches": None}, "even_batches must be true or false, not None"),
            ({"gradient_accumulation_kwargs": {"adjust_schedule": 1}}, "did you mean"),
            ({"gradient_accumulation_kwargs": {"num_steps": 0}}, "num_steps must be a"),
            ({"even_batch": True}, "has no 'even_batch'; did you mean 'even_batches'"),
            ([], "must be a dict, or the path"),
        ],
    )
    def test_settings_of_accelerate_are_read(self, config, text, tmp_path) -> None:
        with pytest.raises(ValueError, match=f"accelerator_config.*{text}"):
            TrainingArguments(tmp_path, accelerator_config=config)

    def test_harmless_settings_of_accelerate_pass(self, tmp_path) -> None:
        given = {"split_batches": True, "even_batches": False}
        file = tmp_path / "accelerate.json"
        file.write_text(json.dumps(given))
        for config in (given, json.dumps(given), file, str(file)):
            found = TrainingArguments(tmp_path, accelerator_config=config)
            assert found.accelerator_config.split_batches
            assert found.to_dict()["accelerator_config"] == {
                **TrainingArguments(tmp_path).to_dict()["accelerator_config"], **given
            }  # fmt: skip

    def test_keywords_of_accumulation_are_read_and_a_class_is_rejected(
        self, tmp_path
    ) -> None:
        keywords = {
            "num_steps": 10, "adjust_scheduler": False, "sync_with_dataloader": False,
            "sync_each_batch": True,
        }  # fmt: skip
        config = {"gradient_accumulation_kwargs": keywords}
        args = adopt(TrainingArguments(tmp_path, accelerator_config=config))
        assert args.gradient_accumulation_steps == 10
        found = args.accelerator_config
        assert found.gradient_accumulation_kwargs == keywords
        with pytest.raises(
            NotImplementedError, match=r"is the class AcceleratorConfig"
        ):
            TrainingArguments(tmp_path, accelerator_config=type(found))

    def test_num_steps_is_the_accumulation_unless_both_are_set(self, tmp_path) -> None:
        config = {"gradient_accumulation_kwargs": {"num_steps": 4}}
        args = TrainingArguments(tmp_path, accelerator_config=config)
        assert adopt(args).gradient_accumulation_steps == 4
        assert adopt(args).gradient_accumulation_steps == 4  # for another trainer
        args = TrainingArguments(
            tmp_path, accelerator_config=config, gradient_accumulation_steps=2
        )
        with pytest.raises(ValueError, match=r"it is 4, and .* is 2; set one"):
            adopt(args)

    def test_a_configured_state_has_to_be_there(self, tmp_path) -> None:
        state = pytest.importorskip("accelerate").PartialState
        kept = dict(state._shared_state)
        config = {"use_configured_state": True}
        state._reset_state()
        try:
            with pytest.raises(ValueError, match="needs a state to use"):
                TrainingArguments(tmp_path, accelerator_config=config)
            made = state(cpu=True)
            args = TrainingArguments(tmp_path, accelerator_config=config)
            assert args.device == made.device
        finally:
            state._reset_state()
            state._shared_state.update(kept)

    @pytest.mark.parametrize(
        ("name", "value"), [("save_safetensors", False), ("overwrite_output_dir", True)]
    )
    def test_what_has_no_effect_any_more_is_told(self, name, value, tmp_path) -> None:
        with pytest.warns(FutureWarning, match=f"{name}={value} has no effect") as told:
            TrainingArguments(tmp_path, **{name: value})
        assert told[0].filename == __file__

    def test_every_supported_argument_is_read_somewhere(self) -> None:
        """A name that no code reads, beside that which defines it, is not supported."""
        own = {f"arguments/{name}.py" for name in ("table", "checks", "setters")}
        own |= {"arguments/fields.py", "arguments/older_fields.py", "_C.pyi"}
        folder = ROOT / "ctrainer"
        own_paths = {folder / name for name in own}
        sources = [p for p in folder.rglob("*.py*") if p not in own_paths]
        sources += (ROOT / "csrc" / "binding").rglob("*.c")
        text = "\n".join(p.read_text() for p in sources if p.suffix in (".py", ".c"))
        # Read where they are normalized, or what they say is what is done anyway.
        at_home = {"enable_jit_checkpoint", "accelerator_config"}
        at_home |= {"half_precision_backend", "fp16_backend"}
        pattern = r"(args|self)\.{0}\b|str_{0}\b|[\"']{0}[\"']"
        idle = table.RECORDED | table.WITHOUT_EFFECT | table.REJECTED
        unread = [
            f.name
            for f in dataclasses.fields(Seq2SeqTrainingArguments)
            if f.name not in {*idle, *ALIASES, *at_home}
            and not re.search(pattern.format(f.name), text)
        ]
        assert sorted(unread) == []

    def test_document_is_current(self) -> None:
        spec = importlib.util.spec_from_file_location(
            "make_arguments", ROOT / "docs" / "make_arguments.py"
        )
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        assert module.PAGE.read_text() == module.page()


# Fields of transformers 4.5.1 and 4.57.6 that 5.17 has no more, with their defaults.
OLDER_FIELDS = {
    "_n_gpu": -1,
    "adafactor": False,
    "evaluation_strategy": "no",
    "fp16_backend": "auto",
    "fp16_opt_level": "O1",
    "fsdp_min_num_params": 0,
    "fsdp_transformer_layer_cls_to_wrap": None,
    "group_by_length": False,
    "half_precision_backend": "auto",
    "include_inputs_for_metrics": False,
    "include_tokens_per_second": False,
    "jit_mode_eval": False,
    "logging_dir": None,  # a folder in output_dir, which is where it still is
    "mp_parameters": "",
    "no_cuda": False,
    "overwrite_output_dir": False,
    "past_index": -1,
    "per_gpu_eval_batch_size": None,
    "per_gpu_train_batch_size": None,
    "push_to_hub_model_id": None,
    "push_to_hub_organization": None,
    "push_to_hub_token": None,
    "ray_scope": "last",
    "save_safetensors": True,
    "sharded_ddp": "",
    "torchdynamo": None,
    "tpu_metrics_debug": False,
    "tpu_num_cores": None,
    "use_legacy_prediction_loop": False,
    "use_mps_device": False,
    "warmup_ratio": 0.0,
}


class TestOldNames:
    def test_fields_of_older_releases_are_there_with_their_defaults(self, hf) -> None:
        theirs = {f.name for f in dataclasses.fields(hf.TrainingArguments)}
        older = {f.name for f in dataclasses.fields(OlderFields)} - theirs
        assert {name: default_of(TrainingArguments, name) for name in older} == (
            OLDER_FIELDS
        )

    def test_each_default_of_an_older_release_is_accepted(self, tmp_path) -> None:
        given = {k: v for k, v in OLDER_FIELDS.items() if k != "_n_gpu"}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert TrainingArguments(tmp_path, **given)

    def test_each_alias_is_tried(self) -> None:
        assert set(OLD_VALUES) | {"adafactor"} == set(ALIASES)

    @pytest.mark.parametrize(("name", "value"), OLD_VALUES.items())
    def test_old_name_warns_and_sets_the_new(self, name, value, tmp_path) -> None:
        with pytest.warns(FutureWarning, match=f"{name} is the old name of") as told:
            args = TrainingArguments(tmp_path, **{name: value})
        assert told[0].filename == __file__
        alias = ALIASES[name]
        new = getattr(args, alias.successor)
        assert new == alias.to(value, default_of(TrainingArguments, alias.successor))
        assert getattr(args, name) == value

    @pytest.mark.parametrize(("name", "value"), OLD_VALUES.items())
    def test_setting_it_later_works_too(self, name, value, tmp_path) -> None:
        args = TrainingArguments(tmp_path)
        with pytest.warns(FutureWarning, match=f"{name} is the old name of") as told:
            setattr(args, name, value)
        assert told[0].filename == __file__
        assert getattr(args, name) == value

    def test_old_name_as_the_default_of_a_subclass_counts(self, tmp_path) -> None:
        @dataclasses.dataclass
        class Older(TrainingArguments):
            evaluation_strategy: str = "epoch"
            eval_delay: float = 2

        with pytest.warns(FutureWarning, match="old name of eval_strategy"):
            args = Older(tmp_path)
        assert (args.eval_strategy, args.eval_delay) == ("epoch", 2)
        assert Older(tmp_path, evaluation_strategy="no").eval_strategy == "no"

    def test_both_names_with_different_values_raise(self, tmp_path) -> None:
        with pytest.raises(ValueError, match="contradict each other"):
            TrainingArguments(
                tmp_path, evaluation_strategy="steps", eval_strategy="epoch"
            )
        with pytest.raises(ValueError, match="contradict each other"):
            TrainingArguments(tmp_path, warmup_ratio=0.1, warmup_steps=10)

    def test_both_names_with_the_same_value_agree(self, tmp_path) -> None:
        with pytest.warns(FutureWarning):
            args = TrainingArguments(
                tmp_path, evaluation_strategy="steps", eval_strategy="steps"
            )
        assert args.eval_strategy is IntervalStrategy.STEPS

    def test_replace_does_not_bring_the_old_value_back(self, tmp_path) -> None:
        with pytest.warns(FutureWarning):
            args = TrainingArguments(
                tmp_path, evaluation_strategy="steps", warmup_ratio=0.1, no_cuda=True
            )
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            again = dataclasses.replace(
                args, eval_strategy="no", warmup_steps=5, use_cpu=False
            )
        assert (again.eval_strategy, again.warmup_steps) == ("no", 5)
        assert again.use_cpu is False

    def test_ratio_of_one_warms_up_in_the_whole_run(self, tmp_path) -> None:
        with pytest.warns(FutureWarning):
            args = TrainingArguments(tmp_path, warmup_ratio=1.0)
        assert args.get_warmup_steps(77) == 77

    @pytest.mark.parametrize("ratio", [-0.1, 1.5, float("nan")])
    def test_ratio_out_of_range_raises(self, ratio, tmp_path) -> None:
        with pytest.raises(
            ValueError, match=r"warmup_ratio must be a number in \[0, 1\]"
        ):
            TrainingArguments(tmp_path, warmup_ratio=ratio)

    def test_adafactor_chooses_the_optimizer_that_it_names(self, tmp_path) -> None:
        with pytest.warns(FutureWarning, match="adafactor is the old name of optim"):
            args = TrainingArguments(tmp_path, adafactor=True)
        assert args.optim == "adafactor"


class TestObject:
    def test_making_one_imports_neither_torch_nor_transformers(self) -> None:
        done = run_alone("trainer.arguments_alone")
        done.check_returncode()
        assert done.stdout.split() == ["False", "False"]

    def test_output_dir_by_position_and_default(self) -> None:
        assert TrainingArguments("out").output_dir == "out"
        assert TrainingArguments().output_dir == "trainer_output"
        assert TrainingArguments("~/x").output_dir == str(Path.home() / "x")

    def test_dictionary_and_text_hide_tokens_and_old_names(self, tmp_path) -> None:
        args = TrainingArguments(tmp_path, hub_token="secret", hub_model_id="m")
        content = json.loads(args.to_json_string())
        assert content["hub_token"] == "<HUB_TOKEN>"
        assert content["lr_scheduler_type"] == "linear"
        assert "secret" not in repr(args)
        assert not set(ALIASES) & set(content)
        again = TrainingArguments(**{**content, "hub_token": None})
        assert {**again.to_dict(), "hub_token": 0} == {**content, "hub_token": 0}

    def test_sanitized_values_are_plain(self, tmp_path) -> None:
        values = TrainingArguments(tmp_path, label_names=["a"]).to_sanitized_dict()
        assert {type(v) for v in values.values()} <= {bool, int, float, str}
        assert (values["train_batch_size"], values["label_names"]) == (8, "['a']")

    def test_pickles_and_copies_with_users_attributes(self, tmp_path) -> None:
        args = UsersArguments(tmp_path, mine=7, optim="sgd")
        args.noted = "x"
        for again in (pickle.loads(pickle.dumps(args)), copy.deepcopy(args)):
            assert again == args
            assert (again.mine, again.noted) == (7, "x")
            with pytest.warns(FutureWarning):
                again.no_cuda = True
            assert again.use_cpu

    def test_device_is_chosen_once_and_not_pickled(self, tmp_path) -> None:
        torch = pytest.importorskip("torch")
        args = TrainingArguments(tmp_path, use_cpu=True)
        assert args.device == torch.device("cpu")
        assert args.n_gpu == 0
        assert args.device is args.device
        assert "_device" not in vars(pickle.loads(pickle.dumps(args)))

    def test_tf32_needs_a_gpu(self, tmp_path) -> None:
        pytest.importorskip("torch")
        with pytest.raises(ValueError, match="tf32=True needs a CUDA device"):
            _ = TrainingArguments(tmp_path, tf32=True, use_cpu=True).device

    def test_one_process(self, tmp_path) -> None:
        args = TrainingArguments(tmp_path)
        assert (args.world_size, args.process_index, args.local_process_index) == (
            1,
            0,
            0,
        )
        assert args.parallel_mode is ParallelMode.NOT_PARALLEL
        assert args.should_save
        assert args.should_log
        with args.main_process_first(desc="tokenizing"):
            pass

    @pytest.mark.parametrize(
        ("environ", "expected"),
        [
            ({"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}, (4, 2, 0)),
            ({"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_NNODES": "1"},
             (4, 3, 3)),
            ({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2",
              "MPI_LOCALRANKID": "1"}, (2, 1, 1)),
        ],
    )  # fmt: skip
    def test_a_launcher_says_which_process_this_is(
        self, environ, expected, monkeypatch, tmp_path
    ) -> None:
        processes = pytest.importorskip("ctrainer.comm.processes")
        monkeypatch.setattr(processes, "join_run", lambda *where: None)
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        args = TrainingArguments(tmp_path)
        world_size, rank, local_rank = expected
        assert args.world_size == world_size
        assert (args.process_index, args.local_process_index) == (rank, local_rank)
        assert args.local_rank == local_rank
        assert args.parallel_mode is ParallelMode.DISTRIBUTED
        assert args.should_log is (local_rank == 0)
        assert not args.should_save
        args = TrainingArguments(tmp_path, log_on_each_node=False)
        assert not args.should_log
        args = TrainingArguments(tmp_path, save_on_each_node=True)
        assert args.should_save is (local_rank == 0)

    def test_engines_of_accelerate_launch_are_rejected(
        self, monkeypatch, tmp_path
    ) -> None:
        name = "ACCELERATE_USE_MEGATRON_LM"
        args = TrainingArguments(tmp_path)
        monkeypatch.setenv(name, "true")
        with pytest.raises(RuntimeError, match=name):
            TrainingArguments(tmp_path)
        with pytest.raises(RuntimeError, match=name):
            adopt(args)

    def test_precision_of_accelerate_launch_counts(self, monkeypatch, tmp_path) -> None:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
        assert TrainingArguments(tmp_path).bf16
        assert TrainingArguments(tmp_path, fp16=True).mixed_precision == "fp16"
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
        with pytest.raises(ValueError, match="fp8 is not supported"):
            TrainingArguments(tmp_path)

    def test_what_accelerate_launch_sets_counts_in_arguments_of_transformers(
        self, monkeypatch, tmp_path
    ) -> None:
        transformers = pytest.importorskip("transformers")
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
        monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "EAGER")
        args = adopt(transformers.TrainingArguments(tmp_path, use_cpu=True))
        assert (args.bf16, args.torch_compile_backend) == (True, "eager")
        monkeypatch.setenv("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "True")
        with pytest.raises(ValueError, match="USE_REGIONAL_COMPILATION is set"):
            adopt(transformers.TrainingArguments(tmp_path, use_cpu=True))

    def test_a_backend_that_torch_lacks_is_an_error_under_torchrun(
        self, monkeypatch, tmp_path
    ) -> None:
        monkeypatch.setattr(
            torch.distributed, "is_backend_available", lambda name: name == "gloo"
        )
        for name, value in torchrun(0, 1, "job").items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ValueError, match="ddp_backend='nccl', which this torch"):
            TrainingArguments(tmp_path, use_cpu=True, ddp_backend="nccl")

    def test_accumulation_of_accelerate_launch_is_a_warning(
        self, monkeypatch, tmp_path, recwarn
    ) -> None:
        monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
        adopt(TrainingArguments(tmp_path, gradient_accumulation_steps=4))
        assert not recwarn
        with pytest.warns(UserWarning, match="STEPS=4 has no effect on a Trainer"):
            adopt(TrainingArguments(tmp_path))

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("per_device_train_batch_size", 0),
            ("gradient_accumulation_steps", 0),
            ("learning_rate", float("nan")),
            ("adam_beta2", 1.0),
            ("label_smoothing_factor", -0.1),
            ("nonfinite_policy", "ignore"),
            ("grad_norm_type", 0.0),
            ("grad_norm_type", float("nan")),
            ("max_grad_value", -1.0),
            ("layer_grad_norm_depth", 0),
        ],
    )
    def test_numbers_out_of_range_are_named(self, name, value, tmp_path) -> None:
        with pytest.raises(ValueError, match=f"{name} must be .*not {value!r}"):
            TrainingArguments(tmp_path, **{name: value})

    def test_a_jit_checkpoint_is_one_on_a_signal(self, tmp_path) -> None:
        given = {"enable_jit_checkpoint": True, "save_on_signal": False}
        assert TrainingArguments(tmp_path, **given).save_on_signal

    def test_log_level_is_set_unless_passive(self, tmp_path) -> None:
        logger = logging.getLogger("ctrainer")
        before, handlers = logger.level, list(logger.handlers)
        try:
            set_log_level(TrainingArguments(tmp_path))
            assert logger.level == before
            set_log_level(TrainingArguments(tmp_path, log_level="error"))
            assert logger.level == logging.ERROR
        finally:
            logger.setLevel(before)
            logger.handlers[:] = handlers

    def test_enumerations_equal_their_words(self) -> None:
        assert SchedulerType("cosine") == "cosine"
        assert str(OptimizerNames.SGD) == "sgd"
        with pytest.raises(ValueError, match="choose one of 'no', 'steps', 'epoch'"):
            IntervalStrategy("daily")


class TestDevice:
    @pytest.mark.parametrize(("index", "ranks", "gpus"), [
        (0, 1, 1), (0, 1, 2), (0, 2, 2), (1, 2, 2), (1, 2, 1), (3, 8, 4), (4, 8, 4),
    ])  # fmt: skip
    def test_each_process_of_a_machine_has_its_own_gpu(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture, index: int, ranks: int, gpus: int,
    ) -> None:  # fmt: skip
        chosen: list[object] = []
        cuda = torch.device("cuda")
        monkeypatch.setattr("torch.accelerator.current_accelerator", lambda: cuda)
        monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
        monkeypatch.setattr("torch.accelerator.device_count", lambda: gpus)
        monkeypatch.setattr("torch.cuda.set_device", chosen.append)
        for name, value in (("RANK", index), ("LOCAL_RANK", index)):
            monkeypatch.setenv(name, str(value))
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        processes = pytest.importorskip("ctrainer.comm.processes")
        monkeypatch.setattr(processes, "join_run", lambda *where: None)
        if index >= gpus:
            with pytest.raises(
                ValueError, match=f"process {index} .*no GPU of its own"
            ):
                _ = TrainingArguments(str(tmp_path)).device
            return
        args = TrainingArguments(str(tmp_path))
        assert str(args.device) == f"cuda:{index}"
        assert list(map(str, chosen)) == [f"cuda:{index}"]
        unused = [r.getMessage() for r in caplog.records if "visible" in r.getMessage()]
        assert len(unused) == (ranks == 1 and gpus > 1)

    def test_torch_that_raises_without_an_accelerator_means_the_cpu(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def none_there() -> torch.device:  # as torch 2.6
            raise RuntimeError("Cannot access accelerator device")

        monkeypatch.setattr("torch.accelerator.current_accelerator", none_there)
        monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
        assert str(TrainingArguments(str(tmp_path)).device) == "cpu"
        torch_fairseq.seed(1)
        assert str(torch_fairseq.choose_device(cpu=False)) == "cpu"


class TestAdopt:
    def test_ours_comes_back_and_later_changes_are_checked(self, tmp_path) -> None:
        args = TrainingArguments(tmp_path)
        assert adopt(args) is args
        args.optim = "lomo"
        with pytest.raises(ValueError, match="optim='lomo' is not supported"):
            adopt(args)

    def test_transformers_object_comes_back_with_our_fields(self, hf, tmp_path) -> None:
        args = hf.TrainingArguments(str(tmp_path), eval_strategy="epoch", use_cpu=True)
        before = dict(vars(args))
        assert adopt(args) is args
        assert {k: v for k, v in vars(args).items() if k in before} == before
        assert (args.async_save, args.nonfinite_policy) == (True, "skip")

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("optim", "lomo"),
            ("debug", "tpu_metrics_debug"),
        ],
    )
    def test_transformers_object_is_checked_too(
        self, hf, name, value, tmp_path
    ) -> None:
        args = hf.TrainingArguments(str(tmp_path), use_cpu=True, **{name: value})
        with pytest.raises(ValueError, match=f"{name}=.* is not supported"):
            adopt(args)

    @pytest.mark.parametrize(
        "given",
        [
            {},
            {
                "eval_strategy": "steps", "save_strategy": "steps", "optim": "sgd",
                "lr_scheduler_type": "cosine", "hub_strategy": "end",
                "save_steps": 20.0,
                "logging_strategy": "epoch", "logging_steps": 0.5, "eval_steps": 10,
                "load_best_model_at_end": True, "debug": "underflow_overflow",
                "lr_scheduler_kwargs": '{"a": 1}',
                "include_num_input_tokens_seen": True,
            },
        ],
        ids=["defaults", "given"],
    )  # fmt: skip
    def test_fields_have_transformers_types_and_values(
        self, hf, given, tmp_path
    ) -> None:
        given = {"output_dir": str(tmp_path), "use_cpu": True, **given}
        theirs, ours = hf.TrainingArguments(**given), TrainingArguments(**given)
        for field in dataclasses.fields(theirs):
            a, b = getattr(theirs, field.name), getattr(ours, field.name)
            assert type(a).__name__ == type(b).__name__, field.name
            assert a == b or hasattr(a, "to_dict"), field.name

    def test_object_of_an_older_release_is_completed(self) -> None:
        from types import SimpleNamespace

        old = SimpleNamespace(
            output_dir="o",
            per_device_train_batch_size=4,
            group_by_length=True,
            get_warmup_steps=int,
        )
        adopt(old)
        assert old.train_sampling_strategy == "group_by_length"
        assert old.dataloader_in_order is True

    def test_object_of_an_older_release_warns_of_what_has_no_effect(
        self, hf, tmp_path
    ) -> None:
        old = hf.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
        old.save_safetensors = False
        with pytest.warns(FutureWarning, match="save_safetensors=False has no effect"):
            adopt(old)

    def test_something_else_is_a_type_error(self) -> None:
        with pytest.raises(TypeError, match="not dict"):
            adopt({"output_dir": "x"})
