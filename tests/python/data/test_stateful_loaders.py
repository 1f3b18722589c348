"""A run resumes behind a loader that says where it is: with the row that follows, and
without those before."""

from pathlib import Path

import pytest
from ranks import run, told
from tiny import Net, arguments

torch = pytest.importorskip("torch")
pytest.importorskip("torchdata")
transformers = pytest.importorskip("transformers")

from stateful_loaders import BATCH, KINDS, N, Noted, row, trainer_of  # noqa: E402

MAP = "stateful loader of a map"
CASES = [
    (kind, workers)
    for kind in KINDS
    for workers in (0, 2)
    if kind != "own loader" or workers == 0
]


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_the_rows_before_are_not_read(tmp_path, world) -> None:
    ranks = told(run(tmp_path, "data.stateful_loaders", world, cases=CASES))
    assert len(ranks) == world
    for rank, cases in enumerate(ranks):
        own = range(rank, N, world)
        for (kind, workers), (whole, again) in zip(CASES, cases, strict=True):
            case = (kind, workers, rank)
            assert len(whole["losses"]) == 8, case
            assert again["losses"] == whole["losses"], case
            assert again["seen"] == whole["seen"][5:], case
            first = 5 * BATCH
            if kind not in ("own loader", MAP):
                # Of each worker its last batch is read once more, to compare it.
                first -= BATCH * max(workers, 1)
            before = {own[i] for i in range(first)}
            assert set(whole["rows"]) >= before, case
            assert not set(again["rows"]) & before, case


def test_the_following_rows_are_those_of_the_data(tmp_path) -> None:
    """Of one process without workers, in the order of the stream."""
    cases = [["stateful loader of a stream", 0]]
    ((found,),) = told(run(tmp_path, "data.stateful_loaders", 1, cases=cases))
    _, again = found
    rows = [x for batch in again["seen"] for x in batch]
    assert rows == [row(i)["x"].tolist() for i in range(5 * BATCH, 8 * BATCH)]


def test_transformers_reads_the_rows_before(tmp_path: Path) -> None:
    noted = Noted(tmp_path / "rows")
    for resumed in (False, True):
        args = arguments(
            transformers.TrainingArguments, output_dir=str(tmp_path), max_steps=8,
            save_strategy="steps", save_steps=5,
        )  # fmt: skip
        kind = "stateful loader of a stream"
        trainer = trainer_of(transformers, args, Net(), kind, noted, 0)
        trainer.train(str(tmp_path / "checkpoint-5") if resumed else None)
        rows = noted.read()
    assert rows[: 5 * BATCH] == list(range(5 * BATCH))
