"""log_outputs and log_mean: means of what micro-batches give, against NumPy's of all
their numbers; save_minutes."""

import numpy as np
import pytest
from ranks import run, told

torch = pytest.importorskip("torch")

import ctrainer  # noqa: E402
from ctrainer import callbacks  # noqa: E402


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.seen = torch.nn.Linear(3, 1), []

    def forward(self, x, labels=None):
        y = self.layer(x).squeeze(-1)
        aux = y.detach().abs().mean()
        if self.training:
            self.seen.append(float(aux))
        loss = ((y - labels) ** 2).mean()
        return {"loss": loss, "aux": aux, "logits": y}


class Own(ctrainer.Trainer):
    def compute_loss(self, model, inputs, *args, **kwargs):
        self.log_mean("rows", len(inputs["x"]), weight=len(inputs["x"]))
        return super().compute_loss(model, inputs, *args, **kwargs)


def made(folder, cls=Own, **options):
    options = {"logging_steps": 3, "max_steps": 9, **options}
    args = ctrainer.TrainingArguments(
        str(folder), per_device_train_batch_size=4, gradient_accumulation_steps=2,
        use_cpu=True, report_to=[], disable_tqdm=True, **options,
    )  # fmt: skip
    torch.manual_seed(1)
    rows = [{"x": torch.randn(3), "labels": torch.randn(())} for _ in range(22)]
    trainer = cls(Net(), args, train_dataset=rows, eval_dataset=rows[:5])
    trainer.remove_callback(ctrainer.PrinterCallback)
    return trainer


def test_means_are_those_of_the_window_s_micro_batches(tmp_path) -> None:
    options = {"log_outputs": ["aux"], "eval_strategy": "steps", "eval_steps": 2}
    trainer = made(tmp_path, **options, save_strategy="no")
    trainer.train()
    logs = [e for e in trainer.state.log_history if "loss" in e]
    sizes = [4, 4, 4, 4, 4, 2] * 3  # 22 rows: three updates an epoch
    for i, log in enumerate(logs):
        window = slice(6 * i, 6 * i + 6)
        assert log["aux"] == pytest.approx(np.mean(trainer.model.seen[window]))
        rows = np.array(sizes[window], float)
        assert log["rows"] == pytest.approx(np.average(rows, weights=rows))
    assert len(logs) == 3
    assert not any("aux" in e for e in trainer.state.log_history if "eval_loss" in e)


@pytest.mark.parametrize(
    ("names", "match"),
    [(["loss"], "has 'loss' already"), (["more"], "the model's outputs have none"),
     (["logits"], r"of shape \(4,\)")],
)  # fmt: skip
def test_what_is_no_number_of_its_own_is_rejected(tmp_path, names, match) -> None:
    with pytest.raises(ValueError, match=match):
        made(tmp_path, log_outputs=names).train()


def test_ranks_log_the_mean_of_all(tmp_path) -> None:
    ranks = told(run(tmp_path, "trainer.logged_means"))
    every = [x for rank in ranks for x in rank["seen"]]
    assert len({round(x, 9) for x in every}) > 8
    for rank in ranks:
        assert rank["logged"][0]["own"] == pytest.approx(np.mean(every))
        assert rank["logged"][0]["first"] == 7.0  # of the rank that has it


def test_a_checkpoint_is_saved_by_the_clock(tmp_path, monkeypatch) -> None:
    now = [0.0]
    monkeypatch.setattr(callbacks.time, "monotonic", lambda: now[0])

    class Slow(ctrainer.TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            now[0] += 40.0

    trainer = made(
        tmp_path, ctrainer.Trainer, save_minutes=2.0, save_strategy="steps",
        save_steps=5, max_steps=14,
    )  # fmt: skip
    trainer.callback_handler.callbacks.insert(0, Slow())
    trainer.train()
    saved = {int(path.name.split("-")[1]) for path in tmp_path.glob("checkpoint-*")}
    # By the clock three steps after the last save, whatever that was for.
    assert saved == {3, 5, 8, 10, 13, 14}
