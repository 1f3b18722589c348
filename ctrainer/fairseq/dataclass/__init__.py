"""The base of configs, by the names of fairseq.dataclass."""

import sys

from ctrainer.fairseq import config as configs
from ctrainer.fairseq.config import II, ChoiceEnum, FairseqDataclass

__all__ = ["II", "ChoiceEnum", "FairseqDataclass", "configs"]

sys.modules[f"{__name__}.configs"] = configs
