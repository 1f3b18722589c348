"""Trainers of sentence-transformers, PEFT and setfit: losses, metrics, weights, events
and files as on transformers' engine, in whole and in resumed runs, and of a trainer
that fails, resumes and trains again."""

from importlib.util import find_spec
from subprocess import CompletedProcess

import pytest
from ranks import run_alone

pytest.importorskip("sentence_transformers")
pytest.importorskip("peft")


def faults(done: CompletedProcess[str]) -> str:
    lines = (line for line in done.stdout.splitlines() if not line.startswith("ok "))
    return "\n".join(lines)[-5000:] + done.stderr[-2000:]


FEW = ["sentence_softmax", "sentence_evaluator_alone", "cross_lambda", "peft_prefix"]


@pytest.mark.parametrize(
    "names", [FEW, pytest.param([], id="all", marks=pytest.mark.exhaustive)]
)
def test_trainings_are_those_on_transformers_engine(names) -> None:
    if not names:
        names = ["sentence", "cross", "sparse", "vectors", "lora", "peft"]
        names += ["setfit"] if find_spec("setfit") is not None else []
    done = run_alone("parity.sentence_trainings", *names)
    assert done.returncode == 0, faults(done)
    assert done.stdout.count("ok ") >= 3 * max(len(names), 1)


@pytest.mark.exhaustive
def test_trainings_on_two_ranks_are_those_on_transformers_engine() -> None:
    done = run_alone("parity.sentence_trainings", "--ranks", "2", *RANKED)
    assert done.returncode == 0, faults(done)
    assert done.stdout.count("ok ") == 3 * len(RANKED)


def test_sharded_trainings_are_those_of_whole_models_on_transformers_engine() -> None:
    """encode() within an evaluator, an override that loads the best, and a module that
    saves itself by safetensors' save_model()."""
    names = ["sparse_csr", "sparse_evaluator", "sparse_evaluator_alone"]
    done = run_alone("parity.sentence_trainings", "--ranks", "2", "--ours",
                     '{"fsdp": "full_shard auto_wrap"}', *names)  # fmt: skip
    assert done.returncode == 0, faults(done)
    assert done.stdout.count("ok ") == 3 * len(names)


RANKED = ["sentence_softmax", "sentence_accumulation", "sentence_drop_last"]
