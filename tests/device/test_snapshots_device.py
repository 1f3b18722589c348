"""Saves of tensors in a GPU's memory: a file has what the tensors held when they were
added, whatever follows on the stream, and the host waits for none of the copies."""

from __future__ import annotations

import gc
import random
from pathlib import Path
from typing import Any

import any_gpu
import emulated_torch
import pytest
import torch
from draws import draws
from safetensors.torch import load_file
from torch import nn

import ctrainer
from ctrainer import optim
from ctrainer.checkpoint import CheckpointWriter, verify_checkpoint

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


@pytest.fixture(scope="module")
def gpu() -> torch.device:
    return any_gpu.device()


def drawn(draw: random.Random, gpu: torch.device) -> dict[str, torch.Tensor]:
    """Tensors on the device, and some on the host."""
    found = {}
    for i in range(draw.randint(1, 12)):
        shape = draw.choice([(), (0,), (3, 5), (70_001,), (2, 3, 4), (1 << 20,)])
        value = torch.randint(0, 2, shape).to(draw.choice(DTYPES))
        found[f"t{i}"] = value.to(gpu if draw.random() < 0.8 else "cpu")
    return found


def overwrite(tensors: dict[str, torch.Tensor]) -> None:
    for tensor in tensors.values():
        tensor.copy_(torch.zeros(tensor.shape, dtype=tensor.dtype) == 0)


@pytest.mark.parametrize("seed", range(draws(12, 200)))
def test_a_save_has_what_was_added(
    gpu: torch.device, seed: int, tmp_path: Path
) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    writer = CheckpointWriter()
    if draw.random() < 0.3:
        writer.reserve(1 << 20, torch.empty(0, device=gpu))
    for turn in range(2):
        tensors = drawn(draw, gpu)
        expected = {name: tensor.cpu().clone() for name, tensor in tensors.items()}
        folder = tmp_path / f"checkpoint-{turn}"
        snapshot = draw.random() < 0.8
        writer.begin(folder)
        writer.add_safetensors("a.safetensors", tensors, snapshot=snapshot)
        writer.add_torch("b.pt", {"state": [tensors]}, snapshot=snapshot)
        overwrite(tensors)
        if draw.random() < 0.3:
            writer.flush()
        writer.commit()
        writer.wait()
        assert verify_checkpoint(folder) == []
        there = torch.load(folder / "b.pt", weights_only=True)["state"][0]
        for name, tensor in load_file(folder / "a.safetensors").items():
            assert torch.equal(tensor, expected[name])
            assert torch.equal(there[name].cpu(), expected[name])
            assert there[name].device == tensors[name].device


def test_the_host_waits_for_no_copy(gpu: torch.device, tmp_path: Path) -> None:
    tensors = {str(i): torch.randn(1000, device=gpu) for i in range(20)}
    expected = {name: tensor.cpu() for name, tensor in tensors.items()}
    writer = CheckpointWriter()
    before = any_gpu.waits()
    writer.begin(tmp_path / "checkpoint-1")
    writer.add_safetensors("a.safetensors", tensors)
    writer.add_torch("b.pt", tensors)
    assert any_gpu.waits() == before
    writer.commit()  # and nothing else on the stream: the thread has to wait
    writer.wait()
    for name, tensor in load_file(tmp_path / "checkpoint-1/a.safetensors").items():
        assert torch.equal(tensor, expected[name])
    assert writer.snapshot_bytes > 0
    writer.release()
    assert writer.snapshot_bytes == 0


def test_memory_that_cannot_be_pinned(gpu: torch.device, tmp_path: Path) -> None:
    if any_gpu.REAL:
        pytest.skip("a GPU pins what it is asked for")
    tensors = {"a": torch.randn(70_000, device=gpu)}
    expected = tensors["a"].cpu()
    writer = CheckpointWriter()
    writer.begin(tmp_path / "checkpoint-1")
    emulated_torch.fail_pin()
    writer.add_safetensors("a.safetensors", tensors)
    overwrite(tensors)
    writer.commit()
    writer.wait()
    found = load_file(tmp_path / "checkpoint-1/a.safetensors")["a"]
    assert torch.equal(found, expected)


