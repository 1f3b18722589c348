"""HF's Trainer on 2 ranks."""

import warnings

import torch
from programs.run import folder, rank, tell
from rank_trainings import (
    Exchanging,
    Failing,
    Holding,
    Late,
    Moding,
    Spoiling,
    Wish,
    parameters,
    trained,
)

import ctrainer

found = {}
whole = trained(folder, 48, per_device_train_batch_size=4)
found["parameters"] = parameters(whole).tolist()
found["wrapped"] = type(whole.model_wrapped).__name__
halves = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
accumulated = trained(folder, 48, base=Exchanging, **halves)
found["steps"] = [accumulated.state.global_step, accumulated.state.epoch]
always = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
synced = trained(folder, 48, base=Exchanging, accelerator_config=always, **halves)
found["synced"] = parameters(synced).tolist()
found["accumulated"] = parameters(accumulated).tolist()
found["exchanges"] = [accumulated.seen[:4], synced.seen[:4]]
shuffled = {
    "train_sampling_strategy": "random",
    "num_train_epochs": 2,
    "max_steps": -1,
    "accelerator_config": {"use_seedable_sampler": False},
    "save_steps": 4,
    "per_device_train_batch_size": 4,
}
drawn = trained(folder, 24, **{**shuffled, "save_strategy": "steps"})
again = trained(folder, 24, resume=f"{folder}/checkpoint-4", **shuffled)
found["drawn"] = [parameters(drawn).tolist(), parameters(again).tolist()]

saving = {"save_strategy": "steps", "save_steps": 4, "per_device_train_batch_size": 4}
trained(f"{folder}/late", 48, Late(), **saving)
late = trained(f"{folder}/late", 48, resume=True, **saving)
found["late"] = [late.state.resumed_from[-12:], parameters(late).tolist()]
try:
    trained(f"{folder}/late", 48, resume=[None, True][rank], **saving)
except ValueError as problem:
    found["differ"] = str(problem)

stopped = trained(folder, 48, Wish(1, 4), per_device_train_batch_size=4)
found["stopped"] = stopped.state.global_step

with warnings.catch_warnings(record=True) as told_of:
    warnings.simplefilter("always", RuntimeWarning)
    spoilt = trained(folder, 48, base=Spoiling, per_device_train_batch_size=4)
found["spoilt"] = spoilt._loss_state()["nonfinite_total"]
found["spoilt finite"] = bool(parameters(spoilt).isfinite().all())
found["spoilt sum"] = parameters(spoilt).tolist()
found["warned"] = sum("of step 3 are not finite" in str(w.message) for w in told_of)

modes = trained(folder, 48, base=Moding, eval_strategy="steps", eval_steps=2)
found["modes"] = sorted(set(modes.seen))

scales = [
    trained(
        folder, 48, base=base, fp16=True, loss_scaler={"init_scale": 256.0}
    )._loss_scaler.state_dict()["scale"]
    for base in (ctrainer.Trainer, Spoiling)
]
found["scales"] = [scales[0] / scales[1], scales[1]]

uneven = {"even_batches": False, "dispatch_batches": False}
with warnings.catch_warnings(record=True) as told_of:
    warnings.simplefilter("always", UserWarning)
    trained(folder, 12, per_device_train_batch_size=4, accelerator_config=uneven)
left_over = "2 batches on this rank and 1"
found["left over"] = sum(left_over in str(w.message) for w in told_of)

try:
    trained(folder, 48, base=Holding, **halves)
except Exception as problem:
    found["held"] = f"{type(problem).__name__}: {problem}"
try:
    trained(folder, 48, base=Failing, per_device_train_batch_size=4)
except Exception as problem:
    found["failure"] = f"{type(problem).__name__}: {problem}"
    found["note"] = problem.__notes__
again = trained(folder, 48, per_device_train_batch_size=4)
found["again"] = parameters(again).tolist()
found["torch.distributed"] = torch.distributed.is_initialized()
shown = {"even_batches": False, "gradient_accumulation_kwargs": {"num_steps": 1}}
accelerator = trained(
    folder,
    48,
    per_device_train_batch_size=4,
    data_seed=3,
    ddp_bucket_cap_mb=7,
    accelerator_config=shown,
).accelerator
found["shown"] = [
    accelerator.even_batches,
    accelerator.dataloader_config.data_seed,
    accelerator.ddp_handler.bucket_cap_mb,
]
found["accelerator"] = [
    accelerator.num_processes,
    accelerator.process_index,
    accelerator.gather(torch.tensor([rank])).tolist(),
]
tell(found)
