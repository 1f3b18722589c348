"""A rank of fairseq's Trainer whose passes run out of memory at its own times: its run
and one without failures."""

import fairseq_failing as failing
import fairseq_tiny as tiny
from programs.run import join_gloo, options, rank, tell

join_gloo()
TWO = {
    "distributed_training__distributed_world_size": 2,
    "distributed_training__ddp_backend": options["backend"],
}
n = 400
updates = tiny.groups(failing.samples(n)[rank::2], options["update_freq"])
if options["update_freq"] > 1:
    del updates[-1]  # of fewer samples
most = 0 if rank and options["update_freq"] == 1 else 50
draws = failing.Drawn(rank, rate=0.5, most=most)
plain = failing.trained(updates, failing.Failing(), "tokens", **TWO)
found = failing.trained(
    updates, failing.Failing(draws), "tokens", **TWO, common__split_oom_batches=True
)
tell(
    {
        "plain": plain[1:4],
        "failing": found[1:4],
        "failed": draws.failed,
    }
)
