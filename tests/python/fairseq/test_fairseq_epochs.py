"""Epochs of batches: order, shards, position, and exact resuming."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from ctrainer.fairseq.iterators import (  # noqa: E402
    EpochBatchIterator,
    GroupedIterator,
    StreamingEpochBatchIterator,
)

BATCHES = [[i, i + 1] for i in range(0, 20, 2)]


class Numbers(torch.utils.data.Dataset):  # type: ignore[misc]
    def __init__(self, n: int = 20, prefetches: bool = False) -> None:
        self.n, self.supports_prefetch = n, prefetches
        self.prefetched: list[list[int]] = []
        self.epochs: list[int] = []

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> int:
        return int(i)

    def prefetch(self, indices: list[int]) -> None:
        self.prefetched.append(indices)

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


def epochs_of(
    batches: Any = BATCHES, dataset: Any = None, **options: Any
) -> EpochBatchIterator:
    return EpochBatchIterator(dataset or Numbers(), list, batches, **options)


def shuffled(batches: list[Any], seed: int) -> list[Any]:
    """As NumPy's global generator shuffles, which fairseq seeds."""
    state = np.random.get_state()
    np.random.seed(seed)
    batches = list(batches)
    np.random.shuffle(batches)
    np.random.set_state(state)
    return batches


def test_batches_are_shuffled_by_the_seed_plus_the_epoch() -> None:
    epochs = epochs_of(seed=5)
    for epoch in (1, 2, 3):
        assert list(epochs.next_epoch_itr()) == shuffled(BATCHES, 5 + epoch)
        assert epochs.epoch == epoch


def test_numpys_global_generator_is_left_alone() -> None:
    before = np.random.get_state()[1].tolist()
    list(epochs_of().next_epoch_itr())
    assert np.random.get_state()[1].tolist() == before


@pytest.mark.parametrize("disabled", [False, True])
def test_without_shuffling_the_order_is_the_samplers(disabled: bool) -> None:
    epochs = epochs_of(disable_shuffling=disabled)
    assert list(epochs.next_epoch_itr(shuffle=disabled)) == BATCHES
    assert epochs.state_dict()["shuffle"] is False


def test_shards_deal_out_the_shuffled_batches() -> None:
    order = shuffled(BATCHES, 1 + 1)
    shards = [
        list(epochs_of(num_shards=3, shard_id=i).next_epoch_itr()) for i in range(3)
    ]
    assert shards == [order[0::3], [*order[1::3], []], [*order[2::3], []]]
    assert {len(epochs_of(num_shards=3, shard_id=i)) for i in range(3)} == {4}


def test_grouped_shuffling_keeps_neighbours_in_one_step() -> None:
    groups = shuffled([BATCHES[i : i + 3] for i in (0, 3, 6)], 1 + 1)
    for shard in range(3):
        options: Any = {"num_shards": 3, "shard_id": shard, "grouped_shuffling": True}
        assert list(epochs_of(**options).next_epoch_itr()) == [g[shard] for g in groups]


def test_a_prefetching_data_set_is_told_its_shard() -> None:
    dataset = Numbers(prefetches=True)
    epochs = epochs_of(dataset=dataset, num_shards=2, shard_id=1)
    batches = list(epochs.next_epoch_itr())
    assert batches == shuffled(BATCHES, 2)[1::2]
    assert dataset.prefetched == [[i for batch in batches for i in batch]]


def test_fixed_batches_stay_with_their_shard_and_are_shuffled_there() -> None:
    epochs = epochs_of(
        dataset=Numbers(prefetches=True), num_shards=2, shard_id=1, seed=3
    )
    for epoch in (1, 2):
        batches = list(epochs.next_epoch_itr(fix_batches_to_gpus=True))
        assert batches == shuffled(BATCHES[1::2], 3 + epoch + 1)
    plain = epochs_of(num_shards=2, shard_id=1)  # without prefetching it means nothing
    fixed = list(plain.next_epoch_itr(fix_batches_to_gpus=True))
    assert fixed == shuffled(BATCHES, 2)[1::2]


def test_the_position_is_known() -> None:
    epochs = epochs_of()
    assert (epochs.n, epochs.next_epoch_idx, epochs.end_of_epoch()) == (0, 1, False)
    itr = epochs.next_epoch_itr()
    itr.skip(4)
    assert (epochs.iterations_in_epoch, epochs.n) == (4, 4)
    assert (epochs.next_epoch_idx, epochs.end_of_epoch()) == (1, False)
    itr.skip(6)
    assert (epochs.next_epoch_idx, epochs.end_of_epoch()) == (2, True)


