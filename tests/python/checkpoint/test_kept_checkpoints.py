"""A checkpoint and its training_args.bin that were written before modules moved.

tests/kept/trainer was written by the Trainer of `Regression` below, six updates with a
cosine schedule, when AcceleratorConfig was in ctrainer._rank_options.
"""

import pickle
import pickletools
import shutil
from pathlib import Path

import pytest
import torch
from places import ROOT

from ctrainer import Trainer, TrainingArguments
from ctrainer.trainer_pt_utils import AcceleratorConfig

KEPT = ROOT / "tests" / "kept" / "trainer" / "checkpoint-3"
# What the run that wrote the files logged, and where it ended.
LOSSES = [1.490098, 0.970085, 0.307596, 0.123052, 0.251138, 0.046137]
WEIGHTS = [0.3374216556549072, 0.6309755444526672, -0.12794926762580872]
BIAS = [-0.0776585191488266]


class Regression(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 1)

    def forward(self, x, y):
        return {"loss": ((self.linear(x)[:, 0] - y) ** 2).mean()}


def examples() -> list[dict[str, torch.Tensor]]:
    return [
        {
            "x": torch.tensor([float(i % 3), float(i % 5) / 5, 1.0]),
            "y": torch.tensor(float(i % 7) / 7),
        }
        for i in range(24)
    ]


def test_a_run_resumes_from_a_checkpoint_of_before(tmp_path: Path) -> None:
    folder = shutil.copytree(KEPT, tmp_path / KEPT.name)
    args = TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, per_device_train_batch_size=4,
        max_steps=6, save_steps=3, logging_steps=1, learning_rate=0.1, report_to=[],
        disable_tqdm=True, accelerator_config={"even_batches": False},
        lr_scheduler_type="cosine", max_grad_norm=0.5,
    )  # fmt: skip
    trainer = Trainer(Regression(), args, train_dataset=examples())
    trainer.train(resume_from_checkpoint=str(folder))
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses == pytest.approx(LOSSES, abs=1e-5)
    linear = trainer.model.linear
    assert linear.weight[0].tolist() == pytest.approx(WEIGHTS, abs=1e-5)
    assert linear.bias.tolist() == pytest.approx(BIAS, abs=1e-5)


def test_training_args_of_before_load_as_today_s() -> None:
    args = torch.load(KEPT / "training_args.bin", weights_only=False)
    assert type(args) is TrainingArguments
    assert type(args.accelerator_config) is AcceleratorConfig
    assert args.accelerator_config.even_batches is False
    assert args.lr_scheduler_type == "cosine"


def test_pickled_names_of_before_are_importable() -> None:
    """Every class that the file names, by module and name."""
    archive = torch.PyTorchFileReader(str(KEPT / "training_args.bin"))
    strings, named = [], set()
    for opcode, value, _ in pickletools.genops(archive.get_record("data.pkl")):
        if opcode.name == "GLOBAL":
            named.add(tuple(value.split(" ")))
        elif isinstance(value, str):
            strings.append(value)
    assert ("ctrainer._rank_options", "AcceleratorConfig") in named
    for module, name in named:
        pickle.loads(f"c{module}\n{name}\n.".encode())
