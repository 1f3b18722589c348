"""Ranks that do not do the same are told who does what; equal ones are left alone."""

from __future__ import annotations

import random
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import desync_scenarios
import pytest
import ranks
import torch
from counting import Counting
from draws import draws
from rank_threads import on_ranks, seeded
from torch import nn

from ctrainer import _C, DataParallel


@pytest.mark.parametrize("kind", desync_scenarios.KINDS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("seed", range(draws(2, 40)))
def test_ranks_in_different_units_are_told_which(kind, seed: int) -> None:
    draw = random.Random(f"{kind.__name__} {seed}")
    world = draw.choice([2, 3, 4])
    wrong = draw.randrange(world)
    told = on_ranks(world, lambda group: desync_scenarios.run(group, kind, wrong, seed))
    desync_scenarios.check(told, kind, wrong)


@pytest.mark.parametrize("seed", range(draws(4, 100)))
def test_equal_ranks_are_told_nothing(seed: int) -> None:
    world = random.Random(seed).choice([2, 3, 4])

    def train(group):
        return desync_scenarios.run(group, desync_scenarios.same, -1, seed)

    assert on_ranks(world, train) == [None] * world


@pytest.mark.parametrize(
    "kind", desync_scenarios.UNSEEN_BY_ENGINES, ids=lambda f: f.__name__
)
@pytest.mark.parametrize("seed", range(draws(4, 100)))
def test_ranks_over_an_engine_are_told_at_the_next_norm(kind, seed: int) -> None:
    """Nothing is asked for: a hash goes with the norm of the gradients."""
    draw = random.Random(f"{kind.__name__} {seed}")
    world = draw.choice([2, 3, 4])
    wrong = draw.randrange(world)

    def train(group):
        over = _C.Communicator(Counting(group))
        told = desync_scenarios.run(over, kind, wrong, seed, prefetches=False)
        return told, desync_scenarios.run(over, desync_scenarios.same, -1, seed)

    told = on_ranks(world, train)
    desync_scenarios.check([first for first, _ in told], kind, wrong)
    assert [then for _, then in told] == [None] * world


def ahead(draw: random.Random) -> dict[str, object]:
    behind = draw.choice([None, "BACKWARD_PRE", "BACKWARD_POST"])
    return {"forward_prefetch": draw.random() < 0.7, "backward_prefetch": behind}


@pytest.mark.parametrize("seed", range(draws(1, 12)))
def test_ranks_over_gloo_are_told_in_seconds_also_of_what_is_begun_ahead(
    tmp_path: Path, seed: int
) -> None:
    """The ranks make other numbers of collectives, and would wait for two minutes."""
    draw = random.Random(f"gloo {seed}")
    world = 2 + seed % 2
    names = [k.__name__ for k, w in desync_scenarios.KINDS.items() if w == "units"]
    cases = [
        [name, draw.randrange(world), draw.randrange(99), ahead(draw)]
        for name in [*names, "batch_skipped", "same"]
    ]
    made = ranks.told(ranks.run(tmp_path, "comm.other_units", world, cases=cases))
    kinds = {kind.__name__: kind for kind in desync_scenarios.KINDS}
    for number, case in enumerate(cases):
        told = [rank[number] for rank in made]
        assert all(seconds < 60 for _, seconds in told), case
        if case[0] == "same":
            assert [text for text, _ in told] == [None] * world
            continue
        desync_scenarios.check([text for text, _ in told], kinds[case[0]], case[1])


@pytest.mark.parametrize("way", desync_scenarios.OTHER_MODULES)
@pytest.mark.parametrize("over", ["threads", "an engine"])
@pytest.mark.parametrize("seed", range(draws(1, 10)))
def test_ranks_that_have_sharded_another_module_are_told_before_the_first_gather(
    way: str, over: str, seed: int
) -> None:
    draw = random.Random(f"{way} {seed}")
    world = draw.choice([2, 3, 4])
    wrong = draw.randrange(world)

    def train(group):
        group = group if over == "threads" else _C.Communicator(Counting(group))
        told = desync_scenarios.run_other(way, group, wrong)
        return told, desync_scenarios.run_other(way, group, -1)

    told = on_ranks(world, train)
    desync_scenarios.check_other([first for first, _ in told], way, wrong)
    assert [then for _, then in told] == [None] * world


def test_modules_are_compared_once_with_8_bytes() -> None:
    def train(group):
        counting = Counting(group)
        model = desync_scenarios.build_other("alike", _C.Communicator(counting), -1)
        sent = []
        for _ in range(2):
            counting.sent.clear()
            model(torch.ones(2, desync_scenarios.WIDTH), [0, 1]).sum().backward()
            model.zero_grad()
            sent.append(dict(counting.sent))
        return sent

    for first, second in on_ranks(2, train):
        assert first == second | {"all_gather": second["all_gather"] + 8}


class Replica(nn.Module):
    """Several buckets of gradients, and a buffer that rank 0 gives to all."""

    def __init__(self) -> None:
        super().__init__()
        with seeded(0):
            self.layers = nn.Sequential(
                nn.Linear(6, 40), nn.BatchNorm1d(40), nn.Linear(40, 6)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


# What a rank does whose loop has ended, and what the others are told of it.
AFTERWARDS = {
    "leaves": r"rank {} \(process \d+\) has left the group",
    "waits": r"rank {} calls barrier",
    "sums": r"rank {} calls all_reduce of 1 float64",
}


@pytest.mark.parametrize("then", AFTERWARDS)
@pytest.mark.parametrize("seed", range(draws(2, 30)))
def test_a_rank_whose_loop_ends_early_is_named_in_data_parallel(
    then: str, seed: int
) -> None:
    draw = random.Random(f"{then} {seed}")
    world = draw.choice([2, 3, 4])
    early, steps = draw.randrange(world), draw.randrange(3)
    options = {
        "bucket_cap_mb": draw.choice([None, 1e-4]),
        "find_unused_parameters": draw.random() < 0.5,
        "broadcast_buffers": draw.random() < 0.5,
    }

    def train(group):
        model = DataParallel(Replica(), group, **options)
        try:
            for _ in range(steps + (group.rank != early)):
                model(torch.ones(3, 6) + group.rank).backward()
                model.zero_grad()
            if then == "waits":
                group.barrier()
            elif then == "sums":
                group.all_reduce(torch.ones(1, dtype=torch.float64))
        except (RuntimeError, ValueError) as error:
            return str(error)
        return None

    told = on_ranks(world, train)
    for rank, text in enumerate(told):
        if rank == early and then == "leaves":
            assert text is None
            continue
        assert text is not None, f"rank {rank} of {world} is quiet"
        if then == "leaves" or not options["broadcast_buffers"]:
            assert re.search(AFTERWARDS[then].format(early), text), text
        assert re.search(rf"rank {early}\b", text), text


@pytest.mark.parametrize("killed", [False, True], ids=["ends", "is killed"])
def test_a_process_whose_loop_ends_early_is_named_in_data_parallel(
    tmp_path: Path, killed: bool
) -> None:
    first, early, last = ranks.run(tmp_path, "ddp.ends_early", 3, killed=killed)
    assert early.told is None
    assert early.code == (-9 if killed else 0), early.output
    for rank in (first, last):
        text, seconds = rank.told
        how = "died" if killed else "(died|has left the group)"
        assert re.search(rf"rank 1 \(process \d+\) {how}", text), text
        assert seconds < 60  # the group would wait for half an hour


# Engines of torch, and machines of two ranks each, all of this one machine.


def test_ranks_of_processes_are_told_by_their_numbers_in_the_run(
    tmp_path: Path,
) -> None:
    every = ranks.told(ranks.run(tmp_path, "fsdp.desync", 4))
    unseen = desync_scenarios.UNSEEN_BY_ENGINES
    kinds = [k for k, why in desync_scenarios.KINDS.items() if why != "left"]
    for way, expected in [
        ("engine", unseen), ("engine compared", kinds), ("levels compared", kinds)
    ]:  # fmt: skip
        assert [rank[way][-1] for rank in every] == [None] * 4
        for number, kind in enumerate(expected):
            told = [rank[way][number] for rank in every]
            desync_scenarios.check(told, kind, number % 4)
    for number, way in enumerate(desync_scenarios.OTHER_MODULES):
        told = [rank["other modules"][number] for rank in every]
        desync_scenarios.check_other(told, way, number % 4)
    for rank in every:  # of two machines that agree each
        assert rank["machine"][-1] is None
        for text in rank["machine"][:-1]:
            assert "rank 0 gathers" in text, text
            assert "rank 2 gathers" in text, text
    # of one machine, whose ranks tell at once
    assert all(rank["alone"] for rank in every)
    for rank in every[2:]:
        assert "rank 2 gathers" in rank["alone"], rank["alone"]
        assert "rank 3 gathers" in rank["alone"], rank["alone"]


class Backend:
    rank, world_size = 0, 2


def test_a_word_that_is_neither_yes_nor_no_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CTRAINER_CHECK_COLLECTIVES", "ture")
    told = (
        "CTRAINER_CHECK_COLLECTIVES is 'ture'; expected 1, true, yes or on to compare "
        "what ranks call, 0, false, no or off"
    )
    with pytest.raises(ValueError, match=told):
        _C.Communicator(Backend())
    with ThreadPoolExecutor(2) as pool:  # both have to come
        made = [
            pool.submit(_C.shared_memory_communicator, "a wrong word", rank, 2, 30.0)
            for rank in range(2)
        ]
    for rank in made:
        with pytest.raises(ValueError, match=told):
            rank.result()


@pytest.mark.parametrize("word", ["", "0", "No", "FALSE", "off", "1", "true", "YES"])
def test_words_for_yes_and_no_are_taken(
    monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    monkeypatch.setenv("CTRAINER_CHECK_COLLECTIVES", word)
    assert _C.Communicator(Backend()).world_size == 2


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_unequal_data_is_told_with_the_length_on_each_rank(
    tmp_path: Path, world: int
) -> None:
    first, *others = ranks.told(ranks.run(tmp_path, "data.unequal", world))
    assert others == [first] * (world - 1)
    differ = "ValueError: the ranks' training data differ in length: rank 0 has"
    assert first["rows"].startswith(differ)
    assert "rank 0 has 41 rows in" in first["rows"]
    assert "rank 1 has 42 rows in" in first["rows"]
    assert first["batches"].startswith(f"{differ} 40 rows in")
    assert f"rank 1 has {40 + 4 * world} rows in" in first["batches"]
    assert f"rank {world - 1} has 48 rows in 12 batches" in first["own"]
    assert "rank 0 has 40 rows in 10 batches" in first["own"]
    assert "the ranks have different numbers of batches for update" in first["stream"]
    assert "set accelerator_config={'even_batches': False}" in first["stream"]
    assert first["skip"].startswith(
        "ValueError: the ranks have different numbers of batches for update 3: rank 0 "
        "has 2, rank 1 has 1"
    )
    assert first["asked for"] == 5
    assert isinstance(first["equal"], int)
    assert first["equal streams"] == 3


def test_what_ranks_compare_is_in_host_memory_whatever_the_default_device() -> None:
    def run(group: _C.Communicator) -> bool:
        model = desync_scenarios.build_other("none", group, 0)
        with torch.device("meta"):
            loss = model(torch.ones(2, desync_scenarios.WIDTH, device="cpu"), [0, 1])
        return bool(loss.isfinite().all())

    assert on_ranks(2, run) == [True, True]
