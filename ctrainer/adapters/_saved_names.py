"""Which weight of a model each tensor of its files is.

save_pretrained() of transformers 5 writes many models under the names, and in the
layout, of the checkpoints they were first published with: ViT under other names,
Mixtral's experts one by one. A saved name is therefore resolved by what
save_pretrained() would write now, then as a name of the model's own, and then as
from_pretrained() resolves names of any age.
"""

from __future__ import annotations

import copy
import dataclasses
import re
import sys
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch

State = dict[str, torch.Tensor]


@dataclasses.dataclass
class Layout:
    """How the tensors of files become those of a model."""

    model: Any
    own: State  # the model's tensors, of whose values nothing is read
    renamed: dict[str, str]  # saved name -> own name, of tensors saved as they are
    made: set[str]  # own names of tensors that transformers makes of saved ones
    sources: set[str]  # the names of those saved ones
    converters: list[Any] = dataclasses.field(default_factory=list)
    exact: bool = False  # are files compared with what would be saved again?

    def fit(self, names: Collection[str]) -> tuple[list[str], list[str]]:
        """The model's names that have no tensor among the saved names, and the saved
        names that are none of the model's. Tied weights need one name."""
        filled = {self.renamed[name] for name in names if name in self.renamed}
        if self.sources <= set(names):
            filled |= self.made
        places = {_place(self.own[name]) for name in filled}
        missing = [
            name
            for name, tensor in self.own.items()
            if name not in filled and _place(tensor) not in places and tensor.numel()
        ]
        known = self.renamed.keys() | self.sources
        unexpected = [name for name in names if name not in known]
        return _without_ignored(self.model, missing, unexpected)

    def state(self, saved: State) -> State:
        """The tensors that were saved, under the model's own names."""
        state = {
            self.renamed.get(name, name): tensor
            for name, tensor in saved.items()
            if name not in self.sources
        }
        sources = {name: saved[name] for name in self.sources if name in saved}
        return state | self._convert(sources) if sources else state

    def _convert(self, sources: State) -> State:
        """What transformers makes of several saved tensors, or of their parts.

        Raises RuntimeError where it would not save the same tensors again.
        """
        loading = _loading()
        made: State = {}
        for first, group in _groups(self.model, sources, self.own, self.converters):
            tensors = _realized(group.convert(first, self.model, self.model.config))
            made |= tensors
            again = self.exact and loading.revert_weight_conversion(self.model, tensors)
            for name, tensor in (again or {}).items():
                if name not in sources or not _same_bits(tensor, sources[name]):
                    raise RuntimeError(
                        f"{type(self.model).__name__}: {', '.join(tensors)} would not "
                        f"become what was saved as {name}: transformers' conversion "
                        "for this model is not invertible; save the model with "
                        "save_pretrained(save_original_format=False)"
                    )
        return made


def layout(model: Any, own: State, names: Collection[str]) -> Layout:
    """The layout that leaves the fewest names over on both sides.

    model: whole, as its save_pretrained() sees it. own: its state_dict(), the tensors
    on any device, the meta device included. names: of the saved tensors.
    """
    best, fewest = None, None
    for found in _layouts(model, own, names):
        left = sum(map(len, found.fit(names)))
        if fewest is None or left < fewest:
            best, fewest = found, left
        if fewest == 0:
            break
    assert best is not None
    return best


def _layouts(model: Any, own: State, names: Collection[str]) -> Iterator[Layout]:
    converts = _converts(model)
    if converts:
        yield _as_saved(model, own)
    yield Layout(model, own, {name: name for name in own}, set(), set())
    if converts:
        yield _as_loaded(model, own, names)


def _converts(model: Any) -> bool:
    """Is it a model whose weights transformers renames when it saves them?"""
    modeling = sys.modules.get("transformers.modeling_utils")
    return (
        hasattr(_loading(), "revert_weight_conversion")
        and modeling is not None
        and isinstance(model, modeling.PreTrainedModel)
    )


def _loading() -> Any:
    return sys.modules.get("transformers.core_model_loading")


