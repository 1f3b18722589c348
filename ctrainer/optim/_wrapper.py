"""What every optimizer's wrapper shares: torch's protocol, driven by the engine."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import torch
from torch.optim.optimizer import ParamsT

from ctrainer._C import OptimEngine, prefer_huge_pages
from ctrainer.optim import _disk
from ctrainer.optim._precision import Precision, keep_float32, new_master
from ctrainer.runtime.notes import locate


def given(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a constructor, from its locals(): those of its ** beside the
    others, without torch's options that are off or rejected here."""
    options = {k: v for k, v in arguments.items() if k not in ("self", "__class__")}
    options |= options.pop("precision")
    if options.pop("differentiable", False):
        raise ValueError(
            "differentiable=True: this optimizer does not have it; leave it out, or "
            "use torch.optim"
        )
    if not options.get("capturable", True):
        del options["capturable"]
    return options


def own(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same for a class that torch lacks: its named options as `defaults`."""
    options = given({**arguments, "precision": {}})
    params = options.pop("params")
    return {"params": params, "defaults": options, **arguments["precision"]}


def count() -> torch.Tensor:
    """Return a count of steps as torch keeps it: float32, of no dimension."""
    return torch.tensor(0.0, dtype=torch.float32, device="cpu")


def zeros(param: torch.Tensor) -> torch.Tensor:
    """Return zeros like the parameter, in its order of memory."""
    made = torch.empty_like(param, memory_format=torch.preserve_format)
    prefer_huge_pages(made)
    return made.zero_()


def shape_of(param: torch.Tensor) -> torch.Size:
    """Return the shape of a parameter, of one that is sharded that of the whole."""
    part = getattr(param, "_part", None)
    return param.shape if part is None else torch.Size(part.shape)


class EngineOptimizer(torch.optim.Optimizer):
    """A mixin in front of torch's class of the same name, or of torch's Optimizer."""

    _kind: str
    _native_step = True  # step() is ours, so the trainer may call the engine itself
    _counts = True  # state[param] has a count of updates
    state_block: int | None = None  # elements of a parameter that share a scale
    # The arrays of state[param], zeros like the parameter: "name", or "name if option"
    # for the groups with that option.
    _moments: tuple[str, ...] = ()
    _disk_state: _disk.DiskState | None = None
    # Options of torch's class that the torch at hand does not have yet.
    _unknown_to_torch: frozenset[str] = frozenset()
    # The options that every wrapper has.
    precision_defaults: ClassVar[Mapping[str, Any]] = {
        "master_weights": False,
        "fp32_state": False,
        "stochastic_rounding": False,
        "rounding_seed": 0,
    }

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._native_step = inspect.unwrap(cls.step) is EngineOptimizer.step

    def __init__(self, params: ParamsT, **options: Any) -> None:
        self._engine = OptimEngine(self._kind)
        ours = Precision.__annotations__.keys() | self._unknown_to_torch
        names = ours & options.keys()
        self._precision = {name: options.pop(name) for name in names}
        try:
            super().__init__(params, **options)
        except (TypeError, ValueError, IndexError) as error:
            locate(error, "optimizer", (self, params, options))
            raise
        self.defaults.update(self._precision)
        self._fill_in_precision()
        # torch.amp.GradScaler would leave unscaling to a fused step.
        self._step_supports_amp_scaling = False

    def _fill_in_precision(self) -> None:
        """Give groups that came without our options those of the constructor."""
        for group in self.param_groups:
            for name, value in self._precision.items():
                group.setdefault(name, value)

    @classmethod
    def _state_of(cls, param: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """Return the state that the original has before a parameter's first step."""
        state = {"step": count()} if cls._counts else {}
        for moment in cls._moments:
            name, _, option = moment.partition(" if ")
            if not option or group.get(option):
                state[name] = zeros(param)
        return state

    def _new_state(self, param: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """Return the state of `param` before its first step. Called by the engine."""
        return self._state_of(param, group)

    _new_master = staticmethod(new_master)  # called by the engine

    @torch.no_grad()
    def sync_master_weights(self) -> None:
        """Take the parameters, as they are now, for the new master weights."""
        self._engine.check_idle("sync_master_weights()")
        for param, state in self.state.items():
            if "master_param" in state:
                state["master_param"].copy_(param)

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        max_norm: float | None = None,
        zero_grads: bool = False,
        loss_scale: float = 1.0,
        nonfinite: Literal["keep", "skip", "stop"] = "keep",
        norm_type: float = 2.0,
        clip_value: float | None = None,
        clip_by_group: bool = False,
    ) -> Any:
        """Clip, update and zero the gradients; return the closure's loss, or None.

        Clipping equals torch.nn.utils.clip_grad_norm_ of the parameters that are
        clipped together, then clip_grad_value_. A group with a "max_grad_norm" is
        clipped to that by its own norm in any case (0: never), and the rest without it.

        Args:
            closure (Callable[[], Any] | None, default None): Computes the loss and its
                gradients before the update.
            max_norm (float | None, default None): The largest norm of the gradients,
                after division by loss_scale; larger ones are scaled down to it. None:
                no clipping.
            zero_grads (bool, default False): Write zeros over the gradients in the same
                pass.
            loss_scale (float, default 1.0): The factor that the loss was multiplied by;
                gradients are divided by it.
            nonfinite (Literal[keep, skip, stop], default 'keep'): For a gradient that
                is Inf or NaN: "keep" updates all the same, as torch does; "skip"
                changes nothing; "stop" raises.
            norm_type (float, default 2.0): p of the norm, > 0; inf for the largest
                element.
            clip_value (float | None, default None): After max_norm, clip each element
                to [-clip_value, clip_value], in a pass of its own.
            clip_by_group (bool, default False): Let max_norm bound the norm of each
                group by itself, not of all gradients together.

        Raises:
            FloatingPointError: nonfinite is "stop" and a gradient is not finite.
            ValueError, TypeError: a parameter or gradient that cannot be read; the
                message says which, and nothing has changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._engine.step(
            self,
            max_norm,
            loss_scale,
            nonfinite,
            zero_grads,
            norm_type,
            clip_value,
            clip_by_group,
        )
        return loss

    def prepare_replay(self) -> None:
        """Send the GPU the next update's constants, before a graph with step() replays.

        With capturable=True, step() may be called while torch.cuda.graph() captures the
        current stream, after one step() of the same parameters outside. From then on,
        call this before each replay, on the stream of the replay: the update takes
        learning rate, betas, weight decay and step count as they are now, to the bit as
        step() would. The options of the captured step() stay.

        Raises:
            RuntimeError: no update was captured.
            ValueError: gradients, parameters or their state are not in the memory that
                the graph knows, as after load_state_dict() or zero_grad(); capture an
                update again.
        """
        self._engine.prepare_replay(self)

    @property
    def grad_norm(self) -> float | None:
        """Norm of all gradients at the last step, of its norm_type, before clipping.

        None where neither max_norm, a group's "max_grad_norm" nor nonfinite asked for
        it.
        """
        return self._engine.grad_norm

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch does.

        Args:
            param_group (dict[str, Any]): "params" and options; options that are missing
                are the constructor's.

        Raises:
            RuntimeError: another thread is in step().
        """
        self._engine.check_idle("add_param_group()")
        # Past torch's guard against tracing, which imports torch._dynamo (1 s).
        inspect.unwrap(torch.optim.Optimizer.add_param_group)(self, param_group)
        self._offload_again()

    def offload_state(
        self, folder: str | os.PathLike[str], *, buffers: int = 4
    ) -> None:
        """Keep the state in a file from now on, as on an NVMe drive, for parameters in
        host memory and optimizers that work element by element.

        Tensors of state from 64 KiB on move there. An update reads them in pieces of
        2**20 elements while it updates the piece before and writes those behind, with
        the same results to the bit. state_dict() and state[param] read the file.

        Args:
            folder (str | os.PathLike[str]): Of the drive. The file has no name, and
                ends with the optimizer or the process.
            buffers (int, default 4): Pieces in memory at once, >= 1; from 3 on reading,
                updating and writing overlap.

        Raises:
            OSError: the folder is missing, or the drive has too little room for all of
                the state. An update raises it where the drive fails.
            ValueError: the optimizer looks at whole parameters, or a parameter is on a
                GPU.

        Example:
            >>> import torch
            >>> from ctrainer.optim import AdamW
            >>> layer = torch.nn.Linear(300, 200)
            >>> optimizer = AdamW(layer.parameters())
            >>> optimizer.offload_state("/tmp")
        """
        self._engine.check_idle("offload_state()")
        self._disk_state = _disk.offload(self, folder, buffers)

    def _offload_again(self) -> None:
        """Move state that was loaded, or make room for that of a new group."""
        if self._disk_state is not None:
            self.offload_state(
                self._disk_state.folder, buffers=self._disk_state.buffers
            )

    def state_dict(self) -> dict[str, Any]:
        """Return torch's own dict of state and groups."""
        self._engine.await_update()
        made: dict[str, Any] = inspect.unwrap(torch.optim.Optimizer.state_dict)(self)
        return made

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what state_dict() of this class or of torch's returned.

        Args:
            state_dict (dict[str, Any]): State and groups; float32 state of bf16 or fp16
                parameters stays float32.

        Raises:
            RuntimeError: another thread is in step().
            ValueError: the groups, or their numbers of parameters, are others.
        """
        self._engine.check_idle("load_state_dict()")
        self._engine.await_update()  # whose counts may have to be taken back
        groups = len(state_dict["param_groups"])
        if groups != len(self.param_groups):
            raise ValueError(
                "loaded state dict has a different number of parameter groups: "
                f"{groups}, and the optimizer has {len(self.param_groups)} in "
                "param_groups; make the optimizer with the groups of the one that saved"
            )
        inspect.unwrap(torch.optim.Optimizer.load_state_dict)(self, state_dict)
        self._fill_in_precision()
        keep_float32(self, state_dict)
        for state in self.state.values():
            for name in ("step", "mu_product"):  # single numbers, which the host reads
                if isinstance(state.get(name), torch.Tensor):
                    state[name] = state[name].cpu()
        self._offload_again()

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_engine" in self.__dict__:
            self._engine.check_idle("__setstate__()")
        else:
            self._engine = OptimEngine(self._kind)
            self._precision = {}
        super().__setstate__(state)
        self._step_supports_amp_scaling = False
