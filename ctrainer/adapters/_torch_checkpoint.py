"""torch: a model, an optimizer and other objects to files and back."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn

from ctrainer import _C
from ctrainer.adapters import _saved_names
from ctrainer.checkpoint import Sink, shard_names
from ctrainer.checkpoint.files import expected_of, is_there, naming
from ctrainer.checkpoint.torch_files import archive_records, load_plain, numpy_names

logger = logging.getLogger("ctrainer.checkpoint")


def save_object(sink: Sink, name: str, obj: Any) -> None:
    """Save an object as torch.save would."""
    sink.archive(name, archive_records(name, obj))


def load_object(folder: str, name: str) -> Any:
    """Read it back onto the CPU; None where there is none. Only plain data and NumPy's
    arrays are unpickled."""
    path = os.path.join(folder, name)
    if not is_there(path):
        return None
    return load_plain(path, expected_of(path), numpy_names())


# Weights


def save_arguments(sink: Sink, args: Any) -> None:
    """training_args.bin, which transformers writes; nothing here ever reads it."""
    name = "training_args.bin"
    sink.archive(name, archive_records(name, args))


def save_model(sink: Sink, model: Any, state_dict: dict[str, Any] | None) -> None:
    """Save as transformers does: by the model's save_pretrained where it has one, its
    tensors written by C; else the state_dict alone."""
    inner = _unwrapped(model)
    if callable(getattr(inner, "save_pretrained", None)):
        with _tensors_into(sink):
            inner.save_pretrained(sink.folder, state_dict=state_dict)
        return
    state = inner.state_dict() if state_dict is None else state_dict
    metadata = {"format": "pt"}
    sink.tensors("model.safetensors", _writable(state, metadata), metadata)


def save_configuration(sink: Sink, model: Any) -> None:
    """The configuration of a model that has one."""
    config: Any = getattr(model, "config", None)
    if callable(getattr(config, "save_pretrained", None)):
        config.save_pretrained(sink.folder)


def _unwrapped(model: Any) -> Any:
    """The model that torch.compile, or torch's data parallelism, has wrapped."""
    inner = getattr(model, "_orig_mod", model)
    if isinstance(inner, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return inner.module
    return inner


@contextlib.contextmanager
def _tensors_into(sink: Sink) -> Iterator[None]:
    """Lets C write the safetensors files that save_pretrained makes in the sink's
    folder; files of other folders go where they went."""
    modeling = sys.modules.get("transformers.modeling_utils")
    write: Callable[..., None] | None = getattr(modeling, "safe_save_file", None)
    if modeling is None or write is None:
        yield
        return

    def write_by_c(
        tensors: dict[str, Any],
        filename: str | os.PathLike[str],
        metadata: dict[str, str] | None = None,
    ) -> None:
        path = os.path.abspath(filename)
        if os.path.dirname(path) == sink.folder:
            sink.tensors(os.path.basename(path), _writable(tensors, {}), metadata)
        else:
            write(tensors, filename, metadata=metadata)

    from transformers.utils import logging as progress

    shown = progress.is_progress_bar_enabled()
    # There is nothing to wait for.
    progress.disable_progress_bar()  # type: ignore[no-untyped-call]
    modeling.safe_save_file = write_by_c  # type: ignore[attr-defined]
    try:
        yield
    finally:
        modeling.safe_save_file = write  # type: ignore[attr-defined]
        if shown:
            progress.enable_progress_bar()  # type: ignore[no-untyped-call]


_TAGS = {
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
    torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


def _writable(state: dict[str, Any], metadata: dict[str, str]) -> dict[str, Any]:
    """Contiguous tensors, on the CPU or where C reads them; of tensors that are one and
    the same memory, the first name alone, noted in metadata under the others."""
    kept: dict[Any, str] = {}
    tensors: dict[str, Any] = {}
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"state_dict()[{name!r}] is a {type(value).__name__}; safetensors "
                "holds tensors only: leave it out of the state_dict, or override _save"
            )
        if value.numel() > 0 and value.device.type != "meta":
            place = (value.device, value.data_ptr(), value.dtype, value.shape)
            first = kept.setdefault((*place, value.stride()), name)
            if first != name:
                metadata[name] = first
                continue
        tensors[name] = _plain(name, value)
    return tensors


def _plain(name: str, value: torch.Tensor) -> Any:
    if type(value) not in (torch.Tensor, nn.Parameter):
        full = getattr(value, "full_tensor", None)  # DTensor's
        value = full() if callable(full) else value.as_subclass(torch.Tensor)
    value = value.detach().contiguous()
    if not _C.has_kernels(value):
        value = value.to("cpu")
    if value.is_conj() or value.is_neg():
        value = value.resolve_conj().resolve_neg()
    tag = _TAGS.get(value.dtype)
    if tag is None:
        return value
    return value.reshape(-1).view(torch.uint8), tag, tuple(value.shape)


def snapshot_bytes(model: Any, optimizer: Any) -> tuple[int, torch.Tensor | None]:
    """About how much a checkpoint has to copy: weights, and two moments of what an
    optimizer of Adam's kind trains; and a tensor in the same memory, unless C cannot
    read that."""
    weights = [t.detach() for t in (*model.parameters(), *model.buffers())]
    like = next((w.new_empty(0) for w in weights[:1] if _C.has_kernels(w)), None)
    nbytes = sum(t.nbytes for t in weights)
    if "adam" in type(optimizer).__name__.lower():
        groups = optimizer.param_groups
        nbytes += sum(2 * p.nbytes for g in groups for p in g["params"])
    return int(nbytes), like


# Reading weights


def load_model(model: Any, folder: str) -> None:
    """Read a checkpoint's weights into the model, in place where memory allows.

    Raises FileNotFoundError without any, and ValueError, before a weight is changed,
    naming weights that only one side has. Tied weights, and names that the model says
    to ignore, may be on one side.
    """
    model = _unwrapped(model)
    if _load_adapter(model, folder):
        return
    files = weight_files(folder)
    if files[0].endswith(".safetensors"):
        _load_files(model, folder, files)
        return
    state: dict[str, Any] = {}
    for file in files:
        state |= load_plain(file, expected_of(file))
    layout = _layout(model, folder, state)
    _load_state(model, folder, layout.state(state))


def weight_files(folder: str) -> list[str]:
    """The paths of transformers' files of whole weights in a folder.

    Raises FileNotFoundError without any.
    """
    stems = ("model.safetensors", "pytorch_model.bin")
    names = [name for stem in stems for name in (stem, f"{stem}.index.json")]
    paths = [os.path.join(folder, name) for name in names]
    # Somebody may have replaced what the manifest lists by another of these.
    found = next(filter(os.path.lexists, paths), None)
    if found is None:
        found = next(filter(is_there, paths), None)
    if found is not None:
        if not found.endswith(".index.json"):
            return [found]
        return [os.path.join(folder, name) for name in shard_names(found)]
    raise FileNotFoundError(
        f"{folder} holds no weights: neither model.safetensors nor pytorch_model.bin, "
        "whole or in shards; give a checkpoint's folder, such as checkpoint-500"
    )


def _load_adapter(model: Any, folder: str) -> bool:
    """PEFT's own format, if the checkpoint is one of adapters."""
    places = [folder, *(e.path for e in os.scandir(folder) if e.is_dir())]
    places = [
        p for p in places if os.path.isfile(os.path.join(p, "adapter_config.json"))
    ]
    if not places or not callable(getattr(model, "load_adapter", None)):
        return False
    active = model.active_adapters
    active = active() if callable(active) else active
    for place in places:
        name = active[0] if place == folder else os.path.basename(place)
        _load_one_adapter(model, place, name, name in active)
    return True


def save_tensors(sink: Sink, name: str, tensors: dict[str, Any]) -> None:
    """Write tensors, or arrays of NumPy, as a safetensors file."""
    on_host = {
        n: t if isinstance(t, torch.Tensor) else torch.as_tensor(t, device="cpu")
        for n, t in tensors.items()
    }
    sink.tensors(name, _raw(on_host))


def load_tensors(path: str) -> dict[str, torch.Tensor]:
    """All tensors of a safetensors file, on the CPU."""
    index = _C.safetensors_index(path)[1]
    tensors = {name: _empty(tag, shape) for name, tag, shape, _ in index}
    _C.load_safetensors_into(path, _raw(tensors), True, True, expected_of(path))
    return tensors


def _adapter_tensors(place: str) -> dict[str, Any]:
    path = os.path.join(place, "adapter_model.safetensors")
    if is_there(path):
        return load_tensors(path)
    path = os.path.join(place, "adapter_model.bin")
    state: dict[str, Any] = load_plain(path, expected_of(path))
    return state


def _load_one_adapter(model: Any, place: str, name: str, trains: bool) -> None:
    """Into the adapter of that name, in its own dtype; one that the model lacks is made
    first."""
    import peft

    tensors = _adapter_tensors(place)
    if not isinstance(model, peft.PeftModel):
        tensors = {n.removeprefix("base_model.model."): t for n, t in tensors.items()}
    elif name not in model.peft_config:
        model.load_adapter(
            place, name, is_trainable=trains, autocast_adapter_dtype=False
        )
    with naming(place):
        found: Any = peft.set_peft_model_state_dict(model, tensors, name)
    missing = [n for n in found.missing_keys if name in n.split(".")]
    unexpected = list(found.unexpected_keys)
    if model.peft_config[name].is_prompt_learning:  # whose prompts PEFT loads apart
        own = peft.get_peft_model_state_dict(
            model, adapter_name=name, save_embedding_layers=False
        )
        missing = [n for n in own if n not in tensors]
        unexpected = [n for n in unexpected if n not in own]
    raise_unless_all(place, missing, unexpected)


def _layout(model: Any, folder: str, names: Any) -> _saved_names.Layout:
    """Where each saved tensor goes; raises ValueError unless all weights are there."""
    own = {n: t for n, t in model.state_dict().items() if isinstance(t, torch.Tensor)}
    layout = _saved_names.layout(model, own, names)
    if _loads_plainly(model):
        raise_unless_all(folder, *layout.fit(names))
    return layout


def _load_files(model: Any, folder: str, files: list[str]) -> None:
    indexes = {file: _C.safetensors_index(file)[1] for file in files}
    entries = {
        name: (tag, shape)
        for index in indexes.values()
        for name, tag, shape, _ in index
    }
    layout = _layout(model, folder, entries)
    own = layout.renamed if _lies_in_memory(model, layout.own) else {}
    direct = {
        name: layout.own[own[name]]
        for name, (tag, shape) in entries.items()
        if name in own and _fits(layout.own[own[name]], tag, shape)
    }
    fresh = {n: _empty(*entry) for n, entry in entries.items() if n not in direct}
    for file, index in indexes.items():
        raw = _raw({n: fresh[n] for n, *_ in index if n in fresh})
        here = {n: direct[n] for n, *_ in index if n in direct}
        _C.load_safetensors_into(file, here | raw, True, True, expected_of(file))
    if direct.keys() < entries.keys():
        _load_state(model, folder, layout.state(fresh), {own[n] for n in direct})


def _loads_plainly(model: Any) -> bool:
    """Is writing into the model's tensors all that loading does: no hook, no
    override?"""
    plain = nn.Module._load_from_state_dict
    norm = nn.modules.batchnorm._NormBase._load_from_state_dict
    return type(model).load_state_dict is nn.Module.load_state_dict and not any(
        type(module)._load_from_state_dict not in (plain, norm)
        or module._load_state_dict_pre_hooks
        or module._load_state_dict_post_hooks
        or module._state_dict_hooks
        for module in model.modules()
    )


def _lies_in_memory(model: Any, own: dict[str, torch.Tensor]) -> bool:
    """May files be read straight into the model's tensors?"""
    return _loads_plainly(model) and all(
        type(t) is torch.Tensor and t.device.type == "cpu" and t.is_contiguous()
        for t in own.values()
    )


DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16,
    "BF16": torch.bfloat16, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    **{tag: dtype for dtype, tag in _TAGS.items()},
}  # fmt: skip
TAGS = {dtype: tag for tag, dtype in DTYPES.items()}


