"""torch: batches, samplers, devices, random state."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Sampler

from ctrainer import _C, schedules
from ctrainer.adapters import _torch_average as averages  # noqa: F401
from ctrainer.adapters import _torch_batches as batches
from ctrainer.adapters import _torch_checkpoint as checkpoints  # noqa: F401
from ctrainer.adapters import _torch_memory as memory
from ctrainer.adapters import _torch_optim as optimizers
from ctrainer.adapters import _torch_packing as packing  # noqa: F401
from ctrainer.adapters import _torch_precision as precision
from ctrainer.adapters import _torch_ranks as ranks
from ctrainer.adapters import deferred, generators, parameters, reading
from ctrainer.adapters.lengths import TokenBatches
from ctrainer.arguments import accelerator

Args = Any
Model = nn.Module

default_collator = batches.default_collator
defer_logits = deferred.Deferral
gradient_marks = memory.gradient_marks
drop_gradients = memory.drop_gradients
hold_gradients = memory.hold_gradients
same_rng = memory.same_rng
normalizes_batches = memory.normalizes_batches
evaluated = memory.evaluated
decay_parameter_names = optimizers.decay_parameter_names
grad_norms = optimizers.grad_norms
is_metric_scheduler = optimizers.is_metric_scheduler
step_undo = optimizers.step_undo
make_scheduler = schedules.get_scheduler
devices_elsewhere = optimizers.devices_elsewhere
optimizer_class = optimizers.optimizer_class
package_optimizer_class = optimizers.package_optimizer_class
optimizer_groups = parameters.optimizer_groups
clip_grads = optimizers.clip_grads
layer_norms = optimizers.layer_norms
parameter_labels = parameters.parameter_labels
stray_parameters = parameters.stray_parameters
updates_others = parameters.updates_others
cast_model = precision.cast_model
enter_mixed_precision = precision.enter_mixed_precision
leave_mixed_precision = precision.leave_mixed_precision
lossy_fp16_parameter = precision.lossy_fp16_parameter
length_grouped_sampler = batches.LengthGroupedSampler
set_epoch = reading.set_epoch
share_order = ranks.share_order


def prepare_args(args: Args) -> None:
    """torch has all that args can ask for."""


# Inputs and devices


def inputs_stay(args: Args) -> bool:
    """Does a batch train where the data loader put it, in host memory?"""
    return torch.device(args.device).type == "cpu"


def prepare_input(data: Any, device: Any) -> Any:
    """`data`, a tensor or a nest of mappings, lists and tuples, with its tensors on
    `device`. New containers of the same types; leaves that are no tensors as given."""
    return precision.map_tensors(
        data, lambda tensor: tensor.to(device=device, non_blocking=True)
    )


# What a batch of an evaluation pins at most, which torch keeps pinned; copying more
# takes longer than waiting for the device. Tensors below _SMALL are copied in any case.
_MOST_PINNED, _SMALL = 256 << 20, 1 << 16


def begin_copy(data: Any) -> tuple[Any, Callable[[], None] | None]:
    """A copy of `data`, nested as for prepare_input(), in host memory, which is pinned
    for tensors of a device; and what waits until their values are there, None without
    such tensors. A tensor for which too little memory can be pinned stays on its
    device."""
    devices: set[torch.device] = set()
    pinned = 0

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal pinned
        if tensor.is_cpu or tensor.nbytes > max(_SMALL, _MOST_PINNED - pinned):
            return tensor
        try:
            copied = tensor.detach().to("cpu", non_blocking=True)
        except RuntimeError:
            return tensor
        pinned += tensor.nbytes
        devices.add(tensor.device)
        return copied

    copied, events = precision.map_tensors(data, copy), []
    for device in devices:
        events.append(torch.Event(device))
        events[-1].record(torch.accelerator.current_stream(device))

    def wait() -> None:
        for event in events:
            event.synchronize()

    return copied, wait if events else None


def move_model(model: Model, device: Any) -> None:
    """Move the model's parameters and buffers in place; tied weights stay tied."""
    model.to(device)


# Counting


