"""Sharded modules of which one rank does something else.

Over engines of torch, and machines of 2 ranks each, all of this one machine.
"""

import os

import desync_scenarios as scenarios
from programs.run import join_gloo, rank, tell, world

from ctrainer.comm.machines import over_machines
from ctrainer.comm.process_group import communicator

join_gloo()


def train(group, kinds, wrong=None):
    told = []
    for seed, kind in enumerate([*kinds, scenarios.same]):
        wrong_one = seed % world if wrong is None else wrong
        told.append(scenarios.run(group, kind, wrong_one, seed, prefetches=False))
    return told


machine, all_kinds = (
    str(rank // 2),
    [k for k, why in scenarios.KINDS.items() if why != "left"],
)  # nothing works behind that
found = {"engine": train(communicator(), scenarios.UNSEEN_BY_ENGINES)}
two = over_machines(communicator(), 60.0, machine)
found["machine"] = train(two, scenarios.UNSEEN_BY_ENGINES, rank if rank > 1 else -1)
os.environ["CTRAINER_CHECK_COLLECTIVES"] = "yes"
found["engine compared"] = train(communicator(), all_kinds)
compared = over_machines(communicator(), 60.0, machine)
found["levels compared"] = train(compared, all_kinds)
found["other modules"] = [
    scenarios.run_other(way, communicator(), n % 4)
    for n, way in enumerate(scenarios.OTHER_MODULES)
]
found["alone"] = scenarios.run(two, scenarios.other_unit, 3, 1)
tell(found)
os._exit(0)  # the second machine's ranks, which leave the others waiting, among them
