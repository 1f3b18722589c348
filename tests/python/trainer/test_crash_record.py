"""crash_record: an update that fails is recorded, and fails again in the same place."""

import json
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

import ctrainer  # noqa: E402
from ctrainer.trainer import crash  # noqa: E402


class Head(torch.nn.Module):
    """Fails as its model asks."""

    def __init__(self):
        super().__init__()
        self.layer, self.kind = torch.nn.Linear(8, 1), None
        self.seen = []

    def forward(self, hidden):
        self.seen.append(hidden.detach().clone())
        if self.kind == "raises" and hidden.abs().sum() > 30:
            raise ArithmeticError("too large")
        scale = float("inf") if self.kind == "nan" and len(self.seen) > 5 else 1.0
        return self.layer(hidden * 0.0 * scale + hidden)


class Net(torch.nn.Module):
    def __init__(self, kind=None):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = torch.nn.Linear(4, 8), Head()
        self.drop = torch.nn.Dropout(0.5)
        self.head.kind = kind

    def forward(self, x, labels=None, notes=None):
        y = self.head(self.drop(torch.tanh(self.body(x)))).squeeze(-1)
        return {"loss": ((y - labels) ** 2).mean(), "logits": y}


def made(folder, kind, **options):
    options = {"crash_record": True, "gradient_accumulation_steps": 2, **options}
    args = ctrainer.TrainingArguments(
        str(folder), per_device_train_batch_size=6, max_steps=40, use_cpu=True,
        report_to=[], disable_tqdm=True, save_strategy="no", learning_rate=0.05,
        remove_unused_columns=False, **options,
    )  # fmt: skip
    torch.manual_seed(1)
    rows = [
        {"x": torch.randn(4), "labels": torch.randn(()), "notes": str(i)}
        for i in range(60)
    ]

    def collate(rows):
        batch = {k: torch.stack([r[k] for r in rows]) for k in ("x", "labels")}
        return {**batch, "notes": [r["notes"] for r in rows]}

    trainer = ctrainer.Trainer(Net(kind), args, collate, train_dataset=rows)
    trainer.remove_callback(ctrainer.PrinterCallback)
    return trainer


def test_what_raised_raises_again_with_the_same_numbers(tmp_path) -> None:
    trainer = made(tmp_path, "raises")
    with pytest.raises(ArithmeticError, match="too large") as raised:
        trainer.train()
    folder = str(tmp_path / "crash")
    assert any(f"ctrainer replay {folder}" in note for note in raised.value.__notes__)
    content = json.loads((tmp_path / "crash" / "crash.json").read_text())
    assert content["step"] == trainer.state.global_step + 1 > 2
    assert content["error"] == "ArithmeticError: too large"
    assert "in forward" in content["traceback"]
    assert content["arguments"]["learning_rate"] == 0.05
    assert len(content["batches"]) == 2
    # Dropout draws as it did, so that the same hidden values are too large.
    again = made(tmp_path / "again", "raises")
    found = crash.replay(folder, again)
    assert found == "raised in model.head: ArithmeticError: too large"
    assert torch.equal(again.model.head.seen[-1], trainer.model.head.seen[-1])


@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_first_tensor_that_is_not_finite_is_named(tmp_path, accumulation) -> None:
    options = {"nonfinite_policy": "stop", "gradient_accumulation_steps": accumulation}
    trainer = made(tmp_path, "nan", **options)
    with pytest.raises(FloatingPointError):
        trainer.train()
    again = made(tmp_path / "again", "nan", **options)
    again.model.head.seen = [None] * 9
    found = crash.replay(str(tmp_path / "crash"), again)
    assert found.startswith("not finite: output of model.head.layer (Linear)")
    well = crash.replay(str(tmp_path / "crash"), made(tmp_path / "well", None))
    assert well.startswith("nothing failed this time; then it was FloatingPointError")


def test_weights_are_those_of_before_the_update(tmp_path) -> None:
    trainer = made(tmp_path, "raises")
    with pytest.raises(ArithmeticError):
        trainer.train()
    loaded = Net()
    trainer._adapter.checkpoints.load_model(loaded, str(tmp_path / "crash"))
    for a, b in zip(loaded.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_nothing_is_recorded_unasked_or_after_ctrl_c(tmp_path) -> None:
    with pytest.raises(ArithmeticError):
        made(tmp_path / "off", "raises", crash_record=False).train()
    trainer = made(tmp_path / "stopped", None)

    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    trainer.model.head.register_forward_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert not list(tmp_path.glob("*/crash*"))


def test_a_record_that_fails_does_not_hide_the_error(tmp_path, monkeypatch) -> None:
    trainer = made(tmp_path, "raises")

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trainer._adapter.checkpoints, "save_tensors", full)
    with pytest.raises(ArithmeticError) as raised:
        trainer.train()
    assert any("could not be recorded" in note for note in raised.value.__notes__)
    assert not list(tmp_path.glob("crash*")) + list(tmp_path.glob(".ctrainer-crash*"))


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (None, "holds no crash.json"),
        ('{"version": 9}', "version 9"),
        ("{", "crash.json"),
    ],
)
def test_what_is_no_record_is_rejected(tmp_path, damage, match) -> None:
    if damage is not None:
        (tmp_path / "crash.json").write_text(damage)
    with pytest.raises(ValueError, match=match):
        crash.replay(str(tmp_path), None)


def test_the_command_finds_it_with_transformers_models_alone(tmp_path) -> None:
    hf = pytest.importorskip("transformers")
    config = hf.GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    rows = [{"input_ids": [i % 16] * 6, "labels": [i % 16] * 6} for i in range(40)]
    rows[25]["input_ids"] = [99] * 6  # no such token
    args = ctrainer.TrainingArguments(
        str(tmp_path), per_device_train_batch_size=4, max_steps=10, use_cpu=True,
        report_to=[], disable_tqdm=True, save_strategy="no", crash_record=True,
        bf16=True,
    )  # fmt: skip
    trainer = ctrainer.Trainer(hf.GPT2LMHeadModel(config), args, train_dataset=rows)
    with pytest.raises(IndexError):
        trainer.train()
    command = [sys.executable, "-m", "ctrainer", "replay", str(tmp_path / "crash")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("raised in model.transformer.wte: IndexError")
