"""A rank on a GPU dies and the others continue; or none dies, and updates are saved."""

import os
from typing import Any

import any_gpu
import torch
from enqueued import run
from programs.run import folder, options, rank, tell
from safetensors.torch import load_file
from tiny import Net

import ctrainer

any_gpu.device()
place, at = options["place"], options["at"]


class Watch(ctrainer.TrainerCallback):
    trainer: Any = None

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **k: Any) -> None:
        if (place, state.global_step, rank) == ("updated", at, 2):
            os._exit(9)

    def on_step_end(self, args: Any, state: Any, control: Any, **k: Any) -> None:
        if (place, state.global_step, rank) == ("behind", at, 2):
            os._exit(9)


watch = Watch()


class Dying(Net):
    """A rank dies in a pass, when the last layer's gradients are on their way."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].register_full_backward_hook(self.die)

    def die(self, *_: Any) -> None:
        if (place, watch.trainer.state.global_step, rank) == ("within", at, 2):
            os._exit(9)


class Trainer(ctrainer.Trainer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        watch.trainer = self


given: dict[str, Any] = {
    "save_strategy": "steps", "logging_strategy": "no", "ddp_timeout": 20,
    "lr_scheduler_type": "constant", "max_grad_norm": 0.05,
}  # fmt: skip
if place == "nowhere":
    given |= {"save_steps": 1, "max_steps": at + 2}
else:
    given |= {"save_steps": 100, "min_world_size": 1, "max_steps": at + 4}
given |= options.get("arguments", {})
made, notes = run(folder, Trainer, set(), model=Dying, callbacks=[watch], **given)
resumed = made.state.resumed_from
parameters = list(made.model.parameters())
saved = [resumed] if resumed else [f"{folder}/checkpoint-{k}" for k in (at, at + 1)]
tell(
    {
        "resumed": resumed,
        "step": made.state.global_step,
        "enqueued": any(notes.enqueued),
        "weights": {
            os.path.basename(path): {
                name: value.flatten().tolist()
                for name, value in load_file(f"{path}/model.safetensors").items()
            }
            for path in saved
        },
        "finite": all(bool(torch.isfinite(p).all()) for p in parameters),
        "kinds": sorted({p.device.type for p in parameters}),
        "last": {
            name: value.flatten().tolist()
            for name, value in made.model.state_dict().items()
        },
    }
)
