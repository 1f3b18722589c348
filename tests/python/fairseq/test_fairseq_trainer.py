"""ctrainer.fairseq.Trainer against the original's training step, written out here over
torch, and what the original does wrong."""

from __future__ import annotations

import logging
import math
from argparse import Namespace
from pathlib import Path
from typing import Any

import fairseq_tiny as tiny
import pytest
import torch

from ctrainer.fairseq import metrics
from ctrainer.fairseq.config import as_config


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # crash.pt goes to ./checkpoints


class Original:
    """train_step of fairseq's Trainer with its Adam and inverse_sqrt, in plain torch.

    Source: fairseq, trainer.py, optim/adam.py, utils.clip_grad_norm_ and
    optim/lr_scheduler/inverse_square_root_schedule.py.
    """

    def __init__(self, model: tiny.Model, clip_norm: float, lr: float = 0.02) -> None:
        self.model, self.criterion = model, tiny.Criterion()
        self.clip_norm, self.peak, self.updates = clip_norm, lr, 0
        self.moments = {
            p: (torch.zeros_like(p), torch.zeros_like(p)) for p in model.parameters()
        }
        self.logged: list[dict[str, float]] = []

    def rate(self) -> float:
        if self.updates < 4:
            return self.updates * self.peak / 4
        return self.peak * math.sqrt(4) / math.sqrt(self.updates)

    def train_step(self, samples: list[Any]) -> None:
        torch.manual_seed(7 + self.updates)
        self.model.train()
        self.model.zero_grad()
        outputs = []
        for sample in samples:
            loss, _, output = self.criterion(self.model, sample)
            loss.backward()
            outputs.append(output)
        size = float(sum(o["sample_size"] for o in outputs))
        parameters = list(self.model.parameters())
        for p in parameters:
            p.grad.mul_(1 / size)
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        if self.clip_norm > 0:
            coef = (self.clip_norm / (norm + 1e-6)).clamp(max=1)
            for p in parameters:
                p.grad.mul_(coef)
        lr, self.updates = self.rate(), self.updates + 1
        with torch.no_grad():
            for p in parameters:
                self.adam(p, lr)
        loss = sum(o["loss"] for o in outputs) / size / math.log(2)
        self.logged.append({"loss": loss, "gnorm": norm.item(), "lr": self.rate()})

    def adam(self, p: torch.nn.Parameter, lr: float) -> None:
        m, v = self.moments[p]
        assert p.grad is not None
        m.mul_(0.9).add_(p.grad, alpha=0.1)
        v.mul_(0.98).addcmul_(p.grad, p.grad, value=1 - 0.98)
        step = lr * math.sqrt(1 - 0.98**self.updates) / (1 - 0.9**self.updates)
        p.addcdiv_(m, v.sqrt().add_(1e-8), value=-step)


@pytest.mark.parametrize("clip_norm", [0.0, 0.05])
@pytest.mark.parametrize("update_freq", [1, 4])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_twenty_updates_are_the_originals(
    update_freq: int, clip_norm: float, dropout: float
) -> None:
    samples = tiny.groups(tiny.batches(20 * update_freq), update_freq)
    theirs = Original(tiny.Model(dropout), clip_norm)
    ours = tiny.trainer(tiny.Model(dropout), optimization__clip_norm=clip_norm)
    for group in samples:
        theirs.train_step(group)
        ours.train_step(group)
        expected = theirs.logged[-1]
        # 20 updates of float32: each adds a rounding or two of 6e-8 to values below 4.
        assert metrics.get_meter("train", "gnorm").val == pytest.approx(
            expected["gnorm"], rel=2e-5
        )
        assert ours.get_lr() == pytest.approx(expected["lr"], rel=1e-12)
    assert ours.get_num_updates() == 20
    for a, b in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-6)


