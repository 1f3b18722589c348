"""Sharded runs over gloo that go on with what groups in shared memory have saved."""

from pathlib import Path

import fsdp_scenarios as scenarios
import fsdp_trees as trees
import fsdp_world_sizes as sizes
from programs.run import folder, join_gloo, tell

from ctrainer.comm import process_group

join_gloo()
group = process_group.communicator()
given, own = Path(folder).parent, Path(folder)
found = {}
for layout in sizes.LAYOUTS:
    found[layout] = {"saved": sizes.save(group, trees.whole(sizes.LAYERS), layout, own)}
    for old in sizes.SIZES:
        model = trees.whole(sizes.LAYERS)
        found[layout][old] = sizes.resume(group, model, layout, given, old, "full")
for check in (
    scenarios.scenario_every_layout_trains_like_one_process,
    scenarios.scenario_gradients_accumulate_with_and_without_no_sync,
):
    check(group)
tell(found)
