"""auto_find_batch_size: evaluations and predictions in which batches fail for want of
memory, at drawn places, are those in which none does."""

import random

import numpy as np
import pytest
from ranks import run, told

torch = pytest.importorskip("torch")

import tiny  # noqa: E402

import ctrainer  # noqa: E402
from ctrainer.runtime import parts  # noqa: E402

_SPEED = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time")


class Tokens(torch.nn.Module):
    """The mean over targets, with predictions of the length of the batch."""

    main_input_name = "input_ids"

    def __init__(self, kind="mean"):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = torch.nn.Embedding(50, 8), torch.nn.Linear(8, 50)
        self.norm = torch.nn.BatchNorm1d(8) if kind == "normalized" else None
        self.kind, self.fails = kind, lambda rows: False

    def forward(self, input_ids, labels=None):
        if not self.training and self.fails(len(input_ids)):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        hidden = self.table(input_ids)
        if self.norm is not None:
            hidden = self.norm(hidden.transpose(1, 2)).transpose(1, 2)
        logits = self.head(hidden)
        if labels is None:
            return {"logits": logits}
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(),
            reduction="sum" if self.kind == "sum" else "mean",
        )  # fmt: skip
        if self.kind == "coupled":
            loss = loss**2 * len(labels)
        outputs = {"loss": loss, "logits": logits}
        return {**outputs, "count": loss} if self.kind == "scalar" else outputs


class Override(ctrainer.Trainer):
    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        loss, logits, labels = super().prediction_step(
            model, inputs, prediction_loss_only, ignore_keys
        )
        return loss, (None if logits is None else {"twice": 2 * logits}), labels


class Drawn:
    def __init__(self, seed, most):
        self.draw, self.left, self.failed = random.Random(seed), most, 0

    def __call__(self, rows):
        if rows < 3 or not self.left or self.draw.random() > 0.4:
            return False
        self.left, self.failed = self.left - 1, self.failed + 1
        return True


def on_host(values):
    return torch.as_tensor(values).cpu().numpy()


class Sums:
    """compute_metrics by batch: the rows and the mean loss of each."""

    def __init__(self):
        self.rows, self.right, self.losses = 0, 0, []

    def __call__(self, p, compute_result=True):
        predictions = p.predictions
        if isinstance(predictions, dict):
            predictions = predictions["twice"]
        labels = on_host(p.label_ids)
        self.rows += len(labels)
        right = on_host(predictions).argmax(-1) == labels
        self.right += right.sum()
        if p.losses is not None:
            self.losses += on_host(p.losses).tolist()
        found = {"rows": self.rows, "right": self.right, "inputs": len(p.inputs)}
        return {**found, "last": self.losses[-1]} if self.losses else found


def evaluated(folder, fails=None, cls=ctrainer.Trainer, kind="mean", data=None, **more):
    options = {"per_device_eval_batch_size": 8, "auto_find_batch_size": True, **more}
    args = ctrainer.TrainingArguments(
        str(folder), report_to=[], use_cpu=True, disable_tqdm=True,
        include_for_metrics=["inputs", "loss"], **options,
    )  # fmt: skip
    model = Tokens(kind)
    model.fails = fails or model.fails
    trainer = cls(
        model, args, eval_dataset=data or tiny.tokens(190, padded=True),
        compute_metrics=Sums() if kind != "scalar" else None,
    )  # fmt: skip
    trainer.remove_callback(ctrainer.PrinterCallback)
    return trainer


def plain_metrics(metrics):
    return {k: v for k, v in metrics.items() if not k.endswith(_SPEED)}


def arrays(value):
    return value["twice"] if isinstance(value, dict) else value


@pytest.mark.parametrize("by_batch", [False, True])
@pytest.mark.parametrize("cls", [ctrainer.Trainer, Override])
@pytest.mark.parametrize("kind", ["mean", "sum"])
def test_an_evaluation_with_failures_is_the_one_without(
    tmp_path, monkeypatch, by_batch, cls, kind
) -> None:
    options = {"batch_eval_metrics": by_batch, "eval_loss_by_token": kind == "mean"}
    plain = evaluated(tmp_path, cls=cls, kind=kind, **options)
    draws = Drawn(1, most=15)
    failing = evaluated(tmp_path, draws, cls, kind, **options)
    for _ in range(8):
        failing.compute_metrics = Sums()
        plain.compute_metrics = Sums()
        expected, found = (
            plain_metrics(trainer.evaluate()) for trainer in (plain, failing)
        )
        assert found == pytest.approx(expected, rel=1e-6)
        failing._evaluations.rows = 0  # whole batches again
    assert draws.failed == 15


