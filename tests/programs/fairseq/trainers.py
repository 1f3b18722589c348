"""fairseq's Trainer on 2 ranks: scenarios, one after the other."""

import os
import time

import fairseq_tiny as tiny
import torch
import torch.distributed as dist
from programs.run import folder, join_gloo, rank, tell

from ctrainer.fairseq import metrics, wrappers

join_gloo()


TWO = {"distributed_training__distributed_world_size": 2}
LEGACY = {**TWO, "distributed_training__ddp_backend": "legacy_ddp"}
found = {}


def flat(module):
    return [v for p in module.parameters() for v in p.flatten().tolist()]


def weights(trainer):
    return flat(trainer.get_model())


def train(updates, trainer=None, model=None, task=None, criterion=None, **changes):
    trainer = trainer or tiny.trainer(model, task, criterion, **{**TWO, **changes})
    trainer.reset_dummy_batch("DUMMY")  # the first batch
    outputs = [trainer.train_step(u) for u in updates]
    meters = metrics.get_smoothed_values("train")
    return trainer, {
        "weights": weights(trainer),
        "losses": [o and o["loss"] for o in outputs],
        "sizes": [o and o["sample_size"] for o in outputs],
        "updates": trainer.get_num_updates(),
        "gnorm": meters.get("gnorm"),
        "oom": meters.get("oom"),
        "wpb": meters.get("wpb"),
    }


def mine(batches, per_update=1):
    "This rank's share: every second batch, in groups of one update."
    return tiny.groups(batches[rank::2], per_update)


# Who is who
trainer = tiny.trainer(**TWO)
found["who"] = [
    trainer.data_parallel_world_size,
    trainer.data_parallel_rank,
    trainer.is_data_parallel_master,
    trainer.should_save_checkpoint_on_current_rank,
    trainer.use_distributed_wrapper,
]
if rank == 0:
    trainer.state_dict()  # alone: nothing in it waits for the others
found["wrapper"] = [type(trainer.model).__name__, sorted(trainer.model.state_dict())]

# Numbers
_, found["c10d"] = train(mine(tiny.batches(8)), optimization__clip_norm=0.5)
_, found["legacy"] = train(mine(tiny.batches(8)), optimization__clip_norm=0.5, **LEGACY)
_, found["delayed"] = train(mine(tiny.batches(8), 2))
_, found["bf16"] = train(mine(tiny.batches(8)), common__bf16=True)


# Other weights at the start: those of rank 0 count
def other_model():
    model = tiny.Model()
    if rank == 1:
        with torch.no_grad():
            model.out.weight += 1
    return model


for name, changes in (("c10d", TWO), ("legacy", LEGACY)):
    _, found[f"other weights {name}"] = train(
        mine(tiny.batches(8)),
        model=other_model(),
        **{"optimization__clip_norm": 0.5, **changes},
    )

# A rank without a batch for the last update, and one of two of a delayed update
batches = tiny.batches(5)
_, found["dummy"] = train([*mine(batches[:4]), [batches[4] if rank == 0 else None]])
_, found["part dummy"] = train(
    [[batches[0], batches[1]] if rank == 0 else [batches[2], None]]
)


# Logs that cannot be summed, of more than 16 KiB; and keys of one rank only
class Gathered(tiny.Criterion):
    def forward(self, model, sample):
        loss, size, output = super().forward(model, sample)
        return loss, size, {**output, "text": "x" * 20000, "who": torch.tensor(rank)}

    @classmethod
    def reduce_metrics(cls, outputs):
        super().reduce_metrics(outputs)
        metrics.log_scalar("texts", sum(len(o["text"]) for o in outputs), round=0)
        metrics.log_scalar("whos", sum(int(o["who"]) for o in outputs), round=0)

    @staticmethod
    def logging_outputs_can_be_summed():
        return False


_, found["gathered"] = train(
    mine(tiny.batches(8)), criterion=Gathered(), optimization__clip_norm=0.5
)
smoothed = metrics.get_smoothed_values("train")
found["gathered"]["more"] = [smoothed["texts"], smoothed["whos"]]


class Uneven(tiny.Criterion):
    def forward(self, model, sample):
        loss, size, output = super().forward(model, sample)
        return loss, size, {**output, **({"extra": 1} if rank else {})}


_, found["uneven"] = train(
    mine(tiny.batches(8)), criterion=Uneven(), optimization__clip_norm=0.5
)


class Words(tiny.Criterion):
    def forward(self, model, sample):
        loss, size, output = super().forward(model, sample)
        return loss, size, {**output, "text": "no number"}


try:
    train(mine(tiny.batches(2)), criterion=Words())
except TypeError as error:
    found["words"] = str(error)
found_many = {f"k{i:03}": i for i in range(100)}


class Many(tiny.Criterion):
    def forward(self, model, sample):
        loss, size, output = super().forward(model, sample)
        return loss, size, {**output, **found_many}

    @classmethod
    def reduce_metrics(cls, outputs):
        super().reduce_metrics(outputs)
        metrics.log_scalar("many", sum(outputs[0][k] for k in found_many), round=0)