def test_the_logging_output_has_what_was_logged_and_the_sample_size() -> None:
    ours, theirs = tiny.trainer(), Original(tiny.Model(), 0.0)
    group = tiny.batches(3)
    theirs.train_step(group)
    output = ours.train_step(group)
    assert output is not None
    assert output["sample_size"] == sum(b["target"].numel() for b in group)
    assert output["loss"] == pytest.approx(theirs.logged[0]["loss"], abs=1e-3)
    assert not {"ppl", "wps", "wpb", "bsz"} & output.keys()
    train = metrics.get_smoothed_values("train")
    assert train["num_updates"] == 1
    assert train["wpb"] == output["sample_size"]
    assert "train_wall" in train
    assert "clip" not in train


def test_the_share_of_clipped_updates_is_logged() -> None:
    ours = tiny.trainer(optimization__clip_norm=1e-3)
    ours.train_step(tiny.batches(1))
    assert metrics.get_smoothed_value("train", "clip") == 100
    ours = tiny.trainer(optimization__clip_norm=1e3)
    ours.train_step(tiny.batches(1))
    assert metrics.get_smoothed_value("train", "clip") == 0


def test_the_task_is_told_of_the_update_and_of_dummies() -> None:
    task = tiny.Task()
    ours = tiny.trainer(task=task)
    first, second = tiny.batches(2)
    ours.reset_dummy_batch("DUMMY")
    ours.train_step([first])
    ours.train_step([second, {}])
    told = [(s["update_num"], s["ignore_grad"]) for s in task.seen]
    assert told == [(0, False), (1, False), (1, True)]
    assert ours.model.updates == [0, 1, 1]


def test_without_a_dummy_batch_an_empty_one_is_an_error() -> None:
    ours = tiny.trainer()
    with pytest.raises(AssertionError, match="Invalid dummy batch: None"):
        ours.train_step([None])
    ours.reset_dummy_batch("DUMMY")
    with pytest.raises(Exception, match="uninitialized 'dummy' batch"):
        ours.train_step([{}])


def trained_on(samples: list[Any], **options: Any) -> dict[str, torch.Tensor]:
    ours = tiny.trainer(optimizer__adam_betas=(0.0, 0.0), **options)
    ours.set_num_updates(4)
    ours.reset_dummy_batch(tiny.batches(1)[0])
    output = ours.train_step(samples)
    assert output is not None
    return {"size": output["sample_size"], **ours.model.state_dict()}


def test_fault_p10_a_dummy_in_the_last_place_counts_for_nothing() -> None:
    real = tiny.batches(2)[1]
    with_dummy, without = trained_on([real, {}]), trained_on([real])
    assert with_dummy["size"] == real["target"].numel()
    for name, value in without.items():
        torch.testing.assert_close(with_dummy[name], value, rtol=0, atol=0)


def test_fault_p10_is_kept_behind_its_switch() -> None:
    real = tiny.batches(2)[1]
    assert trained_on([real, {}], original_dummies=True)["size"] == 0
    both = trained_on([{}, real], original_dummies=True)["size"]
    assert both == real["target"].numel() + tiny.batches(1)[0]["target"].numel()


def test_gradients_that_are_not_finite_are_an_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ours = tiny.trainer()
    sample = tiny.batches(1)[0] | {"factor": torch.tensor(float("nan"))}
    before = {k: v.clone() for k, v in ours.get_model().state_dict().items()}
    with pytest.raises(FloatingPointError, match="gradients are Nan/Inf"):
        ours.train_step([sample])
    assert ours.get_num_updates() == 0
    for name, value in ours.get_model().state_dict().items():
        assert torch.equal(value, before[name])


def test_fault_p4_an_exception_leaves_no_aggregator_active() -> None:
    ours = tiny.trainer()
    active = metrics.get_active_aggregators()
    with pytest.raises(KeyError, match="words"):
        ours.train_step([{"target": torch.zeros(1, 1)}])
    with pytest.raises(KeyError, match="words"):
        ours.valid_step({"target": torch.zeros(1, 1)})
    assert metrics.get_active_aggregators() == active