@pytest.mark.parametrize("labelled", [True, False])
def test_a_prediction_with_failures_is_the_one_without(tmp_path, labelled) -> None:
    rows = tiny.tokens(61)
    rows = rows if labelled else [{"input_ids": row["input_ids"]} for row in rows]
    plain = evaluated(tmp_path).predict(rows)
    seen = []

    def fails(n):
        seen.append(n)
        return n > 3

    failing = evaluated(tmp_path, fails, Override)
    found = failing.predict(rows)
    assert np.allclose(arrays(found.predictions), 2 * plain.predictions, rtol=1e-6)
    if labelled:
        assert (found.label_ids == plain.label_ids).all()
    assert plain_metrics(found.metrics) == pytest.approx(
        plain_metrics(plain.metrics), rel=1e-6
    )
    assert failing._evaluations.rows == 2
    assert sum(n for n in seen if n <= 2) >= 61


def test_a_batch_with_labels_after_one_without_is_tried_out(tmp_path) -> None:
    trainer = evaluated(tmp_path, lambda n: n > 3, kind="coupled")
    rows = [{"input_ids": row["input_ids"]} for row in tiny.tokens(16)]
    assert len(trainer.predict(rows).predictions) == 16
    with pytest.raises(ValueError, match="not the mean nor the sum"):
        trainer.evaluate()


def test_a_loss_that_couples_rows_is_not_split_quietly(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"split_coupled_rows.*per_device_eval_batch"):
        evaluated(tmp_path, lambda n: n > 3, kind="coupled").evaluate()
    trainer = evaluated(
        tmp_path, lambda n: n > 3, kind="coupled", split_coupled_rows=True
    )
    assert trainer.evaluate()["eval_rows"] == 190


def test_a_batchnorm_couples_no_rows_of_an_evaluation(tmp_path) -> None:
    plain = evaluated(tmp_path, kind="normalized").evaluate()
    found = evaluated(tmp_path, lambda n: n > 3, kind="normalized").evaluate()
    assert found["eval_loss"] == pytest.approx(plain["eval_loss"], rel=1e-6)


def test_an_output_without_rows_is_named(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"output of shape \(\) for \d rows"):
        evaluated(tmp_path, lambda n: n > 3, kind="scalar").predict(tiny.tokens(9))


def test_an_evaluation_in_training_is_split_too(tmp_path) -> None:
    def run_with(fails):
        options = {"max_steps": 6, "eval_strategy": "steps", "eval_steps": 2}
        args = {"logging_steps": 1, "save_strategy": "no", "learning_rate": 0.01}
        trainer = evaluated(tmp_path, fails, **options, **args)
        trainer.train_dataset = tiny.tokens(64, padded=True)
        trainer.train()
        return [
            plain_metrics({k: v for k, v in e.items() if "train" not in k})
            for e in trainer.state.log_history
        ]

    plain, found = run_with(None), run_with(lambda n: n > 3)
    for a, b in zip(plain, found, strict=True):
        assert b == pytest.approx(a, rel=1e-6)


def test_a_row_that_does_not_fit_and_other_errors_are_raised(tmp_path) -> None:
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        evaluated(tmp_path, lambda n: True).evaluate()
    without = {"auto_find_batch_size": False}
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        evaluated(tmp_path, lambda n: n > 3, **without).evaluate()

    def broken(n):
        raise RuntimeError("size mismatch")

    with pytest.raises(RuntimeError, match="size mismatch"):
        evaluated(tmp_path, broken).evaluate()


def test_ranks_fail_each_at_its_own_times(tmp_path) -> None:
    ranks = told(run(tmp_path, "trainer.evaluation_out_of_memory"))
    for found in (found for rank in ranks for found in rank):
        assert found["failed"]
        assert found["failing"] == pytest.approx(found["plain"], rel=1e-6)
        assert found["same_predictions"]
        assert found["same_labels"]


def test_larger_parts_are_tried_again(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(parts, "GROWTH_INTERVAL", 0)
    seen = []

    def fails(n):
        seen.append(n)
        return n > 3 and len(seen) < 20

    evaluated(tmp_path, fails).evaluate()
    assert seen[-2] == 8
