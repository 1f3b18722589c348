"""Training on two ranks, against transformers' Trainer on them and one process."""

from __future__ import annotations

import socket

import pytest

pytest.importorskip("torch")

from trainer_ranks import run_ranks, told

PARITY = """
import ctrainer, torch, transformers
from rank_trainings import CASES, compare, run

ours = {name: run(ctrainer, folder, name) for name in CASES}
assert not torch.distributed.is_initialized()
for name, mine in ours.items():
    compare(name, mine, run(transformers, folder, name))
tell(len(ours))
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_equal_to_transformers_on_two_ranks(tmp_path) -> None:
    pytest.importorskip("accelerate")
    assert told(run_ranks(tmp_path, PARITY, port=free_port())) == [9, 9]
