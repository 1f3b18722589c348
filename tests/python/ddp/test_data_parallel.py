"""DataParallel on two processes, beside torch's DistributedDataParallel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ranks


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    pytest.importorskip("torch")
    return ranks.told(ranks.run(tmp_path_factory.mktemp("ranks"), "ddp.data_parallel"))


CASES = ["all used", "small buckets", "buffers stay", "unused", "static"]


@pytest.mark.parametrize("case", CASES)
def test_training_gives_the_bits_of_torchs_wrapper(
    found: list[dict[str, Any]], case: str
) -> None:
    names = ["finite", "shm True", "shm False", "gloo True", "gloo False"]
    expected = dict.fromkeys(names, True)
    assert [rank[case] for rank in found] == [expected, expected]


def test_halves_are_rounded_to_as_many_bits(found: list[dict[str, Any]]) -> None:
    # Each share and their sum are rounded once, to 11 or 8 bits, and of numbers below
    # 2^-12, the least that counts as largest here, fp16 has multiples of 2^-24; shares
    # may be larger than the sum is
    for rank in found:
        assert 0 < rank["fp16"] <= 4 * 2**-11
        assert 0 < rank["bf16"] <= 4 * 2**-8


def test_another_hook_is_rejected(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert "powerSGD_hook" in rank["other hook"]
        assert "others are for torch's" in rank["other hook"]


@pytest.mark.parametrize("divide", [True, False])
def test_uneven_data_gives_the_bits_of_torchs_join(
    found: list[dict[str, Any]], divide: bool
) -> None:
    for rank in found:
        assert rank[f"join shm {divide}"]
        assert rank[f"join gloo {divide}"]


def test_the_end_of_one_ranks_data_can_be_an_error(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["early"].startswith("1 of 2 ranks have no data left")


def test_gradients_are_those_of_the_whole_batch(found: list[dict[str, Any]]) -> None:
    # Convolutions add in another order in float32, of which 2^-24 is half a unit
    assert max(rank["whole batch"] for rank in found) < 1e-5


def test_parameters_without_a_gradient_are_named(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["unused rejected"].startswith(
            "RuntimeError: the backward pass has ended and these parameters got no "
            "gradient: 'nobodys.weight', 'nobodys.bias'. "
        )


def test_parameters_may_be_frozen_for_a_while(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["thawed"] == [True] * 24


def test_a_second_pass_adds_its_average(found: list[dict[str, Any]]) -> None:
    # Two sums and a mean more, of 2^-24 each
    assert all(all(rank["again"]) for rank in found)


def test_a_nan_of_one_rank_is_seen_by_all(found: list[dict[str, Any]]) -> None:
    assert found[0]["nan"] == found[1]["nan"]
    assert any(found[0]["nan"])


def test_a_rank_that_uses_no_parameter_takes_part(found: list[dict[str, Any]]) -> None:
    assert [rank["one rank has one"] for rank in found] == [[0.5] * 3, [0.5] * 3]


def test_checkpoints_with_passes_of_their_own(found: list[dict[str, Any]]) -> None:
    assert all(all(rank["checkpoints"]) for rank in found)


def test_modules_that_differ_are_rejected_on_all_ranks(
    found: list[dict[str, Any]],
) -> None:
    for rank in found:
        assert rank["differ"] == (
            "ValueError: the ranks differ: parameter or buffer 0 is 'weight float32 "
            "[2, 3]' on rank 0 and 'weight float32 [3, 3]' on rank 1; all ranks must "
            "have the same, in the same order"
        )


def test_what_cannot_be_wrapped_says_why(found: list[dict[str, Any]]) -> None:
    assert found[0]["frozen"].startswith("ValueError: no parameter of this Linear")
    assert found[0]["wrapped"] == [True, False, "DataParallel already"]


def test_state_has_torchs_names_and_attributes_are_the_modules(
    found: list[dict[str, Any]],
) -> None:
    assert found[0]["keys"] == ["module.conv.weight", "module.conv.bias"]
    assert found[0]["forwarded"]
    assert "no_such" in found[0]["missing"]


def test_a_module_whose_wrapper_has_gone_is_a_rank_of_its_own(
    found: list[dict[str, Any]],
) -> None:
    assert [rank["closed"] for rank in found] == [[[1.0, 1.0]], [[2.0, 2.0]]]
    assert [rank["gone"] for rank in found] == [[[1.0, 1.0]], [[2.0, 2.0]]]


def test_a_module_on_a_gpu_gets_torchs_wrapper_in_the_launchers_group(
    tmp_path: Path,
) -> None:
    given = [["cuda:7"], {"bucket_cap_mb": 3}] * 2
    found = ranks.told(ranks.run(tmp_path, "ddp.on_gpu"))
    for rank, (*facts, reasons) in enumerate(found):
        assert facts == [rank, 2, "gloo", given, 2.0]
        assert reasons[0] == "the backend is 'gloo', and not nccl"
        assert reasons[1].startswith("rank 0: NCCL needs ")
