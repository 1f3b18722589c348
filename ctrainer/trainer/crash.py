"""Trainer: the record of an update that has failed, and its repetition.

With args.crash_record an exception in an update leaves OUTPUT_DIR/crash, of rank N > 0
OUTPUT_DIR/crash_N:

- crash.json: step, epoch, error, traceback, arguments, the generators' states from
  before the update, and the batches without their tensors,
- batches.safetensors: these tensors,
- the model's weights from before the update, with its configuration.

`ctrainer replay OUTPUT_DIR/crash` runs the forward and backward passes again.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import traceback
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from ctrainer import integrations
from ctrainer.checkpoint import Sink, from_json, to_json
from ctrainer.checkpoint.files import read_object

if TYPE_CHECKING:
    from ctrainer import _C
    from ctrainer.trainer.run import TrainerRun

RECORD, BATCHES = "crash.json", "batches.safetensors"
_VERSION = 1
# What a repetition does not do.
_OFF: dict[str, Any] = {
    "report_to": [], "push_to_hub": False, "crash_record": False, "fsdp": None,
    "deepspeed": None, "fsdp_config": None, "use_bmuf": False, "use_diloco": False,
    "torch_compile": False, "disable_tqdm": True, "auto_find_batch_size": False,
    "local_rank": -1,
}  # fmt: skip


def record(
    trainer: TrainerRun, run: _C.Run, batches: list[Any], generators: Any, error: Any
) -> None:
    """Write the record of an update that `error` has ended, in the place of the one
    before. A failure to do so is a note of the error."""
    if not isinstance(error, Exception):
        return  # Ctrl-C
    rank = trainer.args.process_index
    folder = os.path.join(trainer.args.output_dir, f"crash_{rank}" if rank else "crash")
    made = None
    try:
        os.makedirs(trainer.args.output_dir, exist_ok=True)
        made = tempfile.mkdtemp(".saving", ".ctrainer-crash-", trainer.args.output_dir)
        _write(trainer, run, batches, generators, error, made)
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(made, folder)
    except Exception as problem:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)
        error.add_note(
            f"ctrainer: the failed update could not be recorded in {folder}: {problem}"
        )
        return
    error.add_note(f"ctrainer: recorded; repeat it with: ctrainer replay {folder}")


def _write(
    trainer: TrainerRun,
    run: _C.Run,
    batches: list[Any],
    generators: Any,
    error: Exception,
    folder: str,
) -> None:
    tensors: dict[str, Any] = {}
    plain = [_taken(batch, str(i), tensors) for i, batch in enumerate(batches)]
    text = "".join(traceback.format_exception(error))
    sink, files = Sink(folder, None), trainer._adapter.checkpoints
    sink.json(
        RECORD,
        {
            "version": _VERSION,
            "step": trainer.state.global_step + 1,
            "epoch": run.epoch,
            "micro_step": run.micro_step,
            "world_size": trainer.args.world_size,
            "error": f"{type(error).__name__}: {error}",
            "traceback": text,
            "arguments": trainer.args.to_dict(),
            "items": trainer._count_targets(batches),
            "generators": to_json(generators),
            "batches": plain,
        },
    )
    files.save_tensors(sink, BATCHES, tensors)
    files.save_model(sink, trainer.model, None)


def _taken(value: Any, name: str, tensors: dict[str, Any]) -> Any:
    """A part of a batch as JSON, its tensors put aside by name."""
    if hasattr(value, "detach") or type(value).__module__ == "numpy":
        tensors[name] = value
        return {"tensor": name}
    if hasattr(value, "keys"):
        items = {str(k): _taken(value[k], f"{name}.{k}", tensors) for k in value.keys()}
        return {"dict": items}
    if isinstance(value, list | tuple):
        return {
            "list": [_taken(v, f"{name}.{i}", tensors) for i, v in enumerate(value)]
        }
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    return {"left_out": repr(value)[:200]}


def _given(part: Any, tensors: dict[str, Any]) -> Any:
    """The inverse of _taken()."""
    ((kind, content),) = part.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: _given(value, tensors) for key, value in content.items()}
    if kind == "list":
        return [_given(value, tensors) for value in content]
    return content if kind == "value" else None


def read(folder: str) -> dict[str, Any]:
    """The content of crash.json. Raises ValueError for a folder without a record."""
    path = os.path.join(folder, RECORD)
    if not os.path.isfile(path):
        raise ValueError(f"{folder} holds no {RECORD}, the record of a failed update")
    content: dict[str, Any] = read_object(path)
    if content.get("version") != _VERSION:
        raise ValueError(
            f"{path}: version {content.get('version')!r}; this release reads {_VERSION}"
        )
    return content


def replay(folder: str, trainer: Any) -> str:
    """Run forward and backward pass of a failed update again, and return what went
    wrong in it.

    Weights, batches and generators are those of the failed update. Stops at the first
    module and tensor that is not finite, or at the module that raises.

    Args:
        folder (str): The record of the update, OUTPUT_DIR/crash.
        trainer (Trainer): One of the same model and arguments.

    Raises:
        ValueError: `folder` holds no record.
    """
    from ctrainer.adapters.nan_detector import NanDetector, NonFiniteError

    content = read(folder)
    files = trainer._adapter.checkpoints
    tensors = files.load_tensors(os.path.join(folder, BATCHES))
    batches = [_given(batch, tensors) for batch in content["batches"]]
    files.load_model(trainer.model, folder)
    model = trainer._wrap_model(trainer.model)
    model.train()
    trainer.current_gradient_accumulation_steps = len(batches)
    trainer._adapter.set_rng_state(from_json(content["generators"]))
    items = content["items"] if content["items"] > 0 else None
    detector = NanDetector({"model": trainer.model}, stop=True)
    try:
        with detector:
            for batch in batches:
                trainer._call_hook(
                    "training_step", model, batch, num_items_in_batch=items
                )
    except NonFiniteError as error:
        return f"not finite: {error}"
    except Exception as error:
        where = detector.first_raising or "outside of the model"
        return f"raised in {where}: {type(error).__name__}: {error}"
    finally:
        trainer._adapter.leave_mixed_precision(trainer.model)
    bad = [n for n, p in trainer.model.named_parameters() if not _is_finite(p.grad)]
    if bad:
        return f"not finite: the gradient of {bad[0]}"
    return f"nothing failed this time; then it was {content['error']}"


def _is_finite(grad: Any) -> bool:
    return grad is None or bool(grad.isfinite().all())


def run_again(folder: str, setup: Any) -> int:
    """What `ctrainer replay FOLDER` does; 0 when the failure was found again.

    setup: makes the Trainer of the arguments, a dict; None: of transformers' class that
    the configuration in the folder names.
    """
    arguments = read(folder)["arguments"]
    trainer = _trainer_of(folder, arguments) if setup is None else setup(arguments)
    verdict = replay(folder, trainer)
    print(verdict)
    return 1 if verdict.startswith("nothing") else 0


def _trainer_of(folder: str, arguments: dict[str, Any]) -> Any:
    from ctrainer.trainer import Trainer
    from ctrainer.training_args import TrainingArguments

    model = integrations.model_of(os.path.join(folder, "config.json"))
    if model is None:
        raise SystemExit(
            f"{folder} names no model of transformers: give --setup MODULE:FUNCTION, a "
            "function that gets the run's arguments, a dict, and returns the Trainer"
        )
    known = {f.name for f in fields(TrainingArguments) if f.init}
    given = {k: v for k, v in arguments.items() if k in known} | _OFF
    return Trainer(model, TrainingArguments(**given))