def _fits(tensor: torch.Tensor, tag: str, shape: tuple[int, ...]) -> bool:
    known = tag not in _TAGS.values()
    return known and tensor.dtype == DTYPES.get(tag) and tensor.shape == shape


def _empty(tag: str, shape: tuple[int, ...]) -> torch.Tensor:
    if tag not in DTYPES:
        raise ValueError(f"torch has no dtype for safetensors' {tag}")
    return torch.empty(shape, dtype=DTYPES[tag], device="cpu")


def _raw(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {name: _plain(name, tensor) for name, tensor in tensors.items()}


def _load_state(
    model: Any, folder: str, state: dict[str, Any], loaded: Collection[str] = ()
) -> None:
    """Load tensors by the model's own names, those in `loaded` being there already."""
    with naming(folder):
        result = model.load_state_dict(state, strict=False)
    own = model.state_dict()
    tensors = {n: t for n, t in own.items() if isinstance(t, torch.Tensor)}
    layout = _saved_names.Layout(model, tensors, {n: n for n in tensors}, set(), set())
    missing, _ = layout.fit([n for n in tensors if n in state or n in loaded])
    _, unexpected = layout.fit(result.unexpected_keys)
    raise_unless_all(folder, missing if result.missing_keys else [], unexpected)


def trained_state(model: Any) -> dict[str, Any]:
    """What training changes in the model: state_dict() without frozen parameters."""
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
    return {n: t for n, t in model.state_dict().items() if n not in frozen}


def load_trained_state(model: Any, state: dict[str, Any]) -> None:
    """Load it back; raises ValueError for weights that only one side has."""
    trained = trained_state(model)
    layout = _saved_names.Layout(model, trained, {n: n for n in trained}, set(), set())
    raise_unless_all("the state of a block", *layout.fit(state))
    model.load_state_dict(state, strict=False)


def raise_unless_all(folder: str, missing: list[str], unexpected: list[str]) -> None:
    if not missing and not unexpected:
        return
    sides = ("lacks weights of the model", missing), (
        "has weights that the model lacks", unexpected,
    )  # fmt: skip
    found = " and ".join(f"{what}: {_some(names)}" for what, names in sides if names)
    raise ValueError(
        f"{folder} {found}. Resume with the model that was saved, of the same class "
        "and configuration; to begin anew from some of the weights, load them with the "
        "model's own load_state_dict(..., strict=False) and leave out "
        "resume_from_checkpoint"
    )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 20} more" if len(names) > 20 else ""
    return f"{sorted(names)[:20]}{more}"
