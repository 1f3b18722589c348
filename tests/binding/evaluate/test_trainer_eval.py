"""Trainer's evaluation on its own: hooks, callbacks, errors, memory."""

import gc
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import ctrainer  # noqa: E402
from ctrainer import TrainerCallback, TrainingArguments  # noqa: E402
from ctrainer.trainer_utils import EvalLoopOutput  # noqa: E402


class Model(torch.nn.Module):
    """Linear on 4 features; the loss is the mean square."""

    def __init__(self, n_outputs: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(4, n_outputs)
        self.dropout = torch.nn.Dropout(0.5)

    def forward(self, x: Any, labels: Any = None) -> Any:
        logits = self.dropout(self.linear(x))
        if labels is None:
            return {"logits": logits}
        return {"loss": (logits - labels).square().mean(), "logits": logits}


class Data(torch.utils.data.Dataset):
    def __init__(self, n: int, labels: bool = True) -> None:
        self.n, self.labels = n, labels

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> dict[str, Any]:
        row = {"x": torch.full((4,), float(i))}
        return {**row, "labels": torch.zeros(3)} if self.labels else row


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    options.setdefault("per_device_eval_batch_size", 4)
    return TrainingArguments(
        str(folder), use_cpu=True, disable_tqdm=True, report_to="none", **options
    )


def make(
    folder: Path, cls: type = ctrainer.Trainer, n: int = 10, **options: Any
) -> Any:
    names = (
        "optimizers",
        "callbacks",
        "compute_metrics",
        "model",
        "eval_dataset",
        "data_collator",
    )
    own = {k: options.pop(k) for k in names if k in options}
    own.setdefault("eval_dataset", Data(n))
    model = own.pop("model", None) or Model()
    return cls(model, arguments(folder, **options), **own)


def test_model_is_evaluated_without_dropout_and_without_gradients(
    tmp_path: Path,
) -> None:
    trainer = make(tmp_path)
    with torch.no_grad():
        wanted = trainer.model.eval()(
            torch.stack([r["x"] for r in map(Data(10).__getitem__, range(10))])
        )
    trainer.model.train()
    seen = []

    def compute_loss(model: Any, inputs: Any, return_outputs: bool = False) -> Any:
        seen.append((model.training, torch.is_grad_enabled()))
        outputs = model(**inputs)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]

    trainer.compute_loss = compute_loss  # of 2021: no num_items_in_batch
    output = trainer.predict(Data(10))
    assert seen == [(False, False)] * 3
    assert torch.is_grad_enabled()
    np.testing.assert_allclose(output.predictions, wanted["logits"].numpy(), rtol=1e-6)


def test_every_hook_is_looked_up(tmp_path: Path) -> None:
    calls: list[str] = []

    class Recording(ctrainer.Trainer):
        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            calls.append("get_eval_dataloader")
            return super().get_eval_dataloader(eval_dataset)

        def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
            calls.append("evaluation_loop")
            return super().evaluation_loop(*args, **kwargs)

        def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
            calls.append("prediction_step")
            return super().prediction_step(*args, **kwargs)

        def _prepare_inputs(self, inputs: Any) -> Any:
            calls.append("_prepare_inputs")
            return super()._prepare_inputs(inputs)

        def compute_loss_context_manager(self) -> Any:
            calls.append("compute_loss_context_manager")
            return super().compute_loss_context_manager()

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            calls.append("compute_loss")
            return super().compute_loss(*args, **kwargs)

        def log(self, logs: Any) -> None:  # of 4.5: no start_time
            calls.append("log")
            super().log(logs)

    make(tmp_path, Recording, n=8).evaluate()
    step = ["prediction_step", "_prepare_inputs", "compute_loss_context_manager"]
    step.append("compute_loss")
    assert calls == ["get_eval_dataloader", "evaluation_loop", *step, *step, "log"]


def test_old_overrides_run_with_the_arguments_they_take(tmp_path: Path) -> None:
    class Old(ctrainer.Trainer):
        def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None) -> Any:
            return super().evaluate(eval_dataset, ignore_keys)

        def prediction_step(self, model: Any, inputs: Any, loss_only: bool) -> Any:
            loss, logits, labels = super().prediction_step(model, inputs, loss_only)
            return loss, logits * 0 + 7, labels

        def evaluation_loop(self, dataloader: Any, description: str) -> Any:
            return super().evaluation_loop(dataloader, description)

    trainer = make(tmp_path, Old, eval_dataset={"a": Data(4), "b": Data(5)})
    assert trainer.evaluate()["eval_loss"] > 0
    assert (trainer.predict(Data(3)).predictions == 7).all()