class Hungry(tiny.Criterion):
    """Runs out of memory on marked samples, in the forward or the backward pass."""

    def forward(self, model: Any, sample: dict[str, Any]) -> Any:
        loss, size, output = super().forward(model, sample)
        when = sample.get("oom")
        if when == "forward":
            raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")
        if when == "backward":
            loss.register_hook(self.fail)
            loss = loss * 1
        return loss, size, output

    @staticmethod
    def fail(_: torch.Tensor) -> None:
        raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")


@pytest.mark.parametrize(("when", "left"), [("forward", [0, 2]), ("backward", [2])])
def test_fault_p8_a_sample_without_memory_is_dropped_and_counted(
    when: str, left: list[int]
) -> None:
    samples = tiny.batches(3)
    ours = tiny.trainer(criterion=Hungry())
    output = ours.train_step([samples[0], samples[1] | {"oom": when}, samples[2]])
    plain = tiny.trainer(criterion=Hungry())
    expected = plain.train_step([samples[i] for i in left])
    assert output is not None
    assert expected is not None
    assert output["sample_size"] == expected["sample_size"]
    for a, b in zip(ours.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("use_bmuf", [False, True])
def test_an_update_without_memory_for_any_sample_is_none(use_bmuf: bool) -> None:
    sample = tiny.batches(1)[0] | {"oom": "forward"}
    ours = tiny.trainer(criterion=Hungry(), optimization__use_bmuf=use_bmuf)
    assert ours.train_step([sample]) is None
    assert ours.get_num_updates() == 0
    assert metrics.get_smoothed_value("train", "oom") == 1
    with pytest.raises(RuntimeError, match="out of memory"):
        ours.train_step([sample], raise_oom=True)


def test_valid_step_changes_nothing_and_logs_under_valid() -> None:
    ours = tiny.trainer(tiny.Model(dropout=0.5))
    sample = tiny.batches(1)[0]
    first, second = ours.valid_step(sample), ours.valid_step(sample)
    assert first["loss"] == second["loss"]
    assert first["sample_size"] == sample["target"].numel()
    assert not ours.model.training
    assert metrics.get_smoothed_value("valid", "loss") == first["loss"]
    assert metrics.get_meters("train") is None
    assert all(p.grad is None for p in ours.model.parameters())


def test_valid_step_tries_once_more_without_memory(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Once(tiny.Criterion):
        calls = 0

        def forward(self, model: Any, sample: Any) -> Any:
            self.calls += 1
            if self.calls == 1:
                raise RuntimeError("CUDA out of memory")
            return super().forward(model, sample)

    with caplog.at_level(logging.WARNING):
        output = tiny.trainer(criterion=Once()).valid_step(tiny.batches(1)[0])
    assert output["sample_size"] == 10
    assert "ran out of memory in validation step, retrying batch" in caplog.text


def test_overrides_in_python_win() -> None:
    calls: list[str] = []

    class Mine(tiny.Trainer):
        def clip_grad_norm(self, clip_norm: float, /) -> Any:
            calls.append("clip")
            return super().clip_grad_norm(clip_norm)

        def zero_grad(self, /) -> None:
            calls.append("zero")
            super().zero_grad()

        def set_num_updates(self, num_updates: int, /) -> None:
            calls.append("count")
            super().set_num_updates(num_updates)

    Mine(tiny.config(), tiny.Task(), tiny.Model(), tiny.Criterion()).train_step(
        tiny.batches(1)
    )
    assert calls == ["zero", "clip", "count"]


def test_a_criterion_that_logs_no_loss_is_told_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Silent(tiny.Criterion):
        @classmethod
        def reduce_metrics(cls, outputs: Any) -> None: ...

    ours = tiny.trainer(criterion=Silent())
    with caplog.at_level(logging.WARNING):
        outputs = [ours.train_step(tiny.batches(1)) for _ in range(2)]
    assert [o["loss"] for o in outputs if o is not None] == [-1, -1]
    assert caplog.text.count("did not log a 'loss' value") == 1


def test_shared_parameters_stay_shared() -> None:
    model = tiny.Model()
    model.out.weight = model.embed.weight
    ours = tiny.trainer(model, common__bf16=True)
    assert ours.model.out.weight is ours.model.embed.weight
    assert ours.model.out.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"distributed_training__distributed_world_size": 2},
            r"torch\.distributed is not initialised",
        ),
        (
            {
                "distributed_training__distributed_world_size": 2,
                "distributed_training__ddp_backend": "slowmo",
                "distributed_training__slowmo_base_algorithm": "sgp",
            },
            "slowmo_base_algorithm is 'sgp'; expected localsgd",
        ),
        ({"common__model_parallel_size": 2}, "holds the whole model"),
        ({"distributed_training__cpu_offload": True}, "requires --ddp-backend=fully"),
        ({"optimization__clip_norm": -1.0}, "clip_norm"),
        ({"common__tpu": True}, "TPU"),
    ],
)
def test_what_it_cannot_do_is_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny.trainer(**changes)


