"""The Trainer on a device: our kernels update the model there, and a run is the one on
the host, where it is held against transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import any_gpu
import pytest
import ranks
import torch
from draws import EXHAUSTIVE
from tiny import Net, arguments, rows
from torch import nn

import ctrainer
from ctrainer import adapters, optim

DATA = rows(40)
# A run whose update adds no squares of gradients has the same bits.
PLAIN: dict[str, Any] = {"max_grad_norm": 0.0}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "clipped": {},
    "clipped by value": PLAIN | {"max_grad_value": 0.01},
    "clipped by group": {"clip_by_group": True, "weight_decay": 0.1},
    "bf16": PLAIN | {"bf16": True},
    "fp16": PLAIN | {"fp16": True},
    "accumulated": PLAIN | {"gradient_accumulation_steps": 2},
    "lion_8bit": PLAIN | {"optim": "lion_8bit"},
    "adafactor": {"optim": "adafactor"},
    "sgd": PLAIN | {"optim": "sgd", "lr_scheduler_type": "cosine"},
    "layers": PLAIN | {"log_layer_grad_norms": True},
}
SOME = ["plain", "clipped", "fp16", "adafactor", "layers"]


@pytest.fixture(scope="module", autouse=True)
def gpu() -> torch.device:
    return any_gpu.device()


class Watch(ctrainer.TrainerCallback):
    """Whoever hears of this sees clipped gradients: they are clipped in place."""

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, **k: Any
    ) -> None:
        self.largest = max(p.grad.abs().max().item() for p in k["model"].parameters())


class Spread(Net):
    """Its last layer is on the host, the others are on the device."""

    def __init__(self) -> None:
        super().__init__(dropout=any_gpu.DROPOUT)
        self.layers[:-1].to(any_gpu.device())

    def forward(self, x: torch.Tensor, labels: Any = None) -> dict[str, torch.Tensor]:
        y = self.layers[-1](self.layers[:-1](x).cpu()).squeeze(-1)
        return {"loss": nn.functional.mse_loss(y, labels.cpu()), "logits": y}


class Normed(Net):
    def __init__(self) -> None:
        super().__init__(dropout=any_gpu.DROPOUT)
        self.layers.insert(1, nn.BatchNorm1d(16))


class KeepsPlace(ctrainer.TrainingArguments):
    @property
    def place_model_on_device(self) -> bool:
        return False


def trained(
    folder: Path, on_host: bool, resume: Path | None = None, **options: Any
) -> ctrainer.Trainer:
    callbacks = options.pop("callbacks", [])
    make = options.pop("optimizer", None)
    model = options.pop("model", None) or Net(dropout=any_gpu.DROPOUT)
    kept = {"cls": KeepsPlace} if isinstance(model, Spread) else {}
    args = arguments(
        output_dir=str(folder), use_cpu=on_host, max_steps=8, logging_steps=1, seed=5,
        per_device_train_batch_size=5, learning_rate=1e-2, save_steps=4,
        **{"save_strategy": "no", **kept, **options},
    )  # fmt: skip
    model = model if kept else model.to(args.device)
    optimizer = None if make is None else make(model.parameters())
    trainer = ctrainer.Trainer(
        model, args, train_dataset=DATA, eval_dataset=DATA[:11],
        callbacks=callbacks, optimizers=(optimizer, None),
    )  # fmt: skip
    trainer.remove_callback(ctrainer.PrinterCallback)
    trainer.train(None if resume is None else str(resume / "checkpoint-4"))
    kinds = {p.device.type for p in trainer.model.parameters()}
    assert kinds == (
        {"cpu", any_gpu.KIND} if kept else {"cpu" if on_host else any_gpu.KIND}
    )
    return trainer


def compare(here: ctrainer.Trainer, there: ctrainer.Trainer, exact: bool) -> None:
    logs = [
        [
            {k: v for k, v in e.items() if "time" not in k and "second" not in k}
            for e in x
        ]
        for x in (here.state.log_history, there.state.log_history)
    ]
    for a, b in zip(*logs, strict=True):
        assert a.keys() == b.keys()
        for name, value in a.items():
            rel = max(1e-5, any_gpu.LIMIT)
            assert b[name] == pytest.approx(value, rel=rel, abs=1e-7, nan_ok=True)
    states = (trainer.model.state_dict().values() for trainer in (here, there))
    pairs = zip(*states, strict=True)
    for a, b in pairs:
        any_gpu.assert_same(b, a, 0.0 if exact else 2e-6)
    assert there.evaluate()["eval_loss"] == pytest.approx(
        here.evaluate()["eval_loss"], rel=max(1e-5, any_gpu.LIMIT)
    )


@pytest.mark.parametrize("name", OPTIONS if EXHAUSTIVE else SOME)
def test_a_run_on_the_device_is_that_on_the_host(tmp_path: Path, name: str) -> None:
    options = OPTIONS[name]
    here = trained(tmp_path, True, **options)
    there = trained(tmp_path, False, **options)
    assert isinstance(there.optimizer, optim._wrapper.EngineOptimizer)
    compare(here, there, "max_grad_norm" in options)


@pytest.mark.parametrize("saved_on_host", [True, False])
def test_a_run_resumes_on_the_other_device(tmp_path: Path, saved_on_host: bool) -> None:
    save = PLAIN | {"save_strategy": "steps"}
    whole = trained(tmp_path, saved_on_host, **save)
    other = trained(tmp_path / "b", not saved_on_host, tmp_path, **PLAIN)
    here, there = (whole, other) if saved_on_host else (other, whole)
    compare(here, there, exact=True)


def test_batch_norms_statistics_are_those_of_the_host(tmp_path: Path) -> None:
    pair = [trained(tmp_path, host, model=Normed(), **PLAIN) for host in (True, False)]
    compare(*pair, exact=False)
    for trainer in pair:
        assert int(trainer.model.layers[1].num_batches_tracked) == 8
        assert trainer.model.layers[1].running_var.min() > 0.05


def test_gradients_that_a_callback_sees_are_clipped(tmp_path: Path) -> None:
    watches = [Watch(), Watch()]
    pair = [
        trained(tmp_path, on_host, callbacks=[watch], max_grad_norm=0.1)
        for on_host, watch in zip((True, False), watches, strict=True)
    ]
    compare(*pair, exact=False)
    rel = max(1e-5, 10 * any_gpu.LIMIT)
    assert watches[0].largest == pytest.approx(watches[1].largest, rel=rel)
    assert watches[0].largest < 0.1


@pytest.mark.parametrize("average", [{"ema_decay": 0.9}, {"swa_start_update": 2}])
def test_weights_are_averaged_on_the_device(
    tmp_path: Path, average: dict[str, Any]
) -> None:
    pair = [trained(tmp_path, host, **average, **PLAIN) for host in (True, False)]
    found = []
    for trainer in pair:
        assert trainer.weight_average is not None
        with trainer.weight_average.applied():
            state = trainer.model.state_dict()
            found.append({name: v.cpu().clone() for name, v in state.items()})
    for name, value in found[0].items():
        any_gpu.assert_same(found[1][name], value)
        assert not torch.equal(pair[0].model.state_dict()[name], value)


def torchs(parameters: Any) -> torch.optim.Optimizer:
    one_by_one: dict[str, Any] = {"foreach": False}  # on every device
    return torch.optim.SGD(parameters, lr=1e-2, **one_by_one)


CLIPPING: list[dict[str, Any]] = [
    {"max_grad_norm": 0.1}, {"max_grad_norm": 0.1, "grad_norm_type": float("inf")},
    {"max_grad_norm": 0.1, "clip_by_group": True}, PLAIN | {"max_grad_value": 0.01},
]  # fmt: skip


@pytest.mark.parametrize("options", CLIPPING)
def test_our_kernels_clip_for_torchs_optimizers(
    tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("grad_norms", "clip_grads"):
        monkeypatch.setattr(adapters.torch, name, None)
    compare(
        *(
            trained(tmp_path, host, optimizer=torchs, **options)
            for host in (True, False)
        ),
        exact=options["max_grad_norm"] == 0.0,
    )


@pytest.mark.parametrize("options", [PLAIN, *CLIPPING])
def test_a_model_on_two_devices(tmp_path: Path, options: dict[str, Any]) -> None:
    here = trained(tmp_path, True, optimizer=torchs, **options)
    there = trained(tmp_path, False, optimizer=torchs, model=Spread(), **options)
    compare(here, there, exact=options["max_grad_norm"] == 0.0)


class Count(ctrainer.TrainerCallback):
    def __init__(self) -> None:
        self.taken: list[int] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **k: Any) -> None:
        self.taken.append(any_gpu.allocations())


@pytest.mark.parametrize(
    "options",
    [*CLIPPING[:2], {"optimizer": torchs}, {"ema_decay": 0.9}, {"callbacks": [Watch()]},
     {"optim": "adafactor"}, {"optim": "lion_8bit"}],
)  # fmt: skip
def test_no_memory_is_taken_after_the_second_update(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    count = Count()
    before = any_gpu.allocations()
    more = options | {"callbacks": [*options.get("callbacks", []), count]}
    trained(tmp_path, False, **more)
    assert count.taken[1:] == [count.taken[1]] * 7
    if not {"optimizer", "callbacks"} & set(options):  # whose list outlives a run
        assert count.taken[1] > before  # it is counted


def test_ranks_on_the_device(tmp_path: Path) -> None:
    told = ranks.told(ranks.run(tmp_path, "trainer.on_device"))
    for name in ("bmuf", "diloco"):
        (first, there), (second, also) = (found[name] for found in told)
        assert (first, there) == (second, also)
        assert there == pytest.approx(first, rel=0, abs=any_gpu.LIMIT)
    for found in told:
        assert "nothing averages the gradients of the 2 ranks" in found["bare"]
