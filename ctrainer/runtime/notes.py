"""Where in a run an exception was raised: the note that it gets.

The loops are C and leave no frames in a traceback; on the way out of them an exception
gets a note, once, from what the traceback, the run and the reader of the data know.
Only an exception costs anything.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from ctrainer.runtime.hooks import definition, wrong_return

_BEGIN = "ctrainer: raised in "
_PACKAGE = str(Path(__file__).parents[1])
_MANY = 16  # rows that a note lists

# What the text of an exception says, and what to do. Of torch's and Python's own, that
# ours have it in their text.
_REMEDIES = (
    (
        r"index out of range in self|device-side assert",
        "an index is not below the rows of an Embedding: compare the largest id of the "
        "batch with the model's vocabulary, and call resize_token_embeddings() where "
        "the tokenizer has more",
    ),
    (
        r"Target -?\d+ is out of bounds",
        "a label is not below the model's classes: set num_labels, or count the labels "
        "from 0; -100 marks those to leave out",
    ),
    (
        r"shapes cannot be multiplied|must match the size of tensor|size mismatch",
        "compare the shapes of the batch with those that the layer expects",
    ),
    (
        r"expected target dtype|must have the same dtype|expected scalar type",
        "compare the dtypes of the batch with those that the layer and the loss "
        "expect, such as float32 for features and int64 for class labels",
    ),
    (
        r"stack expects each tensor to be equal size|all input arrays must have the "
        r"same shape|expected sequence of length",
        "the rows have different shapes: pass a data_collator that pads them, such as "
        "transformers' DataCollatorWithPadding",
    ),
    (
        r"invalid index of a 0-dim tensor",
        "the model returned the loss alone: return {'loss': loss}, or (loss, outputs)",
    ),
    (
        r"takes \d+ positional arguments? but",
        "take the arguments that the base class's method has, and **kwargs",
    ),
    (
        r"out of memory",
        "set auto_find_batch_size=True, which splits what does not fit, a smaller "
        "per_device_train_batch_size and as many times more "
        "gradient_accumulation_steps, or gradient_checkpointing=True",
    ),
    (
        r"does not require grad",
        "the loss depends on no trainable parameter: compute it without detach(), "
        "item() and no_grad(), and leave requires_grad of some parameter True",
    ),
    (
        r"grad can be implicitly created only for scalar outputs",
        "the loss has several elements: return its mean or its sum",
    ),
    (
        r"unexpected keyword argument|missing \d+ required (positional|keyword)",
        "the names of the batch are the arguments of the model's forward: rename the "
        "columns of the dataset, or set remove_unused_columns=True",
    ),
    (
        r"shape '.*' is invalid for input",
        "compare the shape with those of the batch; the last one of an epoch may have "
        "fewer rows: dataloader_drop_last=True leaves it out",
    ),
    (
        r"gradients are Nan/Inf",
        "set a smaller lr or clip_norm, or look at the samples of the update",
    ),
    (
        r"[Ee]xpected all tensors to be on the same device",
        "make new tensors on the device of the inputs: torch.zeros(n, device=x.device)",
    ),
)


def locate(error: BaseException, place: str, facts: tuple[Any, ...]) -> None:
    """Add a note to an exception that has none of ours; place: a key of _PLACES.

    What fails while the note is made is dropped, but for MemoryError and Ctrl-C.
    """
    try:
        if not any(n.startswith(_BEGIN) for n in getattr(error, "__notes__", ())):
            lines = [line for line in _PLACES[place](error, *facts) if line]
            remedy = () if "remedy: " in str(lines) else _remedy(error, place)
            error.add_note(_BEGIN + "\n  ".join([*lines, *remedy]))
    except MemoryError:
        raise
    except Exception:
        return


def computed(compute: Callable[[Any], Any], predicted: Any, trainer: Any) -> Any:
    """compute_metrics(predicted); its exception gets a note."""
    try:
        return compute(predicted)
    except Exception as error:
        locate(error, "metrics", (trainer, predicted))
        raise


def _training(error: BaseException, trainer: Any, run: Any) -> Iterator[str]:
    frames = list(_frames(error))
    hook = frames[0].f_code.co_name if frames else ""
    reader, state, place = trainer._reader, trainer.state, None
    if hook == "get_batch_samples" and reader is not None:
        place = reader.place
    elif hook in _OF_A_BATCH or "the loss must be a scalar" in str(error):
        place = run.micro_step
    returned = hook in ("", "add_device_loss") and place is not None
    step = "training_step"
    yield definition(trainer, step) if returned else _ran(frames, trainer.model)
    if run.loader is None:
        yield wrong_return(trainer, "get_train_dataloader", None, "return a DataLoader")
    if "0-dim tensor" in str(error):
        yield f"the outputs, of {definition(trainer.model, 'forward')}"
    if place is None:
        yield _join(f"after step {state.global_step} of {state.max_steps}",
                    _epoch(run), _rank(trainer.args))  # fmt: skip
        return
    n = max(trainer.current_gradient_accumulation_steps, run.accumulation)
    yield _join(
        f"at {_nth('step', state.global_step, state.max_steps)}", _epoch(run),
        _nth("micro-batch", place % run.accumulation, n), _rank(trainer.args),
    )  # fmt: skip
    yield from _data(frames, reader, place)
    loss = frames[0].f_locals.get("loss") if frames else None
    if loss is not None:
        own = type(trainer).compute_loss.__module__.startswith("ctrainer.")
        source = (trainer.model, "forward") if own else (trainer, "compute_loss")
        yield f"the loss, of {definition(*source)}: {_shape(loss)}"


_OF_A_BATCH = (
    "training_step", "add_device_loss", "floating_point_ops", "_track_num_input_tokens",
)  # fmt: skip


def _evaluation(
    error: BaseException, trainer: Any, source: Any, n_batches: int
) -> Iterator[str]:
    frames = list(_frames(error))
    runs = bool(frames) and frames[0].f_code.co_name == "take"
    place = n_batches - 1 if runs else n_batches
    yield _ran(frames[1:], trainer.model) if runs else _ran(frames[-1:])
    done = f"after step {trainer.state.global_step}"
    yield _join(f"at batch {place + 1} of an evaluation", done, _rank(trainer.args))
    reader = next((r for f in frames if (r := _reader(f.f_locals.get("self")))), None)
    yield from _data(frames, reader or _reader(source), place)


def _metrics(error: BaseException, trainer: Any, predicted: Any) -> Iterator[str]:
    yield f"{_ran(list(_frames(error))[1:])}, as compute_metrics"
    done = f"after step {trainer.state.global_step}"
    yield _join(f"at the end of an evaluation, {done}", _rank(trainer.args))
    outputs, labels = predicted.predictions, predicted.label_ids
    yield f"predictions {_shape(outputs)}, label_ids {_shape(labels)}"
    if isinstance(outputs, tuple):
        yield (
            f"remedy: predictions has {len(outputs)} outputs of the model; take one, "
            "such as predictions[0]"
        )


def _epoch_of_fairseq(error: BaseException, reader: Any) -> Iterator[str]:
    frames = list(_frames(error))
    yield _ran([f for f in frames if _is_users(f)][-1:] or frames[-1:])
    ranks = reader.world_size
    yield _join(f"at batch {reader.place + 1} of epoch {reader.epoch}",
                f"rank {reader.rank} of {ranks}" if ranks > 1 else "")  # fmt: skip
    yield from _data(frames, reader, reader.place)


def _callback(
    error: BaseException, callback: Any, event: str, args: Any, state: Any
) -> Iterator[str]:
    yield f"{type(callback).__name__}.{event}"
    step = getattr(state, "global_step", 0)
    epoch = getattr(state, "epoch", None)
    yield _join(f"after step {step} of {getattr(state, 'max_steps', step)}",
                "" if epoch is None else f"epoch {epoch:.4g}", _rank(args))  # fmt: skip


def _fairseq(
    error: BaseException, trainer: Any, what: str, samples: list[Any], place: int | None
) -> Iterator[str]:
    frames = list(_frames(error))
    alone = definition(trainer.task, "train_step")
    yield _ran(frames, trainer.get_model()) if frames or place is None else alone
    if "unpack non-iterable NoneType" in str(error):
        yield wrong_return(
            trainer.get_criterion(), "forward", None,
            "return (loss, sample_size, logging_output)",
        )  # fmt: skip
    ranks = trainer.data_parallel_world_size
    rank = f"rank {trainer.data_parallel_rank} of {ranks}" if ranks > 1 else ""
    at = "" if place is None else _nth("sample", place, len(samples))
    yield _join(f"at {what} {trainer.get_num_updates() + 1}", at, rank)
    sample = None if place is None else samples[place]
    if isinstance(sample, dict):
        ids: Any = sample.get("id")
        rows = ids.tolist() if hasattr(ids, "tolist") else ids
        yield _join(_rows(rows), _shapes({**sample, **(sample.get("net_input") or {})}))


def _optimizer(
    error: BaseException, optimizer: Any, params: Any, options: Any
) -> Iterator[str]:
    given = ", ".join(f"{name}={value!r}" for name, value in options.items())
    kind = type(optimizer).__name__
    yield f"{kind}(params: a {type(params).__name__}, {given})"
    yield (
        f"remedy: pass model.parameters(), or a list of groups, and options in the "
        f"ranges that help({kind}) has"
    )


_PLACES: dict[str, Callable[..., Iterator[str]]] = {
    "training": _training, "evaluation": _evaluation, "callback": _callback,
    "fairseq": _fairseq, "optimizer": _optimizer, "metrics": _metrics,
    "epoch": _epoch_of_fairseq,
}  # fmt: skip


# What ran


def _frames(error: BaseException) -> Iterator[FrameType]:
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def _ran(frames: list[FrameType], model: Any = None) -> str:
    """The innermost module and the innermost function of the user, in the hook that
    the loop has called."""
    users = [f for f in frames if _is_users(f)]
    modules = [f for f in frames if f.f_code.co_name == "forward"]
    ran = [_label(f, model) for f in (*modules[-1:], *users[-1:], *frames[:1])]
    return ", in ".join(dict.fromkeys(ran)) or "the loop"


_PARTS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")  # of a function


def _is_users(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    if frame.f_code.co_name in _PARTS:
        return False
    others = (_PACKAGE, sys.prefix, sys.base_prefix, "<")
    return not file.startswith(others) and "site-packages" not in file


def _label(frame: FrameType, model: Any) -> str:
    """Class and method; of a module of the model its name in there, too."""
    code = frame.f_code
    owner = frame.f_locals.get("self") if code.co_argcount else None
    if owner is None:
        return code.co_qualname.rpartition("<locals>.")[2]
    modules: Any = getattr(model, "named_modules", tuple)()
    name = next((name for name, module in modules if module is owner), "")
    return f"{type(owner).__name__}.{code.co_name}" + (f" ({name})" if name else "")


# Where


def _join(*parts: str) -> str:
    return ", ".join(part for part in parts if part)


def _nth(what: str, at: int, n: int) -> str:
    return f"{what} {at + 1} of {n}"


def _epoch(run: Any) -> str:
    endless = run.epochs >= sys.maxsize
    return f"epoch {run.epoch + 1}" if endless else _nth("epoch", run.epoch, run.epochs)


def _rank(args: Any) -> str:
    ranks = getattr(args, "world_size", 1)
    return f"rank {args.process_index} of {ranks}" if ranks > 1 else ""


# With what


def _reader(source: Any) -> Any:
    """What reads the batches of a generator, or is given; None."""
    while (frame := getattr(source, "gi_frame", None)) is not None:
        source = frame.f_locals.get(
            "self" if "training" in frame.f_locals else "batches"
        )
    return source if hasattr(source, "rows_of") else None


def _data(frames: list[FrameType], reader: Any, place: int) -> Iterator[str]:
    rows = None if reader is None else reader.rows_of(place)
    one, batch = "", None
    for frame in frames:
        code, local = frame.f_code, frame.f_locals
        if code.co_name == "__getitem__" and code.co_argcount == 2 and not one:
            one = f"reading row {local.get(code.co_varnames[1])!r}"
        if code.co_name in ("training_step", "compute_loss", "prediction_step"):
            batch = local.get("inputs", batch)
    yield _join(one, _rows(rows))
    if batch is not None:
        yield f"batch: {_shapes(batch)}"


def _rows(rows: Any) -> str:
    if not isinstance(rows, list | tuple):
        return "" if rows is None else f"row {rows!r}"
    more = f" and {len(rows) - _MANY} more" if len(rows) > _MANY else ""
    return f"rows {', '.join(map(str, rows[:_MANY]))}{more} of the dataset"


def _shapes(batch: Any) -> str:
    """The names, dtypes and shapes of a batch."""
    if not hasattr(batch, "items"):
        return f"a {type(batch).__name__}"
    return ", ".join(f"{name} {_shape(value)}" for name, value in batch.items())


def _shape(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_shape, value))})"
    if not hasattr(value, "shape"):
        return type(value).__name__
    dtype = str(getattr(value, "dtype", "")).removeprefix("torch.")
    return f"{dtype} {list(value.shape)}"


def _remedy(error: BaseException, place: str) -> Iterator[str]:
    text = str(error)
    of_data = isinstance(error, KeyError) and place not in ("callback", "metrics")
    if of_data and re.search(r"(^|: )'[^']*'\s*$", text):
        yield "remedy: compare the key with the names that the rows and the batch have"
    found = (said for pattern, said in _REMEDIES if re.search(pattern, text))
    yield from (f"remedy: {said}" for said in list(found)[:1])
