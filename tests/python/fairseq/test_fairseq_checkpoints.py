"""fairseq's checkpoints, crash.pt and its replay, averages and iterators."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fairseq_tiny as tiny
import pytest
import torch
from places import PYTHONPATH
from test_fairseq_precision import MODES

from ctrainer.adapters import torch_fairseq as tools
from ctrainer.fairseq import iterators, metrics
from ctrainer.fairseq.replay import replay
from ctrainer.fairseq.utils import resolve_max_positions


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(ours: tiny.Trainer, samples: list[Any]) -> None:
    for sample in samples:
        ours.train_step([sample])


def weights(ours: tiny.Trainer) -> list[torch.Tensor]:
    return [p.detach().clone() for p in ours.model.parameters()]


@pytest.mark.parametrize("mode", [None, *MODES])
def test_a_resumed_run_is_the_run_that_was_not_stopped(mode: str | None) -> None:
    changes = {} if mode is None else MODES[mode]
    samples = tiny.batches(8)
    straight = tiny.trainer(tiny.Model(0.2), **changes)
    run(straight, samples[:4])
    extra = {"train_iterator": {"epoch": 1, "version": 2, "iterations_in_epoch": 4}}
    saved = straight.save_checkpoint("last.pt", extra)
    run(straight, samples[4:])

    assert saved == os.path.abspath("last.pt")
    assert os.listdir() == ["last.pt"]
    resumed = tiny.trainer(tiny.Model(0.2), **changes)
    assert resumed.load_checkpoint("last.pt")["train_iterator"]["epoch"] == 1  # type: ignore[index]
    assert resumed.get_num_updates() == 4
    run(resumed, samples[4:])
    for a, b in zip(weights(straight), weights(resumed), strict=True):
        assert torch.equal(a, b)


def test_the_dictionary_is_the_originals() -> None:
    ours = tiny.trainer()
    run(ours, tiny.batches(2))
    ours.save_checkpoint("a.pt", {"best": 1.5})
    state = torch.load("a.pt", weights_only=True)
    assert list(state) == [
        "args", "cfg", "model", "criterion", "optimizer_history", "task_state",
        "extra_state", "last_optimizer_state",
    ]  # fmt: skip
    assert state["args"] is None
    assert state["criterion"] is None
    assert state["cfg"]["optimizer"]["adam_betas"] == "(0.9, 0.98)"
    assert state["task_state"] == {"words": tiny.WORDS}
    assert state["extra_state"].keys() == {"metrics", "previous_training_time", "best"}
    (history,) = state["optimizer_history"]
    assert history["criterion_name"] == "Criterion"
    assert history["optimizer_name"] == "FairseqAdam"
    assert history["num_updates"] == 2
    entry = state["last_optimizer_state"]["state"][0]
    assert entry["step"] == 2
    assert entry.keys() == {"step", "exp_avg", "exp_avg_sq"}


def test_fault_p1_state_dict_needs_nothing_called_before_it() -> None:
    state = tiny.trainer().state_dict()
    assert state["optimizer_history"][0]["num_updates"] == 0


def test_no_optimizer_state_is_saved_where_it_is_not_wanted() -> None:
    ours = tiny.trainer(checkpoint__no_save_optimizer_state=True)
    assert "last_optimizer_state" not in ours.state_dict()


def test_the_state_of_fp16_is_flat_as_the_originals() -> None:
    ours = tiny.trainer(common__fp16=True)
    run(ours, tiny.batches(2))
    state = ours.optimizer.state_dict()
    n = sum(p.numel() for p in ours.model.parameters())
    assert state["loss_scale"] == 128
    assert state["param_groups"][0]["params"] == [0]
    assert state["state"][0]["exp_avg"].shape == (n,)
    assert state["state"][0]["step"] == 2


def test_a_flat_state_of_fairseqs_own_loads() -> None:
    ours = tiny.trainer(common__fp16=True)
    run(ours, tiny.batches(2))
    state = ours.optimizer.state_dict()
    theirs = {k: v for k, v in state["state"][0].items() if k != "master_param"}
    other = tiny.trainer(common__fp16=True)
    other.optimizer.load_state_dict(
        {
            "state": {0: theirs},
            "param_groups": state["param_groups"],
            "loss_scale": 64.0,
        }
    )
    assert other.optimizer.scaler.loss_scale == 64
    first, second = ours.optimizer.optimizer.state, other.optimizer.optimizer.state
    for a, b in zip(ours.optimizer.params, other.optimizer.params, strict=True):
        assert torch.equal(first[a]["exp_avg"], second[b]["exp_avg"])


def test_reset_optimizer_leaves_updates_at_zero_and_overrides_hold() -> None:
    ours = tiny.trainer()
    run(ours, tiny.batches(3))
    ours.save_checkpoint("a.pt", {})
    fresh = tiny.trainer()
    fresh.load_checkpoint("a.pt", reset_optimizer=True)
    assert fresh.get_num_updates() == 0
    assert not fresh.optimizer.optimizer.state
    for a, b in zip(weights(ours), weights(fresh), strict=True):
        assert torch.equal(a, b)
    other = tiny.trainer()
    other.load_checkpoint("a.pt", optimizer_overrides={"weight_decay": 0.5})
    assert other.optimizer.param_groups[0]["weight_decay"] == 0.5


def test_another_optimizer_or_criterion_is_rejected() -> None:
    class Other(tiny.Criterion): ...

    tiny.trainer().save_checkpoint("a.pt", {})
    with pytest.raises(AssertionError, match=r"Optimizer does not match.*FairseqAdam"):
        tiny.trainer(optimizer___name="sgd").load_checkpoint("a.pt")
    with pytest.raises(AssertionError, match=r"Criterion does not match.*Other"):
        tiny.trainer(criterion=Other()).load_checkpoint("a.pt")


def test_fault_p7_the_message_says_which_weights_do_not_fit() -> None:
    tiny.trainer().save_checkpoint("a.pt", {})
    model = tiny.Model()
    model.extra = torch.nn.Linear(1, 1)  # type: ignore[assignment]
    with pytest.raises(Exception, match=r"architectures match(.|\n)*extra\.weight"):
        tiny.trainer(model).load_checkpoint("a.pt")


def test_a_file_that_is_not_there_is_none() -> None:
    assert tiny.trainer().load_checkpoint("nothing.pt") is None


class Danger:
    def __reduce__(self) -> Any:
        return os.mkdir, ("harm",)


def test_loading_runs_no_code() -> None:
    torch.save({"model": Danger()}, "a.pt")
    with pytest.raises(ValueError, match="no plain data"):
        tiny.trainer().load_checkpoint("a.pt")
    assert not os.path.exists("harm")


def test_fault_p5_rates_do_not_count_the_old_process() -> None:
    ours = tiny.trainer()
    metrics.log_speed("ups", 1.0)
    metrics.log_speed("ups", 1000.0)
    assert metrics.get_meter("default", "ups").n == 1000  # type: ignore[union-attr]
    position = {"train_iterator": {"epoch": 1, "version": 2, "iterations_in_epoch": 3}}
    ours.save_checkpoint("a.pt", position)
    tiny.trainer().load_checkpoint("a.pt")
    assert metrics.get_meter("default", "ups").n == 0  # type: ignore[union-attr]


# crash.pt


class Noisy(tiny.Task):
    """Draws from Python's generator in every step, and fails when told to."""

    def train_step(self, sample: Any, *args: Any, **more: Any) -> Any:
        self.drawn = random.random()
        if "fail" in sample:
            raise sample["fail"]
        return super().train_step(sample, *args, **more)