def test_the_state_has_fairseqs_keys_and_rolls_over_at_the_end() -> None:
    epochs = epochs_of()
    keys = {"version": 2, "epoch": 1, "iterations_in_epoch": 0, "shuffle": True}
    assert epochs.state_dict() == keys  # before the first epoch too
    itr = epochs.next_epoch_itr().skip(3)
    assert epochs.state_dict() == {**keys, "iterations_in_epoch": 3}
    itr.skip(7)
    assert epochs.state_dict() == {**keys, "epoch": 2}


def resumed(state: dict[str, Any], **options: Any) -> EpochBatchIterator:
    epochs = epochs_of(**options)
    epochs.load_state_dict(json.loads(json.dumps(state)))
    return epochs


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"buffer_size": 3},
        {"num_shards": 3, "shard_id": 2},
        {"grouped_shuffling": True, "num_shards": 2},
        {"skip_remainder_batch": True},
        {"disable_shuffling": True},
    ],
)
def test_a_resumed_epoch_goes_on_exactly(options: dict[str, Any]) -> None:
    whole = epochs_of(**options)
    list(whole.next_epoch_itr())
    expected = list(whole.next_epoch_itr())
    last = list(whole.next_epoch_itr())
    for position in range(len(expected) + 1):
        saved = epochs_of(**options)
        list(saved.next_epoch_itr())
        saved.next_epoch_itr().skip(position)
        again = resumed(saved.state_dict(), **options)
        if position in (0, len(expected)):
            assert again.iterations_in_epoch == 0
        else:
            assert (again.epoch, again.iterations_in_epoch) == (2, position)
            assert again.state_dict() == saved.state_dict()
            assert list(again.next_epoch_itr()) == expected[position:]
            position = len(expected)
        if position == len(expected):
            assert list(again.next_epoch_itr()) == last
            assert again.epoch == 3


def test_fixed_batches_are_resumed_in_their_order() -> None:
    def epochs() -> EpochBatchIterator:
        return epochs_of(dataset=Numbers(prefetches=True), num_shards=2, shard_id=1)

    whole = list(epochs().next_epoch_itr(fix_batches_to_gpus=True))
    saved, again = epochs(), epochs()
    saved.next_epoch_itr(fix_batches_to_gpus=True).skip(2)
    again.load_state_dict(saved.state_dict())
    assert list(again.next_epoch_itr(fix_batches_to_gpus=True)) == whole[2:]


def test_an_epoch_keeps_the_shuffling_it_was_saved_with() -> None:
    saved = epochs_of()
    saved.next_epoch_itr(shuffle=False).skip(2)
    again = resumed(saved.state_dict())
    itr = again.next_epoch_itr(shuffle=True)
    next(itr)
    assert again.state_dict()["shuffle"] is False  # so that it can be resumed once more
    third = resumed(again.state_dict())
    assert list(third.next_epoch_itr(shuffle=True)) == BATCHES[3:]
    assert list(third.next_epoch_itr(shuffle=True)) == shuffled(BATCHES, 1 + 2)


def test_loading_forgets_the_epoch_under_way() -> None:
    epochs = epochs_of()
    list(epochs.next_epoch_itr())
    epochs.load_state_dict({"version": 2, "epoch": 1, "iterations_in_epoch": 0})
    assert (epochs.next_epoch_idx, epochs.iterations_in_epoch) == (1, 0)
    assert list(epochs.next_epoch_itr()) == shuffled(BATCHES, 2)


def test_a_position_beyond_the_data_is_a_mismatch() -> None:
    text = (
        "Cannot resume training due to dataloader mismatch, please report this to the "
        "fairseq developers. You can relaunch training with `--reset-dataloader` and "
        "it should work."
    )
    epochs = epochs_of()
    list(epochs.next_epoch_itr())
    with pytest.raises(RuntimeError) as raised:
        epochs.load_state_dict({"version": 2, "epoch": 2, "iterations_in_epoch": 10})
    assert str(raised.value) == text


def test_the_first_version_of_the_state_means_the_next_epoch_then() -> None:
    epochs = resumed({"epoch": 2, "iterations_in_epoch": 10})
    assert (epochs.epoch, epochs.iterations_in_epoch) == (3, 0)
    assert list(epochs.next_epoch_itr()) == shuffled(BATCHES, 1 + 3)
    middle = resumed({"epoch": 2, "iterations_in_epoch": 4})
    assert list(middle.next_epoch_itr()) == shuffled(BATCHES, 1 + 2)[4:]


def test_an_epoch_is_one_batch_shorter_without_the_remainder(caplog: Any) -> None:
    caplog.set_level("INFO")
    epochs = epochs_of(skip_remainder_batch=True)
    itr = epochs.next_epoch_itr()
    assert (len(itr), list(itr)) == (9, shuffled(BATCHES, 2)[:9])
    assert epochs.end_of_epoch()
    assert "skip final residual batch, total_num_itrs = 9" in caplog.messages
    empty = epochs_of([], skip_remainder_batch=True).next_epoch_itr()
    assert (len(empty), empty.has_next()) == (0, False)


