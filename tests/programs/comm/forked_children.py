"""Ranks of a group of some kind fork children, which end in many ways."""

import fork_scenarios
from programs.run import folder, join_gloo, options, rank, tell

from ctrainer.comm import world

if options["backend"] == "shm":
    group = world(200.0)
else:
    join_gloo(200.0)
    from ctrainer.comm.machines import over_machines
    from ctrainer.comm.process_group import communicator

    group = communicator()
    if options["backend"] == "hierarchical":
        group = over_machines(group, 200.0, machine=str(rank // 2))
told = fork_scenarios.run(group, folder, options["seed"], options["n"])
tell([group.backend, told])
