"""Classes of others, made before or after, on our engine."""

import pytest
from ranks import run_alone

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from ctrainer import hf  # noqa: E402
from ctrainer.trainer import Trainer  # noqa: E402


class Foreign(transformers.Trainer):
    """Written against transformers, with a base of its own between."""

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        return super().compute_loss(model, inputs, return_outputs, **kwargs)

    @property
    def described(self):
        return f"{__class__.__name__} of {super().__init__.__qualname__}"

    @staticmethod
    def plain(x):
        return x + 1


class Deeper(Foreign):
    def log(self, logs, start_time=None):
        self.seen = dict(logs)
        super().log(logs, start_time)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x, labels=None):
        y = self.layer(x).squeeze(-1)
        return {"loss": torch.nn.functional.mse_loss(y, labels), "logits": y}


def test_native_rebases_a_class_and_its_super_calls(tmp_path) -> None:
    cls = hf.native(Deeper)
    assert issubclass(cls, Trainer)
    assert not issubclass(cls, transformers.trainer.Trainer) or (
        transformers.trainer.Trainer is Trainer
    )
    assert cls.__name__ == "Deeper"
    assert cls.plain(1) == 2
    args = transformers.TrainingArguments(
        str(tmp_path), max_steps=3, use_cpu=True, report_to=[], logging_steps=1,
        save_strategy="no", disable_tqdm=True, per_device_train_batch_size=2,
    )  # fmt: skip
    rows = [{"x": torch.ones(4) * i, "labels": torch.tensor(1.0)} for i in range(8)]
    trainer = cls(model=Net(), args=args, train_dataset=rows)
    assert "Trainer.__init__" in trainer.described
    output = trainer.train()
    assert output.global_step == 3
    assert trainer.seen["train_loss"] == output.training_loss


def test_native_leaves_ours_alone_and_rejects_others() -> None:
    class Mine(Trainer):
        pass

    assert hf.native(Mine) is Mine
    with pytest.raises(TypeError, match="not a subclass"):
        hf.native(dict)


def test_patching_puts_ours_in_transformers_and_back() -> None:
    done = run_alone("trainer.patching")
    assert done.returncode == 0, done.stderr