def test_groups_of_an_epoch_end_with_it() -> None:
    epochs = epochs_of(skip_remainder_batch=True)
    groups = GroupedIterator(epochs.next_epoch_itr(), 2, skip_remainder_batch=True)
    assert len(list(groups)) == 4
    assert epochs.end_of_epoch()


def test_the_data_set_hears_of_epochs() -> None:
    dataset = Numbers()
    epochs = epochs_of(dataset=dataset, epoch=0)  # counted from 1
    for _ in range(2):
        list(epochs.next_epoch_itr())
    list(epochs.next_epoch_itr(set_dataset_epoch=False))
    assert dataset.epochs == [1, 2]


@pytest.mark.parametrize("buffer_size", [0, 4])
def test_workers_load_each_epoch(buffer_size: int) -> None:
    epochs = epochs_of(num_workers=1, buffer_size=buffer_size)
    for epoch in (1, 2):
        assert list(epochs.next_epoch_itr()) == shuffled(BATCHES, 1 + epoch)


def test_an_error_of_the_data_set_reaches_the_training_loop() -> None:
    class Broken(Numbers):
        def __getitem__(self, i: int) -> int:
            if i == 7:
                raise OSError("disk on fire")
            return i

    epochs = epochs_of(dataset=Broken(), buffer_size=2)
    itr = epochs.next_epoch_itr(shuffle=False)
    itr.skip(3)
    with pytest.raises(OSError, match="disk on fire"):
        next(itr)


def test_buffers_are_of_twenty_batches_at_most() -> None:
    assert epochs_of(buffer_size=100).buffer_size == 20


def test_the_first_batch_is_collated_before_shuffling() -> None:
    assert epochs_of().first_batch == [0, 1]
    outside = Numbers()
    outside.supports_fetch_outside_dataloader = False
    assert epochs_of(dataset=outside).first_batch == "DUMMY"
    with pytest.raises(Exception, match=r"^The dataset is empty\. This could indicate"):
        _ = epochs_of([]).first_batch


def test_what_is_no_data_set_is_rejected() -> None:
    with pytest.raises(TypeError, match="generator without __getitem__"):
        epochs_of(dataset=(i for i in range(3)))
    with pytest.raises(ValueError, match="shard_id must be between 0 and num_shards"):
        epochs_of(num_shards=2, shard_id=2)


# ---- streams -------------------------------------------------------------------------


class Stream(torch.utils.data.IterableDataset):  # type: ignore[misc]
    epoch = 0

    def __len__(self) -> int:
        return 7

    def __iter__(self) -> Iterator[int]:
        return iter(range(10 * self.epoch, 10 * self.epoch + 7))

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


@pytest.mark.parametrize("buffer_size", [0, 2])
def test_a_stream_is_cut_into_batches_in_its_own_order(buffer_size: int) -> None:
    epochs = StreamingEpochBatchIterator(Stream(), 3, list, buffer_size=buffer_size)
    assert (epochs.next_epoch_idx, epochs.iterations_in_epoch) == (1, 0)
    assert not epochs.end_of_epoch()
    itr = epochs.next_epoch_itr()
    assert (len(itr), next(itr), epochs.iterations_in_epoch) == (3, [10, 11, 12], 1)
    itr.skip(2)
    assert (epochs.end_of_epoch(), epochs.next_epoch_idx) == (True, 2)
    assert next(epochs.next_epoch_itr()) == [20, 21, 22]
    assert epochs.first_batch == "DUMMY"


def test_the_state_of_a_stream_says_where_it_is() -> None:
    epochs = StreamingEpochBatchIterator(Stream(), 2, list, epoch=3)
    list(epochs.next_epoch_itr())
    assert epochs.state_dict() == {"epoch": 4}
    epochs.load_state_dict({"epoch": 2})
    assert (epochs.next_epoch_idx, epochs.iterations_in_epoch) == (2, 0)
    epochs.next_epoch_itr().skip(3)
    saved = json.loads(json.dumps(epochs.state_dict()))
    again = StreamingEpochBatchIterator(Stream(), 2, list)
    again.load_state_dict(saved)
    assert (again.next_epoch_idx, again.iterations_in_epoch) == (2, 3)
    assert again.state_dict() == saved
    itr = again.next_epoch_itr()
    assert (itr.n, len(itr), list(itr)) == (3, 4, [[26]])
    again.load_state_dict({**saved, "epoch": 5})
    with pytest.raises(ValueError, match="batch 3 of epoch 5 is not the one"):
        again.next_epoch_itr()
    with pytest.raises(TypeError, match="int, which is not iterable"):
        StreamingEpochBatchIterator(5)