def test_a_save_dropped_in_the_middle(gpu: torch.device, tmp_path: Path) -> None:
    writer = CheckpointWriter()
    for turn in range(3):
        writer.begin(tmp_path / f"checkpoint-{turn}")
        writer.add_safetensors("a.safetensors", {"a": torch.randn(70_000, device=gpu)})
        writer.abort()
    assert list(tmp_path.iterdir()) == []


class Model(nn.Module):
    """With statistics that the forward pass writes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(8))
        self.last = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen += x.detach().sum(0)
        return {"loss": self.last(self.first(x)).square().mean()}


class Looks(ctrainer.TrainerCallback):
    """Weights and state after every fifth update."""

    def __init__(self) -> None:
        self.seen: dict[int, Any] = {}

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any, optimizer: Any, **_: Any
    ) -> None:
        if state.global_step % 5 == 0:
            weights = {k: v.cpu().clone() for k, v in model.state_dict().items()}
            moments = optimizer.state_dict()["state"]
            first = {k: v["exp_avg"].cpu().clone() for k, v in moments.items()}
            self.seen[state.global_step] = weights, first


class Counts(ctrainer.Trainer):
    """How often the host has waited within saves."""

    waits = 0

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        before = any_gpu.waits()
        super()._save_checkpoint(*args, **kwargs)
        self.waits += any_gpu.waits() - before


SHARDS = {"fsdp": True, "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}}


def train(
    gpu: torch.device, folder: Path, looks: Looks | None, save: bool, **options: Any
) -> int:
    """The waits of the host within its saves."""
    torch.manual_seed(0)
    rows = [{"x": torch.randn(8)} for _ in range(40)]
    args = ctrainer.TrainingArguments(
        output_dir=str(folder), max_steps=20, per_device_train_batch_size=2,
        save_strategy="steps" if save else "no", save_steps=5, logging_strategy="no",
        report_to="none", disable_tqdm=True, **options,
    )  # fmt: skip
    trainer = Counts(
        model=Model().to(gpu), args=args, train_dataset=rows,
        optimizer_cls_and_kwargs=(optim.AdamW, {"lr": 0.1}),
        callbacks=[] if looks is None else [looks],
    )  # fmt: skip
    gc.collect()  # releasing an engine waits for its last result
    trainer.train()
    return trainer.waits


def test_a_training_saves_what_each_update_left(
    gpu: torch.device, tmp_path: Path
) -> None:
    looks = Looks()
    train(gpu, tmp_path / "looked", looks, False)
    train(gpu, tmp_path / "saved", None, True)
    for step in (5, 10, 15, 20):
        folder = tmp_path / f"saved/checkpoint-{step}"
        weights, first = looks.seen[step]
        assert verify_checkpoint(folder) == []
        for name, tensor in load_file(folder / "model.safetensors").items():
            any_gpu.assert_same(tensor, weights[name])
        state = torch.load(folder / "optimizer.pt", weights_only=True)["state"]
        for number, moment in first.items():
            any_gpu.assert_same(state[number]["exp_avg"], moment)


def test_a_sharded_training_saves_what_each_update_left(
    gpu: torch.device, tmp_path: Path
) -> None:
    looks = Looks()
    train(gpu, tmp_path / "looked", looks, False, **SHARDS)
    train(gpu, tmp_path / "saved", None, True, **SHARDS)
    for step in (5, 10, 15, 20):
        folder = tmp_path / f"saved/checkpoint-{step}"
        weights, first = looks.seen[step]
        assert verify_checkpoint(folder) == []
        saved = load_file(folder / "shard-00000-of-00001.safetensors")
        for name, value in weights.items():
            any_gpu.assert_same(saved[f"model.{name}"], value)
        for number, moment in first.items():
            any_gpu.assert_same(saved[f"optimizer.{number}.exp_avg"], moment)


@pytest.mark.parametrize("options", [{}, SHARDS], ids=["whole", "shards"])
def test_a_save_waits_for_its_update_and_for_no_copy(
    gpu: torch.device, tmp_path: Path, options: dict[str, Any]
) -> None:
    waits = train(gpu, tmp_path, None, True, **options)
    assert waits <= 4 or any_gpu.REAL
