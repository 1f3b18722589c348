"""fairseq's Trainer on two processes: its numbers, and what one rank's trouble does.

All scenarios run in one pair of processes, one after the other; each test looks at what
both ranks told of one of them.
"""

from __future__ import annotations

import math
from typing import Any

import fairseq_tiny as tiny
import numpy as np
import pytest
import torch
from ranks import Rank, run

from ctrainer.fairseq.replay import replay


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Rank]:
    made = run(tmp_path_factory.mktemp("ranks"), "fairseq.trainers")
    for rank in made:
        assert rank.told is not None, rank.output
        assert rank.code == 0, rank.output
    return made


@pytest.fixture(scope="module")
def both(ranks: list[Rank]) -> list[dict[str, Any]]:
    return [rank.told for rank in ranks]


def alone(updates: list[list[Any]], **changes: Any) -> dict[str, Any]:
    """The same in this process, on all batches."""
    ours = tiny.trainer(**changes)
    outputs = [ours.train_step(u) for u in updates]
    parameters = ours.get_model().parameters()
    return {
        "weights": [v for p in parameters for v in p.flatten().tolist()],
        "losses": [o and o["loss"] for o in outputs],
        "sizes": [o and o["sample_size"] for o in outputs],
        "updates": ours.get_num_updates(),
    }


def assert_like(found: list[Any], name: str, expected: dict[str, Any]) -> None:
    """Both ranks have the expected numbers, and each other's weights to the bit.

    Gradients are sums of float32 taken in another order: their relative error is at
    most a few 1e-7, and Adam's updates of 0.02 follow it; losses are averaged alike.
    """
    assert found[0][name]["weights"] == found[1][name]["weights"]
    for rank in found:
        assert rank[name]["updates"] == expected["updates"]
        np.testing.assert_allclose(rank[name]["sizes"], expected["sizes"])
        np.testing.assert_allclose(rank[name]["losses"], expected["losses"], rtol=1e-5)
        np.testing.assert_allclose(
            rank[name]["weights"], expected["weights"], rtol=0, atol=2e-5
        )


def test_each_rank_knows_its_place(both: list[Any]) -> None:
    assert both[0]["who"] == [2, 0, True, True, True]
    assert both[1]["who"] == [2, 1, False, False, True]
    for rank in both:
        assert rank["wrapper"] == ["Distributed", ["embed.weight", "out.bias",
                                                   "out.weight"]]  # fmt: skip


@pytest.mark.parametrize("backend", ["c10d", "legacy"])
def test_two_ranks_have_the_numbers_of_one_with_twice_the_update_freq(
    both: list[Any], backend: str
) -> None:
    expected = alone(tiny.groups(tiny.batches(8), 2), optimization__clip_norm=0.5)
    assert_like(both, backend, expected)
    assert_like(both, f"other weights {backend}", expected)


def test_a_delayed_update_on_two_ranks_too(both: list[Any]) -> None:
    assert_like(both, "delayed", alone(tiny.groups(tiny.batches(8), 4)))


def test_ranks_stay_alike_in_16_bits(both: list[Any]) -> None:
    assert both[0]["bf16"]["weights"] == both[1]["bf16"]["weights"]
    expected = alone(tiny.groups(tiny.batches(8), 2), common__bf16=True)
    # bfloat16 has 8 bits: a gradient of its rounding error moves Adam's first steps
    np.testing.assert_allclose(both[0]["bf16"]["losses"], expected["losses"], rtol=0.02)


def test_a_dummy_batch_counts_for_nothing_on_several_ranks(both: list[Any]) -> None:
    """Fault P10 of the original: a dummy in the last place voids its rank's update."""
    batches = tiny.batches(5)
    assert_like(both, "dummy", alone([*tiny.groups(batches[:4], 2), [batches[4]]]))
    assert_like(both, "part dummy", alone([batches[:3]]))


def test_logs_that_cannot_be_summed_are_gathered_on_the_cpu(both: list[Any]) -> None:
    """Fault P15 of the original: a buffer on a GPU, and 16 KiB a worker at most."""
    expected = alone(tiny.groups(tiny.batches(8), 2), optimization__clip_norm=0.5)
    assert_like(both, "gathered", expected)
    for rank in both:
        assert rank["gathered"]["more"] == [40000, 1]  # of two ranks, 0 and 1


def test_ranks_that_log_different_keys_exchange_the_logs(both: list[Any]) -> None:
    expected = alone(tiny.groups(tiny.batches(8), 2), optimization__clip_norm=0.5)
    assert_like(both, "uneven", expected)