class ItemCount(torch.Tensor):
    """Number of predicted targets in an update, a scalar int64 tensor.

    It notes in `was_read` whether anybody used its value, so that the trainer knows
    whether the loss is normalised by it already.
    """

    was_read: bool = False

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if _reads(func):
            for count in _counts((args, *(kwargs or {}).values())):
                count.was_read = True
        with torch._C.DisableTorchFunctionSubclass():
            return func(
                *[_plain(a) for a in args],
                **{k: _plain(v) for k, v in (kwargs or {}).items()},
            )


_SHAPE_QUERIES = {"dim", "size", "numel", "is_floating_point", "__repr__"}
_VIEWS = {"data", "T", "mT", "H", "mH", "real"}


def _reads(func: Any) -> bool:
    """Does the function, or the getter of an attribute, use a tensor's value?"""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(func.__self__, "__name__", "") in _VIEWS
    return name not in _SHAPE_QUERIES


def _counts(values: Any) -> Iterator[ItemCount]:
    for value in values:
        if isinstance(value, ItemCount):
            yield value
        elif isinstance(value, list | tuple):
            yield from _counts(value)


def _plain(value: Any) -> Any:
    return value.as_subclass(torch.Tensor) if isinstance(value, ItemCount) else value


def item_count(n: int, device: Any) -> torch.Tensor:
    """The count that loss functions are passed."""
    # Filled there: a copy of host memory would wait for the device.
    count = torch.full((), n, dtype=torch.int64, device=device)
    return count.as_subclass(ItemCount)


def count_targets(labels: Any, shifted: bool) -> int | None:
    """Labels that are not -100, without each row's first where the loss shifts them."""
    if not isinstance(labels, torch.Tensor):
        return None
    if shifted and labels.dim() > 0:
        labels = labels[..., 1:]
    return int(labels.ne(-100).sum())


def shifts_labels(model: Model) -> bool:
    """Does the model's own loss predict each label from those before it?

    True where a transformers model ends up with its causal loss, be it by loss_type
    or, for a model made from a bare configuration, by default.
    """
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        return False
    kind = getattr(model, "loss_type", None)
    if isinstance(kind, str):
        return kind == "ForCausalLM" or _mapped_loss(kind) == "ForCausalLMLoss"
    return type(model).__name__.endswith(("ForCausalLM", "LMHeadModel")) and hasattr(
        model, "loss_function"
    )


def _mapped_loss(kind: str) -> str:
    from transformers.loss.loss_utils import LOSS_MAPPING

    return getattr(LOSS_MAPPING.get(kind), "__name__", "")


def flos_per_token(model: Model) -> float:
    """6 times the parameters without embeddings, worked out once a run; 0 where the
    model cannot count them."""
    count = getattr(model, "num_parameters", None)
    try:
        return 6.0 * count(exclude_embeddings=True) if callable(count) else 0.0
    except TypeError:
        return 0.0


# Losses on a device, summed without waiting for it


def no_loss(loss: torch.Tensor) -> torch.Tensor:
    """A loss of nothing: 0 where `loss` lies."""
    return torch.zeros_like(loss, requires_grad=False)


def add_device_loss(total: torch.Tensor | None, loss: torch.Tensor) -> torch.Tensor:
    """[sum of finite losses, losses that are not finite] on the loss's device."""
    if not isinstance(loss, torch.Tensor):
        got = type(loss).__name__
        raise TypeError(f"training_step returned {got}; return the loss, a tensor")
    loss = loss.detach().double()
    finite = torch.isfinite(loss)
    pair = torch.stack((torch.where(finite, loss, 0.0), (~finite).double()))
    return pair if total is None else total + pair


def device_scale(total: torch.Tensor) -> torch.Tensor:
    """A factor of losses, 1, where their sum lies."""
    return torch.ones((), dtype=torch.float32, device=total.device)


