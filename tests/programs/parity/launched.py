"""A script that accelerate launch starts, or that calls notebook_launcher or
debug_launcher itself: a short run of transformers' Trainer or of ours. Its first
argument is JSON; each rank writes what it found into its folder."""

import json
import os
import sys

import accelerate
import tiny
import transformers
from torch import distributed

import ctrainer

options = json.loads(sys.argv[1])
folder = options["folder"]
LIBRARY = {"ours": ctrainer, "theirs": transformers}[options["engine"]]


def main():
    args = LIBRARY.TrainingArguments(
        f"{folder}/run", report_to="none", disable_tqdm=True, logging_steps=1,
        max_steps=4, save_steps=2, per_device_train_batch_size=4, learning_rate=1e-2,
        ddp_timeout=60,
        **{"use_cpu": True, **options["args"]},
    )  # fmt: skip
    trainer = LIBRARY.Trainer(tiny.Net(), args, train_dataset=tiny.rows(64))
    accelerator = trainer.accelerator
    trainer.train()
    trainer.save_model(f"{folder}/final")
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    whole = accelerator.get_state_dict(trainer.model_wrapped)
    found = {
        "losses": [entry["loss"] for entry in history],
        "norms": [entry["grad_norm"] for entry in history],
        "parameters": [x for n in sorted(whole) for x in whole[n].flatten().tolist()],
        "ranks": [args.world_size, args.process_index, accelerator.num_processes],
        "kind": str(accelerator.distributed_type), "mode": args.parallel_mode.value,
        "precision": accelerator.mixed_precision, "device": args.device.type,
        "group": distributed.is_initialized(), "main": accelerator.is_main_process,
    }  # fmt: skip
    if args.process_index == 0:
        found["files"] = sorted(
            os.path.relpath(f"{path}/{name}", folder)
            for path, _, names in os.walk(folder) for name in names
            if not name.startswith("told")
        )  # fmt: skip
    with open(f"{folder}/told{args.process_index}.json", "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    if "launcher" in options:
        getattr(accelerate, options["launcher"])(
            main, num_processes=2, **options["launcher_options"]
        )
    else:
        main()
