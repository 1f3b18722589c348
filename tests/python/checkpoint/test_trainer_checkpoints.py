"""Checkpoints of a Trainer: what hooks find, rotation keeps and a kill leaves."""

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from places import PYTHONPATH

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")

from ctrainer.callbacks import TrainerCallback  # noqa: E402
from ctrainer.checkpoint import (  # noqa: E402
    find_checkpoints,
    last_whole_checkpoint,
    verify_checkpoint,
)
from ctrainer.trainer import Trainer  # noqa: E402
from ctrainer.training_args import TrainingArguments  # noqa: E402

CHECKPOINTS = ("checkpoint-4", "checkpoint-8", "checkpoint-12")


class Net(torch.nn.Module):
    """Two layers with dropout, of which the first is there under two names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = torch.nn.Linear(6, 6)
        self.tied = self.a
        self.b = torch.nn.Linear(6, 1)

    def forward(self, x: Any, labels: Any) -> dict[str, Any]:
        hidden = torch.nn.functional.dropout(self.a(x).tanh(), 0.3, self.training)
        return {"loss": ((self.b(hidden) - labels) ** 2).mean()}


def rows(n: int = 40) -> list[dict[str, Any]]:
    g = torch.Generator().manual_seed(1)
    return [
        {"x": torch.randn(6, generator=g), "labels": torch.randn(1, generator=g)}
        for _ in range(n)
    ]


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    options: dict[str, Any] = {
        "max_steps": 12, "per_device_train_batch_size": 4, "save_steps": 4,
        "logging_steps": 1, "report_to": "none", "use_cpu": True,
        "disable_tqdm": True, "learning_rate": 1e-2,
    }  # fmt: skip
    return TrainingArguments(output_dir=str(folder), **{**options, **changes})


def make(
    folder: Path, cls: type = Trainer, callbacks: Any = None, **changes: Any
) -> Any:
    args = arguments(folder, **changes)
    return cls(model=Net(), args=args, train_dataset=rows(), callbacks=callbacks)


def steps_of(folder: Path) -> list[int]:
    return [int(p.rsplit("-", 1)[1]) for p in find_checkpoints(folder)]


def same_weights(a: Any, b: Any) -> bool:
    pairs = zip(
        a.model.state_dict().values(), b.model.state_dict().values(), strict=True
    )
    return all(torch.equal(x, y) for x, y in pairs)


def test_resumed_run_is_bit_equal_at_every_checkpoint(tmp_path: Path) -> None:
    whole = make(tmp_path / "whole", save_steps=1)
    output = whole.train()
    for step in range(1, 12):
        resumed = make(tmp_path / "resumed", save_strategy="no")
        again = resumed.train(str(tmp_path / "whole" / f"checkpoint-{step}"))
        assert same_weights(whole, resumed), step
        assert again.training_loss == output.training_loss, step
        losses = [
            [e["loss"] for e in t.state.log_history if "loss" in e]
            for t in (whole, resumed)
        ]
        assert losses[0] == losses[1], step


def test_shared_weights_are_written_once_and_come_back(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    trainer.save_model(str(tmp_path / "m"))
    from safetensors import safe_open

    with safe_open(tmp_path / "m" / "model.safetensors", "pt") as file:
        assert sorted(file.keys()) == ["a.bias", "a.weight", "b.bias", "b.weight"]
        assert file.metadata()["tied.weight"] == "a.weight"
    other = make(tmp_path)
    torch.nn.init.zeros_(other.model.a.weight)
    other._load_from_checkpoint(str(tmp_path / "m"))
    assert same_weights(trainer, other)


def test_on_save_finds_the_folder_in_place(tmp_path: Path) -> None:
    seen = []

    class Looking(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(verify_checkpoint(tmp_path / f"checkpoint-{state.global_step}"))

    make(tmp_path, callbacks=[Looking()]).train()
    assert seen == [[], [], []]
    assert steps_of(tmp_path) == [4, 8, 12]
    assert not [n for n in os.listdir(tmp_path) if n.startswith(".ctrainer")]


class WritesMore(Trainer):
    """Overrides in the ways that are found in the wild."""

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        assert output_dir is not None
        size = os.path.getsize(os.path.join(output_dir, "model.safetensors"))
        with open(os.path.join(output_dir, "size.txt"), "w") as file:
            file.write(str(size))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:  # without metrics
        super()._save_checkpoint(model, trial)
        name = f"checkpoint-{self.state.global_step}"
        folder = os.path.join(self._get_output_dir(trial), name)
        assert os.path.isfile(os.path.join(folder, "optimizer.pt"))
        with open(os.path.join(folder, "inside.txt"), "w") as file:
            file.write("x")
        outside = os.path.join(self.args.output_dir, name)
        with open(os.path.join(outside, "bare.txt"), "w") as file:
            file.write("z")
        os.makedirs(os.path.join(outside, "sub"))
        with open(os.path.join(outside, "sub", "outside.txt"), "w") as file:
            file.write("y")


def test_overrides_write_into_the_same_whole_folder(tmp_path: Path) -> None:
    trainer = make(tmp_path, WritesMore)
    trainer.train()
    for step in steps_of(tmp_path):
        folder = tmp_path / f"checkpoint-{step}"
        manifest = json.loads((folder / "ctrainer_manifest.json").read_text())["files"]
        assert {"size.txt", "inside.txt", "bare.txt", "sub/outside.txt"} < set(manifest)
        assert "optimizer.pt" in manifest
        assert verify_checkpoint(folder) == []
        assert not folder.is_symlink()
        size = (folder / "model.safetensors").stat().st_size
        assert (folder / "size.txt").read_text() == str(size)


class Appends(Trainer):
    """Changes what super() has saved, under the name it will have."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        step = self.state.global_step
        folder = os.path.join(self.args.output_dir, f"checkpoint-{step}")
        with open(os.path.join(folder, "trainer_state.json")) as file:
            assert json.load(file)["global_step"] == step
        with open(os.path.join(folder, "run.txt"), "w") as file:
            file.write(str(self.args.run_name))
        assert folder not in find_checkpoints(self.args.output_dir)
        if self.args.run_name == "fails":
            raise RuntimeError("no luck")
        if self.args.run_name == "killed":
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("async_save", [False, True])
def test_an_override_writes_where_the_checkpoint_will_be_also_in_its_place(
    tmp_path: Path, async_save: bool
) -> None:
    for name in ("first", "second"):
        make(tmp_path, Appends, run_name=name, async_save=async_save).train()
        assert sorted(os.listdir(tmp_path)) == sorted(CHECKPOINTS)
        for folder in find_checkpoints(tmp_path):
            assert (Path(folder) / "run.txt").read_text() == name
            assert verify_checkpoint(folder) == []


