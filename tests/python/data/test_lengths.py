"""Batches by length: their rows, their limits, the order of an evaluation's results."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ctrainer
from ctrainer.adapters import _torch_ranks as ranks
from ctrainer.adapters.lengths import TokenBatches
from ctrainer.arguments.accelerator import BatchPlan
from ctrainer.trainer import data

N = 53
LENGTHS = np.random.default_rng(3).integers(1, 40, N)


class Counted(nn.Module):
    """Says of each row which one it is; its loss is of the weight and the row."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.shapes: list[tuple[int, ...]] = []

    def forward(self, input_ids: Any, labels: Any) -> dict[str, Any]:
        self.shapes.append(tuple(input_ids.shape))
        number = input_ids[:, 0].float()
        return {"loss": (self.weight * number).mean(), "logits": {"row": number}}


def rows() -> list[dict[str, Any]]:
    """Row i begins with i, and has LENGTHS[i] tokens."""
    return [{"input_ids": [i] * n, "labels": i} for i, n in enumerate(LENGTHS.tolist())]


def collate(features: list[dict[str, Any]]) -> dict[str, Any]:
    width = max(len(row["input_ids"]) for row in features)
    padded = [[*r["input_ids"], *[0] * (width - len(r["input_ids"]))] for r in features]
    labels = torch.tensor([row["labels"] for row in features])
    return {"input_ids": torch.tensor(padded), "labels": labels}


def trainer_of(folder: Path, dataset: Any, **given: Any) -> ctrainer.Trainer:
    args = ctrainer.TrainingArguments(
        str(folder), report_to="none", disable_tqdm=True, use_cpu=True, max_steps=9,
        logging_steps=1, save_steps=4, learning_rate=1e-3, **given,
    )  # fmt: skip
    return ctrainer.Trainer(
        Counted(), args, train_dataset=dataset, eval_dataset=dataset,
        data_collator=collate,
    )  # fmt: skip


def losses(trainer: ctrainer.Trainer) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


BY_LENGTH = [
    {"train_sampling_strategy": "group_by_length"},
    {"max_tokens_per_batch": 64},
]


@pytest.mark.parametrize("how", BY_LENGTH)
def test_results_are_in_the_order_of_the_data(tmp_path: Path, how: Any) -> None:
    trainer = trainer_of(tmp_path, rows(), per_device_eval_batch_size=4, **how)
    found = trainer.predict(rows())
    assert found.predictions["row"].tolist() == list(range(N))
    assert found.label_ids.tolist() == list(range(N))
    padded = sum(a * b for a, b in trainer.model.shapes)
    assert padded < 1.2 * LENGTHS.sum()
    assert trainer.model.shapes[0][1] == LENGTHS.max()
    plain = trainer_of(tmp_path, rows(), per_device_eval_batch_size=4)
    plain.predict(rows())
    assert sum(a * b for a, b in plain.model.shapes) > 1.4 * LENGTHS.sum()


def test_results_without_a_row_each_keep_the_order_of_length(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = trainer_of(tmp_path, rows(), **BY_LENGTH[0])
    trainer.preprocess_logits_for_metrics = lambda logits, labels: torch.cat(
        [logits["row"]] * 2
    )
    found = trainer.predict(rows())
    by_length = np.argsort(-LENGTHS, kind="stable")
    assert found.label_ids.tolist() == by_length.tolist()
    assert "stay in the order of length" in caplog.text


def test_lists_of_batches_stay_in_the_order_of_the_data(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, rows(), eval_do_concat_batches=False, **BY_LENGTH[0])
    found = trainer.predict(rows()).label_ids
    assert np.concatenate(found).tolist() == list(range(N))


def test_rows_are_read_once_for_their_lengths(tmp_path: Path) -> None:
    class Read(list[Any]):
        times = 0

        def __getitem__(self, index: Any) -> Any:
            self.times += 1
            return super().__getitem__(index)

        def __iter__(self) -> Any:
            return (self[i] for i in range(len(self)))

    dataset = Read(rows())
    trainer = trainer_of(tmp_path, dataset, **BY_LENGTH[0])
    for times in (1, 2, 3):
        trainer.evaluate()
        assert dataset.times == N * (1 + times)


def test_a_length_that_the_model_does_not_take_is_used(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    known = datasets.Dataset.from_list(
        [{**row, "length": -i} for i, row in enumerate(rows())]
    )
    trainer = trainer_of(tmp_path, known, **BY_LENGTH[0])
    sampler = trainer.get_eval_dataloader().batch_sampler.sampler
    assert sampler.order.tolist() == list(range(N))


@pytest.mark.parametrize("indirect", [False, True])
@pytest.mark.parametrize("how", ["plain", "torch", "transform"])
def test_lengths_of_lists_are_those_of_the_rows(
    tmp_path: Path, indirect: bool, how: str
) -> None:
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_list(rows())
    expected = LENGTHS
    if indirect:
        chosen = [5, 2, 40, 2]
        dataset, expected = dataset.select(chosen), LENGTHS[chosen]
    if how == "torch":
        dataset = dataset.with_format("torch")
    if how == "transform":
        expected = expected + 1
        dataset.set_transform(
            lambda rows: {**rows, "input_ids": [[0, *r] for r in rows["input_ids"]]}
        )
    trainer = trainer_of(tmp_path, dataset, **BY_LENGTH[0])
    sampler = trainer.get_train_dataloader().sampler
    assert sampler.lengths.tolist() == expected.tolist()


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=80),
    most=st.integers(30, 90),
    packed=st.booleans(),
    seed=st.none() | st.integers(0, 9),
    n=st.integers(0, 90),
)
def test_batches_of_tokens_keep_the_limit_and_have_each_row_once(
    lengths: list[int], most: int, packed: bool, seed: int | None, n: int
) -> None:
    batches = TokenBatches(lengths, most, packed, seed)
    for epoch in range(3):
        batches.set_epoch(epoch)
        found = list(batches)
        assert sorted(itertools.chain.from_iterable(found)) == list(range(len(lengths)))
        assert len(found) == len(batches)
        for batch in found:
            sizes = [lengths[i] for i in batch]
            assert (sum(sizes) if packed else max(sizes) * len(sizes)) <= most
        batches.set_epoch(epoch)
        assert list(batches.after(n)) == found[n:]
    # Batches are full: the first row of the next one had no room.
    sizes = np.asarray(lengths)[batches.order]
    place = 0
    for batch in batches.batches[:-1]:
        part = sizes[place : place + len(batch) + 1]
        assert (part.sum() if packed else part.max() * len(part)) > most
        place += len(batch)


