"""NumPy: models whose parameters and gradients are arrays, trained without torch.

A model has `parameters()`, an iterable of Parameter, and `__call__(**batch)`, which
returns a dict with "loss" (or a tuple that begins with it): a Loss, whose backward()
adds to each parameter's gradient. `named_parameters()` is optional.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from ctrainer import _C, schedules
from ctrainer.adapters import _numpy_average as averages  # noqa: F401
from ctrainer.adapters import _numpy_batches as batches
from ctrainer.adapters import _numpy_checkpoint as checkpoints  # noqa: F401
from ctrainer.adapters import _numpy_optim, reading
from ctrainer.adapters._numpy_model import ItemCount, Loss, Parameter
from ctrainer.adapters._numpy_optim import (
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Lion,
    Optimizer,
    RMSprop,
)
from ctrainer.adapters.generators import rng_state, set_rng_state  # noqa: F401
from ctrainer.adapters.lengths import TokenBatches
from ctrainer.adapters.parameters import (
    grads_of,
    named_parameters,
    optimizer_groups,  # noqa: F401
    parameter_labels,  # noqa: F401
    stray_parameters,  # noqa: F401
    updates_others,  # noqa: F401
)
from ctrainer.arguments import accelerator

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "ItemCount",
    "Lion",
    "Loss",
    "Optimizer",
    "Parameter",
    "RMSprop",
]

default_collator = batches.default_collator
length_grouped_sampler = batches.LengthGroupedSampler
make_scheduler = schedules.get_scheduler
sequential_sampler = batches.SequentialSampler
set_epoch = reading.set_epoch


class Host:
    """What args.device is where there is no torch."""

    type = "cpu"
    index = None

    def __str__(self) -> str:
        return "cpu"


# Options that need a framework, and what they mean when they are not used.
_NEEDS_TORCH: dict[str, Any] = {
    "bf16": False,
    "fp16": False,
    "bf16_full_eval": False,
    "fp16_full_eval": False,
    "gradient_checkpointing": False,
    "label_smoothing_factor": 0,
    "neftune_noise_alpha": None,
    "torch_compile": False,
    "auto_find_batch_size": False,
    "crash_record": False,
    "pack_sequences": False,
    "chunked_cross_entropy": False,
    "dataloader_num_workers": 0,
}


def prepare_args(args: Any) -> None:
    """Put args on the host, and reject what a NumPy model cannot have."""
    for name, unused in _NEEDS_TORCH.items():
        value = getattr(args, name, unused)
        if value != unused:
            raise ValueError(
                f"{name}={value!r} needs a torch model; a NumPy model is trained with "
                f"{name}={unused!r}"
            )
    if not accelerator.config_of(args.accelerator_config).use_seedable_sampler:
        _reject("use_seedable_sampler=False in accelerator_config")
    vars(args).setdefault("_device", Host())


def _reject(what: str) -> NoReturn:
    raise ValueError(f"{what} needs a torch model; this one is NumPy's")


# Inputs and devices


def inputs_stay(args: Any) -> bool:
    return True


def prepare_input(data: Any, device: Any) -> Any:
    return data


def begin_copy(data: Any) -> tuple[Any, None]:
    """All is in host memory."""
    return data, None


def move_model(model: Any, device: Any) -> None:
    """Arrays are where they are."""


# Counting


def item_count(n: int, device: Any) -> ItemCount:
    return ItemCount(n)


def count_targets(labels: Any, shifted: bool) -> int | None:
    """Labels that are not -100, without each row's first where the loss shifts them."""
    if not isinstance(labels, np.ndarray):
        return None
    if shifted and labels.ndim > 0:
        labels = labels[..., 1:]
    return int(np.count_nonzero(labels != -100))


def shifts_labels(model: Any) -> bool:
    return bool(getattr(model, "shifts_labels", False))


def flos_per_token(model: Any) -> float:
    """6 times the number of parameters; a model may say better in flos_per_token."""
    said = getattr(model, "flos_per_token", None)
    if said is not None:
        return float(said)
    return 6.0 * float(sum(p.data.size for p in model.parameters()))


# Losses


def no_loss(loss: Any) -> float:
    """A loss of nothing."""
    return 0.0


def add_device_loss(total: tuple[float, int] | None, loss: Any) -> tuple[float, int]:
    """(sum of finite losses, losses that are not finite)."""
    value, bad = (0.0, 0) if total is None else total
    loss = float(loss)
    finite = np.isfinite(loss)
    return (value + loss, bad) if finite else (value, bad + 1)


def device_scale(total: tuple[float, int]) -> float:
    """A factor of losses, 1."""
    return 1.0


def step_undo(scheduler: Any) -> None:
    """Of no schedule: an update in host memory is known when it is made."""


