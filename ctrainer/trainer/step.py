"""Trainer: one micro-batch: the inputs, the loss, backward, and the count of work.

Each function is transformers' hook of that name. C adds the losses up, and makes the
update.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ctrainer.runtime.hooks import no_loss, no_tensor, not_named
from ctrainer.trainer.checkpoint import set_mode

if TYPE_CHECKING:
    from ctrainer.trainer.run import TrainerRun


def drop_gradients(trainer: TrainerRun) -> None:
    """Forget gradients of the model, and of other parameters that the optimizer has,
    such as those of an update in which a training has failed."""
    for part in (trainer.model, trainer.optimizer):
        if callable(getattr(part, "zero_grad", None)):
            part.zero_grad()


def training_step(
    trainer: TrainerRun, model: Any, inputs: Any, num_items_in_batch: Any = None
) -> Any:
    """Run forward and backward on one micro-batch; return its loss, detached.

    Calls _prepare_inputs, compute_loss_context_manager and compute_loss. The loss is
    weighted by the micro-batch's part in the update, so that the sum over an update is
    the loss of its whole batch.

    Args:
        model (torch.nn.Module): The model, in its wrapper where it has one.
        inputs (dict): A batch.
        num_items_in_batch (Tensor | int | None, default None): Targets of the update,
            on all ranks.

    Raises:
        TypeError: compute_loss returns no tensor.
    """
    # A wrapper keeps the flag when the model within is put into eval mode.
    if not (getattr(model, "training", True) and getattr(trainer.model, "training", 1)):
        set_mode("train", model, trainer.optimizer)
    count = num_items_in_batch
    inputs = trainer._prepare_inputs(inputs)
    with trainer.compute_loss_context_manager():
        loss = trainer._call_hook(
            "compute_loss", model, inputs, num_items_in_batch=count
        )
    if trainer._deferral is not None:
        trainer._deferral.check()
    del inputs  # memory for backward
    if not hasattr(loss, "backward"):
        raise TypeError(no_tensor(trainer, loss))
    weighted = not trainer._dummy_batch and _is_weighted(trainer, count)
    # The mean loss of a micro-batch without targets is 0 / 0 and adds nothing to the
    # update. On several ranks backward runs on 0: the exchange of gradients waits for
    # the pass.
    weight = trainer._batch_weight if trainer._in_update else None
    empty = weight == 0.0 and not weighted
    if not empty or trainer._communicator.world_size > 1:
        if weight is None:  # the user's own call, outside of an update
            weight = 1.0 / max(trainer.current_gradient_accumulation_steps, 1)
        if weight != 1.0 and not weighted:
            loss = loss * weight
        scale = scale_of(trainer, loss)
        (loss if scale is None else loss * scale).backward()
    return trainer._adapter.no_loss(loss) if empty else loss.detach()


def scale_of(trainer: TrainerRun, loss: Any) -> Any:
    """The loss scale, None without: on the device where it depends on an update there,
    of which the host does not know yet."""
    if trainer._enqueued_scaler is not None:
        scale = trainer._device_scale
        if (loss.dtype, loss.device) == (scale.dtype, scale.device):
            return scale
        trainer._await_update()
    scaler = trainer._loss_scaler
    return None if scaler is None else scaler.scale


def _is_weighted(trainer: TrainerRun, count: Any) -> bool:
    """Whether the loss has its weight: it has used the count of items, or TRL's
    trainers say so, by a flag or a compute_loss_func that is no function. A count that
    is a number, from an override of get_batch_samples, is taken to be used."""
    function = trainer.compute_loss_func
    if function is not None and not callable(function):
        return True
    if getattr(trainer, "loss_is_scaled_for_ga", False):
        return True
    return count is not None and bool(getattr(count, "was_read", True))


def prepare_inputs(trainer: TrainerRun, inputs: Any) -> Any:
    """Bring one batch to the model's device; a mapping is returned as a new one.

    What is no tensor, nor a mapping, list or tuple of them, is returned as it is.

    Raises:
        ValueError: the batch is empty; names the columns that the model's forward
            accepts.
    """
    stays = trainer._inputs_stay and trainer._prepares_plainly()
    if stays and type(inputs) is dict:
        inputs = inputs.copy()  # hooks may pop from it
    else:
        inputs = trainer._prepare_input(inputs)
    if (isinstance(inputs, list | tuple) or is_mapping(inputs)) and not len(inputs):
        raise ValueError(
            "the batch is empty, so the model has nothing to train on; give the "
            "dataset at least one of the columns that the model's forward accepts: "
            f"{trainer._signature_columns}"
        )
    return inputs


def is_mapping(batch: Any) -> bool:
    """Whether a batch maps names to tensors."""
    return isinstance(batch, dict) or hasattr(batch, "keys")


def entry(batch: Any, key: str) -> Any:
    """batch[key]; None for a mapping without it, and for what is no mapping."""
    try:
        return batch[key] if is_mapping(batch) else None
    except KeyError:
        return None


def compute_loss(
    trainer: TrainerRun,
    model: Any,
    inputs: Any,
    return_outputs: bool = False,
    num_items_in_batch: Any = None,
) -> Any:
    """Return the loss of one micro-batch, a scalar with gradients.

    The loss is outputs["loss"] or outputs[0], the label smoother's, or
    compute_loss_func(outputs, labels, num_items_in_batch=...). One that divides its sum
    by num_items_in_batch is right under gradient accumulation as it is, any other is
    weighted by the trainer.

    Args:
        model (torch.nn.Module): The model, in its wrapper where it has one.
        inputs (dict): A batch: the model's arguments by name.
        return_outputs (bool, default False): Return (loss, outputs).
        num_items_in_batch (Tensor | int | None, default None): Targets of the update,
            on all ranks.

    Raises:
        TypeError: the batch is no mapping.
        ValueError: the model returns no loss.
    """
    if not is_mapping(inputs):
        raise TypeError(not_named(inputs))
    function, smoother = trainer.compute_loss_func, trainer.label_smoother
    count, labels = num_items_in_batch, None
    if (function is not None or smoother is not None) and "labels" in inputs:
        labels = inputs.pop("labels")
    if count is not None and trainer.model_accepts_loss_kwargs:
        outputs = model(**{**inputs, "num_items_in_batch": count})
    else:
        outputs = model(**inputs)
    for name in getattr(trainer.args, "log_outputs", None) or ():
        trainer.log_mean(name, _number(outputs, name))
    if function is not None:
        loss = function(outputs, labels, num_items_in_batch=count)
    elif labels is not None:
        shifts = trainer._loss_shifts_labels
        loss = smoother(outputs, labels, shifts, num_items_in_batch=count)
    elif isinstance(outputs, dict) and "loss" in outputs:
        loss = outputs["loss"]
    elif isinstance(outputs, dict) or outputs is None:
        raise ValueError(no_loss(trainer.model, outputs, inputs))
    else:
        loss = outputs[0]
    # Divided by the targets of all ranks: the mean of the gradients divides by
    # world_size once more.
    if count is not None and getattr(count, "was_read", True):
        ranks = trainer._communicator.world_size
        if ranks > 1 and trainer.args.average_tokens_across_devices:
            loss = loss * ranks
    return (loss, outputs) if return_outputs else loss


def _number(outputs: Any, name: str) -> Any:
    """An output of the model that is one number."""
    value = outputs.get(name) if isinstance(outputs, dict) else None
    if value is None:
        has = list(outputs) if isinstance(outputs, dict) else type(outputs).__name__
        raise ValueError(
            f"log_outputs has {name!r}, and the model's outputs have none: {has}"
        )
    if getattr(value, "ndim", 0) and value.numel() != 1:
        raise ValueError(
            f"log_outputs has {name!r}, of shape {tuple(value.shape)}; it must be one "
            "number: log its mean with trainer.log_mean() in compute_loss"
        )
    return value.reshape(()) if hasattr(value, "reshape") else value


def floating_point_ops(trainer: TrainerRun, inputs: Any) -> float:
    """Return the estimated operations of forward and backward on a batch: 6 times the
    tokens times the parameters without embeddings; 0 for a model that cannot say, and
    for a batch without the model's main input by name.

    Args:
        inputs (dict): A batch.
    """
    numel, per_token = None, trainer._flos_per_token
    if per_token != 0.0:
        numel = getattr(entry(inputs, trainer._main_input_name), "numel", None)
    return 0.0 if numel is None else per_token * numel()
