"""Ranks whose models are on a device: blocks of BMUF, and a model without a wrapper."""

import os
from typing import Any

os.environ["LOCAL_RANK"] = "0"  # one GPU, which both take

import any_gpu
from programs.run import folder, tell
from tiny import Net, arguments, rows

import ctrainer

any_gpu.device()


class Bare(ctrainer.Trainer):
    """Its model averages no gradients."""

    def _wrap_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        return model


def made(cls: type[ctrainer.Trainer], on_host: bool, **options: Any) -> Any:
    args = arguments(
        output_dir=folder, use_cpu=on_host, max_steps=6, seed=5, save_strategy="no",
        per_device_train_batch_size=5, learning_rate=1e-2, max_grad_norm=0.0,
        ddp_timeout=60, **options,
    )  # fmt: skip
    trainer = cls(Net(), args, train_dataset=rows(60))
    trainer.remove_callback(ctrainer.PrinterCallback)
    return trainer


def weights(**options: Any) -> list[list[float]]:
    found = []
    for on_host in (True, False):
        trainer = made(ctrainer.Trainer, on_host, **options)
        trainer.train()
        kind = next(trainer.model.parameters()).device.type
        assert kind == ("cpu" if on_host else any_gpu.KIND)
        parameters = trainer.model.parameters()
        found.append([x for p in parameters for x in p.detach().cpu().flatten()])
    return [[float(x) for x in values] for values in found]


told: dict[str, Any] = {
    "bmuf": weights(use_bmuf=True, warmup_iterations=1, global_sync_iter=2),
    "diloco": weights(use_diloco=True, global_sync_iter=2),
}
try:
    made(Bare, False).train()
except RuntimeError as error:
    told["bare"] = str(error)
tell(told)