def read_device_loss(total: torch.Tensor, accumulation: int) -> tuple[float, int]:
    """The sum, and how many updates at least had a loss that is not finite."""
    value, bad = total.tolist()
    return value, -int(-bad // accumulation)


def loss_sum(value: float, device: Any) -> torch.Tensor:
    """A sum of losses as hooks of transformers' Trainer get it."""
    return torch.full((), value, dtype=torch.float32, device=device)


def add_embedding_noise(model: Model, alpha: float) -> Any:
    """Uniform noise of alpha / sqrt(tokens * width) on the input embeddings while
    training; remove() of what is returned ends it.
    Source: Jain et al., "NEFTune", 2023, algorithm 1."""
    embeddings: Any = model.get_input_embeddings()  # type: ignore[operator]

    def add_noise(module: nn.Module, _: Any, output: torch.Tensor) -> torch.Tensor:
        if not module.training:
            return output
        size = alpha / (output.size(1) * output.size(2)) ** 0.5
        return output + torch.zeros_like(output).uniform_(-size, size)

    return embeddings.register_forward_hook(add_noise)


def smoothed_loss(
    outputs: Any, labels: Any, epsilon: float, shift: bool, count: Any
) -> Any:
    """Cross entropy against labels mixed with the uniform distribution.

    (1 - epsilon) * nll + epsilon * mean over classes of -log p, summed over labels that
    are not -100 and divided by their number, or by `count`.
    Source: Szegedy et al., "Rethinking the Inception Architecture", 2016, section 7.
    """
    logits = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
    if shift:
        logits, labels = logits[..., :-1, :], labels[..., 1:]
    labels = labels.reshape(-1)
    loss = nn.functional.cross_entropy(
        logits.reshape(labels.numel(), logits.shape[-1]).float(),
        labels,
        label_smoothing=epsilon,
        reduction="sum",
    )
    return loss / (labels.ne(-100).sum() if count is None else count)


# Randomness


def rng_state() -> dict[str, Any]:
    """States of Python's, NumPy's and torch's generators, as checkpoints keep them."""
    state = {**generators.rng_state(), "cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    generators.set_rng_state(state)
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def compile_model(model: Model, args: Args) -> Model:
    """torch.compile with the backend and mode of `args`; the same parameters."""
    compiled: Any = torch.compile(
        model,
        backend=args.torch_compile_backend or "inductor",
        mode=args.torch_compile_mode,
    )
    compiled.register_forward_pre_hook(_PlainCounts(model), with_kwargs=True)
    return compiled  # type: ignore[no-any-return]


class _PlainCounts:
    """Before each forward pass of a compiled model: an ItemCount, which graphs cannot
    take, becomes a plain tensor. Whether the model reads it is known from a forward
    pass that is not compiled, of the first batch, in evaluation mode, without gradients
    and with the same random state afterwards."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.reads: bool | None = None

    def __call__(self, _: Any, args: Any, kwargs: Any) -> Any:
        counts = list(_counts((*args, *kwargs.values())))
        if not counts:
            return None
        if self.reads is None:
            self.reads = self._tried(args, kwargs, counts)
        for count in counts:
            count.was_read |= self.reads
        return tuple(map(_plain, args)), {k: _plain(v) for k, v in kwargs.items()}

    def _tried(self, args: Any, kwargs: Any, counts: list[ItemCount]) -> bool:
        before, state = [count.was_read for count in counts], rng_state()
        try:
            for count in counts:
                count.was_read = False
            with torch.no_grad(), memory.evaluated(self.model):
                self.model(*args, **kwargs)
            return any(count.was_read for count in counts)
        finally:
            set_rng_state(state)
            for count, was in zip(counts, before, strict=True):
                count.was_read = was


# Several ranks


def data_parallel(model: Model, args: Args, group: _C.Communicator) -> Model:
    """`model` with gradients that become the mean over the ranks while backward runs,
    by the ddp_ options of `args`; one that torch's DistributedDataParallel or ours is
    around already as it is."""
    from ctrainer.comm import data_parallel as wrappers

    if wrappers.is_wrapped(model):
        return model
    options = ddp_options(model, args)
    if inputs_stay(args):
        return wrappers.DataParallel(model, group, **options)
    return wrappers.on_gpu(model, group, args, **options)


def ddp_options(model: Model, args: Args) -> dict[str, Any]:
    """transformers' defaults: parameters may be unused, unless activations are
    recomputed, which its models' second forward pass would contradict."""
    unused = args.ddp_find_unused_parameters
    if unused is None:
        recomputes = args.gradient_checkpointing or getattr(
            model, "is_gradient_checkpointing", False
        )
        unused = not (recomputes and hasattr(model, "gradient_checkpointing_enable"))
    given = {
        "bucket_cap_mb": args.ddp_bucket_cap_mb,
        "broadcast_buffers": args.ddp_broadcast_buffers,
        "static_graph": getattr(args, "ddp_static_graph", None),
    }
    chosen = {name: value for name, value in given.items() if value is not None}
    return {"find_unused_parameters": unused, **chosen}


def is_wrapped(model: Any) -> bool:
    """Is it a wrapper that compile_model() or data_parallel() has made?"""
    if "_orig_mod" in getattr(model, "_modules", ()):
        return any(
            isinstance(hook, _PlainCounts) for hook in model._forward_pre_hooks.values()
        )
    wrappers = sys.modules.get("ctrainer.comm.data_parallel")
    return wrappers is not None and isinstance(model, wrappers.DataParallel)


def no_grad() -> contextlib.AbstractContextManager[Any]:
    """Return torch.no_grad()."""
    return torch.no_grad()


def empty_cache() -> None:
    """Return cached blocks of CUDA's allocator to the device, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# Data


def is_iterable(dataset: Any) -> bool:
    return isinstance(dataset, IterableDataset)


def random_sampler(dataset: Any, args: Args) -> Sampler[int]:
    """A shuffled order that depends on the seed and the epoch alone, unless
    use_seedable_sampler is off: then on torch's generator."""
    if not accelerator.config_of(args.accelerator_config).use_seedable_sampler:
        return torch.utils.data.RandomSampler(dataset)
    return batches.SeededSampler(dataset, args)


def sequential_sampler(dataset: Any) -> Sampler[int]:
    return torch.utils.data.SequentialSampler(dataset)


def data_loader(
    dataset: Any, args: Args, *, training: bool, sampler: Any, **options: Any
) -> Any:
    """A torch DataLoader with the options of `args`; on several ranks this rank's part.

    A plain RandomSampler of training data, which an override of _get_train_sampler
    may return, is replaced by one of the same order as accelerate's: seeded by the
    run's seed plus the epoch, so that a resumed run finds it again.
    """
    workers = args.dataloader_num_workers
    options.update(
        num_workers=workers,
        pin_memory=args.dataloader_pin_memory and torch.cuda.is_available(),
        persistent_workers=args.dataloader_persistent_workers and workers > 0,
    )
    if workers > 0:
        options["prefetch_factor"] = args.dataloader_prefetch_factor
        context = getattr(args, "dataloader_multiprocessing_context", None)
        options["multiprocessing_context"] = context
        options["in_order"] = args.dataloader_in_order
    plan = accelerator.batch_plan(args, training)
    by_tokens = isinstance(sampler, TokenBatches)
    if not is_iterable(dataset):
        sharded = plan is not None and not plan.dispatch_batches
        chosen = batches.seeded(sampler, args, sharded) if training else sampler
        options["sampler"] = chosen
        options["drop_last"] = args.dataloader_drop_last
        if training and workers > 0:
            seeder = batches.worker_seeder(workers, args.process_index)
            options["worker_init_fn"] = seeder
    if plan is None and by_tokens:
        own = {"batch_sampler": sampler, "batch_size": 1, "drop_last": False}
        loader: Any = DataLoader(dataset, **{**options, **own, "sampler": None})
    elif plan is None:
        loader = DataLoader(dataset, **options)
    else:
        rest = {"sampler": None, "drop_last": False, **options}
        loader = ranks.rank_loader(dataset, plan, **rest)
    if not is_iterable(dataset) and not by_tokens:  # as accelerate's loaders have it
        parts = 1 if plan is None or plan.split_batches else plan.world_size
        loader.total_batch_size = options["batch_size"] * parts
        loader.total_dataset_length = len(dataset)
    return loader


def padding_collator(tokenizer: Any) -> Callable[..., Any]:
    """Transformers' collator that pads by the tokenizer."""
    from transformers import DataCollatorWithPadding

    return DataCollatorWithPadding(tokenizer)


def reader(
    loader: Any, seed: int | None, rank: int = 0, world_size: int = 1
) -> reading.Reader:
    """The epochs of the loader's batches, begun at any place; seed: of the draws by
    place, None for torch's way."""
    from ctrainer.adapters import _torch_reading

    return _torch_reading.reader(loader, seed, rank, world_size)
