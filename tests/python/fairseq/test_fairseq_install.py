"""install(): the cures, one by one on small modules, and fairseq's own programs with
our Trainer where fairseq is installed."""

import argparse
import dataclasses
import importlib.util
import json
import os
import random
import shutil
import subprocess
import sys
from types import ModuleType

import pytest
import torch
from places import ROOT
from ranks import run_alone

from ctrainer.adapters.torch_fairseq import allow_namespaces
from ctrainer.fairseq import _install, install, uninstall
from ctrainer.fairseq import _install as cures
from ctrainer.fairseq._install import Patches

INSTALLED = importlib.util.find_spec("fairseq") is not None
needs_fairseq = pytest.mark.skipif(
    not INSTALLED,
    reason="fairseq is not installed here; docs/start/from_fairseq.md says how",
)


@pytest.fixture
def patches():
    made = Patches()
    yield made
    made.undo()


def test_an_optimizer_of_fairseqs_alone_has_no_blocks():
    import fairseq_tiny as tiny

    from ctrainer.fairseq._guest import Trainer

    cfg = tiny.config(optimizer___name="theirs", optimization__use_bmuf=True)
    trainer = Trainer(cfg, tiny.Task(), tiny.Model(), tiny.Criterion())
    with pytest.raises(ValueError, match=r"'theirs'.*would never synchronize"):
        trainer._build_optimizer()


class TestPatches:
    def test_everything_is_given_back_the_latest_first(self, patches):
        module = ModuleType("m")
        module.there = 1
        patches.set(module, "there", 2)
        patches.set(module, "there", 3)
        patches.set(module, "new", 4)
        assert (module.there, module.new) == (3, 4)
        patches.undo()
        assert module.there == 1
        assert not hasattr(module, "new")


def _config(module, base=object, **options):
    """A dataclass as fairseq's are: comparable, hence without a hash."""
    cls = type("Config", (base,), {"__module__": module, "__annotations__": {"n": int}})
    decorate = dataclasses.dataclass(**options) if options else dataclasses.dataclass
    return decorate(cls)


def _holder(default):
    return dataclasses.dataclass(
        type("Holder", (), {"__annotations__": {"part": object}, "part": default})
    )


class TestDataclasses:
    @pytest.mark.parametrize("options", [{}, {"order": True}])
    @pytest.mark.parametrize("module", ["fairseq.dataclass.configs", "hydra.conf"])
    def test_a_config_may_be_a_default(self, patches, module, options):
        cures.cure_dataclasses(patches)
        part = _config(module, **options)(1)
        holder = _holder(part)
        assert holder().part is part
        assert dataclasses.fields(holder)[0].default is part  # which fairseq reads

    def test_configs_of_users_are_configs(self, patches):
        cures.cure_dataclasses(patches)
        base = type("FairseqDataclass", (), {"__module__": "fairseq.dataclass"})
        _holder(_config("users_task", base)(1))

    def test_others_are_rejected_as_python_does(self, patches):
        cures.cure_dataclasses(patches)
        with pytest.raises(ValueError, match="mutable default"):
            _holder(_config("users_task")(1))

    def test_options_of_the_decorator_go_on_working(self, patches):
        cures.cure_dataclasses(patches)

        @dataclasses.dataclass(frozen=True)
        class Frozen:
            n: int = 1

        with pytest.raises(dataclasses.FrozenInstanceError):
            Frozen().n = 2

    def test_it_is_undone(self, patches):
        original = dataclasses.dataclass
        cures.cure_dataclasses(patches)
        assert dataclasses.dataclass is not original
        patches.undo()
        assert dataclasses.dataclass is original


class TestNumpy:
    def test_the_names_that_are_missing_come_back(self, patches):
        numpy = ModuleType("numpy")
        numpy.int = "its own"
        line = cures.cure_numpy(patches, numpy)
        assert numpy.float is float
        assert numpy.int == "its own"
        assert line == "numpy has float, object, complex again"
        patches.undo()
        assert not hasattr(numpy, "float")


class TestBf16:
    @pytest.fixture
    def options(self, patches):
        module = ModuleType("fairseq.options")
        module.parse_args_and_arch = lambda parser, input_args=None, many=False: (
            (argparse.Namespace(bf16=True, tpu=True), [])
            if many
            else argparse.Namespace(bf16=True, tpu=True)
        )
        cures.cure_bf16(patches, module)
        return module

    @pytest.mark.parametrize("many", [False, True])
    def test_it_is_no_wish_for_a_tpu(self, options, many):
        made = options.parse_args_and_arch(None, many=many)
        assert (made[0] if many else made).tpu is False

    def test_a_tpu_that_is_asked_for_stays_one(self, options):
        assert options.parse_args_and_arch(None, input_args=["--bf16", "--tpu"]).tpu


def test_old_checkpoints_load_as_plain_data(tmp_path):
    path = tmp_path / "old.pt"
    torch.save({"args": argparse.Namespace(lr=0.5)}, path)
    allow_namespaces()
    assert torch.load(path)["args"].lr == 0.5


def test_the_trainer_is_replaced_where_it_is_bound_and_nowhere_else(
    patches, monkeypatch
):
    theirs, ours = type("Trainer", (), {}), type("Trainer", (), {})
    modules = {name: ModuleType(name) for name in ("fake_a", "fake_b", "fake_c")}
    modules["fake_a"].Trainer = modules["fake_b"].Trainer = theirs
    modules["fake_c"].Trainer = other = type("Trainer", (), {})
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    line = _install._replace(patches, theirs, ours)
    assert line == "Trainer is ctrainer's in fake_a, fake_b"
    assert modules["fake_a"].Trainer is modules["fake_b"].Trainer is ours
    assert modules["fake_c"].Trainer is other
    patches.undo()
    assert modules["fake_a"].Trainer is theirs


