"""Packages that subclass transformers' Trainer, each in a process of its own: the same
losses on our engine as on transformers'."""

import json
from pathlib import Path

import pytest
from ranks import run_alone

pytest.importorskip("transformers")

CLIENTS = ("sentence_transformers", "sft", "grpo", "rloo", "dpo", "reward")
IN_EVERY_RUN = ("sentence_transformers", "sft", "grpo")


def run(client: str, engine: str, folder: str) -> dict:
    done = run_alone(
        "parity.clients", client, engine, folder,
        HF_HUB_OFFLINE="1", CI="1", TOKENIZERS_PARALLELISM="false",
        CUDA_VISIBLE_DEVICES="",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stderr.splitlines()[-1])


@pytest.mark.parametrize(
    "client",
    [
        pytest.param(name, marks=() if name in IN_EVERY_RUN else pytest.mark.exhaustive)
        for name in CLIENTS
    ],
)
def test_logs_and_checkpoint_are_those_of_transformers(
    client: str, tmp_path: Path
) -> None:
    pytest.importorskip(client if client == "sentence_transformers" else "trl")
    ours = run(client, "ours", str(tmp_path / "ours"))
    theirs = run(client, "theirs", str(tmp_path / "theirs"))
    assert ours["native"]
    assert not theirs["native"]
    assert len(ours["values"]) == len(theirs["values"]) > 3
    for mine, other in zip(ours["values"], theirs["values"], strict=True):
        # Only our norm is summed in double, so clipping may differ in the last bits.
        # A loss of groups is a sum of numbers near 1 that cancel.
        assert mine == pytest.approx(other, rel=1e-4, abs=1e-6)
    assert set(theirs["files"]) <= set(ours["files"])