def _as_saved(model: Any, own: State) -> Layout:
    """The layout that save_pretrained() would write now, by its own conversion of
    tensors without memory: what comes out the same object was renamed."""
    empty = {n: torch.empty_like(t, device="meta") for n, t in own.items()}
    names = {id(tensor): name for name, tensor in empty.items()}
    saved = _loading().revert_weight_conversion(model, dict(empty))
    renamed = {n: names[id(t)] for n, t in saved.items() if id(t) in names}
    made = own.keys() - renamed.values()
    sources = saved.keys() - renamed.keys()
    return Layout(
        model, own, renamed, made, set(sources), _conversions(model), exact=True
    )


def _as_loaded(model: Any, own: State, names: Collection[str]) -> Layout:
    """The layout that from_pretrained() would read these names in."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    conversions = get_model_conversion_mapping(model)
    renamed: dict[str, str] = {}
    made, sources = set(), set()
    for name, target, converter in _resolved(model, names, own, conversions):
        if converter is not None:
            first, *others = converter[1].target_patterns
            sources.add(name)
            made |= {target, *(target.replace(first, other) for other in others)}
        elif target in own and target not in renamed.values():
            renamed[name] = target
    return Layout(model, own, renamed, made & own.keys(), sources, conversions)


def _conversions(model: Any) -> list[Any]:
    """The conversions that the model's save_pretrained() undoes."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    loaded = getattr(model, "_weight_conversions", None)
    if loaded is not None:
        return copy.deepcopy(list(loaded))
    prefix = getattr(_loading(), "PrefixChange", ())
    every = get_model_conversion_mapping(model, add_legacy=False)
    return [c for c in every if not isinstance(c, prefix)]


def _resolved(
    model: Any, names: Iterable[str], own: State, conversions: list[Any]
) -> Iterator[tuple[str, str, tuple[str, Any] | None]]:
    """Each saved name, the first own name that it becomes, and the pattern and the
    converter that make it; in the order in which converters take them."""
    loading = _loading()
    renamings = [c for c in conversions if isinstance(c, loading.WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, loading.WeightConverter)]
    by_pattern = {p: c for c in converters for p in c.source_patterns}
    for name in sorted(names, key=loading.dot_natural_key):
        target, pattern = loading.rename_source_key(
            name, renamings, converters, model.base_model_prefix, own
        )
        if target not in own and name in own:
            target, pattern = name, None
        yield name, target, pattern and (pattern, by_pattern[pattern])


def _groups(
    model: Any, saved: State, own: State, conversions: list[Any]
) -> Iterator[tuple[str, Any]]:
    """Converters with the saved tensors that they take, by the first name they make."""
    groups: dict[str, Any] = {}
    for name, target, found in _resolved(model, saved, own, conversions):
        if found is None:
            continue
        pattern, converter = found
        if target not in groups:
            groups[target] = copy.deepcopy(converter)
        groups[target].add_tensor(target, name, pattern, saved[name])
    while groups:
        first = next(iter(groups))
        yield first, groups.pop(first)


def _realized(made: dict[str, Any]) -> State:
    return {n: t[0] if isinstance(t, list) else t for n, t in made.items()}


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    flat = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return torch.equal(*flat)


def _place(tensor: torch.Tensor) -> Any:
    """The same for tensors that are one and the same memory."""
    if tensor.device.type == "meta":
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride()


def _without_ignored(
    model: Any, missing: list[str], unexpected: list[str]
) -> tuple[list[str], list[str]]:
    """Without the names that the model says to ignore."""
    unsaved = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    absent = list(getattr(model, "_keys_to_ignore_on_load_missing", None) or ())
    extra = list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    if _converts(model):  # buffers of older releases, which transformers ignores
        own = [name.rpartition(".")[2] for name, _ in model.named_buffers()]
        extra += [rf"(^|\.){n}$" for n in ("inv_freq", "position_ids") if n in own]
    return (
        [n for n in missing if n not in unsaved and not _matches(absent, n)],
        [n for n in unexpected if not _matches(extra, n)],
    )


def _matches(patterns: list[str], name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)