def test_epochs_have_the_batches_in_another_order() -> None:
    batches = TokenBatches(LENGTHS, 64, seed=1)
    first, second = list(batches), list(batches)
    assert first != second
    assert sorted(first) == sorted(second)
    batches.seed = 2
    batches.set_epoch(0)
    assert list(batches) not in (first, second)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_of_token_batches_is_resumed(tmp_path: Path, workers: int) -> None:
    given = {**BY_LENGTH[1], "dataloader_num_workers": workers}
    whole = trainer_of(tmp_path / "a", rows(), **given)
    whole.train()
    loader = whole.get_train_dataloader()
    assert len(loader) < N / 2
    assert not hasattr(loader, "total_batch_size")  # no batch has a known one
    assert whole.set_initial_training_values(whole.args, loader)[3] == (
        9 * N // len(loader)
    )
    again = trainer_of(tmp_path / "b", rows(), **given, seed=5)
    again.train(str(tmp_path / "a" / "checkpoint-4"))
    assert losses(again) == losses(whole)
    assert len(set(losses(whole))) > 5


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_share_the_batches(world_size: int) -> None:
    found = []
    for rank in range(world_size):
        plan = BatchPlan(rank, world_size, False, None, True, True)
        loader = ranks.rank_loader(
            rows(), plan, sampler=TokenBatches(LENGTHS, 64, seed=0), batch_size=8,
            drop_last=False, collate_fn=lambda part: [row["labels"] for row in part],
        )  # fmt: skip
        found.append(list(loader))
    assert len({len(batches) for batches in found}) == 1
    rounds = [batch for batches in zip(*found, strict=True) for batch in batches]
    whole = list(TokenBatches(LENGTHS, 64, seed=0))
    assert rounds[: len(whole)] == whole
    assert rounds[len(whole) :] == whole[: len(rounds) - len(whole)]


def test_what_has_no_batches_of_tokens_is_named(tmp_path: Path) -> None:
    class Own(ctrainer.Trainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return torch.utils.data.SequentialSampler(rows())

    n = int(LENGTHS.max())
    most, fewer = {"max_tokens_per_batch": n}, {"max_tokens_per_batch": n - 1}
    with pytest.raises(ValueError, match=f"has {n} tokens and .*_batch={n - 1};"):
        trainer_of(tmp_path, rows(), **fewer).get_train_dataloader()
    args = trainer_of(tmp_path, rows(), **most).args
    with pytest.raises(ValueError, match="SequentialSampler, which an override"):
        Own(Counted(), args, train_dataset=rows()).get_train_dataloader()
    stream = type(
        "S", (torch.utils.data.IterableDataset,), {"__iter__": lambda s: iter(rows())}
    )
    with pytest.raises(ValueError, match="has no length"):
        trainer_of(tmp_path, stream(), **most).get_train_dataloader()
    nameless = [{"x": [1], "labels": 0}]
    with pytest.raises(ValueError, match="need the lengths of the examples"):
        trainer_of(tmp_path, nameless, **most).get_train_dataloader()
    split = SimpleNamespace(
        args=SimpleNamespace(world_size=2, accelerator_config={"split_batches": True})
    )
    with pytest.raises(ValueError, match="split_batches and dispatch_batches"):
        data.check_token_batches(split, TokenBatches([1], 3), True)
    split.args.world_size = 1
    data.check_token_batches(split, TokenBatches([1], 3), True)
    with pytest.raises(ValueError, match="whole"):
        TokenBatches([0.5], 3)
    with pytest.raises(ValueError, match="max_tokens_per_batch"):
        ctrainer.TrainingArguments(str(tmp_path), max_tokens_per_batch=0)
