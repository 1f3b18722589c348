"""Batching, filtering and collation, by the names of fairseq's data/data_utils.py."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, islice, repeat, takewhile
from typing import Any

import numpy as np

from ctrainer import _C

__all__ = [
    "batch_by_size",
    "collate_tokens",
    "collect_filtered",
    "filter_paired_dataset_indices_by_size",
    "infer_language_pair",
    "load_indexed_dataset",
    "numpy_seed",
    "raise_if_valid_subsets_unintentionally_ignored",
]
logger = logging.getLogger(__name__)


def infer_language_pair(path: str) -> Sequence[str | None]:
    """Return ["src", "dst"] of the first file SPLIT.SRC-DST... in a folder.

    Args:
        path (str): The folder.

    Returns:
        The two languages; [None, None] where no file has such a name.
    """
    for name in os.listdir(path):
        parts = name.split(".")
        if len(parts) >= 3 and len(parts[1].split("-")) == 2:
            return parts[1].split("-")
    return [None, None]


@contextlib.contextmanager
def numpy_seed(seed: int | None, *addl_seeds: int) -> Iterator[None]:
    """Seed NumPy's global generator for the body, then restore its state.

    Args:
        seed (int | None): None does nothing.
        addl_seeds (int): Further seeds, hashed together with the first.

    Returns:
        A context manager.
    """
    if seed is None:
        yield
        return
    if addl_seeds:
        seed = int(hash((seed, *addl_seeds)) % 1e6)
    state = np.random.get_state()
    np.random.seed(seed)
    try:
        yield
    finally:
        np.random.set_state(state)


def load_indexed_dataset(
    path: str,
    dictionary: Any = None,
    dataset_impl: str | None = None,
    combine: bool = False,
    default: str = "mmap",
) -> Any:
    """Open the data set with a prefix.

    Args:
        path (str): The prefix, "data-bin/train" for example.
        dictionary (default None): The Dictionary that encodes a text file.
        dataset_impl (str | None, default None): Its kind; None asks the files.
        combine (bool, default False): PATH1, PATH2 and so on belong to it, too, as far
            as they go.
        default (str, default 'mmap'): The kind where the files do not say.

    Returns:
        The data set; None where there is none.
    """
    from ctrainer.fairseq.concat_dataset import ConcatDataset
    from ctrainer.fairseq.indexed_dataset import infer_dataset_impl, make_dataset

    def opened(k: int) -> Any:
        prefix = path + (str(k) if k > 0 else "")
        impl = dataset_impl or infer_dataset_impl(prefix) or default
        dataset = make_dataset(prefix, impl, True, dictionary)
        if dataset is not None:
            logger.info("loaded %s examples from: %s", f"{len(dataset):,}", prefix)
        return dataset

    parts = takewhile(lambda d: d is not None, map(opened, count()))
    datasets = list(parts if combine else islice(parts, 1))
    if len(datasets) < 2:
        return next(iter(datasets), None)
    return ConcatDataset(datasets)


def raise_if_valid_subsets_unintentionally_ignored(cfg: Any) -> None:
    """Reject subsets valid1, valid2... of the data's folder that no option names.

    Args:
        cfg: fairseq's configuration. Subsets may be ignored with
            dataset.ignore_unused_valid_subsets, dataset.combine_valid_subsets or
            dataset.disable_validation.

    Raises:
        ValueError: dataset.valid_subset does not name one of them.
    """
    dataset, data = cfg.dataset, getattr(cfg.task, "data", None)
    if (
        dataset.ignore_unused_valid_subsets
        or dataset.combine_valid_subsets
        or dataset.disable_validation
        or not data
    ):
        return
    folders = [path for path in data.split(os.pathsep) if os.path.isdir(path)]
    files = (name.split(".")[0] for path in folders for name in os.listdir(path))
    found = {name for name in files if name[:5] == "valid" and name[5:].isdecimal()}
    ignored = found - set(dataset.valid_subset.split(","))
    if ignored:
        raise ValueError(
            f"Valid paths {sorted(ignored)} will be ignored. Name them in "
            "--valid-subset, combine them with --combine-val, or say "
            "--ignore-unused-valid-subsets"
        )


# ---- batches -------------------------------------------------------------------------


def _int64(values: Any) -> Any:
    if not isinstance(values, np.ndarray):
        values = np.fromiter(values, np.int64)
    if values.dtype.kind not in "iu":
        raise TypeError(f"expected integers, got an array of {values.dtype}")
    return np.ascontiguousarray(values, np.int64)


def batch_by_size(
    indices: Any,
    num_tokens_fn: Callable[[int], int] | None,
    num_tokens_vec: Any = None,
    max_tokens: float | None = None,
    max_sentences: int | None = None,
    required_batch_size_multiple: int = 1,
) -> list[Any]:
    """Return ordered indices in batches, padded to their longest sample, within limits.

    Args:
        indices: (n,) integers.
        num_tokens_fn (Callable[[int], int] | None): Returns the length of a sample; not
            called with num_tokens_vec.
        num_tokens_vec (default None): Their lengths, (n,).
        max_tokens (float | None, default None): Samples times the longest, at most;
            None is no limit.
        max_sentences (int | None, default None): Samples, at most; None is no limit.
        required_batch_size_multiple (int, default 1): A batch of more samples than this
            has a multiple of it, and a last batch that has not, because there are no
            more, is left out and warned of.

    Returns:
        Views of the indices, int64.

    Raises:
        ValueError: a sample that is too long by itself; the message names it.

    Example:
        >>> import numpy as np
        >>> from ctrainer.fairseq import batch_by_size
        >>> lengths = np.array([2, 2, 3, 5])
        >>> batches = batch_by_size(np.arange(4), None, lengths, max_tokens=6)
        >>> [batch.tolist() for batch in batches]
        [[0, 1], [2], [3]]
    """
    indices = _int64(indices)
    tokens = num_tokens_fn if num_tokens_vec is None else _int64(num_tokens_vec)
    most = -1 if max_tokens is None else int(max_tokens)
    sentences = -1 if max_sentences is None else max_sentences
    multiple = required_batch_size_multiple
    batches = _C.batch_by_size(indices, tokens, most, sentences, multiple)
    if batches and len(batches[-1]) % multiple != 0:
        logger.warning(
            "the last %d of %d samples are left out: they make no batch of a multiple "
            "of required_batch_size_multiple=%d",
            len(batches[-1]),
            len(indices),
            multiple,
        )
        batches.pop()
    return batches


# ---- filters -------------------------------------------------------------------------


def collect_filtered(
    function: Callable[[Any], bool], iterable: Iterable[Any], filtered: list[Any]
) -> Iterator[Any]:
    """Yield the elements that pass a test, as filter() does, and keep the others.

    Args:
        function (Callable[[Any], bool]): The test.
        iterable (Iterable[Any]): The elements.
        filtered (list[Any]): Gets those that do not pass.
    """
    for item in iterable:
        if function(item):
            yield item
        else:
            filtered.append(item)


def _within(size: Any, limit: Any) -> bool:
    """Whether a size is within a limit: a number, or one for each of the size's, None
    being no limit."""
    if not isinstance(limit, Iterable):
        return bool(size <= limit)
    sizes = size if isinstance(size, Iterable) else repeat(size)
    pairs = zip(sizes, limit, strict=False)
    return all(a is None or b is None or a <= b for a, b in pairs)


def _fits(size: Any, limit: Any) -> bool:
    if not isinstance(limit, dict):
        return _within(size, limit)
    if not isinstance(size, dict):
        kind = type(size).__name__
        raise TypeError(f"max_positions is a dict, but a sample's size is a {kind}")
    return all(_within(size[key], limit[key]) for key in limit.keys() & size.keys())


def split_by_size(dataset: Any, indices: Any, limit: Any) -> tuple[Any, list[int]]:
    """The indices of samples within the limit, and the list of the others: by the array
    dataset.sizes where it and a single limit allow, else by dataset.size(index)."""
    sizes = getattr(dataset, "sizes", None)
    if isinstance(sizes, list) and len(sizes) == 1:
        sizes = sizes[0]
    if isinstance(limit, int | float) and isinstance(sizes, np.ndarray):
        fits = sizes[indices] <= limit
        return indices[fits], indices[~fits].tolist()
    ignored: list[int] = []
    plain = np.asarray(indices).tolist()
    kept = collect_filtered(lambda i: _fits(dataset.size(i), limit), plain, ignored)
    return np.fromiter(kept, np.int64), ignored


def report_ignored(
    dataset: Any, ignored: list[int], max_positions: Any, raise_exception: bool
) -> None:
    """Warns of the samples that are too large, or raises for the first of them."""
    if ignored and raise_exception:
        raise Exception(
            f"Size of sample #{ignored[0]} is invalid (={dataset.size(ignored[0])}) "
            f"since max_positions={max_positions}, skip this example with "
            "--skip-invalid-size-inputs-valid-test"
        )
    if ignored:
        logger.warning(
            f"{len(ignored):,} samples have invalid sizes and will be skipped, "
            f"max_positions={max_positions}, first few sample ids={ignored[:10]}"
        )


def filter_paired_dataset_indices_by_size(
    src_sizes: Any, tgt_sizes: Any, indices: Any, max_sizes: Any
) -> tuple[Any, list[int]]:
    """Return the indices whose source and target are within a size.

    Args:
        src_sizes: (n,) integers.
        tgt_sizes: (n,) integers, or None without targets.
        indices: (m,) integers below n.
        max_sizes: None, a number for both, or a pair.

    Returns:
        The indices within the sizes, and the list of the others.
    """
    if max_sizes is None:
        return indices, []
    pair = (max_sizes, max_sizes) if isinstance(max_sizes, int | float) else max_sizes
    most_src, most_tgt = pair
    fits = src_sizes[indices] <= most_src
    if tgt_sizes is not None:
        fits &= tgt_sizes[indices] <= most_tgt
    return indices[fits], indices[~fits].tolist()


# ---- collation -----------------------------------------------------------------------


def collate_tokens(
    values: Sequence[Any],
    pad_idx: int,
    eos_idx: int | None = None,
    left_pad: bool = False,
    move_eos_to_beginning: bool = False,
    pad_to_length: int | None = None,
    pad_to_multiple: int = 1,
    pad_to_bsz: int | None = None,
) -> Any:
    """Put 1-d tensors into the rows of one 2-d tensor, the rest being padding.

    Args:
        values (Sequence[Any]): Tensors of one dtype, of any lengths.
        pad_idx (int): The padding.
        eos_idx (int | None, default None): What a rotated row begins with; None: the
            last of its values.
        left_pad (bool, default False): Padding comes first.
        move_eos_to_beginning (bool, default False): Rotate each row by one.
        pad_to_length (int | None, default None): The width at least; else the longest.
        pad_to_multiple (int, default 1): The width is rounded up to a multiple of it.
        pad_to_bsz (int | None, default None): The height at least; else len(values).

    Returns:
        A tensor (height, width) of the values' dtype.
    """
    width = max([v.numel() for v in values] + [pad_to_length or 0])
    width = -(-width // pad_to_multiple) * pad_to_multiple
    rows = max(len(values), pad_to_bsz or 0)
    out = values[0].new_full((rows, width), pad_idx)
    first = None
    if move_eos_to_beginning and eos_idx is not None:
        first = values[0].new_full((1,), eos_idx)
    if out.is_floating_point() or not _C.pad_rows(
        out, values, left_pad, move_eos_to_beginning, first
    ):
        _pad_rows(out, values, left_pad, move_eos_to_beginning, first)
    return out


def _pad_rows(out: Any, values: Any, left: bool, rotate: bool, first: Any) -> None:
    """_C.pad_rows() for tensors of any device and kind, and for gradients to pass."""
    for i, value in enumerate(values):
        row = out[i]  # not one of unbind's views, which gradients forbid to write to
        place = row[len(row) - len(value) :] if left else row[: len(value)]
        if rotate and len(value) > 0:
            place[:1] = value[-1:] if first is None else first
            place[1:] = value[:-1]
        else:
            place.copy_(value)
