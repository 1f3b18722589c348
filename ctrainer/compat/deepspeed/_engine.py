"""initialize(), and the engine that it returns: DeepSpeed's calls over ctrainer.fsdp
and ctrainer.DataParallel.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from ctrainer import _C, adapters, deepspeed_schedules
from ctrainer.arguments.deepspeed import loss_scaler_of, optimizer_of
from ctrainer.arguments.fsdp import of_zero
from ctrainer.arguments.loss_scaler import make_loss_scaler
from ctrainer.arguments.optimizers import class_of_deepspeed
from ctrainer.comm import world
from ctrainer.comm.data_parallel import DataParallel, ModuleShown
from ctrainer.comm.environment import DEFAULT_TIMEOUT_SECONDS
from ctrainer.comm.processes import join_run
from ctrainer.comm.run import place
from ctrainer.compat.deepspeed import _saving
from ctrainer.compat.deepspeed._config import DeepSpeedConfig
from ctrainer.compat.deepspeed._files import folder_of, save, write_latest
from ctrainer.fsdp import trained_model
from ctrainer.runtime.torch_process import choose_device

logger = logging.getLogger("ctrainer.compat")


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Any], Any] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[Any], Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[DeepSpeedEngine, Any, DataLoader[Any] | None, Any]:
    """Make an engine that trains the model as a DeepSpeed configuration says.

    Collective. In the stages 1 to 3, and with fp16 or bf16 in stage 0, too, the model
    is sharded by ctrainer.fsdp; else its gradients are averaged by
    ctrainer.DataParallel.

    Args:
        args (default None): Its deepspeed_config is the configuration, where config is
            None.
        model (nn.Module | None, default None): The model, which has to be passed; on
            the meta device, as zero.Init() makes it, it gets new values.
        optimizer (torch.optim.Optimizer | Callable | None, default None): An optimizer
            without state of the model's parameters, which gets the parts of them that
            this rank has; or a function that makes one of parameters. None: that of
            the section optimizer.
        model_parameters (Iterable | None, default None): Parameters of the model, or
            groups of them, for an optimizer that is made here; None: all that train.
        training_data (default None): A data set, of which a DataLoader is made.
        lr_scheduler (default None): A scheduler of the optimizer, or a function that
            makes one of it; None: that of the section scheduler.
        distributed_port (int, default 29500): No effect: ranks join as the launcher's
            variables say.
        mpu (default None): Rejected: layers are not split.
        dist_init_required (bool | None, default None): False: the ranks do not join
            torch.distributed.
        collate_fn (Callable | None, default None): Of the DataLoader.
        config (default None): The configuration, as DeepSpeedConfig takes it.
        mesh_param (default None): Rejected: sequences are not split.
        config_params (default None): The older name of config.

    Returns:
        The engine, its optimizer, the DataLoader and the scheduler; None for what
        there is not.

    Raises:
        ValueError: no model or no configuration; an argument or a key that is
            rejected; an optimizer that needs whole parameters or has state already.
        AssertionError: two configurations, or sizes of batches that do not agree.

    Source: DeepSpeed 0.19, deepspeed/__init__.py.

    Example:
        >>> import torch
        >>> from ctrainer.compat import deepspeed
        >>> config = {
        ...     "train_batch_size": 1,
        ...     "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        ...     "zero_optimization": {"stage": 3},
        ... }
        >>> engine, optimizer, _, _ = deepspeed.initialize(
        ...     model=torch.nn.Linear(2, 1), config=config
        ... )
        >>> loss = engine.backward(engine(torch.ones(1, 2)).sum())
        >>> engine.step()
        >>> engine.global_steps
        1
    """
    if model is None:
        raise ValueError("deepspeed.initialize requires a model")
    config = config_params if config is None else config
    given = getattr(args, "deepspeed_config", None)
    assert config is None or given is None, (
        "we were given deepspeed configs in the deepspeed arguments and "
        "deepspeed.initialize() function call"
    )
    config = given if config is None else config
    if config is None:
        raise ValueError(
            "DeepSpeed requires --deepspeed_config to specify configuration file"
        )
    where = place()
    device = choose_device(False, None, where.local_rank, where.world_size)
    if dist_init_required is not False:
        usual = "gloo" if device.type == "cpu" else "nccl"
        join_run(None, usual, DEFAULT_TIMEOUT_SECONDS)
    engine = DeepSpeedEngine(
        model,
        DeepSpeedConfig(config, mpu, mesh_param),
        device,
        optimizer,
        model_parameters,
        lr_scheduler,
    )
    if training_data is not None:
        engine.training_dataloader = engine.deepspeed_io(
            training_data, collate_fn=collate_fn
        )
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


class DeepSpeedEngine(ModuleShown):
    """A model, its optimizer and its schedule, as initialize() makes them.

    backward() follows the engine's call, and step() follows backward(); step() updates
    at the last of gradient_accumulation_steps passes and is to be called after each.
    Other attributes are the module's.

    Args:
        model (nn.Module): The model.
        config (DeepSpeedConfig): The configuration.
        device (torch.device): Where the model is trained.
        optimizer, model_parameters, lr_scheduler (default None): As of initialize().

    Attributes:
        module (nn.Module): The model; sharded, a ctrainer.fsdp.FullyShardedDataParallel
            that shows the model's attributes and names.
        optimizer (torch.optim.Optimizer | None): Of this rank's parts of the
            parameters; its `overflow` is true where the last update was skipped (on a
            GPU an object that waits for the update when it is asked), `cur_scale` is
            the loss scale, on a GPU behind the last update whose result is known.
        lr_scheduler (Any): The schedule, or None.
        global_steps, micro_steps, skipped_steps, global_samples (int): Updates, those
            skipped among them, passes, and samples of all ranks.

    Source: DeepSpeed 0.19, runtime/engine.py.

    Example:
        >>> import torch
        >>> from ctrainer.compat import deepspeed
        >>> config = {"train_batch_size": 1, "zero_optimization": {"stage": 3}}
        >>> engine = deepspeed.initialize(model=torch.nn.Linear(2, 1), config=config)[0]
        >>> engine.zero_optimization_stage(), engine.gradient_accumulation_steps()
        (3, 1)
    """

    module: nn.Module

    def __init__(
        self,
        model: nn.Module,
        config: DeepSpeedConfig,
        device: torch.device,
        optimizer: Any = None,
        model_parameters: Iterable[Any] | None = None,
        lr_scheduler: Any = None,
    ) -> None:
        super().__init__()
        self._config, self.config, self.device = config, config._param_dict, device
        self.communicator = world()
        self.global_rank = self.communicator.rank
        self.world_size = self.dp_world_size = self.communicator.world_size
        self.local_rank = place().local_rank
        self.global_steps = self.micro_steps = self._skipped_steps = 0
        self._passes = 0  # of the update under way
        self.global_samples = 0
        self.training_dataloader: DataLoader[Any] | None = None
        self._boundary: bool | None = None
        self._syncs, self._applied = True, False
        self._norm: float | None = None
        self._enqueued: _Enqueued | None = None
        self._undo: Callable[[], None] | None = None  # of its step of the schedule
        self._next_scale: torch.Tensor | None = None
        trained = [p for p in model.parameters() if p.requires_grad]
        chosen = trained if model_parameters is None else list(model_parameters)
        named = dict(model.named_parameters())
        self.module = self._shard(model)
        own = dict(self.module.named_parameters())
        # What this rank updates of each parameter.
        self._parts = {id(param): own[name] for name, param in named.items()}
        self.__dict__["_replicas"] = (
            DataParallel(model, self.communicator)
            if trained and not self._is_sharded
            else None
        )
        self.optimizer = self._make_optimizer(optimizer, chosen)
        self.lr_scheduler = self._make_scheduler(lr_scheduler)
        fp16 = config.float16_config.enabled
        self._scaler = make_loss_scaler(loss_scaler_of(config.hf)) if fp16 else None
        if fp16 and device.type != "cpu":
            self._next_scale = torch.ones((), device=device)
        self._skips = self._skips_nonfinite()
        self._strays = self._has_strays()
        self._publish(overflow=False)

    # ---- construction

    @property
    def _is_sharded(self) -> bool:
        return isinstance(self.module, trained_model.TrainedModel)

    def _shard(self, model: nn.Module) -> nn.Module:
        config = self._config
        if config.zero_config.stage == 0 and not (
            config.fp16_enabled or config.bfloat16_enabled
        ):
            return model.to(self.device)
        as_of_a_run = SimpleNamespace(
            fp16=config.fp16_enabled, bf16=config.bfloat16_enabled
        )
        return trained_model.shard(
            model,
            of_zero(config.hf),
            as_of_a_run,
            self.communicator,
            device=self.device,
        )

    def _skips_nonfinite(self) -> bool:
        """Whether updates are skipped whose gradients are not finite: in DeepSpeed in
        float32 of stage 0 none, and bf16's check_grad_overflow is of the stages 1 and
        2."""
        config, stage = self._config, self._config.zero_config.stage
        if config.bfloat16_enabled and stage in (1, 2):
            return bool(config.bfloat16_config.check_grad_overflow)
        return bool(config.fp16_enabled or config.bfloat16_enabled or stage)

    def _has_strays(self) -> bool:
        """Whether parameters train that the optimizer has not."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        own = {id(param) for group in groups for param in group["params"]}
        params = self.module.parameters()
        return any(p.requires_grad and id(p) not in own for p in params)

    def _part(self, param: Any) -> Any:
        """What this rank updates of a parameter."""
        if id(param) not in self._parts:
            raise ValueError(
                f"a parameter of shape {tuple(param.shape)} is not the model's: pass "
                "parameters of the model that initialize() gets"
            )
        return self._parts[id(param)]

    def _groups(self, params: Iterable[Any]) -> list[Any]:
        return [
            {**one, "params": self._groups(one["params"])}
            if isinstance(one, dict)
            else self._part(one[1] if isinstance(one, tuple) else one)
            for one in ([params] if isinstance(params, torch.Tensor) else params)
        ]

    def _make_optimizer(self, given: Any, params: list[Any]) -> Any:
        if isinstance(given, torch.optim.Optimizer):
            made: Any = given
            if self._is_sharded and made.state:
                raise ValueError(
                    "the optimizer has state of whole parameters already: pass a new "
                    "one, and load_checkpoint() loads its state"
                )
            for group in made.param_groups:
                group["params"] = self._groups(group["params"])
        elif given is not None:
            made = given(self._groups(params))
        else:
            section = optimizer_of(self._config.hf)
            if section is None:
                return None
            adapter = adapters.for_model(self.module)
            cls, options = class_of_deepspeed(*section, adapter, self.module)
            made = cls(self._groups(params), **options)
        if self._is_sharded:
            trained_model.check_optimizer(made)
        return made

    def _make_scheduler(self, given: Any) -> Any:
        section = self._config.hf.get_value("scheduler")
        if given is None and section is not None and self.optimizer is not None:
            return deepspeed_schedules.from_config(section, self.optimizer)
        makes_one = callable(given) and not hasattr(given, "step")
        return given(self.optimizer) if makes_one else given

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
    ) -> DataLoader[Any]:
        """Return a DataLoader of this rank's part of a data set.

        Args:
            dataset: A map-style data set, which is shuffled, or an iterable one, which
                each rank reads as it is.
            batch_size (int | None, default None): None: the micro batch size.
            collate_fn (Callable | None, default None): Of the DataLoader.
        """
        sampler: Any = None
        if not isinstance(dataset, IterableDataset):
            sampler = DistributedSampler(dataset, self.world_size, self.global_rank)
        size = batch_size or self.train_micro_batch_size_per_gpu()
        return DataLoader(dataset, size, sampler=sampler, collate_fn=collate_fn)

    # ---- a step

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module and return its output.

        Args:
            *inputs, **kwargs: Of the module's forward.
        """
        run: Any = self.__dict__["_replicas"]
        if run is None:
            return self.module(*inputs, **kwargs)
        syncs = self._syncs and (
            self._boundary is not None or self.is_gradient_accumulation_boundary()
        )
        with contextlib.nullcontext() if syncs else run.no_sync():
            return run(*inputs, **kwargs)

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> torch.Tensor:
        """Run the backward pass; return the loss as a part of its update's.

        Args:
            loss (torch.Tensor): Of this pass, a mean over its batch.
            retain_graph (bool, default False): As torch's.
            scale_wrt_gas (bool, default True): Divide the loss by
                gradient_accumulation_steps.

        Raises:
            RuntimeError: there is no optimizer.
        """
        self._check_optimizer("backward")
        if scale_wrt_gas:
            loss = loss / self.gradient_accumulation_steps()
        scaled = loss if self._scaler is None else loss * self._loss_scale(self._scaler)
        scaled.backward(retain_graph=retain_graph)
        return loss

    def _loss_scale(self, scaler: Any) -> Any:
        """The loss scale, which behind an enqueued update the GPU alone knows."""
        return scaler.scale if self._enqueued is None else self._next_scale

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Count a pass; at the last one of an update clip, update, zero the gradients
        and step the schedule.

        An update whose gradients are not finite is skipped, but in stage 0 in float32,
        and with bf16 in the stages 1 and 2 where check_grad_overflow is False. On a GPU
        the update is enqueued, and counts as made until its result is awaited: in the
        next update, before a checkpoint, and by was_step_applied(),
        get_global_grad_norm(), skipped_steps and optimizer.overflow. The schedule's
        step is taken back then if the update was skipped. step() waits with an
        optimizer that is not ctrainer's, for an update that may take a loss scale to
        its minimum, and, where updates may be skipped, with a schedule that is neither
        ctrainer's nor torch's.

        Args:
            lr_kwargs (dict | None, default None): Of the scheduler's step().

        Raises:
            RuntimeError: there is no optimizer, or it is called in no_sync(), or a
                collective of the ranks' GPUs has failed in the update.
        """
        self._check_optimizer("step")
        if not self._syncs:
            raise RuntimeError("step() is called in no_sync(): call it after the block")
        self._applied, is_last = False, self.is_gradient_accumulation_boundary()
        if is_last:
            self._update(lr_kwargs or {})
        self._passes = 0 if is_last else self._passes + 1
        self.micro_steps += 1

    def _update(self, lr_kwargs: dict[str, Any]) -> None:
        unit: Any = self.module
        adapter = adapters.for_model(unit)
        self._await_update()
        undo, ahead = self._ahead(adapter)
        found = _C.update_parameters(
            self.optimizer,
            adapter,
            self.gradient_clipping(),
            self._skips,
            scaler=self._scaler,
            shards=unit.communicator if self._is_sharded else None,
            **ahead,
        )
        if self._strays:
            self.zero_grad()
        if isinstance(found, tuple):
            self._take(*found)
            self._applied = found[1]
        else:
            self._enqueued, self._undo = _Enqueued(self, found), undo
            self._publish(overflow=self._enqueued if self._skips else False)
            self._applied = True
        if self._applied and self.lr_scheduler is not None:
            self.lr_scheduler.step(**lr_kwargs)
        self.global_steps += 1
        self.global_samples += self.train_batch_size()

    def _ahead(self, adapter: Any) -> tuple[Callable[[], None] | None, dict[str, Any]]:
        """What takes the schedule's next step back, and how update_parameters() leaves
        the update to the GPU."""
        undo, can = None, True
        if self.device.type == "cpu":
            return undo, {}
        how: dict[str, Any] = {"group": self.communicator if self._is_sharded else None}
        if self._skips and self.lr_scheduler is not None:
            undo = adapter.step_undo(self.lr_scheduler)
            can = undo is not None
        if self._scaler is not None:
            scales = self._scaler._foresee()
            if scales is not None:
                how["next_scale"] = self._next_scale, *scales
            can = can and scales is not None
        return undo, how | {"enqueue": can}

    def _take(self, norm: float, updated: bool) -> None:
        """Take the result of an update."""
        self._check_collectives()
        self._norm = norm if updated else math.inf
        self._skipped_steps += not updated
        self._publish(overflow=not updated)

    def _await_update(self) -> None:
        """Wait for the result of the last update where a GPU is still busy with it."""
        enqueued, undo = self._enqueued, self._undo
        self._enqueued = self._undo = None
        if enqueued is not None:
            norm, updated = enqueued.result()
            if self._scaler is not None:
                self._scaler.update(not updated)
            if not updated and undo is not None:
                undo()
            self._applied = self._applied and updated
            self._take(norm, updated)

    def _check_collectives(self) -> None:
        """Raise RuntimeError where GPUs' sum of the gradients never came."""
        self.communicator.check()
        if self._is_sharded:
            unit: Any = self.module
            unit.communicator.check()

    @property
    def skipped_steps(self) -> int:
        """The number of updates that were skipped."""
        self._await_update()
        return self._skipped_steps

    @skipped_steps.setter
    def skipped_steps(self, number: int) -> None:
        self._skipped_steps = number

    def _publish(self, overflow: bool | _Enqueued) -> None:
        """Show the loss scale, and whether the last update was skipped."""
        scale = 1.0 if self._scaler is None else self._scaler.scale
        if self.optimizer is not None:
            self.optimizer.overflow = overflow
            self.optimizer.cur_scale = self.optimizer.loss_scale = scale

    def _check_optimizer(self, name: str) -> None:
        if self.optimizer is None:
            raise RuntimeError(
                f"{name}() needs an optimizer: pass one to initialize(), or have a "
                "section optimizer in the configuration"
            )

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let the gradients of passes in the block stay each rank's own, and add up, in
        every stage.

        Yields:
            None; the first pass after it averages the sum.
        """
        unit: Any = self.module
        self._syncs = False
        try:
            with unit.no_sync() if self._is_sharded else contextlib.nullcontext():
                yield
        finally:
            self._syncs = True

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the pass that is next, or under way, is the last one of its
        update."""
        if self._boundary is not None:
            return self._boundary
        return self._passes + 1 >= self.gradient_accumulation_steps()

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say whether the next pass is the last one of its update, whatever the number
        of passes.

        Args:
            is_boundary (bool): It is.
        """
        self._boundary = is_boundary

    def was_step_applied(self) -> bool:
        """Return whether the last step() has updated the parameters."""
        self._await_update()
        return self._applied

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients.

        Args:
            set_to_none (bool, default True): False: fill them with zeros.
        """
        self.module.zero_grad(set_to_none)

    # ---- checkpoints

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write a checkpoint in DeepSpeed's files, and a copy of zero_to_fp32.py.
        Collective.

        Args:
            save_dir (str): The folder of checkpoints.
            tag (str | None, default None): The name of this one, the same on every
                rank; None: global_step and its number.
            client_state (dict | None, default None): What load_checkpoint() returns:
                tensors and plain data.
            save_latest (bool, default True): Name it in the file `latest`.
            exclude_frozen_parameters (bool, default False): Leave them out.

        Returns:
            True.

        Raises:
            ValueError: client_state has a key of the checkpoint's own.
            RuntimeError: a collective of the ranks' GPUs has failed.
        """
        self._await_update()
        self._check_collectives()
        name = f"global_step{self.global_steps}" if tag is None else str(tag)
        folder = os.path.join(save_dir, name)
        os.makedirs(folder, exist_ok=True)
        frozen = not exclude_frozen_parameters
        _saving.write(self, folder, dict(client_state or {}), frozen)
        self.communicator.barrier()
        if self.global_rank == 0:
            _saving.write_script(save_dir)
            if save_latest:
                write_latest(save_dir, name)
        self.communicator.barrier()
        return True

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load a checkpoint of DeepSpeed's or of save_checkpoint(), of any stage and
        any number of ranks, also a universal one, at any time.

        Args:
            load_dir (str): The folder of checkpoints.
            tag (str | None, default None): The name of one; None: that in the file
                `latest`, or `latest_universal` with checkpoint.load_universal.
            load_module_strict (bool, default True): Reject missing and unknown names.
            load_optimizer_states (bool, default True): Load the optimizer's state, and
                the loss scale.
            load_lr_scheduler_states (bool, default True): Load the schedule's state.
            load_module_only (bool, default False): Load nothing but weights.
            custom_load_fn (default None): Rejected: load_state_dict() of the module is
                used.

        Returns:
            The checkpoint's folder and what was saved as client_state; None, None
            without a tag and a file that names one.

        Raises:
            ValueError: an object that is no plain data, by its name; custom_load_fn.
            FileNotFoundError: there is no such checkpoint.
            RuntimeError: names or shapes of parameters differ.
        """
        if custom_load_fn is not None:
            raise ValueError(
                "custom_load_fn is not supported: load weights with "
                "engine.module.load_full_state_dict()"
            )
        self._await_update()
        universal = self._config.load_universal_checkpoint
        latest = "latest_universal" if universal else "latest"
        if tag is None and not os.path.isfile(os.path.join(load_dir, latest)):
            logger.warning(
                "%s has no file %r that names a checkpoint", load_dir, latest
            )
            return None, None
        folder = folder_of(load_dir, tag, latest)
        state = _saving.read(
            self,
            folder,
            load_module_strict,
            load_optimizer_states,
            load_lr_scheduler_states,
            load_module_only,
        )
        return folder, state

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin"
    ) -> bool:
        """Write the whole weights, in the dtype that layers compute in, on the first
        rank. Collective.

        Args:
            save_dir (str): The folder.
            save_filename (str, default 'pytorch_model.bin'): The file in it.

        Returns:
            True.
        """
        state = self._zero3_consolidated_16bit_state_dict()
        if state is not None:
            os.makedirs(save_dir, exist_ok=True)
            save(state, os.path.join(save_dir, save_filename))
        self.communicator.barrier()
        return True

    def _zero3_consolidated_16bit_state_dict(self) -> dict[str, Any] | None:
        """The whole weights in the dtype that layers compute in; None but on the first
        rank. Collective."""
        self._await_update()
        unit: Any = self.module
        low = unit.compute_dtype if self._is_sharded else None
        state: dict[str, Any] = (
            unit.full_state_dict() if self._is_sharded else unit.state_dict()
        )
        if self.global_rank != 0:
            return None
        cast: dict[Any, torch.Tensor] = {}  # by its place: tied ones stay tied
        for name, _ in unit.named_parameters(remove_duplicate=False):
            if name in state:
                place = state[name].data_ptr(), state[name].shape
                state[name] = cast.setdefault(place, state[name].to(low))
        return state

    # ---- what it knows

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of all gradients of the last update before clipping, inf of
        one that was skipped; None before the first."""
        self._await_update()
        return self._norm

    def get_lr(self) -> list[float]:
        """Return the learning rates of the optimizer's groups."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def get_mom(self) -> list[Any]:
        """Return the momenta, or betas, of the optimizer's groups."""
        groups = self.optimizer.param_groups
        return [group.get("betas", group.get("momentum")) for group in groups]

    def train_batch_size(self) -> int:
        """Return the samples of an update."""
        return int(self._config.train_batch_size)

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the samples of a pass of one rank."""
        return int(self._config.train_micro_batch_size_per_gpu)

    def gradient_accumulation_steps(self) -> int:
        """Return the passes of an update."""
        return int(self._config.gradient_accumulation_steps)

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change gradient_accumulation_steps so that an update has so many samples,
        from the next one on (DeepSpeed's next one may have fewer).

        Args:
            train_batch_size (int): A multiple of a pass of all ranks.

        Raises:
            ValueError: it is none.
        """
        each = self.train_micro_batch_size_per_gpu() * self.world_size
        if train_batch_size < each or train_batch_size % each:
            raise ValueError(
                "Train batch size must be divisible by micro-batch data parallelism: "
                f"{train_batch_size} is no multiple of {each}"
            )
        self._config.train_batch_size = train_batch_size
        self._config.gradient_accumulation_steps = train_batch_size // each

    def gradient_clipping(self) -> float:
        """Return the largest norm of gradients, 0 where they are not clipped."""
        return float(self._config.gradient_clipping)

    def zero_optimization_stage(self) -> int:
        """Return the stage of ZeRO."""
        return int(self._config.zero_config.stage)

    def zero_optimization(self) -> bool:
        """Return whether the stage is above 0."""
        return self.zero_optimization_stage() > 0

    def zero_optimization_partition_gradients(self) -> bool:
        """Return whether the stage is 2 or 3."""
        return self.zero_optimization_stage() >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Return whether the stage is 3."""
        return self.zero_optimization_stage() >= 3

    def fp16_enabled(self) -> bool:
        """Return whether layers compute in float16."""
        return bool(self._config.fp16_enabled)

    def bfloat16_enabled(self) -> bool:
        """Return whether layers compute in bfloat16."""
        return bool(self._config.bfloat16_enabled)

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Return the key stage3_gather_16bit_weights_on_model_save."""
        return bool(self._config.zero_config.gather_16bit_weights_on_model_save)

    def destroy(self) -> None:
        """Let go of the optimizer."""
        self.optimizer = self.lr_scheduler = self._enqueued = self._undo = None


class _Enqueued:
    """An update that a GPU is still busy with; true where it was skipped.

    Args:
        engine (DeepSpeedEngine): Of the update.
        updates (_C.OptimEngine): Knows the result.
    """

    def __init__(self, engine: DeepSpeedEngine, updates: _C.OptimEngine) -> None:
        self._engine, self._updates = weakref.ref(engine), updates
        self._result: tuple[float, bool] | None = None

    def result(self) -> tuple[float, bool]:
        """Return the norm of the gradients, and whether the update was made."""
        if self._result is None:
            norm = self._updates.grad_norm
            assert norm is not None
            self._result = norm, self._updates.updated
        return self._result

    def __bool__(self) -> bool:
        engine = self._engine()
        if engine is not None:
            engine._await_update()
        return not self.result()[1]

    def __eq__(self, other: Any) -> bool:
        return bool(bool(self) == other)

    def __hash__(self) -> int:
        return hash(bool(self))

    def __repr__(self) -> str:
        return repr(bool(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return bool, (bool(self),)