train(mine(tiny.batches(2)), criterion=Many())
found["many"] = metrics.get_smoothed_values("train")["many"]


# Out of memory: before and within the backward pass, here and everywhere
class Greedy(tiny.Task):
    def __init__(self, ranks, when):
        super().__init__()
        self.ranks, self.when, self.left = ranks, when, 1

    def train_step(self, sample, model, criterion, optimizer, update_num, **more):
        if self.left and rank in self.ranks and update_num == 1:
            self.left -= 1
            if self.when == "forward":
                raise RuntimeError("CUDA out of memory. Tried to allocate")
            loss, _size, _output = criterion(model, sample)
            loss.register_hook(reject)
            optimizer.backward(loss)
        return super().train_step(
            sample, model, criterion, optimizer, update_num, **more
        )


def reject(gradient):
    raise RuntimeError("CUDA out of memory. Tried to allocate")


for name, changes in (("c10d", TWO), ("legacy", LEGACY)):
    _, found[f"oom {name}"] = train(
        mine(tiny.batches(6)), task=Greedy([1], "forward"), **changes
    )
    _, found[f"oom all {name}"] = train(
        mine(tiny.batches(6)), task=Greedy([0, 1], "forward"), **changes
    )
_, found["oom backward"] = train(
    mine(tiny.batches(6)), task=Greedy([1], "backward"), **LEGACY
)
_, found["oom unsynced"] = train(mine(tiny.batches(8), 2), task=Greedy([1], "forward"))
trainer = tiny.trainer(task=Greedy([1], "forward"), **LEGACY)
trainer._num_updates = 1  # the first step: rank 1 has never seen what is logged
_, found["oom first"] = train(mine(tiny.batches(2)), trainer=trainer)

# Overflow and NaN on rank 1 alone
spoilt = [dict(b) for b in tiny.batches(6)]
spoilt[3]["factor"] = torch.tensor(1e30)
trainer, found["overflow"] = train(mine(spoilt), common__fp16=True)
found["overflow"]["scale"] = trainer.optimizer.scaler.loss_scale
spoilt[3]["factor"] = torch.tensor(float("nan"))
try:
    train(mine(spoilt), checkpoint__save_dir=f"{folder}/nan")
except FloatingPointError as error:
    found["nan"] = str(error)
dist.barrier()
found["crash"] = sorted(os.listdir(f"{folder}/nan"))
found["folder"] = folder


# Norms that differ between ranks
class Drifting(type(tiny.trainer(**TWO))):
    def clip_grad_norm(self, limit):
        return super().clip_grad_norm(limit) * (1 + rank)


metrics.reset()
trainer = Drifting(
    tiny.config(**{**TWO, "checkpoint__save_dir": f"{folder}/drift"}),
    tiny.Task(),
    tiny.Model(),
    tiny.Criterion(),
)
try:
    train(mine(tiny.batches(2)), trainer=trainer)
except FloatingPointError as error:
    found["drift"] = str(error)

# Validation
trainer = tiny.trainer(**TWO)
trainer.reset_dummy_batch("DUMMY")
found["valid"] = trainer.valid_step(tiny.batches(2)[rank])["loss"]
trainer.reset_dummy_batch(tiny.batches(3)[2])
found["valid dummy"] = trainer.valid_step(None if rank else tiny.batches(1)[0])["loss"]

# Checkpoints: rank 0 writes, rank 1 does not even see the file
trainer, found["before"] = train(mine(tiny.batches(8))[:2])
found["saved"] = trainer.save_checkpoint(
    f"{folder}/half.pt",
    {"train_iterator": {"version": 2, "epoch": 1, "iterations_in_epoch": 2}},
)
dist.barrier()
again = tiny.trainer(other_model(), **TWO)
path = f"{folder}/half.pt" if rank == 0 else f"{folder}/nowhere.pt"
found["extra"] = sorted(again.load_checkpoint(path))
_, found["resumed"] = train(mine(tiny.batches(8))[2:], trainer=again)
found["none"] = tiny.trainer(**TWO).load_checkpoint(f"{folder}/nothing.pt")
if rank == 0:
    os.mkdir(f"{folder}/broken.pt")
    open(f"{folder}/rubbish.pt", "w").write("no checkpoint")
try:
    tiny.trainer(**TWO).load_checkpoint(f"{folder}/rubbish.pt")
except Exception as error:
    found["rubbish"] = type(error).__name__
_, found["whole"] = train(mine(tiny.batches(8)))