@pytest.mark.parametrize("end", ["fails", "killed"])
@pytest.mark.parametrize("replaces", [False, True])
def test_an_override_that_does_not_end_leaves_what_had_the_name(
    tmp_path: Path, end: str, replaces: bool
) -> None:
    if replaces:
        make(tmp_path, run_name="first").train()
    before = {path: path.read_bytes() for path in tmp_path.glob("*/*.safetensors")}
    if end == "fails":
        with pytest.raises(RuntimeError, match="no luck"):
            make(tmp_path, Appends, run_name=end).train()
    else:
        child = multiprocessing.get_context("fork").Process(
            target=lambda: make(tmp_path, Appends, run_name=end).train()
        )
        child.start()
        child.join(60)
        assert child.exitcode == -signal.SIGKILL
    newest = last_whole_checkpoint(tmp_path)
    assert newest == (str(tmp_path / "checkpoint-12") if replaces else None)
    assert sorted(os.listdir(tmp_path)) == (sorted(CHECKPOINTS) if replaces else [])
    after = {path: path.read_bytes() for path in tmp_path.glob("*/*.safetensors")}
    assert after == before
    assert not list(tmp_path.glob("*/run.txt"))


class Copied(Trainer):
    """A _save_checkpoint as it stood in transformers 4, pasted into a project."""

    def _save_checkpoint(self, model: Any, trial: Any, metrics: Any = None) -> None:
        run = self._get_output_dir(trial=trial)
        folder = os.path.join(run, f"checkpoint-{self.state.global_step}")
        self.save_model(folder, _internal_call=True)
        torch.save(self.optimizer.state_dict(), os.path.join(folder, "optimizer.pt"))
        torch.save(self.lr_scheduler.state_dict(), os.path.join(folder, "scheduler.pt"))
        self.state.best_model_checkpoint = folder
        self.state.save_to_json(os.path.join(folder, "trainer_state.json"))
        self._rotate_checkpoints(use_mtime=True, output_dir=run)


