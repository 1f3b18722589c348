"""fairseq's configuration: groups of options as dataclasses, out of any source.

Names, types, defaults and order are those of fairseq's last commit,
fairseq/dataclass/configs.py; docs/reference/fairseq_config.md lists them. torch is
imported only to count GPUs, when a config is made.
"""

from dataclasses import fields
from functools import partial

from ctrainer.arguments.docstrings import compose, options
from ctrainer.fairseq.config.base import (
    II,
    MISSING,
    ChoiceEnum,
    FairseqDataclass,
    OpenConfig,
    opt,
)
from ctrainer.fairseq.config.build import (
    as_config,
    checkpoint_config,
    default_options,
    to_dict,
)
from ctrainer.fairseq.config.command_line import (
    add_options,
    parse_training_args,
    training_parser,
)
from ctrainer.fairseq.config.common import CommonConfig, EMAConfig, FairseqBMUFConfig
from ctrainer.fairseq.config.components import (
    component_class,
    component_names,
    register_architecture,
    register_component,
)
from ctrainer.fairseq.config.data import (
    CheckpointConfig,
    DatasetConfig,
    OptimizationConfig,
)
from ctrainer.fairseq.config.distributed import DistributedTrainingConfig
from ctrainer.fairseq.config.root import COMPONENTS, FairseqConfig

__all__ = [
    "II",
    "MISSING",
    "CheckpointConfig",
    "ChoiceEnum",
    "CommonConfig",
    "DatasetConfig",
    "DistributedTrainingConfig",
    "EMAConfig",
    "FairseqBMUFConfig",
    "FairseqConfig",
    "FairseqDataclass",
    "OpenConfig",
    "OptimizationConfig",
    "add_options",
    "as_config",
    "checkpoint_config",
    "component_class",
    "component_names",
    "default_options",
    "opt",
    "parse_training_args",
    "register_architecture",
    "register_component",
    "to_dict",
    "training_parser",
]

_GROUPS = [option.default_factory for option in fields(FairseqConfig)]
_CHOSEN = [component_class(c, name) for c in COMPONENTS for name in component_names(c)]
for _cls in (FairseqConfig, *_GROUPS, *_CHOSEN):
    if isinstance(_cls, type):
        compose(_cls, partial(options, _cls))