class Raising(tiny.Criterion):
    """Raises what a sample says."""

    def forward(self, model: Any, sample: Any) -> Any:
        if "fails" in sample:
            raise RuntimeError("the sizes do not match")
        return super().forward(model, sample)


def crashed(sample: dict[str, Any], kind: type[Exception], **options: Any) -> Any:
    ours = tiny.trainer(**options)
    ours._epoch_itr = SimpleNamespace(state_dict=lambda: {"epoch": 3})
    run(ours, tiny.batches(2))

    def fail() -> None:
        ours.train_step([tiny.batches(1)[0], sample])
        ours._await_update()  # of a GPU

    with pytest.raises(kind) as info:
        fail()
    return ours, info.value, tools.load_file("checkpoints/crash.pt")


def test_faults_p2_and_p3_any_exception_leaves_the_batch_and_the_position() -> None:
    sample = tiny.batches(1)[0] | {"fails": True}
    ours, _, state = crashed(sample, RuntimeError, criterion=Raising())
    crash = state["crash"]
    assert crash["failed_sample"] == 1
    assert crash["error"] == "RuntimeError: the sizes do not match"
    assert "in forward" in crash["traceback"]
    assert torch.equal(crash["samples"][1]["words"], sample["words"])
    assert state["extra_state"]["train_iterator"] == {"epoch": 3}
    assert state["optimizer_history"][-1]["num_updates"] == 2
    for a, b in zip(ours.model.state_dict().values(), state["model"].values(),
                    strict=True):  # fmt: skip
        assert torch.equal(a, b)


