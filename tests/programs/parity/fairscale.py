"""Sharded data parallelism of ours and of fairscale, on 2 ranks."""

import contextlib
import os
import sys

import torch
from fsdp_scenarios import adamw, mse, tree
from programs.run import join_gloo, options, tell

from ctrainer.comm.process_group import communicator
from ctrainer.compat import fairscale as ours

os.environ["ENABLE_NCCL_BASE_COLLECTIVES"] = "0"  # gloo rejects their shapes
sys.path.append(options["fairscale"])

from fairscale.nn import FullyShardedDataParallel as FSDP
from fairscale.nn import ShardedDataParallel as SDP
from fairscale.optim import OSS

join_gloo()
torch.set_num_threads(1)
group = communicator()


def updates(model, optimizer):
    for step in range(20):
        with model.no_sync() if step % 5 == 4 else contextlib.nullcontext():
            mse(model, step, group).backward()
        if step % 5 != 4:
            optimizer.step()
            model.zero_grad()  # fairscale's buffers must stay the gradients


def sharded_gradients(oss, wrapper, size):
    module = tree()
    optimizer = oss(module.parameters(), torch.optim.AdamW, lr=1e-2)
    model = wrapper(module, optimizer, reduce_buffer_size=size)
    updates(model, optimizer)
    model.zero_grad(set_to_none=True)
    mse(model, 0, group).backward()
    kept = [p.grad is not None for p in module.parameters()]
    norm = optimizer.clip_grad_norm(0.1)
    state = optimizer.state_dict(all_ranks=True)["state"]
    return [*module.state_dict().values(), norm], state, kept


found = {}
for size in (0, 2**23):
    mine, state, kept = sharded_gradients(ours.OSS, ours.ShardedDataParallel, size)
    theirs, peers, kept_there = sharded_gradients(OSS, SDP, size)
    found[f"tensors {size}"] = [
        bool(torch.equal(a, b)) for a, b in zip(mine, theirs, strict=False)
    ]
    found[f"states {size}"] = [
        all(torch.equal(state[i][k], peers[i][k]) for k in peers[i]) for i in peers
    ]
    found[f"kept {size}"] = [kept, kept_there]


class Idle:
    def wait_stream(self, stream):
        pass


idle = Idle()
torch.cuda.current_stream = lambda *unused: idle
torch.cuda.stream = contextlib.nullcontext
torch.cuda.synchronize = torch.Tensor.record_stream = lambda *unused: None


class OnCPU(FSDP):
    def _setup_streams(self):
        super()._setup_streams()
        names = ("fp32_to_fp16", "all_gather", "post_backward")
        self._streams.update(dict.fromkeys(names, idle))


def sharded(wrapper, **options):
    module = tree()
    module[2] = wrapper(module[2], **options)
    model = wrapper(module, **options)
    updates(model, adamw(model))
    return model.state_dict()


def shards_of(wrapper, outer, inner, **options):
    """The shards of two units, on this rank and on all, with what is told of them."""
    module = tree()
    module[2] = wrapper(module[2], flatten_parameters=inner, **options)
    model = wrapper(module, flatten_parameters=outer, **options)
    own = model.local_state_dict(), model.local_metadata_dict()
    every = [None] * group.world_size
    torch.distributed.all_gather_object(every, own)
    return own, sorted(n for n, _ in model.named_parameters()), zip(*every, strict=True)


def same_values(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


cpu = {"compute_device": torch.device("cpu")}
found["shards"] = []
for outer, inner in ((True, True), (True, False), (False, True), (False, False)):
    own, names, saved = shards_of(ours.FullyShardedDataParallel, outer, inner)
    theirs, their_names, their_saved = shards_of(OnCPU, outer, inner, **cpu)
    whole = OnCPU.consolidate_shard_weights(*map(list, saved))
    mine = ours.FullyShardedDataParallel.consolidate_shard_weights(
        *map(list, their_saved)
    )
    plain = tree().state_dict()
    found["shards"] += [
        same_values(own[0], theirs[0]),
        own[1] == theirs[1],
        names == their_names,
        same_values(whole, plain),
        same_values(mine, plain),
    ]
mine, theirs = sharded(ours.FullyShardedDataParallel), sharded(OnCPU, **cpu)
found["names"] = [sorted(mine), sorted(theirs)]
found["apart"] = max(float((mine[k] - theirs[k]).abs().max()) for k in mine)
tell(found)
