"""auto_find_batch_size with fsdp: ranks that run out of memory in the middle of passes,
each at its own times, train as ranks that do not."""

from pathlib import Path
from typing import Any

import pytest
from ranks import run, told

pytest.importorskip("torch")

import tiny

import ctrainer
from ctrainer.trainer import memory

LAYERS = {"fsdp": "full_shard auto_wrap", "fsdp_config": {}}
WHOLE = {"fsdp": "full_shard", "fsdp_config": {}}
PREFETCHING = {
    "fsdp": "full_shard auto_wrap",
    "fsdp_config": {"forward_prefetch": True, "backward_prefetch": "backward_pre"},
}
KEPT = {
    "fsdp": "shard_grad_op auto_wrap",
    "fsdp_config": {"reshard_after_forward": False},
}
BY_SIZE = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"min_num_params": 10}}
NONE = {"fsdp": "", "fsdp_config": {}}
HYBRID = {"fsdp": "hybrid_shard auto_wrap", "fsdp_config": {}, "ranks_a_machine": 2}
KEPT_HYBRID = {**HYBRID, "fsdp": "hybrid_shard_zero2 auto_wrap"}


CASES = [
    pytest.param(LAYERS, "gpt2", 3, [3, 3], id="layers"),
    pytest.param(BY_SIZE, "net", 2, [0, 5], id="one rank"),
]
MORE = [
    pytest.param(LAYERS, "gpt2", 1, [0, 8], id="layers, one rank"),
    pytest.param(WHOLE, "gpt2", 2, [8, 0], id="whole"),
    pytest.param(PREFETCHING, "gpt2", 2, [8, 8], id="prefetching"),
    pytest.param(KEPT, "gpt2", 2, [8, 8], id="kept"),
    pytest.param(BY_SIZE, "net", 3, [6, 6, 6], id="three ranks"),
    pytest.param(LAYERS, "gpt2", 2, [8, 0, 0], id="one of three ranks"),
    pytest.param(KEPT, "gpt2", 2, [0, 8, 8], id="two of three ranks"),
    pytest.param(NONE, "gpt2", 2, [8, 0, 0], id="one of three, not sharded"),
    pytest.param(NONE, "net", 3, [0, 8, 8], id="two of three, not sharded"),
    pytest.param(NONE, "gpt2", 1, [8, 8, 8], id="all of three, not sharded"),
    pytest.param(HYBRID, "gpt2", 2, [6, 6, 6, 6], id="hybrid"),
    pytest.param(HYBRID, "gpt2", 1, [0, 8, 0, 0], id="one of two machines"),
    pytest.param(KEPT_HYBRID, "gpt2", 2, [8, 0, 0, 8], id="kept on machines"),
]


def trained(folder: Path, most: list[int], **options: Any) -> list[Any]:
    options = {"rate": 0.1, "most": most, "accumulation": 1, "model": "net"} | options
    return told(run(folder, "fsdp.out_of_memory", len(most), **options))


def is_the_run_without(ranks: list[Any], most: list[int]) -> None:
    assert [rank["failed"] for rank in ranks] == most
    for rank in ranks:
        for plain, failing in zip(rank["plain"], rank["failing"], strict=True):
            assert failing == pytest.approx(plain, rel=1e-6, abs=1e-6)
    assert all(rank["failing"] == ranks[0]["failing"] for rank in ranks)


@pytest.mark.parametrize(("how", "model", "accumulation", "most"), CASES)
def test_ranks_fail_each_at_its_own_times(
    tmp_path: Path, how: Any, model: str, accumulation: int, most: list[int]
) -> None:
    options = {"model": model, "accumulation": accumulation, "steps": 5, **how}
    is_the_run_without(trained(tmp_path, most, rate=0.2, **options), most)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("how", "model", "accumulation", "most"), MORE)
def test_ranks_fail_in_every_place_of_a_pass(
    tmp_path: Path, how: Any, model: str, accumulation: int, most: list[int]
) -> None:
    options = {"model": model, "accumulation": accumulation, "steps": 14, **how}
    ranks = trained(tmp_path, most, **options)
    is_the_run_without(ranks, most)
    places = {place for rank in ranks for place in rank["places"]}
    assert places == {"forward", "after", "backward"}


def test_a_single_row_that_does_not_fit_ends_all_ranks(tmp_path: Path) -> None:
    """The rank itself raises its error, the other one says why it has to stop."""
    first, second = trained(
        tmp_path, [0, 99], rate=1.0, least=1, steps=2, raises=True, **BY_SIZE
    )
    assert (
        "RuntimeError: another rank is out of memory with a single row"
        in (first["error"])
    )
    assert second["error"].startswith("OutOfMemoryError: CUDA out of memory")


