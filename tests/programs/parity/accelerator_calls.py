"""What a script calls on trainer.accelerator, in a run of transformers' Trainer or of
ours, whose model may be sharded, and in a loop of its own after it. As a rank."""

import json
import os

import tiny
import torch
import transformers
from accelerate.tracking import GeneralTracker, on_main_process
from programs.run import folder, options, rank, tell
from torch import distributed
from torch.distributed import fsdp

import ctrainer

LIBRARY = {"ours": ctrainer, "theirs": transformers}[options["engine"]]
SHARDING = {"fsdp": True, "fsdp_config": {"min_num_params": 20}}


class Tracker(GeneralTracker):
    """Writes what it is given to a file."""

    name, requires_logging_directory = "lines", False

    @on_main_process
    def __init__(self, run_name, **given):
        super().__init__()
        self.run_name, self.told = run_name, []

    @property
    def tracker(self):
        return self.told

    @on_main_process
    def store_init_configuration(self, values):
        self.told.append(["config", values])

    @on_main_process
    def log(self, values, step, **given):
        self.told.append([step, sorted(values)])

    @on_main_process
    def finish(self):
        with open(f"{folder}/{self.run_name}.json", "w") as file:
            json.dump(self.told, file)


class Calls(LIBRARY.Trainer):
    """Clips in training_step, and tracks its logs by the accelerator."""

    def __init__(self, *args, **given):
        self.norms = []
        super().__init__(*args, **given)

    def _build_accelerator_args(self, **given):
        tracker = {"log_with": [Tracker("run")]}
        return {**super()._build_accelerator_args(**given), **tracker}

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        accelerator = self.accelerator
        if accelerator.sync_gradients:
            norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
            self.norms.append(float(norm))
            accelerator.clip_grad_value_(model.parameters(), 0.1)
        return loss

    def log(self, logs, *args, **given):
        super().log(logs, *args, **given)
        self.accelerator.log(logs, step=self.state.global_step)


class Saving(transformers.TrainerCallback):
    def __init__(self):
        self.kept, self.names = [], []

    def on_step_end(self, args, state, control, **given):
        accelerator = trainer.accelerator
        if state.global_step == 2:
            accelerator.save_state(f"{folder}/state")
            accelerator.save_model(trainer.model_wrapped, f"{folder}/weights")
        if state.global_step == 4:
            accelerator.load_state(f"{folder}/state")
        if state.global_step in (2, 4):
            whole = accelerator.get_state_dict(trainer.model_wrapped)
            self.names.append(sorted(whole))
            self.kept.append(flat(whole))


def flat(state):
    return torch.cat([state[name].flatten() for name in sorted(state)]).tolist()


def own_loop():
    """Accumulates twice over an uneven loader, as accelerate's documentation does."""
    accelerator = trainer.accelerator
    accelerator.gradient_accumulation_steps = 2
    model = tiny.Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(tiny.rows(27), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    seen = []
    with accelerator.join_uneven_inputs([model]):
        for batch in accelerator.skip_first_batches(loader, 1):
            with accelerator.accumulate(model), accelerator.autocast():
                accelerator.backward(model(**batch)["loss"])
                syncs = accelerator.sync_gradients
                if syncs:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            seen.append([syncs, batch["x"][:, 0].tolist()])
    return seen, flat(accelerator.get_state_dict(model))


def again():
    """The trainer's own model and optimizer, prepared once more, in such a loop."""
    accelerator = trainer.accelerator
    prepared = accelerator.prepare(trainer.model_wrapped)
    optimizer = accelerator.prepare(trainer.optimizer)
    same = prepared is trainer.model_wrapped
    for batch in accelerator.skip_first_batches(trainer.get_train_dataloader(), 2):
        batch = {name: value.to(accelerator.device) for name, value in batch.items()}
        with accelerator.accumulate(prepared):
            accelerator.backward(prepared(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
    return same, flat(accelerator.get_state_dict(prepared))


def reference():
    """The output of a model that is sharded by the state's plugin, as TRL does it."""
    torch.manual_seed(5)
    model, state = tiny.Net(), trainer.accelerator.state
    plugin = getattr(state, "fsdp_plugin", None)
    assert (plugin is not None) == trainer.is_fsdp_enabled == options["shards"]
    if plugin is not None:
        fsdp.fully_shard(
            model, reshard_after_forward=plugin.reshard_after_forward,
            mp_policy=plugin.mixed_precision_policy or fsdp.MixedPrecisionPolicy(),
        )  # fmt: skip
    with torch.no_grad():
        return float(model(**torch.utils.data.default_collate(tiny.rows(4)))["loss"])


args = LIBRARY.TrainingArguments(
    f"{folder}/run", use_cpu=True, report_to="none", disable_tqdm=True, ddp_timeout=60,
    per_device_train_batch_size=4, max_steps=6, logging_steps=1, learning_rate=1e-2,
    gradient_accumulation_steps=2, save_strategy="no", lr_scheduler_type="constant",
    train_sampling_strategy="sequential", **(SHARDING if options["shards"] else {}),
)  # fmt: skip
saving = Saving()
trainer = Calls(tiny.Net(), args, train_dataset=tiny.rows(64), callbacks=[saving])
accelerator = trainer.accelerator
accelerator.init_trackers("project", config={"lr": 0.01})
trainer.train()
order = []
with accelerator.local_main_process_first():
    order.append(rank)
found = {
    "norms": trainer.norms, "kept": saving.kept, "names": saving.names,
    "parameters": flat(accelerator.get_state_dict(trainer.model_wrapped)),
    "files": sorted(os.listdir(f"{folder}/state")),
    "order": order, "is a Net": isinstance(trainer.model, tiny.Net),
    "reference": reference(),
    "own loop": own_loop(), "again": again(),
}  # fmt: skip
accelerator.free_memory()
accelerator.end_training()
found["group"] = distributed.is_initialized()
tell(found)