def test_nan_is_told_of_by_module_and_tensor(caplog: pytest.LogCaptureFixture) -> None:
    sample = tiny.batches(1)[0] | {"factor": torch.tensor(float("nan"))}
    _, error, _ = crashed(sample, FloatingPointError)
    note = error.__notes__[-1]
    assert note.startswith("first not finite: output[0] of criterion (Criterion)")
    assert "gradients of 3 parameters are not finite: embed.weight" in caplog.text


def test_fault_p11_the_second_run_has_the_same_random_numbers() -> None:
    task = Noisy()
    draws = []
    repeat = task.train_step

    def remember(*args: Any, **more: Any) -> Any:
        made = repeat(*args, **more)
        draws.append(task.drawn)
        return made

    task.train_step = remember  # type: ignore[method-assign]
    ours = tiny.trainer(task=task)
    sample = tiny.batches(1)[0] | {"factor": torch.tensor(float("inf"))}
    with pytest.raises(FloatingPointError):
        ours.train_step([sample])
    assert len(draws) == 2
    assert draws[0] == draws[1]


def test_replay_names_the_first_tensor() -> None:
    sample = tiny.batches(1)[0] | {"factor": torch.tensor(float("nan"))}
    crashed(sample, FloatingPointError)
    verdict = replay("checkpoints/crash.pt", tiny.trainer())
    assert verdict.startswith("not finite: output[0] of criterion (Criterion)")


def test_replay_names_the_module_that_raises() -> None:
    sample = tiny.batches(1)[0]
    sample["words"] = sample["words"] + tiny.WORDS
    crashed(sample, IndexError)
    verdict = replay("checkpoints/crash.pt", tiny.trainer())
    assert verdict.startswith("raised in model.embed: IndexError")


def test_replay_of_a_checkpoint_is_rejected() -> None:
    tiny.trainer().save_checkpoint("a.pt", {})
    with pytest.raises(ValueError, match="holds no failed update"):
        replay("a.pt", tiny.trainer())


