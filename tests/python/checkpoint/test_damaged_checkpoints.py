"""Damages of a checkpoint's files: the right result, or an error that names a file.

Damages are drawn by damages.py. Where a damage was signed (a manifest
made of the damaged files) nothing tells it from a change that was wanted; it must not
crash.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from damages import Judge, sign
from draws import draws
from tiny import Net, rows

from ctrainer import _C
from ctrainer.adapters import _numpy_checkpoint, _torch_checkpoint
from ctrainer.adapters import torch_fairseq as tools
from ctrainer.checkpoint import (
    MANIFEST_NAME,
    Sink,
    last_whole_checkpoint,
    read_own_state,
    read_safetensors,
)
from ctrainer.fsdp.shard_files import read_shard
from ctrainer.trainer_state import TrainerState

SEED = 20_000


def same(a: Any, b: Any) -> bool:
    """Equal to the bit, whatever nest it is."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor):
        a, b = a.detach(), b.detach()
        return (
            a.dtype == b.dtype
            and a.shape == b.shape
            and a.reshape(-1).view(torch.uint8).equal(b.reshape(-1).view(torch.uint8))
        )
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return bool(a == b) or (a != a and b != b)


def trained(folder: Path, seed: int) -> None:
    """Two steps with AdamW; a checkpoint after each."""
    from ctrainer.trainer import Trainer
    from ctrainer.training_args import TrainingArguments

    args = TrainingArguments(
        output_dir=str(folder), max_steps=2, save_steps=1, logging_steps=1, seed=seed,
        per_device_train_batch_size=4, report_to="none", use_cpu=True,
        disable_tqdm=True, learning_rate=1e-2 * (1 + seed),
    )  # fmt: skip
    Trainer(model=Net(0.1), args=args, train_dataset=rows(16)).train()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of two runs, "a" and "b"."""
    folder = tmp_path_factory.mktemp("runs")
    trained(folder / "a", 0)
    trained(folder / "b", 1)
    return folder


# ---- one reader at a time


def weights(folder: Path) -> Any:
    model = Net()
    _torch_checkpoint.load_model(model, str(folder))
    return dict(model.state_dict())


def objects(folder: Path) -> Any:
    names = ("optimizer.pt", "scheduler.pt", "rng_state.pth")
    return [_torch_checkpoint.load_object(str(folder), name) for name in names]


def states(folder: Path) -> Any:
    state = TrainerState.load_from_json(folder / "trainer_state.json")
    return [vars(state), read_own_state(folder / "ctrainer_state.json")]


def numpy_objects(folder: Path) -> Any:
    return _numpy_checkpoint.load_object(str(folder), "optimizer.pt")


def fairseq_file(folder: Path) -> Any:
    return tools.load_file(str(folder / "checkpoint_last.pt"))


def fairseq_bytes(folder: Path) -> Any:
    path = str(folder / "checkpoint_last.pt")
    data, problem = tools.read_bytes(path)
    if problem:
        raise OSError(problem)
    if not data:
        raise FileNotFoundError(path)
    return tools.from_bytes(data, path)


def shards(folder: Path) -> Any:
    """One file of each format, with its tensors in memory."""
    from ctrainer.fsdp.shard_files import item_of, tensor_of

    def read(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: read(v) for k, v in value.items()}
        is_stored = type(value).__name__ == "Stored"
        return tensor_of(item_of(value)) if is_stored else value

    found = []
    for path in sorted(folder.glob("shard-*")):
        shard = read_shard(str(path))
        found.append([read(shard.model), shard.metadata, read(shard.optimizer or {})])
    if len(found) < 2:
        raise FileNotFoundError(f"{folder}: a shard is missing")
    return found


def make_shards(folder: Path, seed: int) -> None:
    from ctrainer.fsdp.shard_files import item_of, write_shard

    generator = torch.Generator().manual_seed(seed)
    flat = torch.randn(64, generator=generator)
    metadata = {
        "shard_info": {}, "flatten_info": {}, "buffer_info": {}, "rank": 0,
        "world_size": 1,
    }  # fmt: skip
    optimizer = {
        "state": {0: {"exp_avg": item_of(flat * 2), "step": 3}},
        "param_groups": [{"lr": 0.1, "params": [0]}],
        "param_names": [["w"]],
    }
    for ending in ("pth", "safetensors"):
        content = {
            "model": {"w": item_of(flat), "v": item_of(flat[:32])},
            "shard_metadata": dict(metadata),
            "optimizer": optimizer,
        }
        write_shard(str(folder / f"shard-0.{ending}"), content)


def make_numpy(folder: Path, seed: int) -> None:
    generator = np.random.default_rng(seed)
    state = {"a": generator.normal(size=5), 3: [1, (2.5, None)], "b": np.arange(4)}
    _numpy_checkpoint.save_object(Sink(folder, None), "optimizer.pt", state)


def make_fairseq(folder: Path, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randn(40, generator=generator)
    state = {
        "model": {"a": tensor, "b": tensor[3:9]}, "optimizer_history": [{"n": seed}],
        "extra_state": {"train_iterator": {"epoch": 1}, "val_loss": 0.5 + seed},
        "last_optimizer_state": {"state": {0: {"m": tensor * 3}}},
    }  # fmt: skip
    tools.save_file(str(folder / "checkpoint_last.pt"), state)


def make_sharded(folder: Path, seed: int) -> None:
    """Weights in two files with an index."""
    torch.manual_seed(seed)
    state = {n: torch.randn_like(t) for n, t in Net().state_dict().items()}
    names, weight_map = list(state), {}
    for i, part in enumerate((names[:2], names[2:])):
        file = f"model-0000{i + 1}-of-00002.safetensors"
        tensors = {n: state[n] for n in part}
        _C.write_safetensors(folder / file, tensors, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    Sink(folder, None).json("model.safetensors.index.json", index)


CASES: dict[str, tuple[Callable[[Path], Any], Any, list[str]]] = {
    "weights": (weights, None, ["model.safetensors", MANIFEST_NAME]),
    "weights in shards": (weights, make_sharded, []),
    "objects": (
        objects, None, ["optimizer.pt", "scheduler.pt", "rng_state.pth", MANIFEST_NAME]
    ),
    "states": (
        states, None, ["trainer_state.json", "ctrainer_state.json", MANIFEST_NAME]
    ),
    "numpy's objects": (numpy_objects, make_numpy, []),
    "fairseq's file": (fairseq_file, make_fairseq, ["checkpoint_last.pt"]),
    "fairseq's file, sent": (fairseq_bytes, make_fairseq, ["checkpoint_last.pt"]),
    "shards": (shards, make_shards, ["shard-0.pth", "shard-0.safetensors"]),
}  # fmt: skip
UNSIGNED = {"fairseq's file", "fairseq's file, sent", "shards"}  # no manifest there


def folders(name: str, runs: Path, tmp_path: Path) -> tuple[Path, Path]:
    make = CASES[name][1]
    made = tmp_path / "ck", tmp_path / "other"
    for i, folder in enumerate(made):
        if make is None:
            shutil.copytree(runs / "ab"[i] / "checkpoint-2", folder)
        else:
            folder.mkdir()
            make(folder, i)
            if name not in UNSIGNED:
                sign(folder)
    return made


@pytest.mark.parametrize("name", CASES)
def test_a_damaged_file_is_read_right_or_named(
    name: str, runs: Path, tmp_path: Path
) -> None:
    read, _, names = CASES[name]
    folder, donor = folders(name, runs, tmp_path)
    names = names or sorted(p.name for p in folder.iterdir())
    judge = Swapped(folder, donor, names, read, same)
    count = draws(60, 10_000)
    for seed in range(SEED, SEED + count):
        judge.run(seed)
    assert judge.counts["rejected"] > count // 3, judge.counts
    print(name, judge.counts)


class Swapped(Judge):
    """Knows that a folder without a manifest cannot tell another checkpoint's file."""

    def __init__(self, folder: Path, donor: Path, *rest: Any) -> None:
        super().__init__(folder, donor, *rest)
        self.unsigned = not (folder / MANIFEST_NAME).exists()
        self.theirs = {p.read_bytes() for p in donor.iterdir()}

    def run(self, seed: int) -> None:
        try:
            super().run(seed)
        except AssertionError as error:
            files = [p for p in self.folder.iterdir() if p.is_file()]
            taken = any(p.read_bytes() in self.theirs for p in files)
            if not (self.unsigned and taken and "something else" in str(error)):
                raise
            self.counts["forged"] += 1


