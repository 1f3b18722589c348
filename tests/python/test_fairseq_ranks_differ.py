"""fairseq's Trainer tells all ranks of one that makes a step or a sample less."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
import ranks
from draws import draws

RUN = """
import time
import fairseq_tiny as tiny
from ctrainer.fairseq import metrics

def run(backend, kind, wrong, at):
    '''What was raised, and after how many seconds; None: nothing.'''
    changes = {"distributed_training__distributed_world_size": world}
    if backend == "bmuf":
        changes |= {"optimization__use_bmuf": True,
                    "bmuf__distributed_world_size": world}
    else:
        changes["distributed_training__ddp_backend"] = backend
    metrics.reset()
    trainer = tiny.trainer(**changes)
    batches = tiny.batches(8 * world)[rank::world]
    trainer.reset_dummy_batch(batches[0])
    began = time.monotonic()
    try:
        for number, samples in enumerate(tiny.groups(batches, 2)):
            if rank == wrong and number == at:
                if kind == "ends":
                    break
                if kind == "skips":
                    continue
                samples = samples[1:] if kind == "samples" else [None] * 2
            trainer.train_step(samples)
        trainer.valid_step(batches[0])
    except (ValueError, RuntimeError) as error:
        return [f"{type(error).__name__}: {error}", time.monotonic() - began]
    return None

found = []
for backend, kind, wrong, at in CASES:
    found.append(run(backend, kind, wrong, at))
tell(found)
if LAST:  # its process ends, without a word
    if rank == world - 1:
        os._exit(3)
    found.append(run(LAST, "none", -1, 0))
    tell(found)
os._exit(0)
"""

# The group of torch alone carries everything, as on several machines.
ENGINE = """
for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
    del os.environ[name]
"""
SHARED = ["pytorch_ddp", "legacy_ddp"]


def cases(draw: random.Random, world: int, engine: bool) -> list[list[object]]:
    """Backends with what one rank does, which rank and in which of 4 updates."""
    kinds = [(b, k) for b in SHARED for k in ("ends", "skips", "samples")]
    kinds += [("bmuf", "ends"), ("bmuf", "skips")]
    if engine:  # gloo itself ends a process that gets other bytes than it asked for
        kinds = [(b, k) for b, k in kinds if b != "pytorch_ddp" or k == "samples"]
    kinds += [(b, "dummies") for b in SHARED]  # which the original makes for itself
    draw.shuffle(kinds)
    return [[b, k, draw.randrange(world), draw.randrange(4)] for b, k in kinds]


def check(told: list[list[object]], case: list[object]) -> None:
    _, kind, wrong, _ = case
    if kind == "dummies":
        assert told == [None] * len(told)
        return
    for each in told:
        assert each is not None, case
        text, seconds = each
        assert isinstance(text, str)
        assert isinstance(seconds, float)
        assert seconds < 30, case  # the groups would wait half an hour
        assert text.startswith("ValueError: ranks are in different steps"), text
        assert re.search(rf"rank {wrong} (is in|averages) ", text), text
        if len(told) > 2:
            assert f"{len(told) - 1} of {len(told)} ranks are with rank" in text, text
            assert f"are with rank {wrong}" not in text, text


@pytest.mark.parametrize("engine", [False, True], ids=["shm", "engine"])
@pytest.mark.parametrize("seed", range(draws(1, 8)))
def test_a_rank_with_a_step_or_a_sample_less_is_named_by_all(
    tmp_path: Path, seed: int, engine: bool
) -> None:
    draw = random.Random(f"{seed} {engine}")
    world = 2 + seed % 2
    drawn = cases(draw, world, engine)
    last = "" if engine else draw.choice([*SHARED, "fully_sharded"])
    body = (
        ranks.GLOO
        + (ENGINE if engine else "")
        + f"CASES, LAST = {drawn!r}, {last!r}\n"
        + RUN
    )
    made = ranks.run_ranks(tmp_path, body, world)
    for rank in made:
        assert rank.told is not None, rank.output
    for number, case in enumerate(drawn):
        check([rank.told[number] for rank in made], case)
    if last:
        for rank in made[:-1]:
            text, seconds = rank.told[-1]
            assert re.search(rf"rank {world - 1} \(process \d+\) ", text), text
            assert seconds < 30
