"""What fairseq's Trainer promises beside its numbers, one process: the state that it
begins with, what is built when, and what is logged under which name and priority.

Source: fairseq, fairseq/trainer.py.
"""

import logging
import os
import time
from collections.abc import Iterator
from typing import Any

import fairseq_tiny as tiny
import pytest
import torch
from torch import nn

from ctrainer.fairseq import metrics


@pytest.fixture(autouse=True)
def _empty(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    metrics.reset()
    yield
    metrics.reset()


def _logged(name: str) -> dict[str, tuple[int, Any, Any]]:
    """(priority, decimals, weight) by key; the weight is None of what has none."""
    entries = metrics.state_dict()[name]
    return {k: (p, s.get("round"), s.get("count")) for p, k, _, s in entries}


class TestConstruction:
    def test_it_begins_with_nothing_done(self) -> None:
        ours = tiny.trainer()
        assert ours.get_num_updates() == 0
        nothing = (
            "_dummy_batch", "_lr_scheduler", "_optim_history", "_optimizer", "_ema",
            "_wrapped_criterion", "_wrapped_model", "_grad_norm_buf", "cuda_env",
            "_cumulative_training_time",
        )  # fmt: skip
        assert [getattr(ours, name) for name in nothing] == [None] * len(nothing)
        assert (ours._warn_once, ours._num_xla_compiles) == (set(), 0)
        assert (ours.tpu, ours.cuda, ours.device.type) == (False, False, "cpu")

    def test_the_wall_clock_runs_from_there(self) -> None:
        tiny.trainer()
        assert _logged("default") == {"wall": (790, 0, None)}

    def test_shared_parameters_are_told_of(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        model = tiny.Model()
        model.out.weight = model.embed.weight
        with caplog.at_level(logging.INFO):
            tiny.trainer(model)
        assert "detected shared parameter: embed.weight <- out.weight" in caplog.text

    @pytest.mark.parametrize(
        ("changes", "dtype"),
        [
            ({}, torch.float32),
            ({"common__fp16": True}, torch.float16),
            ({"common__bf16": True}, torch.bfloat16),
            ({"common__amp": True}, torch.float32),
        ],
    )
    def test_model_and_criterion_get_the_runs_precision(
        self, changes: dict[str, Any], dtype: torch.dtype
    ) -> None:
        ours = tiny.trainer(criterion=Weighted(), **changes)
        for module in (ours.get_model(), ours.get_criterion()):
            assert {p.dtype for p in module.parameters()} == {dtype}


class Weighted(tiny.Criterion):
    """A criterion with a parameter, and one that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.frozen = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, model: nn.Module, sample: dict[str, Any]) -> Any:
        loss, size, output = super().forward(model, sample)
        return loss * self.scale.sum(), size, output


class TestProperties:
    def test_one_process_is_the_master_of_itself(self) -> None:
        ours = tiny.trainer()
        assert (ours.data_parallel_world_size, ours.data_parallel_rank) == (1, 0)
        assert ours.data_parallel_process_group is None
        assert ours.is_data_parallel_master
        assert not ours.use_distributed_wrapper
        assert not ours.is_fsdp
        assert ours.should_save_checkpoint_on_current_rank
        assert not ours.always_call_state_dict_during_save_checkpoint

    @pytest.mark.parametrize(("given", "suffix"), [("-a", "-a"), (None, ""), ("", "")])
    def test_the_suffix_of_checkpoints(self, given: Any, suffix: str) -> None:
        ours = tiny.trainer(checkpoint__checkpoint_suffix=given)
        assert ours.checkpoint_suffix == suffix

    def test_one_process_needs_no_wrappers(self) -> None:
        ours = tiny.trainer()
        assert ours.model is ours.get_model()
        assert ours.criterion is ours.get_criterion()

    def test_the_average_is_made_when_it_is_asked_for(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        ours = tiny.trainer(ema__store_ema=True, ema__ema_decay=0.9)
        assert ours._ema is None
        with caplog.at_level(logging.INFO):
            assert ours.ema is ours.ema
        said = "Exponential Moving Average Shadow Model is initialized."
        assert caplog.text.count(said) == 1


class TestOptimizer:
    def test_it_has_what_is_trained_of_model_and_criterion(self) -> None:
        model = tiny.Model()
        model.embed.weight.requires_grad_(False)
        ours = tiny.trainer(model, criterion=Weighted())
        expected = [*model.out.parameters(), ours.get_criterion().scale]
        (group,) = ours.optimizer.param_groups
        assert [id(p) for p in group["params"]] == [id(p) for p in expected]

    def test_it_is_built_once_and_its_schedule_has_begun(self) -> None:
        ours = tiny.trainer()
        assert ours.optimizer is ours.optimizer
        assert ours.lr_scheduler is ours.lr_scheduler
        assert ours.get_lr() == 0.0  # inverse_sqrt's warm-up begins there
        ours.lr_step_update()
        assert ours.get_lr() == 0.0

    def test_reinitialize_forgets_it_and_keeps_the_average_and_the_count(self) -> None:
        ours = tiny.trainer(ema__store_ema=True, ema__ema_decay=0.9)
        ours.train_step(tiny.batches(1))
        optimizer, schedule, average = ours.optimizer, ours.lr_scheduler, ours.ema
        ours.reinitialize()
        assert ours.optimizer is not optimizer
        assert ours.lr_scheduler is not schedule
        assert ours.ema is average
        assert ours.get_num_updates() == 1


class TestLoading:
    def _saved(self, position: dict[str, Any], **extra: Any) -> None:
        ours = tiny.trainer()
        for sample in tiny.batches(3):
            ours.train_step([sample])
        ours._previous_training_time = 500.0
        path = ours.save_checkpoint("a.pt", {"train_iterator": position, **extra})
        assert path == os.path.abspath("a.pt")

    def test_the_position_and_the_time_are_restored_and_told(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        self._saved({"version": 2, "epoch": 4, "iterations_in_epoch": 3}, val_loss=1.5)
        ours = tiny.trainer()
        with caplog.at_level(logging.INFO):
            extra = ours.load_checkpoint("a.pt")
        assert extra["train_iterator"]["epoch"] == 4
        assert extra["val_loss"] == 1.5
        assert "Loaded checkpoint a.pt (epoch 4 @ 3 updates)" in caplog.text
        assert 500.0 <= ours.cumulative_training_time() < 600.0

    @pytest.mark.parametrize(
        ("position", "reset", "kept"),
        [
            ({"version": 2, "epoch": 1, "iterations_in_epoch": 3}, False, True),
            ({"version": 2, "epoch": 1, "iterations_in_epoch": 3}, True, False),
            ({"version": 2, "epoch": 2, "iterations_in_epoch": 0}, False, False),
            ({"version": 1, "epoch": 2, "iterations_in_epoch": 0}, False, True),
        ],
    )
    def test_meters_of_an_epoch_go_on_within_it(
        self, position: dict[str, Any], reset: bool, kept: bool
    ) -> None:
        self._saved(position)
        ours = tiny.trainer()
        ours.load_checkpoint("a.pt", reset_meters=reset)
        found = metrics.get_meter("train", "wpb")
        assert (found is not None and found.count == 3) == kept

    def test_a_reset_schedule_begins_anew(self) -> None:
        ours = tiny.trainer()
        ours.train_step(tiny.batches(1))
        ours.lr_scheduler.best = 1.25
        ours.save_checkpoint("a.pt", {})
        best = []
        for reset in (False, True):
            fresh = tiny.trainer()
            fresh.load_checkpoint("a.pt", reset_lr_scheduler=reset)
            assert fresh.get_num_updates() == 1
            best.append(fresh.lr_scheduler.best)
        assert best == [1.25, None]


class TestEpochs:
    def test_schedule_quantizer_and_task_are_told_in_this_order(self) -> None:
        told: list[Any] = []

        class Task(tiny.Task):
            def begin_epoch(self, epoch: int, model: Any) -> None:
                told.append(("task", epoch, model))

            def begin_valid_epoch(self, epoch: int, model: Any) -> None:
                told.append(("valid", epoch, model))

        ours = tiny.trainer(task=Task())
        ours.lr_scheduler.step_begin_epoch = lambda e: told.append(("schedule", e))
        ours.begin_epoch(3)
        ours.begin_valid_epoch(3)
        model = ours.get_model()
        assert told == [("schedule", 3), ("task", 3, model), ("valid", 3, model)]

    def test_the_end_of_an_epoch_sets_and_returns_the_rate(self) -> None:
        ours = tiny.trainer()
        seen: list[Any] = []
        step = ours.lr_scheduler.step
        ours.lr_scheduler.step = lambda e, v=None: (seen.append((e, v)), step(e, v))
        ours.train_step(tiny.batches(1))
        assert ours.lr_step(1, 2.5) == ours.get_lr() == ours.lr_step(2)
        assert seen == [(1, 2.5), (2, None)]


class TestUpdate:
    def test_random_numbers_depend_on_the_number_of_the_update(self) -> None:
        """Two trainers that drew different numbers before drop the same."""
        ends = []
        for wasted in (0, 17):
            ours = tiny.trainer(tiny.Model(dropout=0.5))
            for sample in tiny.batches(3):
                torch.rand(wasted)
                ours.train_step([sample])
            assert torch.initial_seed() == 7 + 2
            ends.append(ours.get_model().out.weight.detach().clone())
        assert torch.equal(*ends)

    def test_it_trains_in_training_mode(self) -> None:
        ours = tiny.trainer()
        ours.get_model().eval()
        ours.get_criterion().eval()
        ours.train_step(tiny.batches(1))
        assert ours.get_model().training
        assert ours.get_criterion().training

    def test_what_is_logged_by_name_priority_and_decimals(self) -> None:
        ours = tiny.trainer(optimization__clip_norm=1.0)
        for sample in tiny.batches(2):
            ours.train_step([sample])
        logged = _logged("train")
        assert {key: logged[key] for key in ("num_updates", "lr", "gnorm", "clip")} == {
            "num_updates": (200, None, 0),
            "lr": (300, None, 0),
            "gnorm": (400, 3, 2),
            "clip": (500, 1, 2),
        }
        assert logged["ups"][:2] == (100, 2)
        assert logged["train_wall"][:2] == (800, 0)
        assert list(logged) == sorted(logged, key=lambda key: logged[key][0])

    @pytest.mark.parametrize("mode", ["fp16", "amp"])
    def test_the_loss_scale_is_logged(self, mode: str) -> None:
        ours = tiny.trainer(**{f"common__{mode}": True})
        ours.train_step(tiny.batches(1))
        assert _logged("train")["loss_scale"] == (700, 4, 0)
        assert metrics.get_smoothed_value("train", "loss_scale") == 128.0

    def test_the_average_follows_and_its_decay_is_logged(self) -> None:
        ours = tiny.trainer(ema__store_ema=True, ema__ema_decay=0.75)
        ours.train_step(tiny.batches(1))
        assert _logged("train")["ema_decay"] == (10000, 5, 0)
        assert metrics.get_smoothed_value("train", "ema_decay") == 0.75

    def test_slow_momentum_is_performed_after_the_step(self) -> None:
        class Slow(tiny.Model):
            performed: list[Any] = []  # noqa: RUF012

            def perform_slowmo(self, optimizer: Any, *masters: Any) -> None:
                self.performed.append(optimizer)

        ours = tiny.trainer(Slow())
        ours.train_step(tiny.batches(1))
        assert Slow.performed == [ours.optimizer.optimizer]

    def test_a_gradient_of_a_parameter_that_is_not_used_is_none(self) -> None:
        model = tiny.Model()
        model.stray = nn.Parameter(torch.ones(3))
        ours = tiny.trainer(model)
        ours.train_step(tiny.batches(1))
        assert model.stray.grad is None
        assert torch.equal(model.stray, torch.ones(3))


class TestTheRest:
    def test_rates_by_name_are_logged_by_name(self) -> None:
        ours = tiny.trainer()
        for rates, expected in (
            ({"encoder": 0.1, "default": 0.2}, 0.2),
            ({"encoder": 0.1, "decoder": 0.3}, 0.1),
        ):
            ours.lr_scheduler.step_update = lambda _, rates=rates: rates
            assert ours.lr_step_update() == expected
            for name, rate in rates.items():
                key = f"lr_{name}"
                assert metrics.get_smoothed_value("default", key) == rate
                assert _logged("default")[key] == (300, None, 0)

    def test_old_names_of_meters(self, caplog: pytest.LogCaptureFixture) -> None:
        ours = tiny.trainer()
        for sample in tiny.batches(2):
            ours.train_step([sample])
        ours.valid_step(tiny.batches(1)[0])
        with caplog.at_level(logging.WARNING):
            found = {
                name: ours.get_meter(name)
                for name in ("train_loss", "valid_loss", "wall", "wps", "gnorm")
            }
        assert caplog.text.count("Trainer.get_meter is deprecated") == 1
        assert found == {
            "train_loss": metrics.get_meter("train", "loss"),
            "valid_loss": metrics.get_meter("valid", "loss"),
            "wall": metrics.get_meter("default", "wall"),
            "wps": metrics.get_meter("train", "wps"),
            "gnorm": metrics.get_meter("train", "gnorm"),
        }
        assert isinstance(ours.get_meter("valid_nll_loss"), metrics.AverageMeter)
        assert ours.get_meter("nowhere") is None

    def test_the_time_of_training_adds_up(self, monkeypatch: Any) -> None:
        ours = tiny.trainer()
        now = ours._start_time
        monkeypatch.setattr(time, "time", lambda: now + 60.0)
        ours._previous_training_time = 40.0
        assert ours.cumulative_training_time() == pytest.approx(100.0)
        ours._cumulative_training_time = 70.0  # what the workers agreed upon
        assert ours.cumulative_training_time() == 70.0

    @pytest.mark.parametrize("early", [False, True])
    def test_samples_are_converted_deeply_and_only_what_is_float32(
        self, early: bool
    ) -> None:
        ours = tiny.trainer(common__fp16=True, common__on_cpu_convert_precision=early)
        sample = {
            "a": torch.ones(2),
            "b": [torch.ones(2, dtype=torch.int64), (torch.ones(1),)],
            "c": "text",
            "d": torch.ones(2, dtype=torch.float64),
        }
        made, dummy = ours._prepare_sample(sample)
        assert not dummy
        assert made["a"].dtype is made["b"][1][0].dtype is torch.float16
        assert (made["b"][0].dtype, made["c"]) == (torch.int64, "text")
        assert made["d"].dtype is torch.float64
        assert sample["a"].dtype is torch.float32

    def test_the_first_real_batch_becomes_the_dummy_that_was_to_be_found(self) -> None:
        ours = tiny.trainer()
        ours.reset_dummy_batch("DUMMY")
        with pytest.raises(Exception, match="Trying to use an uninitialized 'dummy'"):
            ours._prepare_sample("DUMMY")
        (sample,) = tiny.batches(1)
        ours._prepare_sample(sample)
        made, dummy = ours._prepare_sample(None)
        assert dummy
        assert torch.equal(made["words"], sample["words"])
