"""Objects of other packages: trackers, search backends, accelerators, model cards."""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

from ctrainer.arguments.accelerator import config_of
from ctrainer.arguments.settings import reject_unknown
from ctrainer.comm import run
from ctrainer.runtime import messages

# For accelerate: what accelerate launch asks to be sharded, the trainer shards.
NOT_SHARDED = {"ACCELERATE_USE_FSDP": "false", "ACCELERATE_USE_DEEPSPEED": "false"}


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


def new_accelerator(trainer: Any, cpu: bool) -> Any:
    """accelerate's Accelerator on this process's device, or on the CPU, of all
    processes of the run. It shards batches as args.accelerator_config says, and has
    what the trainer's _build_accelerator_args() adds.

    Raises ImportError without accelerate.
    """
    from accelerate.state import AcceleratorState
    from accelerate.utils import (
        DataLoaderConfiguration,
        GradientAccumulationPlugin,
        patch_environment,
    )

    from ctrainer.integrations.accelerator import Accelerator

    args = trainer.args
    partial_state(args)
    config = config_of(args.accelerator_config).to_dict()
    del config["use_configured_state"]
    accumulation = config.pop("gradient_accumulation_kwargs") or {}
    loaders = DataLoaderConfiguration(**config)
    loaders.data_seed = args.data_seed
    options = trainer._build_accelerator_args(
        dataloader_config=loaders,
        fsdp_plugin=None,
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            **{**accumulation, "num_steps": 1}
        ),
    )
    had = AcceleratorState._shared_state.get("_mixed_precision")
    if had not in (None, options.get("mixed_precision")):
        AcceleratorState._reset_state()  # of a trainer before
    with patch_environment(**NOT_SHARDED):
        return Accelerator(trainer, **{"cpu": cpu, **options})


def follow_run(trainer: Any) -> None:
    """Have the trainer's accelerator, if it is made, take the run's model and
    optimizer."""
    if hasattr(trainer._accelerator, "take"):
        trainer._accelerator.take(trainer)


def show_sharding(trainer: Any) -> None:
    """Have the trainer's accelerator, if it is made, show how models are sharded."""
    if hasattr(trainer._accelerator, "show_sharding"):
        trainer._accelerator.show_sharding(trainer._sharding)


def ddp_handler(options: dict[str, Any]) -> Any:
    """accelerate's settings of torch's DistributedDataParallel.

    Raises ImportError without accelerate.
    """
    from accelerate.utils import DistributedDataParallelKwargs

    return DistributedDataParallelKwargs(**options)


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


def partial_state(args: Any) -> Any:
    """accelerate's PartialState of this process, on the device's kind.

    Where another launcher than torchrun has started the ranks, it sets torchrun's
    variables, by which accelerate knows them. Raises ImportError without accelerate.
    """
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import patch_environment

    cpu, place = args.device.type == "cpu", run.place()
    if PartialState._shared_state and (PartialState().device.type == "cpu") != cpu:
        AcceleratorState._reset_state(reset_partial_state=True)
    options = {}
    if place.world_size > 1:
        known = {"RANK": place.rank, "WORLD_SIZE": place.world_size}
        known["LOCAL_RANK"] = place.local_rank
        if place.on_one_machine:
            known["LOCAL_WORLD_SIZE"] = place.world_size
        for name, number in known.items():
            os.environ.setdefault(name, str(number))
        options = {"backend": args.ddp_backend} if args.ddp_backend else {}
    with patch_environment(**NOT_SHARDED):
        return PartialState(cpu=cpu, **options)


def model_card(trainer: Any, **facts: Any) -> str:
    """The text of transformers' model card about a trainer's run.

    Raises ImportError without transformers.
    """
    from transformers.modelcard import TrainingSummary

    if not hasattr(trainer.model, "config"):
        trainer = _WithoutConfig(trainer)
    summary = TrainingSummary.from_trainer(trainer, **facts)  # type: ignore[no-untyped-call]
    return str(summary.to_model_card())


class _WithoutConfig:
    """A trainer whose model has an empty configuration."""

    model = SimpleNamespace(config=None)

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)


def card_facts(path: str) -> tuple[str | None, list[str]]:
    """library_name and tags of the model card at `path`; none where there is no card.

    Raises ImportError without huggingface_hub.
    """
    if not os.path.exists(path):
        return None, []
    from huggingface_hub import ModelCard

    data = ModelCard.load(path).data
    return getattr(data, "library_name", None), list(getattr(data, "tags", None) or [])


def detect_overflow(model: Any) -> None:
    """Have transformers' DebugUnderflowOverflow look at the outputs of all modules: it
    prints the last ones and raises ValueError where one is NaN or infinite.

    Raises ImportError without transformers.
    """
    from transformers.debug_utils import DebugUnderflowOverflow

    DebugUnderflowOverflow(model)  # type: ignore[no-untyped-call]


def align_special_tokens(model: Any, processing_class: Any) -> None:
    """Give a model's configuration and generation configuration the padding, begin and
    end tokens of a tokenizer, or a processor's tokenizer, of transformers.

    End tokens that the generation configuration has are kept beside the tokenizer's.
    """
    loaded = sys.modules.get("transformers")
    if loaded is None or getattr(model, "config", None) is None:
        return  # a tokenizer of transformers would have imported it
    from transformers.processing_utils import ProcessorMixin
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

    if not isinstance(processing_class, ProcessorMixin | PreTrainedTokenizerBase):
        return
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    generation: Any = getattr(model, "generation_config", None)
    ends = getattr(generation, "eos_token_id", None)
    if isinstance(ends, int):  # as transformers leaves it, also where nothing changes
        ends = generation.eos_token_id = [ends]
    changed = {}
    for name in ("eos_token_id", "bos_token_id", "pad_token_id"):
        token = getattr(tokenizer, name)
        several = name == "eos_token_id" and ends is not None
        had: Any = ends if several else [getattr(generation, name, None)]
        differs = token != getattr(model.config, name, None)
        if differs or (generation is not None and token not in had):
            changed[name] = token
            setattr(model.config, name, token)
            if generation is not None and name == "eos_token_id":
                every = [token, *(ends or [])]
                generation.eos_token_id = [t for t in every if t is not None]
            elif generation is not None:
                setattr(generation, name, token)
    if changed:
        messages.aligned_tokens(changed)


def model_of(path: str) -> Any:
    """A new model of transformers' class that the configuration at `path` names; None
    where there is no such file or it names none."""
    if not os.path.isfile(path):
        return None
    with open(path, encoding="utf-8") as file:
        named = json.load(file).get("architectures")
    if not named:
        return None
    import transformers

    cls = getattr(transformers, named[0])
    return cls(cls.config_class.from_json_file(path))