def test_more_logs_than_a_block_are_summed_too(both: list[Any]) -> None:
    assert [rank["many"] for rank in both] == [2 * sum(range(100))] * 2


def test_a_log_that_is_no_number_is_named(both: list[Any]) -> None:
    for rank in both:
        assert "logs a str as 'text'" in rank["words"]


@pytest.mark.parametrize("backend", ["c10d", "legacy"])
def test_a_rank_out_of_memory_drops_its_sample_and_nobody_hangs(
    both: list[Any], backend: str
) -> None:
    """Fault P16 of the original: the others wait for ever, or get other buffers."""
    batches = tiny.batches(6)
    expected = alone([batches[:2], batches[2:3], batches[4:]])
    assert_like(both, f"oom {backend}", expected)
    assert [rank[f"oom {backend}"]["oom"] for rank in both] == [1, 1]


@pytest.mark.parametrize("backend", ["c10d", "legacy"])
def test_an_update_without_any_sample_is_skipped_by_all(
    both: list[Any], backend: str
) -> None:
    batches = tiny.batches(6)
    for rank in both:
        # the task has run out of memory once, at update 1: the third group is used
        found = rank[f"oom all {backend}"]
        assert found["losses"][1] is None
        assert found["updates"] == 2
        assert found["oom"] == 2
    expected = alone([batches[:2], batches[4:]])
    np.testing.assert_allclose(
        both[0][f"oom all {backend}"]["weights"], expected["weights"], atol=2e-5
    )


def test_out_of_memory_within_the_backward_pass_is_survived_by_the_legacy_exchange(
    both: list[Any],
) -> None:
    batches = tiny.batches(6)
    expected = alone([batches[:2], batches[2:3], batches[4:]])
    assert_like(both, "oom backward", expected)


def test_out_of_memory_before_the_exchange_drops_one_sample_of_a_delayed_update(
    both: list[Any],
) -> None:
    batches = tiny.batches(8)
    # rank 1's first sample of the second update is batch 5
    expected = alone([batches[:4], [batches[4], batches[6], batches[7]]])
    assert_like(both, "oom unsynced", expected)


def test_a_rank_that_has_never_logged_may_run_out_of_memory(both: list[Any]) -> None:
    for rank in both:
        assert rank["oom first"]["updates"] == 2
        assert rank["oom first"]["sizes"] == [tiny.batches(1)[0]["target"].numel()]


def test_an_overflow_on_one_rank_skips_the_update_on_all(both: list[Any]) -> None:
    for rank in both:
        found = rank["overflow"]
        assert found["updates"] == 2
        assert found["losses"][1] is None
        assert found["scale"] == both[0]["overflow"]["scale"] < 128
    assert both[0]["overflow"]["weights"] == both[1]["overflow"]["weights"]


def test_nan_on_one_rank_raises_on_all(both: list[Any]) -> None:
    for rank in both:
        assert "gradients are Nan/Inf" in rank["nan"]
    assert both[0]["crash"] == ["crash.pt", "crash.rank1.pt"]


def test_what_a_rank_has_left_is_replayed_by_one_process(both: list[Any]) -> None:
    """Rank 1 had the NaN, and rank 0 got it in the sum of the gradients."""
    crashes = [f"{both[0]['folder']}/nan/{name}" for name in both[0]["crash"]]
    assert replay(crashes[0], tiny.trainer()).startswith("nothing failed this time")
    assert replay(crashes[1], tiny.trainer()).startswith("not finite: ")


def test_norms_that_differ_are_shown_in_a_table(both: list[Any]) -> None:
    """On the CPU too; the original looks on GPUs alone."""
    for rank in both:
        lines = rank["drift"].split("\n")
        assert lines[0].startswith(
            "Fatal error: gradients are inconsistent between workers. "
            "Try --ddp-backend=legacy_ddp."
        )
        assert lines[1] == lines[-1] == "-" * 80
        assert lines[2] == "grad_norm across the workers:"
        norms = [float(line.split(" = ")[1]) for line in lines[3:5]]
        assert [line.split(" = ")[0] for line in lines[3:5]] == [
            "rank   0", "rank   1"
        ]  # fmt: skip
        assert norms[1] == pytest.approx(2 * norms[0], abs=2e-8)


