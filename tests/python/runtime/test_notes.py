"""The note of an exception that a run raises: what ran, where, and with which rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import fairseq_tiny
import pytest
import tiny
import torch

from ctrainer import Trainer, TrainerCallback
from ctrainer.fairseq import EpochBatchIterator
from ctrainer.runtime import notes


class Failing(tiny.Net):
    """Fails in its n-th forward pass."""

    def __init__(self, at: int, error: BaseException | None = None) -> None:
        super().__init__()
        self.at, self.calls = at, 0
        self.error = error or ValueError("of the user")

    def forward(self, x: torch.Tensor, labels: Any = None) -> Any:
        self.calls += 1
        if self.calls == self.at:
            raise self.error
        return super().forward(x, labels)


class Rows:
    """Rows by index; reading one of them fails."""

    def __init__(self, bad: int) -> None:
        self.rows, self.bad = tiny.rows(32), bad

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        if index == self.bad:
            raise KeyError("x")
        return self.rows[index]


class FailingCallback(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            raise OSError("of the user")


def make(model: Any = None, data: Any = None, **options: Any) -> Any:
    sizes = {"per_device_train_batch_size": 4, "num_train_epochs": 2}
    rows = tiny.rows(32) if data is None else data
    return tiny.make(Trainer, model or tiny.Net(), rows, **{**sizes, **options})


def note_of(run: Callable[[], Any]) -> list[str]:
    """The lines of the one note of what run() raises."""
    with pytest.raises(Exception) as info:  # noqa: PT011
        run()
    (note,) = info.value.__notes__
    return str(note).splitlines()


def test_a_model_is_located_to_the_micro_batch_and_its_rows() -> None:
    seen: list[Any] = []
    trainer = make(Failing(12), gradient_accumulation_steps=2)
    trainer.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["x"]), with_kwargs=True
    )
    lines = note_of(trainer.train)
    assert lines[0] == "ctrainer: raised in Failing.forward, in training_step"
    assert lines[1] == "  at step 6 of 8, epoch 2 of 2, micro-batch 2 of 2"
    assert lines[3] == "  batch: x float32 [4, 8], labels float32 [4]"
    named = [int(i) for i in lines[2].split("rows ")[1].split(" of")[0].split(", ")]
    data = tiny.rows(32)
    assert torch.equal(seen[-1], torch.stack([data[i]["x"] for i in named]))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_is_located_to_the_row(workers: int) -> None:
    trainer = make(data=Rows(17), dataloader_num_workers=workers)
    ran, at, rows = note_of(trainer.train)[:3]
    assert ran.endswith("get_batch_samples")
    assert "epoch 1 of 2, micro-batch 1 of 1" in at
    assert "17" in rows.replace(" of", ",").split("rows ")[1].split(", ")
    assert rows.startswith("  reading row 17") == (workers == 0)


def test_a_resumed_run_knows_the_rows() -> None:
    trainer = make(save_steps=2, save_strategy="steps", max_steps=2)
    trainer.train()
    again = make(
        Failing(1), output_dir=trainer.args.output_dir, save_strategy="no", max_steps=8
    )
    lines = note_of(lambda: again.train(resume_from_checkpoint=True))
    assert lines[1] == "  at step 3 of 8, epoch 1 of 1, micro-batch 1 of 1"
    assert lines[2].startswith("  rows ")


def test_a_callback_is_located_by_class_and_event() -> None:
    lines = note_of(make(callbacks=[FailingCallback()]).train)
    assert lines == [
        "ctrainer: raised in FailingCallback.on_step_end",
        "  after step 3 of 16, epoch 0.375",
    ]


def test_an_evaluation_within_a_training_has_one_note() -> None:
    model = Failing(5 + 2)  # 4 updates, then the third batch of the evaluation
    trainer = make(
        model, parts={"eval_dataset": tiny.rows(6)}, eval_strategy="steps",
        eval_steps=4, per_device_eval_batch_size=2,
    )  # fmt: skip
    assert note_of(trainer.train) == [
        "ctrainer: raised in Failing.forward, in prediction_step",
        "  at batch 3 of an evaluation, after step 4",
        "  rows 4, 5 of the dataset",
        "  batch: x float32 [2, 8], labels float32 [2]",
    ]


def test_a_read_of_an_evaluation_is_located() -> None:
    lines = note_of(lambda: make().evaluate(Rows(17)))
    assert lines[0] == "ctrainer: raised in Rows.__getitem__"
    assert lines[1] == "  at batch 3 of an evaluation, after step 0"
    assert lines[2].startswith("  reading row 17, rows 16, 17, 18, 19")


def test_compute_metrics_is_located_with_what_it_got() -> None:
    def squared(predicted: Any) -> Any:
        return {"error": float((predicted.predictions - predicted.label_ids) ** 2)}

    parts = {"compute_metrics": squared}
    trainer = make(parts=parts, per_device_eval_batch_size=4)
    where = "  at the end of an evaluation, after step 0"
    assert note_of(lambda: trainer.evaluate(tiny.rows(6))) == [
        "ctrainer: raised in squared, as compute_metrics",
        where,
        "  predictions float32 [6], label_ids float32 [6]",
    ]


def test_compute_metrics_of_several_outputs_has_the_remedy() -> None:
    class Two(tiny.Net):
        def forward(self, x: Any, labels: Any = None) -> Any:
            out = super().forward(x, labels)
            return {"loss": out["loss"], "a": x, "b": labels}

    def best(predicted: Any) -> Any:
        return {"best": predicted.predictions.argmax(-1)}

    trainer = make(Two(), parts={"compute_metrics": best})
    lines = note_of(lambda: trainer.evaluate(tiny.rows(6)))
    assert lines[0] == "ctrainer: raised in best, as compute_metrics"
    assert lines[2:] == [
        "  predictions (float32 [6, 8], float32 [6]), label_ids float32 [6]",
        "  remedy: predictions has 2 outputs of the model; take one, such as "
        "predictions[0]",
    ]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("buffered", [0, 2])
def test_an_iterator_of_fairseq_is_located(workers: int, buffered: int) -> None:
    epochs = EpochBatchIterator(
        Rows(19), None, [[i, i + 1] for i in range(0, 32, 2)], num_shards=2,
        shard_id=1, num_workers=workers, buffer_size=buffered,
    )  # fmt: skip
    batches = epochs.next_epoch_itr(shuffle=False)
    lines = note_of(lambda: list(batches))
    # Rank 1 has the batches 1, 3, 5, 7 and 9; that with rows 18 and 19 is its fifth.
    rows = "rows 18, 19 of the dataset"
    if workers == 0:
        assert lines[0] == "ctrainer: raised in Rows.__getitem__"
        rows = f"reading row 19, {rows}"
    assert lines[1:3] == ["  at batch 5 of epoch 1, rank 1 of 2", f"  {rows}"]


def test_the_layer_is_named_and_the_remedy() -> None:
    lines = note_of(make(data=[{"x": torch.zeros(5), "labels": 0.0}] * 8).train)
    assert lines[0].startswith("ctrainer: raised in Linear.forward (layers.0), in Net.")
    assert lines[-1].startswith("  remedy: compare the shapes of the batch")


def test_a_sample_of_fairseq_is_located(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # for crash.pt
    trainer = fairseq_tiny.trainer()
    first, second = fairseq_tiny.batches(2)
    second = {**second, "words": second["words"] + 99, "id": torch.tensor([3, 8])}
    lines = note_of(lambda: trainer.train_step([first, second]))
    ran = "Embedding.forward (embed), in Model.forward, in Task.train_step"
    assert lines[0] == f"ctrainer: raised in {ran}"
    assert lines[1] == "  at update 1, sample 2 of 2"
    assert lines[2].startswith("  rows 3, 8 of the dataset, words int64 [2, 6]")
    assert lines[3].startswith("  remedy: an index is not below the rows")
    lines = note_of(lambda: trainer.valid_step(second))
    assert lines[1] == "  at validation before update 1, sample 1 of 1"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
def test_an_interrupt_gets_no_note(error: BaseException) -> None:
    with pytest.raises(type(error)) as info:
        make(Failing(2, error)).train()
    assert not hasattr(info.value, "__notes__")


class NoNotes(Exception):
    def add_note(self, note: str) -> None:
        raise OSError("no notes here")


def test_the_exception_stays_where_its_note_fails() -> None:
    with pytest.raises(NoNotes) as info:
        make(Failing(2, NoNotes())).train()
    assert info.value.__context__ is None


@pytest.mark.parametrize("error", [MemoryError(), KeyboardInterrupt()])
def test_a_note_drops_no_memory_error_and_no_interrupt(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(*facts: Any) -> Any:
        raise error

    monkeypatch.setitem(notes._PLACES, "training", fail)
    with pytest.raises(type(error)):
        make(Failing(2)).train()


def test_a_rank_is_named() -> None:
    class Args:
        world_size, process_index = 4, 2

    error = ValueError("of the user")
    notes.locate(error, "callback", (FailingCallback(), "on_log", Args, object()))
    notes.locate(error, "callback", (FailingCallback(), "on_save", Args, object()))
    assert error.__notes__ == [
        "ctrainer: raised in FailingCallback.on_log\n  after step 0 of 0, rank 2 of 4"
    ]
