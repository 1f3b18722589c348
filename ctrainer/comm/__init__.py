"""Groups of processes: joined from the environment, or over torch's process groups."""

from ctrainer.comm.environment import from_environment
from ctrainer.comm.run import world

__all__ = ["from_environment", "world"]
