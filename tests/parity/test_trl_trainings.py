"""Each trainer of TRL: losses as on transformers' engine: plain, with LoRA, resumed,
with TRL's defaults, twice, and after a failure."""

import pytest
from ranks import run_alone

pytest.importorskip("trl")
pytest.importorskip("peft")


@pytest.mark.exhaustive
def test_trainings_are_those_on_transformers_engine() -> None:
    done = run_alone("parity.trl_trainings")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert done.stdout.count("\n") > 50


@pytest.mark.exhaustive
def test_trainings_on_two_ranks_are_those_on_transformers_engine() -> None:
    done = run_alone("parity.trl_trainings", "--ranks", "2", "sft", "dpo", "grpo")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert done.stdout.count("\n") > 15


@pytest.mark.exhaustive
def test_sharded_trainings_are_those_of_whole_models_on_transformers_engine() -> None:
    done = run_alone("parity.trl_trainings", "--ranks", "2", "--ours",
                     '{"fsdp": "full_shard auto_wrap"}', "dpo", "kto")  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert done.stdout.count("\n") > 10