# BMUF: each rank by itself, and the average of both after every second update
alike = tiny.batches(36)[0::3]  # of one size
BMUF = {
    **TWO,
    "optimization__use_bmuf": True,
    "optimization__clip_norm": 0.5,
    "bmuf__distributed_world_size": 2,
}
trainer, found["bmuf"] = train(mine(alike), **BMUF)
found["bmuf"]["kinds"] = [
    type(trainer.optimizer).__name__,
    type(trainer.model).__name__,
]
_, found["bmuf oom"] = train(mine(alike), task=Greedy([1], "backward"), **BMUF)
BMUF.update({"bmuf__average_sync": True, "bmuf__block_momentum": 0.5})
_, found["bmuf whole"] = train(mine(alike), **BMUF)
trainer, _ = train(mine(alike)[:4], **BMUF)
trainer.save_checkpoint(f"{folder}/bmuf.pt", {})
dist.barrier()
again = tiny.trainer(other_model(), **BMUF)
again.load_checkpoint(f"{folder}/bmuf.pt")
_, found["bmuf resumed"] = train(mine(alike)[4:], trainer=again)
_, found["bmuf coded"] = train(mine(alike), **BMUF, bmuf__delta_bits=8)

# Stopped within a block, when each rank has a model and moments of its own
APART = {
    **BMUF,
    "bmuf__average_sync": False,
    "ema__store_ema": True,
    "ema__ema_decay": 0.5,
}
trainer, found["apart whole"] = train(mine(alike), **APART)
found["apart whole"]["average"] = flat(trainer.ema.get_model())
trainer, found["apart half"] = train(mine(alike)[:3], **APART)
trainer.consolidate_optimizer()
trainer.save_checkpoint(f"{folder}/apart.pt", {})
dist.barrier()
again = tiny.trainer(other_model(), **APART)
again.load_checkpoint(f"{folder}/apart.pt")
found["apart loaded"] = flat(again.get_model())
_, found["apart resumed"] = train(mine(alike)[3:], trainer=again)
found["apart resumed"]["average"] = flat(again.ema.get_model())
ONE = {
    "bmuf__distributed_world_size": 1,
    "distributed_training__distributed_world_size": 1,
}
alone = tiny.trainer(other_model(), **{**APART, **ONE})
try:
    alone.load_checkpoint(f"{folder}/apart.pt")
except ValueError as error:
    found["apart alone"] = str(error)
alone.load_checkpoint(f"{folder}/apart.pt", reset_optimizer=True)
found["apart reset"] = flat(alone.get_model())

# SlowMo: the average of both after every second update, logs of both in each
LOCAL = {
    **TWO,
    "distributed_training__ddp_backend": "slowmo",
    "distributed_training__localsgd_frequency": 2,
    "optimization__clip_norm": 0.5,
}
trainer, found["slowmo"] = train(mine(alike), **LOCAL)
found["slowmo"]["wrapper"] = type(trainer.model).__name__
_, found["other weights slowmo"] = train(mine(alike), model=other_model(), **LOCAL)
_, found["slowmo bf16"] = train(mine(alike), common__bf16=True, **LOCAL)

# With a momentum, a step of it after every third update
wrappers._SLOW_FREQUENCY = 3
SLOW = {**LOCAL, "distributed_training__slowmo_momentum": 0.5}
trainer, found["slow momentum"] = train(mine(alike), **SLOW)
found["slow momentum"]["momentum"] = trainer.model._slow.block_momentum

# Stopped between two exchanges, when each rank has a model and moments of its own
for stop, changes in ((3, LOCAL), (5, SLOW), (1, SLOW)):
    way = f"slowmo from {stop}"
    trainer, _ = train(mine(alike)[:stop], **changes)
    trainer.consolidate_optimizer()
    trainer.save_checkpoint(f"{folder}/{way}.pt", {})
    dist.barrier()
    again = tiny.trainer(other_model(), **changes)
    again.load_checkpoint(f"{folder}/{way}.pt")
    found[f"{way} loaded"] = flat(again.get_model())
    _, found[way] = train(mine(alike)[stop:], trainer=again)
alone = tiny.trainer(other_model(), **{**LOCAL, **ONE})
try:
    alone.load_checkpoint(f"{folder}/slowmo from 3.pt")
except ValueError as error:
    found["slowmo alone"] = str(error)

# Apart in 16 bits, with an overflow of rank 1 alone within a block
spoilt = [dict(b) for b in alike]
spoilt[5]["factor"] = torch.tensor(1e38)
BMUF["bmuf__average_sync"] = False
for way, changes in (("bmuf", BMUF), ("slowmo", LOCAL)):
    for precision in ("fp16", "amp"):
        name = f"{way} {precision}"
        trainer, found[name] = train(
            mine(spoilt), **changes, **{f"common__{precision}": True}
        )
        found[name]["scale"] = trainer.optimizer.scaler.loss_scale

# The end: rank 1 has no memory within a backward pass that rank 0 is in
found["last"] = None
tell(found)
if os.environ.get("CTRAINER_TEST_ON_DEVICE") == "1":  # it would wait for the time-out
    os._exit(0)
began = time.monotonic()
try:
    train(
        mine(tiny.batches(6)),
        task=Greedy([1], "backward"),
        checkpoint__save_dir=f"{folder}/dead",
    )
except RuntimeError as error:
    found["last"] = [type(error).__name__, str(error), time.monotonic() - began]
    tell(found)
os._exit(0)
