"""A run whose ranks fork children, beside one whose ranks do not."""

import fork_scenarios
from programs.run import folder, options, tell

workers, persistent = options["workers"], options["persistent"]
plain = fork_scenarios.training(f"{folder}/plain", 0, False, forks=False)
forking = fork_scenarios.training(f"{folder}/forking", workers, persistent, forks=True)
tell(forking == plain)
