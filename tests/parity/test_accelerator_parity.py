"""trainer.accelerator and torch.distributed at every hook, event and batch, on one rank
and on two: what a script finds there as with transformers' Trainer."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from ranks import run, told

# Of a whole run: what callbacks and hooks are asked about in an evaluation apart.
OF_EVALUATIONS = ("evaluated", "prediction_step")
OF_MICRO_BATCHES = (
    "step_begin", "training_step", "compute_loss", "substep_end", "after backward",
)  # fmt: skip


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((2, ["accumulated"]), id="two ranks"),
        pytest.param((1, []), id="alone, all", marks=pytest.mark.exhaustive),
        pytest.param((2, []), id="two ranks, all", marks=pytest.mark.exhaustive),
    ],
)
def found(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of each rank, what ours and transformers' Trainer told; of all cases, or some."""
    world, names = request.param
    engines = [
        told(
            run(
                tmp_path_factory.mktemp(engine), "parity.accelerator",
                world, engine=engine, cases=names,
            )
        )
        for engine in ("ours", "theirs")
    ]  # fmt: skip
    return list(zip(*engines, strict=True))


def cases(found: Any) -> Any:
    for ours, theirs in found:
        for name in theirs:
            if name not in ("place", "tools"):
                yield name, ours[name], theirs[name]


def test_the_process_group_is_there_after_training_arguments(found: Any) -> None:
    for rank, (ours, theirs) in enumerate(found):
        ours, theirs = ours["place"], theirs["place"]
        # as it was in transformers 4; 5.17 leaves -1
        assert ours["args"].pop("local_rank") in (rank, -1)
        assert theirs["args"].pop("local_rank") == -1
        assert ours == theirs
        assert ours["gathered"] == list(range(len(found)))


def test_the_accelerator_agrees_in_every_event_and_micro_batch(found: Any) -> None:
    for name, ours, theirs in cases(found):
        seen = [
            [note for note in of["seen"] if note["where"] not in OF_EVALUATIONS]
            for of in (ours, theirs)
        ]
        events = [[(n["where"], n["step"]) for n in of] for of in seen]
        assert events[0] == events[1]
        for mine, other in zip(*seen, strict=True):
            for key in differences(name, mine, other):
                assert mine[key] == other[key], (name, key, mine, other)


def differences(name: str, mine: Any, other: Any) -> set[str]:
    """Keys in which the notes have to be alike."""
    keys = set(other)
    if not mine["inside"]:  # theirs have the loader of the run before, or of this one
        keys -= {"inside", "end", "remainder"}
    if mine["where"] in OF_MICRO_BATCHES and not mine["end"] and other["end"]:
        # the last update's first micro-batches: of theirs rows are dropped
        keys -= {"end", "joined", "objects"}
    if name == "dispatched" and other["remainder"] == -1:  # theirs does not know it yet
        keys.discard("remainder")
    return keys


def test_gather_for_metrics_has_each_row_once(found: Any) -> None:
    for name, ours, theirs in cases(found):
        for key in ("joined", "objects"):
            mine, other = (
                [row for n in of["seen"] if n["where"] == "evaluated" for row in n[key]]
                for of in (ours, theirs)
            )
            # the last whole batch is evaluated
            assert name == "dropped" or mine == other
            numbers = [row[0] if key == "objects" else row for row in mine]
            each = int(max(numbers)) + 1
            assert numbers == [*range(each)] * (len(numbers) // each)


def test_losses_and_predictions_are_those_of_transformers(found: Any) -> None:
    for name, ours, theirs in cases(found):
        if name == "dropped" or (len(found) == 1 and name in WEIGHED):
            continue
        # a few ulp of float32 an update: sums and means are taken in another order
        for key in ("predictions", "parameters"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-5, abs=2e-6), name


# A last micro-batch of fewer rows weighs less: docs/start/from_transformers.md
WEIGHED = ("accumulated", "in threes", "synced", "dispatched", "one row", "few")


def test_everything_that_a_subclass_does_with_the_accelerator(found: Any) -> None:
    for ours, theirs in found:
        ours, theirs = ours["tools"], theirs["tools"]
        for key in ("parameters", "norms", "critic"):
            # as above: a few ulp an update
            assert ours.pop(key) == pytest.approx(theirs.pop(key), rel=1e-5, abs=1e-6)
        for kept in zip(ours.pop("kept"), theirs.pop("kept"), strict=True):
            assert kept[0] == pytest.approx(kept[1], rel=1e-5, abs=1e-6)
        assert ours == theirs