def read_device_loss(total: tuple[float, int], accumulation: int) -> tuple[float, int]:
    """The sum, and how many updates at least had a loss that is not finite."""
    return total[0], -(-total[1] // accumulation)


def loss_sum(value: float, device: Any) -> Any:
    """A sum of losses as hooks of transformers' Trainer get it."""
    return np.array(value)


def add_embedding_noise(model: Any, alpha: float) -> NoReturn:
    _reject("neftune_noise_alpha")


def smoothed_loss(
    outputs: Any, labels: Any, epsilon: float, shift: bool, count: Any
) -> NoReturn:
    _reject("label_smoothing_factor")


def defer_logits(model: Any) -> NoReturn:
    _reject("chunked_cross_entropy")


# Precision


def enter_mixed_precision(model: Any, args: Any) -> bool:
    return False


def leave_mixed_precision(model: Any) -> None:
    """There is nothing to leave."""


def cast_model(model: Any, dtype: str, device: Any) -> NoReturn:
    _reject(f"evaluation in {dtype}")


def compile_model(model: Any, args: Any) -> NoReturn:
    _reject("torch_compile")


def _split(*args: Any) -> NoReturn:
    _reject("auto_find_batch_size")


gradient_marks = drop_gradients = hold_gradients = same_rng = _split
normalizes_batches = evaluated = _split


def no_grad() -> contextlib.AbstractContextManager[Any]:
    """Gradients are made by Loss.backward() alone."""
    return contextlib.nullcontext()


def empty_cache() -> None:
    """There is none."""


# Optimizers


def decay_parameter_names(model: Any) -> list[str]:
    """Names of the parameters that weight decay applies to: matrices, not vectors."""
    return [name for name, p in named_parameters(model) if p.data.ndim > 1]


def devices_elsewhere(parameters: Any) -> set[str]:
    """The kinds of devices, other than the CPU, that have parameters of the model."""
    return set()


def optimizer_class(
    cls: str, name: str, model: Any
) -> tuple[type[Optimizer], dict[str, Any]]:
    """The class `cls`, which optim=name means, and keywords of its own."""
    found = getattr(_numpy_optim, cls, None)
    if found is None:
        raise _of_torch(name)
    return found, {}


def package_optimizer_class(args: Any, model: Any) -> NoReturn:
    """Raise ValueError: the packages' optimizers are for models of torch."""
    raise _of_torch(args.optim)


def _of_torch(name: Any) -> ValueError:
    return ValueError(
        f"optim={getattr(name, 'value', name)!r} is for models of torch, and this one "
        f"is of NumPy, for which there are {', '.join(_numpy_optim.NAMES)}"
    )


def is_metric_scheduler(scheduler: Any) -> bool:
    return False


def grad_norms(optimizer: Any, norm_type: float, by_group: bool) -> list[float]:
    """Norms of the optimizer's gradients, of each group or one of all."""
    lists = [grads_of(group) for group in optimizer.param_groups]
    if not by_group:
        lists = [[grad for grads in lists for grad in grads]]
    flat = [np.concatenate([np.zeros(1), *map(np.ravel, grads)]) for grads in lists]
    return [float(np.linalg.norm(grads, norm_type)) for grads in flat]


def layer_norms(optimizer: Any, norm_type: float) -> dict[Any, float]:
    """The norm of the gradient of each of the optimizer's parameters that has one, in
    double."""
    return {
        param: float(np.linalg.norm(np.append(0.0, param.grad), norm_type))
        for group in optimizer.param_groups
        for param in group["params"]
        if param.grad is not None
    }


def clip_grads(optimizer: Any, factors: list[float], limit: float | None) -> None:
    """Multiply each group's gradients by its factor in place, and clip what is then
    further from 0 than limit."""
    for group, factor in zip(optimizer.param_groups, factors, strict=True):
        for grad in grads_of(group):
            grad *= factor
            if limit is not None:
                np.clip(grad, -limit, limit, out=grad)


def lossy_fp16_parameter(model: Any, optimizer: Any) -> None:
    """None: training with fp16, which asks, needs torch and is rejected before."""


# Data


def is_iterable(dataset: Any) -> bool:
    return not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"))


def random_sampler(dataset: Any, args: Any) -> batches.SeededSampler:
    """A shuffled order that depends on the seed and the epoch alone."""
    seed = args.seed if args.data_seed is None else args.data_seed
    return batches.SeededSampler(dataset, seed)


def data_loader(
    dataset: Any, args: Any, *, training: bool, sampler: Any, **options: Any
) -> batches.DataLoader:
    """A loader of batches in the training process; on several ranks this rank's part,
    of a data set that all of them read."""
    return batches.DataLoader(
        dataset, sampler=sampler, drop_last=args.dataloader_drop_last,
        plan=accelerator.batch_plan(args, training), **options,
    )  # fmt: skip


# Several ranks


def ddp_options(model: Any, args: Any) -> dict[str, Any]:
    """None: torch's wrapper is for torch's modules."""
    return {}


def data_parallel(model: Any, args: Any, group: _C.Communicator) -> Any:
    """The model, with rank 0's parameters; the trainer averages its gradients."""
    for parameter in model.parameters():
        group.broadcast(parameter.data)
    return model


def is_wrapped(model: Any) -> bool:
    return False


def share_order(loader: Any, group: _C.Communicator) -> None:
    """Give all ranks rank 0's generator, which the order of an epoch may depend on."""
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, batches.SeededSampler | TokenBatches):
        return
    mine: Any = np.random.get_state()
    state = json.dumps([mine[0], mine[1].tolist(), *mine[2:]]).encode()
    name, key, *rest = json.loads(group.broadcast_bytes(state, 0))
    np.random.set_state((name, np.array(key, np.uint32), *rest))


def padding_collator(tokenizer: Any) -> Callable[..., Any]:
    """The tokenizer's own padding, to NumPy arrays."""

    def collate(features: list[Any]) -> Any:
        return tokenizer.pad(features, return_tensors="np")

    return collate


def reader(
    loader: Any, seed: int | None, rank: int = 0, world_size: int = 1
) -> reading.Reader:
    """The epochs of the loader's batches, begun at any place; seed: of the draws by
    place, None for the process's generators as they come."""
    ours = isinstance(loader, batches.DataLoader)
    kind = batches.LoaderReader if ours else reading.Reader
    return kind(loader, seed, rank, world_size)
