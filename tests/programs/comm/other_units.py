"""Ranks that come to different units over gloo, whose collectives are begun ahead."""

import time

import desync_scenarios
import torch.distributed as dist
from programs.run import join_gloo, options, tell, world

from ctrainer.comm import calls, process_group

join_gloo(120)
calls.PATIENCE_SECONDS = 0.5
kinds = {
    kind.__name__: kind for kind in [*desync_scenarios.KINDS, desync_scenarios.same]
}
told = []
for name, wrong, seed, more in options["cases"]:
    group = dist.new_group(list(range(world)))  # closed by the error
    over = process_group.communicator(group)
    began = time.monotonic()
    text = desync_scenarios.run(over, kinds[name], wrong, seed, **more)
    told.append([text, time.monotonic() - began])
    tell(told)