def test_a_loss_that_couples_rows_is_rejected_on_all_ranks(tmp_path: Path) -> None:
    ranks = trained(
        tmp_path, [0, 1], rate=1.0, steps=2, raises=True, coupled=True, **BY_SIZE
    )
    for rank in ranks:
        assert "ValueError: out of memory in a micro-batch" in rank["error"]
        assert "set split_coupled_rows=True" in rank["error"]


def test_ranks_that_do_not_compare_their_calls_are_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Backend:
        rank, world_size = 0, 2

    def trainer() -> Any:
        args = tiny.arguments(auto_find_batch_size=True)
        made = ctrainer.Trainer(tiny.Net(), args, train_dataset=tiny.rows(8))
        made._shard_group = ctrainer._C.Communicator(Backend())
        return made

    with pytest.raises(ValueError, match="set CTRAINER_CHECK_COLLECTIVES=1"):
        memory.prepare(one := trainer(), one.model)
    monkeypatch.setenv("CTRAINER_CHECK_COLLECTIVES", "1")
    memory.prepare(one := trainer(), one.model)
    assert isinstance(one._parts, memory.ShardedMicroBatches)


EVALUATIONS = [
    {**LAYERS, "rate": 0.2, "most": [3, 3]},
    {**KEPT, "rate": 0.2, "most": [0, 3]},
]
UNEVEN = {"accelerator_config": {"even_batches": False}}
MORE_EVALUATIONS = [
    {**WHOLE, "rate": 0.4, "most": [3, 0]},
    {**BY_SIZE, "rate": 0.1, "most": [2, 2], "model": "net", "more": UNEVEN},
    {**LAYERS, "rate": 0.2, "most": [2, 2], "more": {"batch_eval_metrics": False}},
]


def evaluated(folder: Path, ranks: int, cases: list[Any], machine: int = 0) -> Any:
    options = {"cases": cases, "ranks_a_machine": machine}
    of_ranks = told(run(folder, "fsdp.evaluation_out_of_memory", ranks, **options))
    return list(zip(cases, zip(*of_ranks, strict=True), strict=True))


def are_those_without(found: Any) -> None:
    for case, ranks in found:
        assert sum(rank["failed"] for rank in ranks) > 1
        for rank, most in zip(ranks, case["most"], strict=True):
            assert (rank["failed"] > 0) == (most > 0)
            assert rank["failing"] == pytest.approx(rank["plain"], rel=1e-6)
            assert rank["same_predictions"]
            assert rank["pieces"] == ranks[0]["pieces"] > 1


def test_evaluations_fail_on_each_rank_at_its_own_times(tmp_path: Path) -> None:
    are_those_without(evaluated(tmp_path, 2, EVALUATIONS))


@pytest.mark.exhaustive
def test_evaluations_of_more_ranks_and_layouts(tmp_path: Path) -> None:
    are_those_without(evaluated(tmp_path / "two", 2, MORE_EVALUATIONS))
    three = [{**case, "most": [0, 3, 3]} for case in (*EVALUATIONS, *MORE_EVALUATIONS)]
    are_those_without(evaluated(tmp_path / "three", 3, three))
    hybrid = [{**HYBRID, "rate": 0.2, "most": [0, 3, 3, 0]}]
    are_those_without(evaluated(tmp_path / "hybrid", 4, hybrid, machine=2))


def test_an_evaluation_that_cannot_go_on_ends_on_all_ranks(tmp_path: Path) -> None:
    common = {**LAYERS, "rate": 1.0, "most": [0, 0], "raises": True}
    row = {**common, "most": [0, 99], "least": 1}
    net = {**common, **BY_SIZE, "model": "net", "coupled": True, "most": [1, 0]}
    broken = [{**common, "broken": at} for at in ("before", "after", "between")]
    found = evaluated(tmp_path, 2, [row, net, *broken])
    (_, (first, second)), (_, coupled), *others = found
    assert first.startswith("RuntimeError: another rank is out of memory with a single")
    assert second.startswith("OutOfMemoryError: CUDA out of memory")
    assert all("split_coupled_rows=True" in error for error in coupled)
    for _, (first, second) in others:
        assert second == "KeyError: 'broken'"
        assert first.startswith(("ValueError", "RuntimeError"))
