"""What of torch belongs to the process: the device, seeds, determinism."""

from __future__ import annotations

import logging
import os

import torch

logger = logging.getLogger(__name__)


def accelerator() -> torch.device | None:
    """torch's accelerator, where a device of it can be used.

    Asked in this order: torch 2.6 raises where there is none.
    """
    there = torch.accelerator.is_available()
    return torch.accelerator.current_accelerator() if there else None


def choose_device(
    use_cpu: bool, tf32: bool | None, index: int = 0, ranks: int = 1
) -> torch.device:
    """Number `index` of torch's accelerator, a CUDA device where a GPU is visible,
    unless the CPU is asked for.

    ranks: processes of the run, each with a GPU of its own.

    Sets TF32 for CUDA's products when `tf32` is not None. Raises ValueError when TF32
    is asked for where there is none, where there is no GPU of that index, or where
    ACCELERATE_TORCH_DEVICE names another device.
    """
    named = os.environ.get("ACCELERATE_TORCH_DEVICE", "")
    launched = os.environ.get("ACCELERATE_USE_CPU", "").lower()
    wants_cpu = use_cpu or named == "cpu" or launched in ("1", "true", "yes", "on")
    kind = (None if wants_cpu else accelerator()) or torch.device("cpu")
    if named not in ("", kind.type, f"{kind.type}:{index}"):
        raise ValueError(
            f"ACCELERATE_TORCH_DEVICE={named} is not the device of this process, "
            f"{kind.type}:{index}; unset it"
        )
    if tf32 and kind.type != "cuda":
        raise ValueError("tf32=True needs a CUDA device, and none is used")
    if kind.type == "cpu":
        return kind
    count = torch.accelerator.device_count()
    if index >= count:
        raise ValueError(
            f"process {index} of this machine has no GPU of its own: {count} are "
            "visible. Start as many processes as there are GPUs, or set use_cpu=True"
        )
    if count > 1 and ranks == 1:
        logger.warning("%d GPUs are visible; one process trains on one alone", count)
    device = torch.device(kind.type, index)
    torch.get_device_module(device).set_device(device)
    if tf32 is not None:
        _set_tf32(device, tf32)
    return device


def _set_tf32(device: torch.device, wanted: bool) -> None:
    major, minor = torch.cuda.get_device_capability(device)
    if wanted and major < 8:
        raise ValueError(
            f"tf32=True needs a GPU of compute capability 8.0; this one has "
            f"{major}.{minor}"
        )
    torch.backends.cuda.matmul.allow_tf32 = wanted
    torch.backends.cudnn.allow_tf32 = wanted


def dtype_of(name: str) -> torch.dtype:
    """torch's dtype of a name such as "bfloat16"."""
    return getattr(torch, name)  # type: ignore[no-any-return]


def seed_torch(seed: int) -> None:
    """Seed torch's generators, those of CUDA devices too."""
    torch.manual_seed(seed)
    torch.cuda.manual_seed_all(seed)


def be_deterministic(warn_only: bool = False) -> None:
    """Let torch use deterministic algorithms alone, or fail (or warn)."""
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def initial_seed() -> int:
    """Seed of this process's generator; differs between workers of a DataLoader."""
    return torch.initial_seed() % 2**32


def visible_gpus() -> int:
    """How many CUDA devices torch sees."""
    return torch.cuda.device_count()


def import_compiler() -> None:
    """Import what a state_dict() or load_state_dict() of torch's optimizers imports the
    first time, which takes seconds."""
    import torch._dynamo  # noqa: F401