def test_replay_from_the_command_line() -> None:
    sample = tiny.batches(1)[0] | {"factor": torch.tensor(float("nan"))}
    crashed(sample, FloatingPointError)
    done = subprocess.run(
        [sys.executable, "-m", "ctrainer", "replay", "checkpoints/crash.pt",
         "--setup", "programs.fairseq.replayed:setup"],
        capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("not finite: output[0] of criterion")


# Averages


@pytest.mark.parametrize("fp32", [False, True])
def test_ema_is_the_originals_formula(fp32: bool) -> None:
    options = {"ema__store_ema": True, "ema__ema_decay": 0.9, "ema__ema_fp32": fp32}
    ours = tiny.trainer(**options, ema__ema_start_update=2)
    expected = None
    for number, sample in enumerate(tiny.batches(5), 1):
        ours.train_step([sample])
        now = weights(ours)
        if expected is None or number < 2:
            expected = now
        else:
            expected = [
                e * 0.9 + p * (1 - 0.9) for e, p in zip(expected, now, strict=True)
            ]
    for e, p in zip(expected or [], ours.ema.get_model().parameters(), strict=True):
        # Five sums of float32 values below 4.
        torch.testing.assert_close(p, e, rtol=0, atol=5 * 4 * 2**-23)
    assert metrics.get_smoothed_value("train", "ema_decay") == 0.9


def test_ema_is_saved_and_resumed_and_handed_to_the_task() -> None:
    options = {"ema__store_ema": True, "ema__ema_decay": 0.9}
    task = tiny.Task()
    task.uses_ema = True
    ours = tiny.trainer(task=task, **options)
    samples = tiny.batches(6)
    run(ours, samples[:3])
    ours.save_checkpoint("a.pt", {})
    other = tiny.trainer(**options)
    other.load_checkpoint("a.pt")
    run(ours, samples[3:])
    run(other, samples[3:])
    assert task.seen[-1]["ema_model"] is ours.ema.get_model()
    first, second = ours.ema.get_model(), other.ema.get_model()
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


def test_fault_p6_a_checkpoint_without_ema_begins_one() -> None:
    ours = tiny.trainer()
    run(ours, tiny.batches(2))
    ours.save_checkpoint("a.pt", {})
    other = tiny.trainer(ema__store_ema=True, ema__ema_decay=0.9)
    other.load_checkpoint("a.pt")
    for a, b in zip(weights(ours), other.ema.get_model().parameters(), strict=True):
        assert torch.equal(a, b)


# Iterators


class WithData(tiny.Task):
    """A task over a list of samples, one a batch."""

    def load_dataset(self, split: str, **options: Any) -> None:
        self.loaded = {"split": split, **options}

    def dataset(self, split: str) -> list[Any]:
        return tiny.batches(6, rows=1)

    def get_batch_iterator(self, dataset: Any, **options: Any) -> Any:
        self.options = options
        return iterators.EpochBatchIterator(
            dataset=dataset,
            collate_fn=lambda samples: samples[0],
            batch_sampler=[[i] for i in range(len(dataset))],
            seed=options["seed"],
            num_shards=options["num_shards"],
            shard_id=options["shard_id"],
            epoch=options["epoch"],
        )


def test_the_train_iterator_is_the_tasks_and_its_position_is_in_a_crash() -> None:
    task = WithData()
    ours = tiny.trainer(
        task=task, criterion=Raising(), dataset__train_subset="train",
        dataset__max_tokens=40,
    )  # fmt: skip
    itr = ours.get_train_iterator(epoch=2)
    assert task.loaded["split"] == "train"
    assert task.loaded["epoch"] == 2
    assert task.options["max_tokens"] == 40
    assert task.options["max_positions"] == 40
    assert (task.options["num_shards"], task.options["shard_id"]) == (1, 0)
    groups = iterators.GroupedIterator(itr.next_epoch_itr(), 2)
    ours.train_step(next(groups))
    assert ours._prepare_sample({})[1]
    batch = next(groups)
    batch[0]["fails"] = True
    with pytest.raises(RuntimeError, match="sizes"):
        ours.train_step(batch)
    position = tools.load_file("checkpoints/crash.pt")["extra_state"]["train_iterator"]
    assert position["epoch"] == 2
    assert position["iterations_in_epoch"] == 4


def test_the_valid_iterator_has_the_options_of_validation() -> None:
    task = WithData()
    ours = tiny.trainer(task=task, dataset__max_tokens_valid=9, common__seed=5)
    itr = ours.get_valid_iterator("valid")
    assert len(list(itr.next_epoch_itr(shuffle=False))) == 6
    assert task.options["max_tokens"] == 9
    assert task.options["epoch"] == 1
    assert task.options["seed"] == 5
    assert task.options["max_positions"] == 64


@pytest.mark.parametrize(
    ("limits", "least"),
    [
        ((64, 32, None), 32),
        (((10, 20), 15), (10, 15)),
        (((10, None), (20, 5), None), (10, 5)),
        (({"a": 3}, {"a": 9, "b": 4}, 7), {"a": 3, "b": 4}),
    ],
)
def test_the_least_of_limits(limits: tuple[Any, ...], least: Any) -> None:
    assert resolve_max_positions(*limits) == least
