"""Everything that writes files which take their place by a rename: one a process.

python tests/support/durable_scenarios.py NAME FOLDER
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace


def trainer(folder: Path) -> None:
    import tiny

    import ctrainer

    args = ctrainer.TrainingArguments(
        str(folder / "run"), max_steps=6, save_steps=2, save_total_limit=2,
        report_to=[], use_cpu=True, disable_tqdm=True, eval_strategy="steps",
        eval_steps=2, load_best_model_at_end=True,
    )  # fmt: skip
    run = ctrainer.Trainer(
        tiny.Net(), args, train_dataset=tiny.rows(), eval_dataset=tiny.rows(8)
    )
    run.train()
    run.save_state()
    run.save_model(str(folder / "model"))


def fairseq_checkpoints(folder: Path) -> None:
    import fairseq_tiny

    from ctrainer.fairseq.checkpoint_utils import save_checkpoint
    from ctrainer.fairseq.config import as_config

    run = fairseq_tiny.trainer()
    group = {"save_dir": str(folder), "keep_last_epochs": 2, "keep_best_checkpoints": 1}
    cfg = as_config({"checkpoint": group}).checkpoint
    for epoch, loss in enumerate((3.0, 2.0, 2.5), 1):
        run.train_step(fairseq_tiny.batches(1))
        ends = SimpleNamespace(
            epoch=epoch, end_of_epoch=lambda: True, state_dict=lambda: {}
        )
        save_checkpoint(cfg, run, ends, loss)


def consolidated(folder: Path) -> None:
    from fsdp_shards import nested_job, save

    from ctrainer.fsdp import consolidate_sharded_model_checkpoints, reshard_checkpoints

    shards = folder.with_name("shards")
    shards.mkdir()
    prefix = save(nested_job(2), shards, adam=True)
    for name in ("one.safetensors", "two.pt"):
        path = str(folder / name)
        consolidate_sharded_model_checkpoints(
            prefix, save_path=path, save_optimizer=True
        )
    reshard_checkpoints(prefix, world_size=3, save_prefix=str(folder / "new"))


def indexed_data(folder: Path) -> None:
    import torch

    from ctrainer.fairseq.indexed_dataset import make_builder

    for _ in range(2):  # the second takes the place of the first
        builder = make_builder(str(folder / "mmap.bin"), "mmap")
        builder.add_item(torch.tensor([5, 6, 7]))
        builder.finalize(str(folder / "mmap.idx"))


SCENARIOS: dict[str, Callable[[Path], None]] = {
    run.__name__: run
    for run in (trainer, fairseq_checkpoints, consolidated, indexed_data)
}

if __name__ == "__main__":
    SCENARIOS[sys.argv[1]](Path(sys.argv[2]))