def test_validation_is_averaged_over_the_ranks(both: list[Any]) -> None:
    ours = tiny.trainer()
    losses, sizes = [], []
    for batch in tiny.batches(2):
        loss, size, _ = tiny.Criterion()(ours.get_model(), batch)
        losses.append(loss.item())
        sizes.append(size)
    expected = sum(losses) / sum(sizes) / math.log(2)
    for rank in both:
        assert rank["valid"] == pytest.approx(expected, abs=1e-3)  # 3 digits are kept
        first = losses[0] / sizes[0] / math.log(2)
        assert rank["valid dummy"] == pytest.approx(first, abs=1e-3)


def test_the_first_rank_saves_and_all_load(both: list[Any]) -> None:
    """Fault P14 of the original: loading on several workers dies on today's torch."""
    assert both[0]["saved"].endswith("half.pt")
    assert both[1]["saved"] is None
    for rank in both:
        assert "train_iterator" in rank["extra"]
        assert rank["none"] is None
        assert rank["resumed"]["weights"] == both[0]["whole"]["weights"]
        assert rank["resumed"]["updates"] == 4
    assert both[0]["rubbish"] == both[1]["rubbish"]


def bmuf_by_hand() -> tuple[list[list[float]], list[Any]]:
    """Two trainers that are averaged after every second update: their weights after
    it, and the losses of each."""
    batches = tiny.batches(36)[0::3]
    apart = [tiny.trainer(optimization__clip_norm=0.5) for _ in range(2)]
    losses: list[Any] = [[], []]
    for update in range(1, 7):
        for rank, ours in enumerate(apart):
            output = ours.train_step([batches[2 * (update - 1) + rank]])
            losses[rank].append(output and output["loss"])
        if update % 2 == 0:
            pairs = zip(*(t.get_model().parameters() for t in apart), strict=True)
            for a, b in pairs:
                a.data = a.data / 2 + b.data / 2
                b.data = a.data.clone()
    weights = [
        [v for p in t.get_model().parameters() for v in p.flatten().tolist()]
        for t in apart
    ]
    return weights, losses


def test_bmuf_averages_the_models_at_the_ends_of_blocks(both: list[Any]) -> None:
    """block_momentum 0 is plain averaging. An update at the end of a block has the sum
    of both sample sizes, and its gradient twice the weight: with batches of one size
    that is each rank's own."""
    weights, losses = bmuf_by_hand()
    assert both[0]["bmuf"]["kinds"] == ["FairseqBMUF", "Model"]
    for rank, found in enumerate(both):
        np.testing.assert_allclose(found["bmuf"]["weights"], weights[rank], atol=2e-6)
        assert found["bmuf"]["updates"] == 6
        # logs of both where they meet, its own in between
        expected = [
            losses[rank][i] if i % 2 == 0 else (losses[0][i] + losses[1][i]) / 2
            for i in range(6)
        ]
        np.testing.assert_allclose(found["bmuf"]["losses"], expected, atol=2e-3)
        assert found["bmuf"]["weights"] == both[0]["bmuf"]["weights"]


def test_slowmo_averages_the_models_and_logs_every_update_of_all(
    both: list[Any],
) -> None:
    """A gradient has the weight of its share in both sample sizes, twice: with batches
    of one size that is each rank's own."""
    weights, losses = bmuf_by_hand()
    for rank, found in enumerate(both):
        assert found["slowmo"]["wrapper"] == "LocalDistributed"
        np.testing.assert_allclose(found["slowmo"]["weights"], weights[rank], atol=2e-6)
        np.testing.assert_allclose(
            found["slowmo"]["losses"], np.mean(losses, axis=0), atol=2e-3
        )
        assert found["slowmo"]["weights"] == both[0]["slowmo"]["weights"]
        other = found["other weights slowmo"]  # at the start: those of rank 0 count
        assert other["weights"] == found["slowmo"]["weights"]
        assert found["slowmo bf16"]["weights"] == both[0]["slowmo bf16"]["weights"]
        np.testing.assert_allclose(
            found["slowmo bf16"]["losses"], found["slowmo"]["losses"], rtol=0.02
        )


def test_slow_momentum_moves_the_model_that_workers_have_averaged(
    both: list[Any],
) -> None:
    """A step of it at the third and the sixth update, averages at the second and the
    fourth; the first block begins with the average after the first update."""
    batches = tiny.batches(36)[0::3]
    apart = [tiny.trainer(optimization__clip_norm=0.5) for _ in range(2)]
    model = momentum = np.zeros(0)
    for update in range(1, 7):
        rate = apart[0].get_lr()
        for rank, ours in enumerate(apart):
            ours.train_step([batches[2 * (update - 1) + rank]])
        mean = np.mean([parameters_of(ours) for ours in apart], axis=0)
        if update == 1:
            model, momentum = mean, np.zeros_like(mean)
        if update in (3, 6):
            momentum = 0.5 * momentum + (model - mean) / rate
            mean = model = model - rate * momentum
        if update != 5:
            for ours in apart:
                torch.nn.utils.vector_to_parameters(
                    torch.tensor(mean, dtype=torch.float32),
                    ours.get_model().parameters(),
                )
    for found in both:
        assert found["slow momentum"]["momentum"] == 0.5
        assert found["slow momentum"]["weights"] == both[0]["slow momentum"]["weights"]
        np.testing.assert_allclose(found["slow momentum"]["weights"], mean, atol=4e-6)


