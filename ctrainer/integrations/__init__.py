"""Objects of other packages: trackers, search backends, accelerators, model cards."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

from ctrainer.arguments.accelerator import config_of
from ctrainer.arguments.settings import reject_unknown
from ctrainer.comm.environment import set_local_rendezvous


def _integrations() -> Any:
    if find_spec("transformers") is None:
        raise ImportError(
            "report_to needs transformers, whose callbacks drive the trackers: "
            'pip install "ctrainer[hf]", or set report_to="none"'
        )
    from transformers.integrations import integration_utils

    return integration_utils


def installed_reporters() -> list[str]:
    """Names of the trackers that are installed; none without transformers."""
    if find_spec("transformers") is None:
        return []
    return list(_integrations().get_available_reporting_integrations())


def reporting_callbacks(
    names: list[str], logging_dir: str | None = None
) -> list[type[Any]]:
    """Callback classes of the trackers called `names`.

    TensorBoard's writes to `logging_dir`, unless TENSORBOARD_LOGGING_DIR is set.
    Raises ImportError without transformers and ValueError for an unknown name.
    """
    if not names:
        return []
    integrations = _integrations()
    if logging_dir is not None:
        os.environ.setdefault("TENSORBOARD_LOGGING_DIR", logging_dir)
    reject_unknown("report_to", names, integrations.INTEGRATION_TO_CALLBACK)
    return list(integrations.get_reporting_integration_callbacks(names))


def search_backend(name: Any) -> tuple[Any, Any, Any]:
    """transformers' backend of hyper-parameter search: its kind, the backend itself and
    the default objective. None takes the first that is installed.

    Raises ImportError without transformers, RuntimeError without the backend.
    """
    from transformers.hyperparameter_search import (
        ALL_HYPERPARAMETER_SEARCH_BACKENDS,
        default_hp_search_backend,
    )
    from transformers.trainer_utils import HPSearchBackend, default_compute_objective

    kind = HPSearchBackend(name or default_hp_search_backend())
    backend: Any = ALL_HYPERPARAMETER_SEARCH_BACKENDS[kind]()
    backend.ensure_available()
    return kind, backend, default_compute_objective


def new_accelerator(args: Any, cpu: bool, ddp_options: dict[str, Any]) -> Any:
    """accelerate's Accelerator on this process's device, or on the CPU, of all
    processes of the run: with several it initialises torch.distributed. It shards
    batches as args.accelerator_config says, and wraps models by ddp_options.

    Raises ImportError without accelerate.
    """
    from accelerate import Accelerator
    from accelerate.utils import (
        DataLoaderConfiguration,
        DistributedDataParallelKwargs,
        GradientAccumulationPlugin,
    )

    if args.world_size > 1:
        partial_state(args, cpu)
    config = config_of(args.accelerator_config).to_dict()
    del config["use_configured_state"]
    accumulation = config.pop("gradient_accumulation_kwargs") or {}
    loaders = DataLoaderConfiguration(**config)
    loaders.data_seed = args.data_seed
    return Accelerator(
        cpu=cpu,
        dataloader_config=loaders,
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            **{**accumulation, "num_steps": 1}
        ),
        kwargs_handlers=[DistributedDataParallelKwargs(**ddp_options)],
    )


def configured_state() -> Any:
    """accelerate's state that the script has made, for use_configured_state.

    Raises ValueError where there is none, ImportError without accelerate.
    """
    from accelerate import PartialState

    if not PartialState._shared_state:
        raise ValueError(
            "use_configured_state in accelerator_config needs a state to use: make an "
            "accelerate.PartialState or Accelerator before the training arguments"
        )
    return PartialState()


def partial_state(args: Any, cpu: bool | None = None) -> Any:
    """accelerate's PartialState of this process; with several it initialises
    torch.distributed, by args.ddp_backend, or gloo on the CPU and nccl elsewhere.

    Raises ImportError without accelerate.
    """
    from accelerate import PartialState

    from ctrainer.comm import processes

    set_local_rendezvous(os.environ)
    cpu = args.device.type == "cpu" if cpu is None else cpu
    backend = args.ddp_backend or ("gloo" if cpu else "nccl")
    joined = processes.is_initialized()
    state = PartialState(cpu=cpu, backend=backend, timeout=args.ddp_timeout_delta)
    if not joined:
        processes.leave_at_exit()
    return state


def model_card(trainer: Any, **facts: Any) -> str:
    """The text of transformers' model card about a trainer's run.

    Raises ImportError without transformers.
    """
    from transformers.modelcard import TrainingSummary

    summary = TrainingSummary.from_trainer(trainer, **facts)  # type: ignore[no-untyped-call]
    return str(summary.to_model_card())
