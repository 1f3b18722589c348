"""A GPT for bench_fsdp.py, and every way to train it on several ranks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

LENGTH, VOCABULARY = 128, 8192


class Block(nn.Module):
    def __init__(self, width: int, recomputes: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.width, self.recomputes = width, recomputes

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(x).view(*x.shape[:2], 3, -1, min(64, self.width))
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.norms[0](x))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recomputes:
            return checkpoint(self.compute, x, use_reentrant=False)
        return self.compute(x)


class GPT(nn.Module):
    def __init__(self, wrap: Callable[[nn.Module], nn.Module], options: Any) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, options.width)
        self.places = nn.Embedding(LENGTH, options.width)
        self.blocks = nn.ModuleList(
            wrap(Block(options.width, options.recomputes))
            for _ in range(options.blocks)
        )
        self.norm = nn.LayerNorm(options.width)
        for table in (self.tokens, self.places):  # wider: a softmax of zeros
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places.weight
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.norm(x), self.tokens.weight).float()
        return functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
        )


def unwrapped(options: Any) -> GPT:
    return GPT(lambda module: module, options)


class Loop:
    """A model, its AdamW and what clips gradients to a norm of 1."""

    def __init__(
        self, model: Any, options: Any, clip: Any = None,
        adamw: Any = torch.optim.AdamW,
    ) -> None:  # fmt: skip
        self.model = model
        self.reduces_each = options.reduces_each
        self.clip = clip or (lambda most: clip_grad_norm_(model.parameters(), most))
        self.optimizer = adamw(model.parameters(), lr=1e-3)

    def last(self, is_last: bool) -> contextlib.AbstractContextManager[object]:
        """Around a micro-batch: with a reduction or without."""
        return contextlib.nullcontext() if is_last else self.model.no_sync()

    def step(self, batches: list[torch.Tensor]) -> float:
        total = 0.0
        for number, ids in enumerate(batches, 1):
            with self.last(self.reduces_each or number == len(batches)):
                loss = self.model(ids) / len(batches)
                loss.backward()
                total += loss.item()
        self.clip(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total


def ours(options: Any, rank: int, folder: str) -> Loop:
    from ctrainer import _C, optim
    from ctrainer.fsdp import FullyShardedDataParallel, hybrid_groups

    group: Any = _C.shared_memory_communicator(folder, rank, options.world, 120.0)
    if options.shares < options.world:
        group = hybrid_groups(options.shares, group)
    dtype = "bfloat16" if options.bf16 else "float32"

    def wrap(module: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(
            module, flatten_parameters=True, on_neuron=False, process_group=group,
            compute_dtype=dtype, **options.more,
        )  # fmt: skip

    model = wrap(GPT(wrap, options))
    return Loop(model, options, model.clip_grad_norm_, optim.AdamW)


def ddp(options: Any) -> Loop:
    class Autocast(nn.parallel.DistributedDataParallel):
        def forward(self, *args: Any) -> Any:
            with torch.autocast("cpu", torch.bfloat16, enabled=options.bf16):
                return super().forward(*args)

    return Loop(Autocast(unwrapped(options)), options)


def fsdp1(options: Any) -> Loop:
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

    low = MixedPrecision(param_dtype=torch.bfloat16) if options.bf16 else None

    def wrap(module: nn.Module) -> nn.Module:
        cpu = torch.device("cpu")
        return FullyShardedDataParallel(module, device_id=cpu, mixed_precision=low)

    model = wrap(GPT(wrap, options))
    return Loop(model, options, model.clip_grad_norm_)


class Fsdp2Loop(Loop):
    def last(self, is_last: bool) -> contextlib.AbstractContextManager[object]:
        self.model.set_requires_gradient_sync(is_last)
        return contextlib.nullcontext()


def fsdp2(options: Any) -> Loop:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    sizes = {"replicas": options.world // options.shares, "shares": options.shares}
    names = tuple(name for name in sizes if sizes[name] > 1)
    shape = tuple(sizes[name] for name in names)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if options.bf16 else None)

    def wrap(module: nn.Module) -> nn.Module:
        return fully_shard(module, mesh=mesh, mp_policy=low)

    return Fsdp2Loop(wrap(GPT(wrap, options)), options)


class Idle:
    """A stream of a device that does its work at once."""

    def wait_stream(self, stream: object) -> None:
        pass


def fairscale(options: Any) -> Loop:
    """fairscale asks for CUDA's streams even where there is no GPU: they become things
    that wait for nothing."""
    from torch.nn.utils import clip_grads_with_norm_, get_total_norm

    os.environ["ENABLE_NCCL_BASE_COLLECTIVES"] = "0"  # gloo rejects their shapes
    cuda: Any = torch.cuda
    tensor: Any = torch.Tensor
    idle = Idle()
    cuda.current_stream, cuda.stream = lambda *unused: idle, contextlib.nullcontext
    cuda.synchronize = tensor.record_stream = lambda *unused: None
    from fairscale.nn import FullyShardedDataParallel

    class OnCPU(FullyShardedDataParallel):  # type: ignore[misc]
        def _setup_streams(self) -> None:
            super()._setup_streams()
            names = ("fp32_to_fp16", "all_gather", "post_backward")
            self._streams.update(dict.fromkeys(names, idle))

    low = {"mixed_precision": True, "compute_dtype": torch.bfloat16}
    low = low if options.bf16 else {}

    def wrap(module: nn.Module) -> nn.Module:
        return OnCPU(module, compute_device=torch.device("cpu"), **low)

    def clip(most: float) -> None:  # its own brings the norm to a GPU
        parameters = list(model.parameters())
        norm = get_total_norm(grads_of(parameters))
        total = norm.square()
        dist.all_reduce(total)
        clip_grads_with_norm_(parameters, most, total.sqrt())

    model = wrap(GPT(wrap, options))
    return Loop(model, options, clip)


def grads_of(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


class ZeroLoop:
    """DeepSpeed's engine clips and updates by itself."""

    def __init__(self, model: nn.Module, options: Any) -> None:
        import deepspeed

        # Compiles at its first use, holding a lock that a killed process leaves behind.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        config = {
            "train_micro_batch_size_per_gpu": options.batch,
            "gradient_accumulation_steps": options.micro,
            "bf16": {"enabled": options.bf16},
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": 3},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        self.model, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=config, dist_init_required=False
        )

    def step(self, batches: list[torch.Tensor]) -> float:
        total = 0.0
        for ids in batches:
            loss = self.model(ids)
            self.model.backward(loss)
            self.model.step()
            total += loss.item()
        return total / len(batches)


def zero3(options: Any) -> ZeroLoop:
    return ZeroLoop(unwrapped(options), options)


PEERS = {"ddp": ddp, "fsdp1": fsdp1, "fsdp2": fsdp2, "fairscale": fairscale,
         "zero3": zero3}  # fmt: skip


def prepare(way: str) -> None:
    """Imports, before memory is counted."""
    import torch.distributed.fsdp  # noqa: F401

    if way in ("ours", "plain"):  # it sets malloc and torch as it needs
        import ctrainer.fsdp  # noqa: F401
    if way == "zero3":
        os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed  # noqa: F401


def make(way: str, options: Any, rank: int, folder: str) -> Any:
    """A loop of the way, in a new group of the ranks."""
    if way in ("ours", "plain"):
        return ours(options, rank, folder)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=options.world
    )
    return PEERS[way](options)