def parameters_of(trainer: Any) -> Any:
    return (
        torch.nn.utils.parameters_to_vector(trainer.get_model().parameters())
        .detach()
        .cpu()
        .numpy()
        .astype(np.float64)
    )


def test_an_overflow_of_a_worker_that_has_local_steps_counts_as_an_update(
    both: list[Any],
) -> None:
    for way in ("bmuf fp16", "bmuf amp", "slowmo fp16", "slowmo amp"):
        for found in (rank[way] for rank in both):
            assert found["updates"] == 6
            assert found["weights"] == both[0][way]["weights"]
            assert np.isfinite(found["weights"]).all()
        # rank 1's scale alone was halved
        assert both[1][way]["scale"] * 2 == both[0][way]["scale"]


def test_bmuf_meets_although_one_rank_had_no_memory(both: list[Any]) -> None:
    for found in both:
        assert found["bmuf oom"]["updates"] == 6
        assert found["bmuf oom"]["weights"] == both[0]["bmuf oom"]["weights"]


def test_bmuf_is_resumed_where_it_was(both: list[Any]) -> None:
    """Fault P13 of the original, which forgets the momentum of blocks and the count.
    The first rank's Adam moments are saved: with average_sync they are all ranks'."""
    for found in both:
        assert found["bmuf resumed"]["weights"] == both[0]["bmuf whole"]["weights"]
        assert found["bmuf resumed"]["updates"] == 6
    assert both[0]["bmuf whole"]["weights"] != both[0]["bmuf"]["weights"]


def test_bmuf_goes_on_within_a_block_to_the_bit(both: list[Any]) -> None:
    """Each rank from its own weights, moments and average."""
    for found in both:
        assert found["apart loaded"] == found["apart half"]["weights"]
        for key in ("weights", "losses", "average"):
            left = len(found["apart resumed"]["losses"])
            expected = found["apart whole"][key]
            if key == "losses":
                expected = expected[-left:]
            assert found["apart resumed"][key] == expected
    for key in ("apart loaded", "apart resumed"):
        one, other = (found[key] for found in both)
        assert one != other  # without which nothing was shown


@pytest.mark.parametrize(
    ("stop", "whole"), [(3, "slowmo"), (5, "slow momentum"), (1, "slow momentum")]
)
def test_slowmo_goes_on_between_averages_to_the_bit(
    both: list[Any], stop: int, whole: str
) -> None:
    way = f"slowmo from {stop}"
    loaded = [found[f"{way} loaded"] for found in both]
    assert (loaded[0] == loaded[1]) is (stop == 1)  # after the first all have met
    for found in both:
        assert found[way]["weights"] == found[whole]["weights"]
        assert found[way]["losses"] == found[whole]["losses"][stop:]
        assert "written by 2 workers" in found["slowmo alone"]


def test_bmuf_s_workers_of_another_number_go_on_from_the_first_if_asked(
    both: list[Any],
) -> None:
    first = both[0]["apart half"]["weights"]
    for found in both:
        assert "written by 2 workers" in found["apart alone"]
        assert "these are 1" in found["apart alone"]
        assert found["apart reset"] == first


def test_bmuf_s_distances_may_travel_as_codes(both: list[Any]) -> None:
    whole = np.array(both[0]["bmuf whole"]["weights"])
    for found in both:
        assert found["bmuf coded"]["weights"] == both[0]["bmuf coded"]["weights"]
        missed = np.abs(whole - found["bmuf coded"]["weights"]).max()
        # a scale is 1/127 of the largest distance of its 256, and 3 blocks end
        assert 0 < missed < 3 * np.abs(whole).max() / 127


def test_a_rank_that_dies_makes_the_other_raise_in_time(both: list[Any]) -> None:
    dead, alive = both[1]["last"], both[0]["last"]
    assert "out of memory" in dead[1]
    assert alive[0] == "RankFailure"
    assert alive[2] < 30  # the group would wait a minute
