"""fairseq's Trainer with --ddp-backend fully_sharded on 2 ranks."""

import gc

import fairseq_tiny as tiny
import torch
import torch.distributed as dist
from programs.run import folder, join_gloo, rank, tell, world

join_gloo()


two = {
    "distributed_training__distributed_world_size": world,
    "distributed_training__ddp_backend": "fully_sharded",
    "optimization__clip_norm": 0.5,
}
groups = tiny.groups(tiny.batches(8), 1)
mine = groups[rank::world]
told = {}


def run(name, **options):
    ours = tiny.trainer(**two, **options)
    outputs = [ours.train_step(update) for update in mine[:3]]
    path = f"{folder}/{name}.pt"
    ours.state_dict() if rank else ours.save_checkpoint(path, {"epoch": 3})
    dist.barrier()
    again = tiny.trainer(**two, **options)
    extra = again.load_checkpoint(path)
    told[name] = {
        "losses": [o["loss"] for o in outputs],
        "sharded": sum(p.numel() for p in ours.model.parameters()),
        "extra": extra["epoch"],
        "last": [t.train_step(mine[3])["loss"] for t in (ours, again)],
        "same": all(
            torch.equal(a, b)
            for a, b in zip(
                ours.model.state_dict().values(),
                again.model.state_dict().values(),
                strict=False,
            )
        ),
        "valid": ours.valid_step(mine[3][0])["loss"],
        "scale": [
            t.optimizer.scaler.loss_scale
            for t in (ours, again)
            if options.get("common__fp16")
        ],
    }


def same_as_wrapped(name, **options):
    # The first updates of a sharded trainer, and of one whose gradients are averaged,
    # with an overflow on one process where losses are scaled.
    told[name] = {}
    backends = ("pytorch_ddp", "fully_sharded")
    spoils = name != "bf16" and "ema" not in name
    for backend in backends:
        now = two | options | {"distributed_training__ddp_backend": backend}
        ours = tiny.trainer(**now)
        outputs = []
        for number, update in enumerate(mine[:4]):
            factor = float("inf") if spoils and rank and number == 1 else 1.0
            spoilt = [{**sample, "factor": factor} for sample in update]
            outputs.append(ours.train_step(spoilt))
        state = ours.state_dict()["extra_state"]
        found = told[name][backend] = {
            "losses": [o and o["loss"] for o in outputs],
            "updates": ours.get_num_updates(),
            "optimizer": type(ours.optimizer).__name__,
            "dtypes": sorted({str(p.dtype) for p in ours.model.parameters()}),
        }
        if "ema" in name:
            found["ema"] = [v.ravel().tolist() for v in state["ema"].values()]
            keys = sorted(ours.ema.get_model().state_dict())
            found["names"] = [
                sorted(state["ema"]),
                keys,
                sorted(state.get("ema_fp32_params", {})),
            ]
            found["decay"] = ours.ema.get_decay()


EMA = {"ema__store_ema": True, "ema__ema_decay": 0.7, "ema__ema_fp32": True}


def shards(**options):
    # Each process saves its own file, and goes on from it.
    options |= two | {"distributed_training__use_sharded_state": True}
    ours, again = tiny.trainer(**options), tiny.trainer(**options)
    for update in mine[:3]:
        ours.train_step(update)
    path = f"{folder}/last{ours.checkpoint_suffix}.pt"
    wrote = ours.save_checkpoint(path, {"epoch": 3})
    whole = ours.model.state_dict()
    if rank == 0:
        torch.save(whole, f"{folder}/whole.pt")
    extra = again.load_checkpoint(path)
    told["shards"] = {
        "wrote": wrote == path,
        "epoch": extra["epoch"],
        "last": [t.train_step(mine[3])["loss"] for t in (ours, again)],
        "same": [
            all(torch.equal(a, b) for a, b in zip(*states, strict=False))
            for states in (
                [t.model.state_dict().values() for t in (ours, again)],
                [t.ema.get_model().state_dict().values() for t in (ours, again)],
            )
        ],
        "scales": [t.optimizer.scaler.loss_scale for t in (ours, again)],
    }


def zero(name, **options):
    # Each worker has a part of the optimizer's state, or all of it; and goes on from
    # what was saved by the one or the other.
    now = two | options | {"distributed_training__ddp_backend": "pytorch_ddp"}
    kinds = ("none", "os")
    made = [tiny.trainer(**now, distributed_training__zero_sharding=k) for k in kinds]
    losses = [[t.train_step(u)["loss"] for u in mine[:3]] for t in made]
    paths = [f"{folder}/{name}-{kind}.pt" for kind in kinds]
    for ours, path in zip(made, paths, strict=False):
        ours.consolidate_optimizer()
        if rank == 0:
            ours.save_checkpoint(path, {"epoch": 3})
    dist.barrier()
    last = [t.train_step(mine[3])["loss"] for t in made]
    resumed = {}
    for kind in kinds:
        for path in paths:
            again = tiny.trainer(**now, distributed_training__zero_sharding=kind)
            again.load_checkpoint(path)
            resumed[f"{path[len(folder) + 1 : -3]} {kind}"] = [
                again.train_step(mine[3])["loss"],
                *(
                    max(
                        float((a - b).abs().max())
                        for a, b in zip(
                            again.get_model().parameters(),
                            t.get_model().parameters(),
                            strict=False,
                        )
                    )
                    for t in made
                ),
            ]
    told[name] = {
        "losses": losses,
        "last": last,
        "resumed": resumed,
        "own": len(made[1].optimizer.optimizer.optim.state),
        "all": len(made[0].optimizer.optimizer.state),
    }


run("flat")
run("scaled", common__fp16=True, common__fp16_init_scale=4)
CODES = {"distributed_training__gather_bits": 8, "distributed_training__reduce_bits": 8}
run("codes", **CODES)
run(
    "apart",
    distributed_training__not_fsdp_flatten_parameters=True,
    distributed_training__no_reshard_after_forward=True,
)
SCALE = {"common__fp16_init_scale": 4}
same_as_wrapped(
    "fp16", common__fp16=True, **SCALE, distributed_training__fp32_reduce_scatter=True
)
same_as_wrapped(
    "memory_efficient_fp16",
    common__fp16=True,
    common__memory_efficient_fp16=True,
    **SCALE,
)
same_as_wrapped("bf16", common__bf16=True)
zero("zero")
zero("zero_fp16", common__fp16=True, common__fp16_no_flatten_grads=True, **SCALE)
zero("zero_in_place", common__fp16=True, common__memory_efficient_fp16=True, **SCALE)
same_as_wrapped("amp", common__amp=True, **SCALE)
same_as_wrapped("ema", **EMA)
shards(**EMA, **SCALE, **CODES, common__fp16=True)
gc.collect()  # torch's wrappers, which keep gloo's threads
tell(told)
