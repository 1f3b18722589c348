"""Communicators over torch's process groups, on processes that talk by gloo."""

from __future__ import annotations

import pytest
from ranks import GLOO, Rank, run_ranks

EVERY_COLLECTIVE = """
import time
from ctrainer.comm.process_group import communicator
group = communicator()
found = {"who": [group.rank, group.world_size]}
for name in ("float64", "float32", "bfloat16", "float16", "int64", "bool"):
    kind = getattr(torch, name)
    for op in ("sum", "mean", "max", "min"):
        values = torch.tensor([rank + 1, 0]).to(kind)
        group.all_reduce(values, op)
        found[f"{name} {op}"] = values.tolist()
out = torch.zeros(4)
group.all_gather(out, torch.tensor([rank, 10.0 + rank]))
found["all_gather"] = out.tolist()
part = torch.zeros(2)
group.reduce_scatter(part, torch.arange(4.0) * (rank + 1), "mean")
found["reduce_scatter"] = part.tolist()
group.all_to_all(out, torch.arange(4.0) + 10 * rank)
found["all_to_all"] = out.tolist()
values = torch.tensor([float(rank)])
group.broadcast(values, 1)
found["broadcast"] = values.tolist()
sums = torch.arange(3) + rank
group.reduce(sums, 1, "mean")
found["reduce"] = sums.tolist()
group.barrier()
first = group.all_reduce(torch.ones(3), async_op=True)
second = group.all_reduce(values, async_op=True)
first.wait()
second.wait()
found["begun"] = values.tolist()
found["gathered"] = [b.decode() for b in group.gather_bytes(b"x" * (3 * rank))]
found["sent"] = group.broadcast_bytes(b"of rank 1" if rank else None, 1).decode()

# What ranks ask for is compared where that is wished for.
os.environ["CTRAINER_CHECK_COLLECTIVES"] = "1"
checked = communicator()
try:
    checked.all_reduce(torch.ones(3), async_op=True) if rank else checked.barrier()
except ValueError as error:
    found["differ"] = str(error)
checked.all_reduce(values)
found["alike"] = values.tolist()
half = group.split(ranks=[1, 0])
half.all_gather(out, torch.tensor([rank, 10.0 + rank]))
alone = group.split(color=rank)
none = group.split(0 if rank else None)
found["split"] = [half.rank, half.world_size, out.tolist(), alone.backend, none is None]
half.close()

# A group of which rank 1 stays away until rank 0 has run into the time-out
stalled = communicator(dist.new_group(timeout=timedelta(seconds=3)))
group.barrier()
stalled.barrier()
if rank == 0:
    began = time.monotonic()
    try:
        stalled.all_reduce(torch.ones(1))
    except RuntimeError as error:
        found["stalled"] = [str(error), time.monotonic() - began]

# Then it dies, which shows at once in the group whose time-out is a minute
group.barrier()
if rank == 1:
    tell(found)
    os._exit(3)
began = time.monotonic()
try:
    group.all_reduce(torch.ones(1))
except RuntimeError as error:
    found["died"] = [str(error), time.monotonic() - began]
tell(found)
os._exit(0)
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Rank]:
    return run_ranks(tmp_path_factory.mktemp("ranks"), GLOO + EVERY_COLLECTIVE)


def test_every_collective_over_gloo(ranks: list[Rank]) -> None:
    for rank, found in enumerate(r.told for r in ranks):
        assert found["who"] == [rank, 2]
        for name in ("float64", "float32", "bfloat16", "float16"):
            assert [found[f"{name} {op}"][0] for op in ("sum", "mean")] == [3.0, 1.5]
        for name in ("float64", "float16", "int64"):
            assert [found[f"{name} {op}"][0] for op in ("max", "min")] == [2, 1]
        assert [found[f"int64 {op}"] for op in ("sum", "mean")] == [[3, 0], [1, 0]]
        assert found["bool sum"] == found["bool mean"] == [True, False]
        assert found["all_gather"] == [0.0, 10.0, 1.0, 11.0]
        assert found["reduce_scatter"] == [[0.0, 1.5], [3.0, 4.5]][rank]
        parts = [[0.0, 1.0, 10.0, 11.0], [2.0, 3.0, 12.0, 13.0]]
        assert found["all_to_all"] == parts[rank]
        assert found["broadcast"] == [1.0]
        assert rank == 0 or found["reduce"] == [0, 1, 2]  # of 0.5, 1.5 and 2.5
        assert found["begun"] == [2.0]
        assert found["gathered"] == ["", "xxx"]
        assert found["sent"] == "of rank 1"
        turned = [1.0, 11.0, 0.0, 10.0]
        assert found["split"] == [1 - rank, 2, turned, "self", rank == 0]


def test_ranks_that_ask_for_different_things_are_told_where_that_is_checked(
    ranks: list[Rank],
) -> None:
    for found in (r.told for r in ranks):
        assert found["differ"] == (
            "all ranks must call the same: rank 0 called barrier of 0 float32 to 0 "
            "(sum, root 0), rank 1 all_reduce of 3 float32 to 0 (sum, root 0)"
        )
        assert found["alike"] == [4.0]


def test_a_rank_that_stays_away_makes_the_other_raise_in_time(
    ranks: list[Rank],
) -> None:
    text, seconds = ranks[0].told["stalled"]
    assert text.startswith("all_reduce on rank 0 of 2: ")
    assert seconds < 30  # the time-out is 3


def test_a_rank_that_dies_makes_the_other_raise_at_once(ranks: list[Rank]) -> None:
    assert [r.code for r in ranks] == [0, 3]
    text, seconds = ranks[0].told["died"]
    assert text.startswith("all_reduce on rank 0 of 2: ")
    assert seconds < 30  # the group would wait a minute


def test_without_a_group_there_is_no_communicator() -> None:
    pytest.importorskip("torch")
    from ctrainer.comm.process_group import communicator

    with pytest.raises(ValueError, match=r"torch\.distributed is not initialised"):
        communicator()
