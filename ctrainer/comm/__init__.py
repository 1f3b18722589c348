"""Groups of processes: joined from the environment, or over torch's process groups."""

from ctrainer.comm.environment import from_environment
from ctrainer.comm.run import world
from ctrainer.runtime.errors import RankFailure

__all__ = ["RankFailure", "from_environment", "world"]
