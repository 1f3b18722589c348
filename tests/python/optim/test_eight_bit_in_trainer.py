"""A Trainer with an optimizer whose state is kept in 8 bits."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from ctrainer import Trainer, TrainingArguments, optim
from ctrainer.adapters._torch_optim import package_optimizer_class


class Model(nn.Module):
    """A table and matrices, each of 4096 elements or more."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(100, 64)
        self.layers = nn.Sequential(
            nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 1)
        )

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.layers(self.table(x).mean(1)).squeeze(-1)
        return {"loss": nn.functional.mse_loss(y, labels)}


def rows() -> list[dict[str, Any]]:
    x = torch.randint(100, (64, 5), generator=torch.Generator().manual_seed(1))
    return [{"x": row, "labels": float(row.sum() % 3)} for row in x]


def trainer(folder: Path, name: str, **options: Any) -> Trainer:
    settings = {"save_strategy": "no", "max_steps": 12, "learning_rate": 3e-3}
    args = TrainingArguments(
        str(folder), optim=name, per_device_train_batch_size=16, report_to="none",
        disable_tqdm=True, **{**settings, **options},
    )  # fmt: skip
    return Trainer(model=Model(), args=args, train_dataset=rows(), eval_dataset=rows())


def losses(folder: Path, name: str, **options: Any) -> list[float]:
    run = trainer(folder, name, logging_steps=1, max_steps=40, **options)
    run.train()
    return [line["loss"] for line in run.state.log_history if "loss" in line]


def test_its_losses_stay_near_those_of_float32_state(tmp_path: Path) -> None:
    coded = losses(tmp_path, "adamw_8bit")
    wide = losses(tmp_path, "adamw_torch")
    assert coded != wide
    assert coded[-1] < coded[0] / 2
    torch.testing.assert_close(coded, wide, rtol=0.02, atol=0.01)


def test_embeddings_stay_in_32_bits(tmp_path: Path) -> None:
    run = trainer(tmp_path, "adamw_8bit", max_steps=1)
    run.train()
    kinds = {
        name: run.optimizer.state[p]["state1"].dtype
        for name, p in run.model.named_parameters()
    }
    coded = {name for name, dtype in kinds.items() if dtype == torch.uint8}
    assert coded == {"layers.0.weight", "layers.2.weight"}
    assert kinds["table.weight"] == torch.float32


@pytest.mark.parametrize("name", ["paged_adamw_8bit", "lion_8bit", "ademamix_8bit"])
def test_a_run_is_resumed_to_the_bit(name: str, tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 5, "optim_args": "optim_bits=8"}
    whole = trainer(tmp_path, name, **options)
    whole.train()
    saved = torch.load(tmp_path / "checkpoint-5" / "optimizer.pt")
    kinds = {state["state1"].dtype for state in saved["state"].values()}
    assert kinds == {torch.uint8, torch.float32}
    maps = [s["qmap1"] for s in saved["state"].values() if "qmap1" in s]
    assert len({m.data_ptr() for m in maps}) == 1
    resumed = trainer(tmp_path, name, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("name", "options", "of_cpu"),
    [
        ("adamw_8bit", "", optim.AdamW8bit),
        ("paged_adamw_32bit", "", optim.AdamW),
        ("lion_32bit", "", optim.Lion),
        ("paged_lion_8bit", "", optim.Lion8bit),
        ("paged_ademamix_8bit", "beta3=0.99,alpha=2", optim.AdEMAMix8bit),
    ],
)
def test_a_model_elsewhere_or_none_gets_bitsandbytes_own(
    name: str, options: str, of_cpu: type, tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes")
    args = TrainingArguments(str(tmp_path), optim=name, optim_args=options)
    theirs = transformers.Trainer.get_optimizer_cls_and_kwargs(args)
    assert theirs[0].__module__.startswith("bitsandbytes.")
    for model in (None, nn.Linear(2, 1, device="meta")):
        assert Trainer.get_optimizer_cls_and_kwargs(args, model) == theirs
    assert Trainer.get_optimizer_cls_and_kwargs(args, nn.Linear(2, 1))[0] is of_cpu


def test_bitsandbytes_own_keeps_embeddings_in_32_bits_as_there(tmp_path: Path) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    args = transformers.TrainingArguments(
        str(tmp_path), optim="adamw_8bit", use_cpu=True, report_to="none"
    )
    kinds = []
    for ours in (True, False):
        model = Model()
        if ours:
            cls, kwargs = package_optimizer_class(args, model)
            optimizer = cls(model.parameters(), **kwargs)
        else:
            optimizer = transformers.Trainer(model, args).create_optimizer()
        assert isinstance(optimizer, bnb.optim.AdamW)
        data = rows()
        x = torch.stack([row["x"] for row in data])
        model(x, torch.zeros(len(x)))["loss"].backward()
        optimizer.step()
        params = model.named_parameters()
        kinds.append({n: optimizer.state[p]["state1"].dtype for n, p in params})
    assert kinds[0] == kinds[1]
    assert kinds[0]["table.weight"] == torch.float32
    assert kinds[0]["layers.0.weight"] == torch.uint8