def test_prediction_loop_runs_where_args_ask_for_it(tmp_path: Path) -> None:
    class Old(ctrainer.Trainer):
        def prediction_loop(self, *args: Any, **kwargs: Any) -> Any:
            output = super().prediction_loop(*args, **kwargs)
            return EvalLoopOutput(None, None, {"eval_mine": output.num_samples}, 1)

    assert "eval_mine" not in make(tmp_path, Old).evaluate()
    trainer = make(tmp_path, Old, use_legacy_prediction_loop=True)
    assert trainer.evaluate()["eval_mine"] == 10


def test_callbacks_see_each_batch_and_may_replace_the_control(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Watch(TrainerCallback):
        def on_prediction_step(
            self, args: Any, state: Any, control: Any, **kw: Any
        ) -> Any:
            seen.append(len(kw["eval_dataloader"]))
            return ctrainer.TrainerControl(should_save=True)

        def on_evaluate(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
            seen.append(control.should_save)
            seen.append(kw["metrics"]["eval_loss"])

        def on_predict(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
            seen.append(set(kw["metrics"]))

    trainer = make(tmp_path, callbacks=[Watch()])
    loss = trainer.evaluate()["eval_loss"]
    assert seen == [3, 3, 3, True, loss]
    assert trainer.control.should_save
    del seen[:]
    trainer.predict(Data(2, labels=False))
    names = {f"test_{n}" for n in ("runtime", "samples_per_second", "steps_per_second")}
    assert seen[1:] == [names]


def test_seconds_are_those_that_evaluating_and_predicting_took(tmp_path: Path) -> None:
    class Timed(Data):
        def __getitem__(self, i: int) -> dict[str, Any]:
            read.append(time.time())
            return super().__getitem__(i)

    trainer = make(tmp_path)
    for prefix in ("eval", "test"):
        read: list[float] = []
        began = time.time()
        if prefix == "eval":
            metrics = trainer.evaluate(Timed(9))
        else:
            metrics = trainer.predict(Timed(9)).metrics
        most = time.time() - began
        rounding = 1e-4
        assert len(read) == 9
        seconds = metrics[f"{prefix}_runtime"]
        assert read[-1] - read[0] - rounding <= seconds <= most + rounding


def test_loss_counts_rows_and_by_token_counts_targets(tmp_path: Path) -> None:
    class Tagger(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.out = torch.nn.Embedding(7, 5)

        def forward(self, ids: Any, labels: Any) -> Any:
            logits = self.out(ids)
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), labels.flatten()
            )
            return {"loss": loss, "logits": logits}

    random = np.random.default_rng(0)
    data = []
    for i in range(11):
        labels = torch.from_numpy(random.integers(0, 5, 6))
        labels[1 + i % 5 :] = -100
        data.append(
            {"ids": torch.from_numpy(random.integers(0, 7, 6)), "labels": labels}
        )
    model = Tagger()
    ids, labels = (torch.stack([d[k] for d in data]) for k in ("ids", "labels"))
    with torch.no_grad():
        per_target = torch.nn.functional.cross_entropy(
            model(ids, labels)["logits"].flatten(0, 1),
            labels.flatten(),
            reduction="none",
        )
    wanted = float(per_target.sum() / labels.ne(-100).sum())
    for size in (1, 4, 16):
        options = {"per_device_eval_batch_size": size, "eval_loss_by_token": True}
        metrics = make(tmp_path, model=model, eval_dataset=data, **options).evaluate()
        # fp32 sums of at most 55 losses: the bound is their number of roundings.
        assert metrics["eval_loss_by_token"] == pytest.approx(wanted, rel=1e-6)


def test_loss_by_token_needs_labels_to_count(tmp_path: Path) -> None:
    trainer = make(tmp_path, eval_loss_by_token=True)
    with pytest.raises(ValueError, match="eval_loss_by_token needs"):
        trainer.predict(Data(4, labels=False))


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self) -> Any:
        return iter(())


@pytest.mark.parametrize(
    "data", [[], torch.utils.data.TensorDataset(torch.zeros(0)), Stream()]
)
def test_empty_data_is_rejected(data: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="empty"):
        make(tmp_path).evaluate(data)
    with pytest.raises(ValueError, match="empty"):
        make(tmp_path).predict(data)


def test_loop_without_a_batch_says_which_loop(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    loader = torch.utils.data.DataLoader(Data(3), batch_size=4, drop_last=True)
    with pytest.raises(ValueError, match=r"Prediction got no batch: .*drop_last"):
        trainer.evaluation_loop(loader, "Prediction")


def test_an_override_of_the_loop_may_measure_without_a_batch(tmp_path: Path) -> None:
    class Evaluator(ctrainer.Trainer):
        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            return torch.utils.data.DataLoader([])

        def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
            output = super().evaluation_loop(*args, **kwargs)
            assert (output.num_samples, output.metrics) == (0, {})
            output.metrics["eval_accuracy"] = 0.5
            return output

    metrics = make(tmp_path, Evaluator, eval_dataset=None).evaluate()
    assert metrics["eval_accuracy"] == 0.5
    assert "eval_loss" not in metrics


def test_rows_of_texts_count_once_each(tmp_path: Path) -> None:
    class Lists(torch.nn.Module):
        def forward(self, text: list[str], labels: list[Any]) -> Any:
            loss = torch.stack([label.mean() for label in labels]).mean()
            return {"loss": loss}

    rows = [{"text": str(i), "labels": torch.full((3,), float(i))} for i in range(6)]

    def collate(found: list[Any]) -> dict[str, list[Any]]:
        return {k: [row[k] for row in found] for k in ("labels", "text")}

    trainer = make(tmp_path, model=Lists(), eval_dataset=rows, data_collator=collate)
    assert trainer.evaluate()["eval_loss"] == np.mean(range(6))


def test_evaluation_without_a_data_set_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="eval_dataset"):
        make(tmp_path, eval_dataset=None).evaluate()


def test_bad_answers_of_hooks_are_named(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    trainer.prediction_step = lambda *a, **k: None
    with pytest.raises(TypeError, match=r"prediction_step .*return \(loss, pred"):
        trainer.evaluate()
    trainer = make(tmp_path)
    trainer.compute_loss = lambda model, inputs, **k: model(**inputs)["loss"]
    with pytest.raises(TypeError, match=r"returned a Tensor.*return_outputs=True"):
        trainer.evaluate()
    with pytest.raises(TypeError, match="compute_metrics must return a dict"):
        make(tmp_path, compute_metrics=lambda p: 3.0).evaluate()


def test_output_that_is_no_array_is_named(tmp_path: Path) -> None:
    class Odd(Model):
        def forward(self, x: Any, labels: Any = None) -> Any:
            return {**super().forward(x, labels), "cache": object()}

    trainer = make(tmp_path, model=Odd())
    with pytest.raises(TypeError, match=r"predictions\[1\]: .*ignore_keys"):
        trainer.predict(Data(4))
    assert trainer.predict(Data(4), ignore_keys=["cache"]).predictions.shape == (4, 3)


def test_bare_tensor_of_a_loss_override_is_the_prediction(tmp_path: Path) -> None:
    # transformers takes outputs[1:] of it, and so loses the first row of each batch.
    trainer = make(tmp_path)

    def compute_loss(model: Any, inputs: Any, return_outputs: bool = False) -> Any:
        outputs = model(**inputs)
        return outputs["loss"], outputs["logits"]

    trainer.compute_loss = compute_loss
    assert trainer.predict(Data(10)).predictions.shape == (10, 3)


def test_exception_leaves_training_mode_and_gradients_as_they_were(
    tmp_path: Path,
) -> None:
    trainer = make(tmp_path)
    trainer.model.train()
    trainer.is_in_train = True

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise KeyError("inside")

    trainer.compute_loss = fail
    with pytest.raises(KeyError, match="inside"):
        trainer.evaluate()
    assert trainer.model.training
    assert torch.is_grad_enabled()


def test_losses_of_a_vector_count_as_their_mean(tmp_path: Path) -> None:
    class PerRow(ctrainer.Trainer):
        def prediction_step(
            self, model: Any, inputs: Any, *args: Any, **kw: Any
        ) -> Any:
            return inputs["x"][:, 0], None, None

    assert make(tmp_path, PerRow, n=10).evaluate()["eval_loss"] == 4.5


def test_device_batches_wait_for_the_next_ones(tmp_path: Path) -> None:
    # What a GPU does, with tensors of the host: results must not depend on it.
    wanted = make(tmp_path).predict(Data(23))
    for steps in (None, 1, 3, 100):
        trainer = make(tmp_path, eval_accumulation_steps=steps)
        trainer._inputs_stay = False
        got = trainer.predict(Data(23))
        np.testing.assert_array_equal(got.predictions, wanted.predictions)
        assert got.metrics["test_loss"] == wanted.metrics["test_loss"]


def test_predictions_may_go_to_a_file(tmp_path: Path) -> None:
    wanted = make(tmp_path).predict(Data(300)).predictions
    got = make(tmp_path, eval_spill_bytes=1).predict(Data(300)).predictions
    np.testing.assert_array_equal(got, wanted)


def test_old_models_get_their_past_dropped_and_kept(tmp_path: Path) -> None:
    class Tuple(Model):
        def forward(self, x: Any, labels: Any = None) -> Any:
            logits = self.linear(x)
            return logits, logits.sum()

    trainer = make(tmp_path, model=Tuple(), past_index=2)
    trainer._past = "of training"
    trainer.predict(Data(4, labels=False))
    assert trainer._past.ndim == 0


def test_run_is_announced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("ctrainer", "transformers"):  # whichever is loaded
        logging.getLogger(f"{name}.trainer").addHandler(caplog.handler)
        caplog.set_level(logging.INFO, logger=f"{name}.trainer")
    make(tmp_path).evaluate()
    assert "Running Evaluation" in caplog.text
    assert "Num examples = 10" in caplog.text


class Wide(Model):
    """256 KiB of logits a row, made fresh for each batch."""

    def forward(self, x: Any, labels: Any = None) -> Any:
        logits = x.new_zeros(x.shape[0], 256, 256) + x[:, :1, None]
        return {"loss": logits.mean(), "logits": logits}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_memory_is_the_predictions_and_a_few_batches(tmp_path: Path) -> None:
    peak = 0

    class Watch(TrainerCallback):
        def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
            nonlocal peak
            peak = max(peak, resident_bytes())

    trainer = make(tmp_path, model=Wide(), callbacks=[Watch()])
    trainer.predict(Data(8))
    gc.collect()
    before, peak = resident_bytes(), 0
    predictions = trainer.predict(Data(256)).predictions
    batch_bytes = 4 * 256 * 256 * 4
    assert predictions.nbytes == 256 << 18
    # The forward holds a batch, its sum and what the allocator keeps; huge pages of
    # 2 MiB round the array up.
    assert peak - before <= predictions.nbytes + 6 * batch_bytes + (4 << 20)


def test_no_leaks(tmp_path: Path) -> None:
    trainer = make(tmp_path, compute_metrics=lambda p: {"n": len(p.label_ids)})
    trainer.log = lambda logs: None  # the history of logs is meant to grow
    data = Data(4)

    def exercise() -> None:
        trainer.evaluate(data)
        trainer.predict(data)

    def growth() -> int:
        """Of memory blocks, in 60 rounds."""
        gc.collect()
        before = sys.getallocatedblocks()
        for _ in range(60):
            exercise()
        gc.collect()
        return sys.getallocatedblocks() - before

    exercise()
    gc.collect()
    counts = sys.getrefcount(trainer), sys.getrefcount(trainer.model)
    # torch and NumPy fill caches now and then; what leaks does so in every window.
    assert min(growth() for _ in range(8)) < 60
    assert (sys.getrefcount(trainer), sys.getrefcount(trainer.model)) == counts


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_cuts_an_evaluation_within_training_short(
    number: int, tmp_path: Path
) -> None:
    batches = 0

    class Interrupt(TrainerCallback):
        def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
            nonlocal batches
            batches += 1
            if batches == 2:
                os.kill(os.getpid(), number)

    def on_term(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, on_term)
    try:
        trainer = make(
            tmp_path,
            n=100,
            callbacks=[Interrupt()],
            max_steps=3,
            eval_strategy="steps",
            eval_steps=1,
            save_strategy="no",
        )
        trainer.train_dataset = Data(40)
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert batches == 2
    assert (tmp_path / "checkpoint-1").is_dir()


def plateau_trainer(folder: Path, metric: str) -> Any:
    """Halves the rate at each evaluation that does not lower eval_constant."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=0.5, patience=0
    )
    trainer = make(
        folder,
        model=model,
        optimizers=(optimizer, schedule),
        compute_metrics=lambda p: {metric: 1.0},
        eval_strategy="steps",
        eval_steps=1,
        max_steps=3,
        save_strategy="no",
        metric_for_best_model="constant",
        greater_is_better=False,
    )
    trainer.train_dataset = Data(40)
    return trainer


def test_learning_rate_follows_the_metric(tmp_path: Path) -> None:
    trainer = plateau_trainer(tmp_path, "constant")
    trainer.train()
    assert trainer.optimizer.param_groups[0]["lr"] == 0.25e-3


def test_metric_that_the_learning_rate_needs_is_named(tmp_path: Path) -> None:
    trainer = plateau_trainer(tmp_path, "other")
    with pytest.raises(KeyError, match=r"eval_constant.*eval_other"):
        trainer.train()


@pytest.mark.parametrize("stop", [KeyboardInterrupt, MemoryError])
def test_what_stops_the_program_while_rows_are_counted_goes_on(
    tmp_path: Path, stop: type[BaseException]
) -> None:
    class Uncounted(Data):
        stops = True

        def __len__(self) -> int:
            if self.stops:
                self.stops = False
                raise stop
            return self.n

    class Own(ctrainer.Trainer):
        def get_eval_dataloader(self, dataset: Any = None) -> Any:
            return torch.utils.data.DataLoader(Uncounted(8), sampler=range(8))

    trainer = make(tmp_path, Own, n=8)
    with pytest.raises(stop):
        trainer.evaluate()
