"""Sequences packed into one row without padding, for causal language models of
transformers whose attention keeps the sequences apart."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

_TAKEN = {"input_ids", "labels", "attention_mask"}


class PackedCollator:
    """Training batches of one row: the sequences one after the other, position_ids that
    begin anew with each, and no target across two; by transformers'
    DataCollatorWithFlattening. Without labels the targets are the tokens themselves.

    Raises:
        ValueError: a row has padding or a value that cannot be joined.
    """

    def __init__(self, model: Any) -> None:
        import transformers

        config = model.config
        varlen = str(getattr(config, "_attn_implementation", "")).startswith("flash")
        flattening: Any = transformers.DataCollatorWithFlattening
        self.join = flattening(return_flash_attn_kwargs=varlen)

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> Any:
        for row in features:
            unknown = sorted(set(row) - _TAKEN)
            if unknown:
                raise ValueError(
                    f"pack_sequences joins {', '.join(sorted(_TAKEN))}, and a row has "
                    f"{', '.join(unknown)}; drop these columns"
                )
            mask = row.get("attention_mask")
            if mask is not None and not all(mask):
                raise ValueError(
                    "pack_sequences joins rows without padding, and a row's "
                    "attention_mask has zeros; tokenize with padding=False"
                )
        return self.join(features)


class PaddedCollator:
    """Evaluation batches of the same rows, padded on the right; labels with -100."""

    def __init__(self, model: Any) -> None:
        pad = getattr(model.config, "pad_token_id", None)
        self.pad = {"input_ids": pad or 0, "labels": -100, "attention_mask": 0}

    def __call__(self, features: list[Mapping[str, Any]]) -> dict[str, Any]:
        def tensors(name: str, default: str) -> list[Any]:
            values = (row.get(name, row[default]) for row in features)
            return [torch.as_tensor(value, device="cpu") for value in values]

        columns = {name: tensors(name, "input_ids") for name in ("input_ids", "labels")}
        columns["attention_mask"] = [torch.ones_like(x) for x in columns["input_ids"]]
        return {
            name: torch.nn.utils.rnn.pad_sequence(
                column, batch_first=True, padding_value=self.pad[name]
            )
            for name, column in columns.items()
        }


def collator(model: Any, training: bool) -> PackedCollator | PaddedCollator:
    """Makes the batches of a run with pack_sequences."""
    return PackedCollator(model) if training else PaddedCollator(model)


def count_sequences(batch: Any) -> int | None:
    """The sequences of a packed batch; None for another one."""
    places = batch.get("position_ids") if isinstance(batch, Mapping) else None
    return None if places is None else int((places == 0).sum())


def sequences(model: Any, batch: Any, begin: int, end: int) -> Any:
    """A packed batch of the sequences from `begin` to before `end`."""
    places = batch["position_ids"][0]
    starts = [*(places == 0).nonzero().flatten().tolist(), len(places)]
    joined = ("input_ids", "labels")
    taken = [
        {name: batch[name][0, first:last].tolist() for name in joined}
        for first, last in zip(starts[begin:end], starts[begin + 1 :], strict=False)
    ]
    return PackedCollator(model)(taken)


_OURS, _THEIRS = "ctrainer_packed", "sdpa"
_SHORT = 32  # tokens of a row of short sequences: on a CPU 16 to 48 were no faster


class _Group(NamedTuple):
    """Rows of like length."""

    shape: tuple[int, int]
    mask: torch.Tensor | None  # which tokens see which; None: all before them


class _Packs(NamedTuple):
    """The mask of a packed row: where its sequences are in rows, each alone in one, or
    short ones one after the other."""

    groups: list[_Group]
    there: torch.Tensor  # of each place in the rows, the token that is there
    back: torch.Tensor  # of each token, its place

    @classmethod
    def of(cls, starts: list[int], device: Any) -> _Packs:
        """Of sequences that begin at all but the last of `starts`."""
        groups: list[_Group] = []
        there: list[int] = []
        owners: list[int] = []  # which sequence of its row a place has, or -1
        for rows in _like_rows(list(pairwise(starts))):
            width, begin = max(map(_tokens, rows)), len(there)
            for row in rows:
                padding = width - _tokens(row)
                for at, (start, end) in enumerate(row):
                    there += range(start, end)
                    owners += [at] * (end - start)
                there += [row[0][0]] * padding
                owners += [-1] * padding
            mask, shape = None, (len(rows), width)
            if any(len(row) > 1 for row in rows):
                own = torch.tensor(owners[begin:], device="cpu").view(shape)
                mask = (own[:, None, :, None] == own[:, None, None, :]).tril()
                mask = mask.to(device)
            groups.append(_Group(shape, mask))
        places = torch.tensor(owners, device="cpu").ge(0).nonzero().squeeze(1)
        tokens = torch.tensor(there, device="cpu")
        back = torch.empty(starts[-1], dtype=torch.int64, device="cpu")
        back[tokens[places]] = places
        return cls(groups, tokens.to(device), back.to(device))


_Row = list[tuple[int, int]]  # beginnings and ends of sequences


def _tokens(row: _Row) -> int:
    return sum(end - start for start, end in row)


def _like_rows(sequences: _Row) -> list[list[_Row]]:
    """Groups of rows: of one sequence each, more than 3/4 as long as the group's
    longest; and of short ones, a long one and the shortest that fit."""
    groups: list[list[_Row]] = []
    blocks: list[_Row] = []
    rest = deque(sorted(sequences, key=lambda one: one[0] - one[1]))
    while rest:
        row = [rest.popleft()]
        tokens = _tokens(row)
        if tokens > _SHORT:
            if not groups or 4 * tokens <= 3 * _tokens(groups[-1][0]):
                groups.append([])
            groups[-1].append(row)
            continue
        while rest and tokens + _tokens([rest[-1]]) <= _SHORT:
            row.append(rest.pop())
            tokens += _tokens(row[-1:])
        blocks.append(row)
    return [*groups, blocks] if blocks else groups


def _mask(*args: Any, **given: Any) -> Any:
    """sdpa's mask, or _Packs where it would be that of one packed row whose tokens see
    all tokens before them in their sequence. Source: masking_utils.py of transformers,
    whose functions that make masks pass all this by name."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    length: Any = given.get("q_length")
    packed = (
        not args
        and given["batch_size"] == 1
        and given["attention_mask"] is None
        and length == given["kv_length"]
        and not given["allow_is_causal_skip"]
        and not given["use_vmap"]
        and not torch.compiler.is_compiling()
    )
    if packed:
        # Which tokens see the one before them, or, as in a block of an image, after.
        sees, device = given["mask_function"], given["device"]
        first = torch.zeros(1, dtype=torch.int64, device=device)
        later = torch.arange(1, length, device=device)
        before = sees(first, first, later, later - 1)
        ends = (~before).nonzero().squeeze(1) + 1
        starts = [0, *ends.tolist(), length]
        longest = max(end - start for start, end in pairwise(starts))
        if (
            longest <= given.get("local_size", longest)
            and not sees(first, first, later - 1, later).any()
        ):
            return _Packs.of(starts, device)
    return ALL_MASK_ATTENTION_FUNCTIONS[_THEIRS](*args, **given)


