"""Runs on 2 ranks that are resumed in the middle of an epoch, with another seed."""

from data_kinds import DATA, collate
from programs.run import folder, options, tell
from tiny import Net, arguments

import ctrainer


def make(kind, name, dispatch, workers=0, seed=11):
    even = kind != "datasets"  # whose shards differ in length
    args = arguments(
        output_dir=f"{folder}/{name}",
        per_device_train_batch_size=2,
        max_steps=7,
        save_strategy="steps",
        save_steps=1,
        seed=seed,
        remove_unused_columns=False,
        accelerator_config={
            "dispatch_batches": dispatch,
            "even_batches": even,
            "use_seedable_sampler": workers == 0,
        },
        ddp_timeout=60,
        dataloader_num_workers=workers,
    )
    trainer = ctrainer.Trainer(Net(dropout=0.2), args, collate, DATA[kind]())
    trainer.remove_callback(ctrainer.PrinterCallback)
    return trainer


def losses(trainer):
    return [e["loss"] for e in trainer.state.log_history if "loss" in e]


def weights(trainer):
    return [float(p.double().sum()) for p in trainer.model.state_dict().values()]


found, seen = {}, []
for number, (kind, dispatch, workers) in enumerate(options["cases"]):
    whole, batches = make(kind, number, dispatch, workers), []
    whole.model.register_forward_pre_hook(
        lambda module, args, kwargs, batches=batches: batches.append(
            kwargs["x"].double().sum(1).tolist()
        ),
        with_kwargs=True,
    )
    whole.train()
    seen.append(batches)
    for step in options["steps"]:
        again = make(kind, f"{number}-{step}", dispatch, workers, 12)
        again.args.save_strategy = ctrainer.enums.SaveStrategy.NO
        again.train(f"{folder}/{number}/checkpoint-{step}")
        same = [losses(again) == losses(whole), weights(again) == weights(whole)]
        found[f"{kind}, {dispatch}, {workers}, from {step}"] = same
tell({"same": found, "seen": seen})