def test_pasted_override_never_shows_the_temporary_folder(tmp_path: Path) -> None:
    trainer = make(tmp_path, Copied, save_total_limit=1)
    trainer.train()
    last = tmp_path / "checkpoint-12"
    assert trainer.state.best_model_checkpoint == str(last)
    state = json.loads((last / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == str(last)
    assert verify_checkpoint(last) == []
    other = make(tmp_path, Copied)
    assert other.train(True).global_step == 12


def test_failing_hook_leaves_nothing_and_the_older_whole(tmp_path: Path) -> None:
    class Failing(Trainer):
        def _save_rng_state(self, output_dir: str) -> None:
            if self.state.global_step == 8:
                raise RuntimeError("no luck")
            super()._save_rng_state(output_dir)

    with pytest.raises(RuntimeError, match="no luck"):
        make(tmp_path, Failing).train()
    assert os.listdir(tmp_path) == ["checkpoint-4"]
    assert verify_checkpoint(tmp_path / "checkpoint-4") == []


def test_failed_write_stops_the_run_and_leaves_the_older_whole(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    class Filling(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
            if state.global_step == 7:  # optimizer.pt has more than this
                trainer._wait_for_save()
                resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))

    trainer = make(tmp_path, callbacks=[Filling()])
    try:
        with pytest.raises(OSError, match="File too large"):
            trainer.train()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.listdir(tmp_path) == ["checkpoint-4"]
    assert verify_checkpoint(tmp_path / "checkpoint-4") == []


def with_scores(folder: Path, scores: list[float], **changes: Any) -> Any:
    class Scored(Trainer):
        def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
            value = scores[self.state.global_step // 2 - 1]
            self.log({"eval_loss": value})
            return {"eval_loss": value}

    options = {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, **changes}
    args = arguments(folder, **options)
    trainer = Scored(model=Net(), args=args, train_dataset=rows(), eval_dataset=rows(4))
    trainer.train()
    return trainer


def test_weights_that_somebody_has_converted_load(tmp_path: Path) -> None:
    """Into shards, which the manifest does not list; a lost file is still missed."""
    whole = make(tmp_path / "whole", save_steps=4)
    whole.train()
    folder = tmp_path / "whole" / "checkpoint-4"
    tensors = safetensors.load_file(folder / "model.safetensors")
    index = {name: f"{i}.safetensors" for i, name in enumerate(tensors)}
    for name, file in index.items():
        safetensors.save_file({name: tensors[name]}, folder / file)
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="lists it"):
        make(tmp_path / "resumed").train(str(folder))
    written = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(written)
    resumed = make(tmp_path / "resumed", save_strategy="no")
    resumed.train(str(folder))
    assert same_weights(whole, resumed)


def test_the_best_survives_a_limit_of_one(tmp_path: Path) -> None:
    trainer = with_scores(
        tmp_path, [3, 1, 2, 4, 5, 6], save_total_limit=1, load_best_model_at_end=True,
        metric_for_best_model="loss", greater_is_better=False,
    )  # fmt: skip
    assert steps_of(tmp_path) == [4]  # at the end; until then the last stays, too
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-4")
    best = make(tmp_path)
    best._load_from_checkpoint(str(tmp_path / "checkpoint-4"))
    assert same_weights(trainer, best)


def test_a_run_that_is_stopped_keeps_its_last_checkpoint(tmp_path: Path) -> None:
    class Stopped(TrainerCallback):
        def on_step_end(
            self, args: Any, state: Any, control: Any, **kwargs: Any
        ) -> None:
            if state.global_step == 9:
                os.kill(os.getpid(), signal.SIGINT)

    class Scored(Trainer):
        def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
            value = abs(self.state.global_step - 4.0)
            self.log({"eval_loss": value})
            return {"eval_loss": value}

    args = arguments(
        tmp_path, eval_strategy="steps", eval_steps=2, save_steps=2,
        save_total_limit=1, load_best_model_at_end=True, greater_is_better=False,
        metric_for_best_model="loss",
    )  # fmt: skip
    data = {"train_dataset": rows(), "eval_dataset": rows(4)}
    with pytest.raises(KeyboardInterrupt):
        Scored(model=Net(), args=args, callbacks=[Stopped()], **data).train()
    assert steps_of(tmp_path) == [4, 9]
    Scored(model=Net(), args=args, **data).train(resume_from_checkpoint=True)
    assert steps_of(tmp_path) == [4]


def test_rotation_by_hand_keeps_the_best_and_the_last(tmp_path: Path) -> None:
    trainer = with_scores(
        tmp_path, [3, 1, 2, 4, 5, 6], metric_for_best_model="loss",
        greater_is_better=False,
    )  # fmt: skip
    assert steps_of(tmp_path) == [2, 4, 6, 8, 10, 12]
    trainer.args.save_total_limit = 4
    trainer._rotate_checkpoints()
    assert steps_of(tmp_path) == [4, 8, 10, 12]
    trainer.args.save_total_limit = 1
    for output_dir in (None, str(tmp_path)):
        trainer._rotate_checkpoints(output_dir=output_dir)
        assert steps_of(tmp_path) == [4, 12]


def test_rotation_goes_by_step_and_not_by_time(tmp_path: Path) -> None:
    class Touching(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            (tmp_path / "checkpoint-2" / "note").write_text(str(state.global_step))

    args = {"save_steps": 2, "save_total_limit": 3, "max_steps": 6}
    make(tmp_path, callbacks=[Touching()], **args).train()
    assert steps_of(tmp_path) == [2, 4, 6]
    make(tmp_path, **{**args, "max_steps": 8}).train(True)
    assert steps_of(tmp_path) == [4, 6, 8]


def test_save_only_model_leaves_the_rest_out(tmp_path: Path) -> None:
    make(tmp_path, save_only_model=True, save_steps=12).train()
    names = set(os.listdir(tmp_path / "checkpoint-12"))
    assert {"model.safetensors", "trainer_state.json"} <= names
    assert not names & {"optimizer.pt", "scheduler.pt", "rng_state.pth"}


def test_broken_newest_is_passed_over_aloud(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = make(tmp_path)
    whole.train()
    path = tmp_path / "checkpoint-12" / "optimizer.pt"
    path.write_bytes(path.read_bytes()[:-100])
    resumed = make(tmp_path, save_strategy="no")
    resumed.train(resume_from_checkpoint=True)
    assert "optimizer.pt" in caplog.text
    assert same_weights(whole, resumed)


def test_nothing_is_unpickled_that_could_run_code(tmp_path: Path) -> None:
    make(tmp_path, save_steps=12).train()

    class Evil:
        def __reduce__(self) -> Any:
            return (os.mkdir, (str(tmp_path / "pwned"),))

    folder = tmp_path / "checkpoint-12"
    for name in ("optimizer.pt", "training_args.bin"):
        torch.save({"state": Evil()}, folder / name)
    (folder / "ctrainer_manifest.json").unlink()
    with pytest.raises(ValueError, match="mkdir that are no plain data"):
        make(tmp_path).train(str(folder))
    assert not (tmp_path / "pwned").exists()


def test_numpy_model_resumes_bit_equal_without_torch_files(tmp_path: Path) -> None:
    from ctrainer.adapters.numpy import Loss, Parameter

    class Line:
        def __init__(self) -> None:
            self.w = Parameter(np.zeros((6, 1), np.float32))

        def parameters(self) -> list[Any]:
            return [self.w]

        def __call__(self, x: Any, labels: Any) -> dict[str, Any]:
            noise = np.random.default_rng(random.getrandbits(32)).random(x.shape)
            x = x + 0.1 * noise.astype(np.float32)
            error = x @ self.w.data - labels

            def pull(scale: float) -> None:
                self.w.accumulate(scale * 2 * x.T @ error / len(x))

            return {"loss": Loss(float((error**2).mean()), pull)}

    data = [{k: v.numpy() for k, v in row.items()} for row in rows()]

    def run(resume: bool = False) -> Any:
        args = arguments(tmp_path)
        trainer = Trainer(model=Line(), args=args, train_dataset=data)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = run()
    names = set(os.listdir(tmp_path / "checkpoint-4"))
    assert {
        "model.safetensors",
        "optimizer.safetensors",
        "rng_state.safetensors",
    } <= names
    for step in (8, 12):
        (tmp_path / f"checkpoint-{step}" / "model.safetensors").unlink()
    resumed = run(resume=True)
    assert np.array_equal(whole.model.w.data, resumed.model.w.data)


def test_killed_at_any_instant_leaves_whole_checkpoints_only(tmp_path: Path) -> None:
    paths = os.pathsep.join([PYTHONPATH, str(Path(__file__).parent)])
    chance = random.Random(0)
    newest = 0
    for _ in range(6):
        child = subprocess.Popen(
            [sys.executable, "-m", "programs.checkpoint.saving_always", str(tmp_path)],
            env={**os.environ, "PYTHONPATH": paths},
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        deadline = time.monotonic() + 200
        before = set(steps_of(tmp_path))
        while not set(steps_of(tmp_path)) - before and time.monotonic() < deadline:
            assert child.poll() is None
            time.sleep(0.005)
        time.sleep(chance.uniform(0, 0.3))
        child.kill()
        child.wait()
        found = find_checkpoints(tmp_path)
        assert found
        assert [verify_checkpoint(p) for p in found] == [[]] * len(found)
        newest = max(newest, *steps_of(tmp_path))
    assert newest > 1
    last = last_whole_checkpoint(tmp_path)
    resumed = make(tmp_path, max_steps=newest + 2, save_steps=1)
    assert resumed.train(last).global_step >= newest
    # The leavings of the killed ones went when this run saved.
    assert not [n for n in os.listdir(tmp_path) if n.startswith(".ctrainer")]