@pytest.mark.skipif(INSTALLED, reason="fairseq is installed here")
def test_without_fairseq_it_says_so_and_changes_nothing():
    before = dataclasses.dataclass
    with pytest.raises(ImportError, match=r"not installed.*from_fairseq\.md"):
        install()
    uninstall()
    assert dataclasses.dataclass is before


# With fairseq itself

MODEL = """--cpu --task language_modeling --arch transformer_lm --decoder-layers 1
--decoder-embed-dim 16 --decoder-ffn-embed-dim 32 --decoder-attention-heads 2
--tokens-per-sample 16 --max-tokens 64 --dropout 0.1 --seed 3""".split()
TRAINING = """--clip-norm 1.0 --log-interval 1 --log-format json --num-workers 0
--no-epoch-checkpoints""".split()
ADAM = """--optimizer adam --adam-betas (0.9,0.98) --lr 0.002
--lr-scheduler inverse_sqrt --warmup-updates 5""".split()
NAG = """--optimizer nag --lr 0.05 --lr-scheduler polynomial_decay
--total-num-update 20 --update-freq 3 --criterion label_smoothed_cross_entropy
--label-smoothing 0.1""".split()
MINE = "--optimizer mine --lr 0.1 --lr-scheduler falling".split()
SHOWN = ("loss", "gnorm", "lr", "clip", "num_updates", "wpb", "bsz", "ppl")


def _original(program, *arguments, keep=False):
    """What a program of fairseq's logs."""
    options = ["--keep-trainer"] if keep else []
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "ctrainer", "original", *options,
         program, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
        timeout=120,
    ).stdout  # fmt: skip


def _train(data, folder, updates, keep, how=ADAM):
    """The numbers of each update, and of the validation at the end."""
    log = _original(
        "train", data, *MODEL, *TRAINING, "--save-dir", folder,
        "--max-update", updates, *how, keep=keep,
    )  # fmt: skip
    lines = [line.rpartition(" | ")[::2] for line in log.splitlines() if "{" in line]
    train = [json.loads(text) for name, text in lines if name.endswith("train_inner")]
    valid = [json.loads(text) for name, text in lines if name.endswith("| valid")]
    shown = [{key: update[key] for key in SHOWN} for update in train]
    return shown, [v["valid_loss"] for v in valid], log


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    draw = random.Random(1)
    for name, n in (("train", 120), ("valid", 10)):
        lines = (" ".join(draw.choices("abcdefgh", k=9)) for _ in range(n))
        (folder / name).write_text("\n".join(lines) + "\n")
    _original(
        "preprocess", "--only-source", "--trainpref", folder / "train",
        "--validpref", folder / "valid", "--destdir", folder / "bin",
    )  # fmt: skip
    return folder / "bin"


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory):
    """Each Trainer's run of 20 updates, and the folder of its checkpoints."""
    folders = {keep: tmp_path_factory.mktemp("run") for keep in (True, False)}
    return {k: (*_train(data, folders[k], 20, k), folders[k]) for k in folders}


@needs_fairseq
class TestFairseq:
    def test_its_language_model_trains_with_the_same_numbers(self, runs):
        (theirs, their_loss, log, _), (ours, our_loss, our_log, _) = (
            runs[True],
            runs[False],
        )
        assert len(theirs) == 20
        assert ours == theirs
        assert our_loss == their_loss
        assert "fairseq.trainer | Saving" in log
        assert "ctrainer.fairseq.trainer | Saving" in our_log

    def test_so_it_does_with_delayed_updates_and_another_criterion(
        self, data, tmp_path
    ):
        theirs, ours = (
            _train(data, tmp_path / str(keep), 6, keep, NAG)[:2]
            for keep in (True, False)
        )
        assert len(theirs[0]) == 6
        assert ours == theirs

    @pytest.mark.parametrize("reader", ["theirs", "ours"])
    def test_each_goes_on_from_the_others_checkpoint(
        self, data, runs, reader, tmp_path
    ):
        keep = reader == "theirs"
        results = []
        for writer in (keep, not keep):
            folder = tmp_path / str(writer)
            folder.mkdir()
            last = runs[writer][3] / "checkpoint_last.pt"
            (folder / last.name).write_bytes(last.read_bytes())
            results.append(_train(data, folder, 23, keep)[:2])
        assert [u["num_updates"] for u in results[0][0]] == ["21", "22", "23"]
        assert results[0] == results[1]

    def test_what_a_user_registers_is_used(self, data, tmp_path):
        plugin = tmp_path / "plugin"
        plugin.mkdir()
        mine = ROOT / "tests/programs/fairseq/user_dir/optimizer.py"
        shutil.copy(mine, plugin / "__init__.py")
        how = [*MINE, "--user-dir", plugin]
        theirs, ours = (
            _train(data, tmp_path / str(keep), 4, keep, how)[:2]
            for keep in (True, False)
        )
        rates = [update["lr"] for update in ours[0]]
        assert rates == ["0.05", "0.0333333", "0.025", "0.02"]
        assert ours == theirs

    def test_bf16_runs_without_a_tpu(self, data, tmp_path):
        _, losses, log = _train(data, tmp_path, 2, False, [*ADAM, "--bf16"])
        assert len(losses) == 1
        assert "done training" in log

    def test_it_is_idempotent_and_undone(self):
        done = run_alone("fairseq.installed", flags=["-W", "ignore"])
        assert done.returncode == 0, done.stderr