def test_fp16_and_amp_exclude_each_other() -> None:
    with pytest.raises(AssertionError, match="Cannot use fp16 and AMP together"):
        tiny.trainer(common__fp16=True, common__amp=True)


def test_a_quantizer_follows_the_updates() -> None:
    class Quantizer:
        steps: list[int] = []  # noqa: RUF012

        def set_trainer(self, trainer: Any) -> None:
            self.trainer = trainer

        def begin_epoch(self, epoch: int) -> None:
            self.steps.append(-epoch)

        def step_update(self, number: int) -> None:
            self.steps.append(number)

    quantizer = Quantizer()
    ours = tiny.Trainer(
        tiny.config(), tiny.Task(), tiny.Model(), tiny.Criterion(), quantizer
    )
    ours.begin_epoch(1)
    ours.train_step(tiny.batches(1))
    assert quantizer.trainer is ours
    assert quantizer.steps == [-1, 1]


FLAT = {
    "optimizer": "adam", "adam_betas": "(0.9, 0.98)", "lr": [0.02],
    "lr_scheduler": "inverse_sqrt", "warmup_updates": 4, "cpu": True, "seed": 7,
}  # fmt: skip


def test_configs_of_every_kind_train_alike(caplog: pytest.LogCaptureFixture) -> None:
    tree = {
        "common": {"cpu": True, "seed": 7},
        "optimization": {"lr": [0.02]},
        "optimizer": {"_name": "adam", "adam_betas": "(0.9, 0.98)"},
        "lr_scheduler": {"_name": "inverse_sqrt", "warmup_updates": 4},
    }
    trained = []
    for cfg in (tiny.config(), as_config(tree), Namespace(**FLAT)):
        ours = tiny.Trainer(cfg, tiny.Task(), tiny.Model(), tiny.Criterion())
        for sample in tiny.batches(6):
            ours.train_step([sample])
        trained.append(list(ours.model.parameters()))
    for other in trained[1:]:
        for a, b in zip(trained[0], other, strict=True):
            assert torch.equal(a, b)
    assert caplog.text.count("argparse.Namespace configuration is deprecated") == 1


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("wanted", [False, True])
def test_a_task_is_handed_averages_where_it_uses_them_and_there_are_some(
    stored: bool, wanted: bool
) -> None:
    task = tiny.Task()
    task.uses_ema = wanted
    trainer = tiny.trainer(task=task, ema__store_ema=stored, ema__ema_decay=0.9)
    trainer.train_step(tiny.batches(1))
    handed = task.seen[-1].get("ema_model")
    assert handed is (trainer.ema.get_model() if stored and wanted else None)