def _attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor,
    value: torch.Tensor, attention_mask: Any, **given: Any,
) -> Any:  # fmt: skip
    """sdpa's attention; with _Packs that of their rows, in which no sequence sees
    another, nor the padding to its right."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attend = ALL_ATTENTION_FUNCTIONS[_THEIRS]
    packs, found = attention_mask, []
    if not isinstance(packs, _Packs):
        return attend(module, query, key, value, attention_mask, **given)
    given["is_causal"] = True
    places = [rows * tokens for (rows, tokens), _ in packs.groups]
    padded = [
        torch.split(x[0].transpose(0, 1).index_select(0, packs.there), places)
        for x in (query, key, value)
    ]
    for (shape, mask), *parts in zip(packs.groups, *padded, strict=True):
        own = [x.unflatten(0, shape).transpose(1, 2) for x in parts]
        found.append(attend(module, *own, mask, **given)[0].flatten(0, 1))
    joined = found[0] if len(found) == 1 else torch.cat(found)
    return joined.index_select(0, packs.back)[None], None


class Packing:
    """Until end(), a model with sdpa as attention computes that of each sequence of a
    packed row for itself."""

    def __init__(self, model: torch.nn.Module) -> None:
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        configs: dict[int, Any] = {
            id(config): config
            for module in model.modules()
            if (config := getattr(module, "config", None))
        }
        self.configs = [
            config
            for config in configs.values()
            if getattr(config, "_attn_implementation", None) == _THEIRS
        ]
        ALL_MASK_ATTENTION_FUNCTIONS.register(_OURS, _mask)
        ALL_ATTENTION_FUNCTIONS.register(_OURS, _attention)
        self._set(_OURS)

    def end(self) -> None:
        self._set(_THEIRS)

    def _set(self, name: str) -> None:
        for config in self.configs:  # the property would set those within it, too
            config._attn_implementation_internal = name


def check_packs(model: Any, given: Any) -> Packing | None:
    """Begin a Packing if the model's attention can have one.

    Raises:
        ValueError: the model does not compute of packed sequences what it computes of
            each alone, for two short ones. It is called up to six times, in eval mode.
    """
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL,
    )

    # By __class__, which for a sharded model is that of the model in its units.
    name = getattr(model, "get_base_model", lambda: model)().__class__.__name__
    if name not in CAUSAL.values():
        raise ValueError(
            f"pack_sequences is for causal language models of transformers, and the "
            f"model is a {name}; leave it out"
        )
    if given is not None:
        raise ValueError(
            "pack_sequences makes the batches, and data_collator is a "
            f"{type(given).__name__}; leave one of them out"
        )
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            packing, fault = _try_packs(model)
    finally:
        for module, training in modes:
            module.training = training
    if fault is not None:
        raise ValueError(
            f"pack_sequences needs a model that keeps packed sequences apart, and in "
            f"{name} with attention {model.config._attn_implementation!r} "
            f"they {fault}; leave it out (max_tokens_per_batch pads little), or load "
            "the model with another attn_implementation"
        )
    return packing


def _try_packs(model: Any) -> tuple[Packing | None, str | None]:
    """The model's Packing, None where only its own attention keeps sequences apart; and
    what is wrong with that one."""
    weight = model.get_input_embeddings().weight
    tokens = (torch.arange(21, device=weight.device) * 5 + 1) % weight.shape[0]
    first, second, other = (part.tolist() for part in tokens.split([8, 5, 8]))
    pack = PackedCollator(model)

    def logits(*sequences: list[int]) -> Any:
        batch = pack([{"input_ids": ids} for ids in sequences])
        batch.pop("labels")
        on_device = {
            key: value.to(weight.device) if hasattr(value, "to") else value
            for key, value in batch.items()
        }
        return model(**on_device).logits[0].float()

    alone = torch.cat([logits(first), logits(second)])

    def fault() -> str | None:
        joined = logits(first, second)
        if not torch.equal(joined[8:], logits(other, second)[8:]):
            return "see each other"
        close = 1e-4 if weight.dtype == torch.float32 else 5e-2
        placed = (joined - alone).abs().max() <= close * alone.abs().max()
        return None if placed else "have other positions than alone"

    packing = Packing(model)
    try:
        if packing.configs and fault() is None:
            return packing, None
    except (AttributeError, TypeError):  # the model computes with its masks
        pass
    except BaseException:
        packing.end()
        raise
    packing.end()
    return None, fault()
