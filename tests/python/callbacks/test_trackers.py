"""What TensorBoard has logged of a run is what it has of transformers' own Trainer.

Where tensorboard is not installed tensorboardX writes the files. W&B and MLflow were
tried by hand: docs/how-to/trackers.md.
"""

import importlib
import struct
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

Logged = dict[str, list[tuple[int, float]]]  # by name: steps and values
TIMES = ("runtime", "per_second")  # differ from run to run


def tiny() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "n_positions": 16, "n_embd": 16, "n_layer": 1}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(**sizes, **ends, n_head=2, resid_pdrop=0,
                                     embd_pdrop=0, attn_pdrop=0)  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def rows() -> list[dict[str, torch.Tensor]]:
    """The first token is no target for either, as transformers counts it."""
    drawn = torch.randint(50, (24, 8), generator=torch.Generator().manual_seed(1))
    labels = drawn.masked_fill(torch.arange(8) == 0, -100)
    return [{"input_ids": x, "labels": y} for x, y in zip(drawn, labels, strict=True)]


def run(package: str, folder: Path) -> None:
    """Six updates, two evaluations in them and one after, a save and a prediction."""
    source = importlib.import_module(package)
    args = source.TrainingArguments(
        output_dir=str(folder / "out"), max_steps=6, per_device_train_batch_size=4,
        logging_steps=2, logging_first_step=True, eval_strategy="steps", eval_steps=3,
        save_steps=4, report_to=["tensorboard"], disable_tqdm=True, use_cpu=True,
        seed=7, run_name="tried", include_num_input_tokens_seen=True,
    )  # fmt: skip
    trainer = source.Trainer(
        tiny(), args, train_dataset=rows(), eval_dataset={"a": rows()[:8]},
        compute_metrics=lambda p: {"mean(x)": float(p.predictions.mean())},
    )  # fmt: skip
    trainer.train()
    trainer.evaluate()
    trainer.predict(rows()[:4])


def tensorboard(folder: Path) -> Logged:
    proto = pytest.importorskip("tensorboardX.proto.event_pb2")
    found: Logged = {}
    for path in sorted(folder.rglob("events.out.*")):
        data, at = path.read_bytes(), 0
        while at < len(data):  # length, its checksum, the event, its checksum
            n = struct.unpack_from("<Q", data, at)[0]
            event = proto.Event.FromString(data[at + 12 : at + 12 + n])
            at += n + 16
            for value in event.summary.value:
                number = value.simple_value
                found.setdefault(value.tag, []).append((event.step, number))
    return found


def test_a_run_logs_what_transformers_logs(tmp_path: Path) -> None:
    logged = {}
    for package in ("ctrainer", "transformers"):
        run(package, tmp_path / package)
        logged[package] = tensorboard(tmp_path / package)
    ours, theirs = logged.values()
    assert len(theirs) >= 12
    assert ours.keys() == theirs.keys()
    for name in theirs:
        steps, values = zip(*sorted(ours[name]), strict=True)
        their_steps, their_values = zip(*sorted(theirs[name]), strict=True)
        if name.endswith(TIMES):  # the tokens per second of the run are ours alone
            assert set(steps) == set(their_steps), name
        else:
            assert steps == their_steps, name
            assert values == pytest.approx(their_values, rel=1e-5), name


def test_transformers_trainer_takes_our_arguments(tmp_path: Path) -> None:
    """WandbCallback makes one to save the model, with WANDB_LOG_MODEL."""
    from ctrainer import TrainingArguments

    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    theirs = transformers.Trainer(args=args, model=tiny(), eval_dataset=["fake"])
    theirs.save_model(str(tmp_path / "model"))
    assert (tmp_path / "model/model.safetensors").is_file()


def test_an_argument_of_a_newer_transformers_has_its_default(
    tmp_path: Path, monkeypatch: Any
) -> None:
    from ctrainer import TrainingArguments

    @dataclass
    class Newer:
        of_tomorrow: int = 3
        needed: list[int] = field(default_factory=list)

    args = TrainingArguments(str(tmp_path))
    package = SimpleNamespace(TrainingArguments=Newer)
    monkeypatch.setitem(sys.modules, "transformers.training_args", package)
    assert args.of_tomorrow == 3
    for name in ("needed", "learning_rat"):
        with pytest.raises(AttributeError, match=f"no attribute '{name}'"):
            getattr(args, name)