def test_the_newest_whole_folder_is_found_whatever_the_newer_one_is(
    runs: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(runs / "a", out)
    names = sorted(p.name for p in (out / "checkpoint-2").iterdir())

    def read(_: Path) -> Any:
        found = last_whole_checkpoint(out)
        if found is None or found.endswith("-1"):
            raise ValueError(f"{out / 'checkpoint-2'} was passed over")
        return objects(Path(found)), weights(Path(found)), states(Path(found))

    judge = Judge(out / "checkpoint-2", runs / "b/checkpoint-2", names, read, same)
    for seed in range(SEED, SEED + draws(60, 10_000)):
        judge.run(seed)
    assert last_whole_checkpoint(out) is not None
    print(judge.counts)


def test_transformers_folders_are_judged_by_their_formats(
    runs: Path, tmp_path: Path
) -> None:
    """Without a manifest every byte of torch's archives is checked, and the header of
    safetensors: what is read is never half a file."""
    folders_ = tmp_path / "ck", tmp_path / "other"
    for i, folder in enumerate(folders_):
        shutil.copytree(runs / "ab"[i] / "checkpoint-2", folder)
        for name in (MANIFEST_NAME, "ctrainer_state.json"):
            (folder / name).unlink()
    names = ["optimizer.pt", "scheduler.pt", "rng_state.pth"]
    judge = Swapped(*folders_, names, objects, same)
    count = draws(60, 10_000)
    for seed in range(SEED, SEED + count):
        try:
            judge.run(seed)
        except AssertionError as error:
            if "deleted" not in str(error):  # nothing says that it was there
                raise
    assert judge.counts["rejected"] > count // 3
    assert read_safetensors(folders_[0] / "model.safetensors")


def test_random_damages_are_the_same_for_a_seed(runs: Path, tmp_path: Path) -> None:
    from damages import damage

    told = []
    for i in range(2):
        folder = tmp_path / str(i)
        shutil.copytree(runs / "a/checkpoint-2", folder)
        names = sorted(p.name for p in folder.iterdir())
        told.append(damage(folder, runs / "b/checkpoint-2", names, random.Random(3)))
    assert told[0] == told[1]


# ---- through training


def trainer(folder: Path, callbacks: Any = None, **changes: Any) -> Any:
    from ctrainer.trainer import Trainer
    from ctrainer.training_args import TrainingArguments

    options: dict[str, Any] = {
        "max_steps": 4, "save_strategy": "no", "logging_steps": 1, "use_cpu": True,
        "per_device_train_batch_size": 4, "report_to": "none", "disable_tqdm": True,
    }  # fmt: skip
    args = TrainingArguments(output_dir=str(folder), **{**options, **changes})
    data = rows(16)
    return Trainer(
        model=Net(0.1), args=args, train_dataset=data, eval_dataset=data[:4],
        callbacks=callbacks,
    )  # fmt: skip


def outcome(done: Any) -> Any:
    """All that a run has come to."""
    logs = [{k: v for k, v in e.items() if k in ("loss", "step")} for e in _logs(done)]
    return [
        dict(done.model.state_dict()), done.optimizer.state_dict(), logs,
        done.lr_scheduler.state_dict(), done.state.global_step, torch.rand(1),
    ]  # fmt: skip


def _logs(done: Any) -> list[dict[str, Any]]:
    return [entry for entry in done.state.log_history if "loss" in entry]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of four updates, stopped after the second."""
    folder = tmp_path_factory.mktemp("stopped")
    for i, name in enumerate("ab"):
        trainer(folder / name, save_strategy="steps", save_steps=1, seed=42 + i).train()
        for step in (3, 4):
            shutil.rmtree(folder / name / f"checkpoint-{step}")
    return folder


@pytest.mark.parametrize("named", [False, True])
def test_a_run_goes_on_right_or_not_at_all(
    named: bool, stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With True an older folder may be taken: the run ends in the same bits."""
    out = tmp_path / "out"
    shutil.copytree(stopped / "a", out)
    newest = out / "checkpoint-2"

    def resume(_: Path) -> Any:
        done = trainer(out)
        done.train(resume_from_checkpoint=str(newest) if named else True)
        capsys.readouterr()
        return outcome(done)

    names = sorted(p.name for p in newest.iterdir())
    judge = Judge(newest, stopped / "b/checkpoint-2", names, resume, same)
    for seed in range(SEED, SEED + draws(15, 1_000)):
        judge.run(seed)
    print(judge.counts)
    assert judge.counts["right"] > 0


def test_the_best_model_is_the_best_or_named(
    stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from ctrainer.callbacks import TrainerCallback

    class Best(TrainerCallback):
        """Puts the damaged folder in the place of the best one."""

        def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            state.best_model_checkpoint = str(best)

    best = tmp_path / "best"
    shutil.copytree(stopped / "a/checkpoint-2", best)

    def train(_: Path) -> Any:
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        done = trainer(
            tmp_path / "out", [Best()], max_steps=1, save_strategy="steps",
            save_steps=1, eval_strategy="steps", eval_steps=1,
            load_best_model_at_end=True,
        )  # fmt: skip
        done.train()
        capsys.readouterr()
        return dict(done.model.state_dict())

    names = ["model.safetensors", "model.safetensors", MANIFEST_NAME]
    judge = Judge(best, stopped / "b/checkpoint-2", names, train, same)
    kept = torch.load(best / "optimizer.pt", weights_only=True)
    assert kept["state"]
    for seed in range(SEED, SEED + draws(10, 2_000)):
        judge.run(seed)
    print(judge.counts)


def test_fairseqs_trainer_loads_the_whole_file_or_names_it(tmp_path: Path) -> None:
    import fairseq_tiny

    def make(folder: Path, n: int) -> None:
        folder.mkdir()
        ours = fairseq_tiny.trainer(fairseq_tiny.Model(0.2))
        for sample in fairseq_tiny.batches(n):
            ours.train_step([sample])
        itr = {"epoch": 1, "version": 2, "iterations_in_epoch": n}
        ours.save_checkpoint(
            str(folder / "checkpoint_last.pt"), {"train_iterator": itr}
        )

    def load(folder: Path) -> Any:
        ours = fairseq_tiny.trainer(fairseq_tiny.Model(0.2))
        extra = ours.load_checkpoint(str(folder / "checkpoint_last.pt"))
        if extra is None:  # fairseq's word for a file that is not there
            raise FileNotFoundError(str(folder / "checkpoint_last.pt"))
        weights = [p.detach().clone() for p in ours.model.parameters()]
        state = ours.optimizer.state_dict()
        return [weights, state, ours.get_num_updates(), extra["train_iterator"]]

    folders_ = tmp_path / "ck", tmp_path / "other"
    for i, folder in enumerate(folders_):
        make(folder, 2 + i)
    judge = Swapped(*folders_, ["checkpoint_last.pt"], load, same)
    for seed in range(SEED, SEED + draws(15, 2_000)):
        judge.run(seed)
    print(judge.counts)


@pytest.mark.parametrize("ending", ["pth", "safetensors"])
def test_shards_are_put_together_right_or_named(ending: str, tmp_path: Path) -> None:
    from fsdp_shards import nested_job, save

    from ctrainer.fsdp.consolidate import consolidate_sharded_model_checkpoints
    from ctrainer.fsdp.shard_files import load_shard, save_shard

    folders_ = tmp_path / "ck", tmp_path / "other"
    for i, folder in enumerate(folders_):
        folder.mkdir()
        job = nested_job(2)
        for unit in job.units:
            unit.parameters = {n: p + i for n, p in unit.parameters.items()}
        save(job, folder, adam=True)
        for path in folder.glob("ckpt*.pth"):
            if ending == "safetensors":
                save_shard(load_shard(path), path.with_suffix(".safetensors"))
                path.unlink()

    def consolidate(folder: Path) -> Any:
        result = tmp_path / "whole.safetensors"
        full, _ = consolidate_sharded_model_checkpoints(
            str(folder / "ckpt"), f"-*.{ending}", save_path=str(result)
        )
        return {name: tensor.clone() for name, tensor in full.items()}

    names = sorted(p.name for p in folders_[0].iterdir())
    judge = Swapped(*folders_, names, consolidate, same)
    for seed in range(SEED, SEED + draws(10, 1_000)):
        judge.run(seed)
    print(judge.counts)


@pytest.mark.parametrize("ending", ["pth", "safetensors"])
@pytest.mark.parametrize("way", ["written", "replaced"])
def test_a_shard_that_changes_after_its_check_is_named(
    ending: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ctrainer.fsdp import load_shard, shard_files

    make_shards(tmp_path, 0)
    path = tmp_path / f"shard-0.{ending}"
    plain = shard_files.tensor_of

    def late(item: Any) -> Any:
        data = bytearray(path.read_bytes())
        data[-40] ^= 1
        if way == "replaced":
            path.unlink()
        path.write_bytes(data)
        return plain(item)

    monkeypatch.setattr(shard_files, "tensor_of", late)
    with pytest.raises(ValueError, match=f"shard-0.{ending}: was changed while it was"):
        load_shard(path)


def test_a_mapped_file_that_is_replaced_after_its_check_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ctrainer.fsdp import shard_files

    make_shards(tmp_path, 0)
    path = tmp_path / "shard-0.safetensors"
    plain = shard_files._map

    def late(name: str, index: Any) -> Any:
        data = path.read_bytes()
        path.unlink()
        path.write_bytes(data)
        return plain(name, index)

    assert shard_files.mapped(str(path))
    monkeypatch.setattr(shard_files, "_map", late)
    with pytest.raises(ValueError, match=r"shard-0.safetensors: was changed while it"):
        shard_files.mapped(str(path))


def test_a_damaged_adapter_is_named(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from tiny import gpt2

    model = peft.get_peft_model(gpt2(), peft.LoraConfig(target_modules=["c_attn"]))
    folder = tmp_path / "ck"
    model.save_pretrained(folder)
    sign(folder)
    _torch_checkpoint.load_model(model, str(folder))
    path = folder / "adapter_model.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 4
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"adapter_model.safetensors: is damaged"):
        _torch_checkpoint.load_model(model, str(folder))
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"adapter_model.safetensors: is miss"):
        _torch_checkpoint.load_model(model, str(folder))
