"""What a script finds of accelerate and torch.distributed, on transformers' Trainer or
on ours: at every hook, event, micro-batch and evaluation batch. As a rank."""

import os

import tiny
import torch
import transformers
from programs.run import folder, options, tell
from torch import distributed
from torch.utils.data import IterableDataset

import ctrainer

LIBRARY = {"ours": ctrainer, "theirs": transformers}[options["engine"]]
EVENTS = (
    "init_end train_begin train_end epoch_begin epoch_end step_begin substep_end "
    "pre_optimizer_step optimizer_step step_end evaluate predict save log "
    "prediction_step"
).split()


class Stream(IterableDataset):
    """Rows without a length."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


def rows(n):
    """Rows whose first input is their number."""
    made = tiny.rows(n)
    for i, row in enumerate(made):
        row["x"][0] = float(i)
    return made


# Rows to train on and to evaluate, and arguments.
CASES = {
    "plain": (rows(37), rows(21), {}),
    "accumulated": (rows(37), rows(21), {"gradient_accumulation_steps": 2}),
    "in threes": (rows(53), rows(8), {"gradient_accumulation_steps": 3}),
    "synced": (rows(37), rows(21), {
        "gradient_accumulation_steps": 2,
        "accelerator_config": {"gradient_accumulation_kwargs": {
            "sync_each_batch": True}}}),
    "dropped": (rows(37), rows(21), {
        "gradient_accumulation_steps": 2, "dataloader_drop_last": True}),
    "split": (rows(37), rows(21), {"accelerator_config": {"split_batches": True}}),
    "dispatched": (rows(37), rows(21), {
        "gradient_accumulation_steps": 2,
        "accelerator_config": {"dispatch_batches": True}}),
    "uneven": (rows(40), rows(24), {"accelerator_config": {"even_batches": False}}),
    "stream": (Stream(rows(37)), Stream(rows(21)), {"max_steps": 4}),
    "one row": (rows(37), rows(17), {"gradient_accumulation_steps": 2}),
    "few": (rows(9), rows(2), {"gradient_accumulation_steps": 2}),
}  # fmt: skip


class Watcher:
    """Notes what the accelerator says, and where."""

    def __init__(self):
        self.seen = []

    def note(self, trainer, where, **more):
        accelerator = trainer.accelerator
        state = accelerator.gradient_state
        self.seen.append({
            "where": where, "step": trainer.state.global_step,
            "sync": accelerator.sync_gradients,
            "end": state.end_of_dataloader, "remainder": state.remainder,
            "inside": state.in_dataloader,
            "accumulation": accelerator.gradient_accumulation_steps,
            "skipped": accelerator.optimizer_step_was_skipped, **more,
        })  # fmt: skip


def callbacks(watcher, of):
    class Watching(transformers.TrainerCallback):
        pass

    def add(event):
        def run(self, args, state, control, **given):
            if of:
                watcher.note(of[0], event)
                if event == "epoch_begin" and given.get("optimizer") is not None:
                    watch_optimizer(given["optimizer"])

        setattr(Watching, f"on_{event}", run)

    watched = []

    def watch_optimizer(optimizer):
        inner = getattr(optimizer, "optimizer", optimizer)
        if inner not in watched and hasattr(inner, "register_step_pre_hook"):
            watched.append(inner)
            inner.register_step_pre_hook(
                lambda *_: watcher.note(of[0], "step of the optimizer")
            )

    for event in EVENTS:
        add(event)
    return Watching()


def watched(watcher, touched):
    class Trainer(LIBRARY.Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            numbers = inputs["x"][:, 0].tolist()
            if touched:
                watcher.note(self, "training_step", rows=numbers)
            loss = super().training_step(model, inputs, num_items_in_batch)
            if touched:
                watcher.note(self, "after backward")
            return loss

        def compute_loss(self, model, inputs, return_outputs=False, **more):
            x = inputs["x"][:, 0]
            joined = self.accelerator.gather_for_metrics(x).tolist()
            number = float(self.accelerator.process_index)
            each = self.accelerator.gather(torch.tensor([number])).tolist()
            objects = self.accelerator.gather_for_metrics(
                [[int(i)] for i in x], use_gather_object=True
            )
            trains = torch.is_grad_enabled()
            watcher.note(
                self, "compute_loss" if trains else "evaluated", rows=x.tolist(),
                joined=joined, each=each, objects=objects,
                within=type(self.accelerator.unwrap_model(model)).__name__,
                training=self.model.training,
            )  # fmt: skip
            return super().compute_loss(model, inputs, return_outputs, **more)

    return Trainer


def run(name):
    train, evaluate, given = CASES[name]
    args = LIBRARY.TrainingArguments(
        f"{folder}/{name}", use_cpu=True, report_to="none", disable_tqdm=True,
        ddp_timeout=60, per_device_train_batch_size=4, per_device_eval_batch_size=4,
        data_seed=11, logging_steps=1, eval_strategy="steps", eval_steps=2,
        save_steps=3, **{"num_train_epochs": 2, **given},
    )  # fmt: skip
    watcher, of = Watcher(), []
    trainer = watched(watcher, True)(
        tiny.Net(), args, train_dataset=train, eval_dataset=evaluate,
        callbacks=[callbacks(watcher, of)],
    )  # fmt: skip
    of.append(trainer)
    watcher.note(trainer, "made")
    trainer.train()
    watcher.note(trainer, "trained")
    metrics = trainer.evaluate()
    watcher.note(trainer, "evaluated apart")
    predicted = trainer.predict(evaluate)
    return {
        "seen": watcher.seen,
        "loss": metrics["eval_loss"],
        "predictions": predicted.predictions.tolist(),
        "parameters": flat(trainer.model),
    }


def place():
    """Of the process, after TrainingArguments alone."""
    before = distributed.is_initialized()
    args = LIBRARY.TrainingArguments(folder, use_cpu=True, report_to="none")
    found = {"before": before, "initialized": distributed.is_initialized()}
    if distributed.is_initialized():
        number = torch.tensor([float(distributed.get_rank())])
        every = [torch.zeros(1) for _ in range(distributed.get_world_size())]
        distributed.all_gather(every, number)
        found["gathered"] = [int(x) for x in every]
        found["backend"] = distributed.get_backend()
    state = args.distributed_state
    found["args"] = {
        "world_size": args.world_size, "process_index": args.process_index,
        "local_process_index": args.local_process_index,
        "parallel_mode": args.parallel_mode.value, "device": args.device.type,
        "n_gpu": args.n_gpu, "should_log": args.should_log,
        "should_save": args.should_save, "local_rank": args.local_rank,
        "state": [type(state).__name__, str(state.distributed_type),
                  state.num_processes, state.is_main_process],
    }  # fmt: skip
    return found


class Tooled(LIBRARY.Trainer):
    """Uses the accelerator in every way that a subclass may: a second model with an
    optimizer and a loader of its own, a reference model, its own backward, clipping and
    collectives."""

    def __init__(self, *args, **given):
        super().__init__(*args, **given)
        accelerator = self.accelerator
        self.reference = accelerator.prepare_model(tiny.Net(), evaluation_mode=True)
        self.critic = tiny.Net()
        optimizer = torch.optim.SGD(self.critic.parameters(), lr=0.01)
        loader = torch.utils.data.DataLoader(rows(26), batch_size=4)
        self.critic, self.critic_optimizer, self.loader = accelerator.prepare(
            self.critic, optimizer, loader
        )
        self.more = iter(self.loader)
        self.seen = []

    def training_step(self, model, inputs, num_items_in_batch=None):
        accelerator = self.accelerator
        model.train()
        inputs = self._prepare_inputs(inputs)
        with accelerator.autocast(), accelerator.accumulate(model):
            loss = self.compute_loss(model, inputs)
        loss = loss / self.current_gradient_accumulation_steps
        accelerator.backward(loss)
        batch = next(self.more, None)
        if batch is not None:
            with accelerator.accumulate(self.critic):
                own = self.critic(**batch)["loss"]
                accelerator.backward(own)
                self.critic_optimizer.step()
                self.critic_optimizer.zero_grad()
            with torch.no_grad():
                y = self.reference(**batch)["loss"]
            joined = accelerator.gather_for_metrics(batch["x"][:, 0])
            self.seen.append([
                own.item(), y.item(), accelerator.reduce(own.detach(), "mean").item(),
                joined.tolist(), accelerator.gradient_state.end_of_dataloader,
            ])  # fmt: skip
        return loss.detach()

    def _clip_grad_norm(self, model):
        return self.accelerator.clip_grad_norm_(model.parameters(), 0.5)


def tools():
    args = LIBRARY.TrainingArguments(
        f"{folder}/tools", use_cpu=True, report_to="none", disable_tqdm=True,
        ddp_timeout=60, per_device_train_batch_size=4, max_steps=6, logging_steps=1,
        gradient_accumulation_steps=2, save_strategy="no", learning_rate=1e-2,
        lr_scheduler_type="constant", train_sampling_strategy="sequential",
    )  # fmt: skip
    kept = []

    class Saving(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **given):
            accelerator = trainer.accelerator
            if state.global_step == 2:
                accelerator.save_state(f"{folder}/state")
                kept.append(flat(trainer.model))
            if state.global_step == 4:
                accelerator.load_state(f"{folder}/state")
                kept.append(flat(trainer.model))

    trainer = Tooled(
        tiny.Net(), args, train_dataset=rows(64), callbacks=[Saving()]
    )  # fmt: skip
    trainer.train()
    accelerator = trainer.accelerator
    rank, ranks = accelerator.process_index, accelerator.num_processes
    ragged = torch.full((1, rank + 1), float(rank))
    with accelerator.split_between_processes([*range(5)], apply_padding=True) as part:
        split = list(part)
    order = []
    with accelerator.main_process_first():
        order.append(rank)
    with args.main_process_first(desc="files"), args.main_process_first(local=False):
        order.append(rank)
    if rank == 0:
        accelerator.set_trigger()
    accelerator.print("once")
    accelerator.wait_for_everyone()
    wrapped = trainer.model_wrapped
    found = {
        "seen": trainer.seen,
        "norms": [e["grad_norm"] for e in trainer.state.log_history if "loss" in e],
        "critic": flat(accelerator.unwrap_model(trainer.critic)),
        "kept": kept, "files": sorted(os.listdir(f"{folder}/state")),
        "parameters": flat(trainer.model), "split": split, "order": order,
        "padded": accelerator.pad_across_processes(ragged, dim=1).tolist(),
        "sum": accelerator.reduce(torch.tensor([1.0]), "sum").item(),
        "triggered": accelerator.check_trigger(),
        "unwrapped": accelerator.unwrap_model(wrapped) is trainer.model,
        "names": sorted(accelerator.get_state_dict(wrapped)),
        "held": [len(accelerator._models), len(accelerator._optimizers)],
        "main": [accelerator.is_main_process, accelerator.is_local_main_process],
        "local": accelerator.local_process_index, "last": accelerator.is_last_process,
        "device": accelerator.device.type, "kind": str(accelerator.distributed_type),
        "precision": accelerator.mixed_precision,
        "is": type(accelerator).__mro__[-2].__name__, "ranks": ranks,
    }  # fmt: skip
    accelerator.free_memory()
    found["freed"] = [len(accelerator._models), len(accelerator._optimizers)]
    return found


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


found = {"place": place(), "tools": tools()}
for name in options.get("cases") or CASES:
    found[name] = run(name)
tell(found)
