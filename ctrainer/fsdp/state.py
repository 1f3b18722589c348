"""Where a unit is in an iteration."""

from enum import Enum


class TrainingState(Enum):
    """Outside of its forward and backward, in its forward, in its backward before and
    after the first gradient of one of its parameters, or in summon_full_params()."""

    IDLE = 1
    FORWARD = 2
    BACKWARD_PRE = 3
    BACKWARD_POST = 4
    SUMMON_FULL_PARAMS = 5
