"""What TensorBoard gets of a run is what it gets of transformers' own Trainer.

TensorBoard's files, W&B and MLflow were tried by hand: docs/how-to/trackers.md.
"""

import importlib
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("tensorboardX")  # or tensorboard: the callback asks for one

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


class Writer:
    """What transformers' callback of TensorBoard writes to, in memory."""

    def __init__(self) -> None:
        self.logged: Logged = {}

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.logged.setdefault(name, []).append((step, value))

    def add_text(self, name: str, text: str, step: int = 0) -> None:
        assert text

    def flush(self) -> None:
        pass

    close = flush


def run(package: str, folder: Path) -> Logged:
    """What is logged of six updates, two evaluations and a save."""
    source, writer = importlib.import_module(package), Writer()
    args = source.TrainingArguments(
        output_dir=str(folder), max_steps=6, per_device_train_batch_size=4,
        logging_steps=2, logging_first_step=True, eval_strategy="steps", eval_steps=3,
        save_steps=4, report_to=[], disable_tqdm=True, use_cpu=True, seed=7,
        include_num_input_tokens_seen=True,
    )  # fmt: skip
    callback = transformers.integrations.TensorBoardCallback(tb_writer=writer)
    source.Trainer(
        tiny(), args, train_dataset=rows(), eval_dataset={"a": rows()[:8]},
        compute_metrics=lambda p: {"mean(x)": float(p.predictions.mean())},
        callbacks=[callback],
    ).train()  # fmt: skip
    return writer.logged


def test_a_run_logs_what_transformers_logs(tmp_path: Path) -> None:
    ours = run("ctrainer", tmp_path / "ours")
    theirs = run("transformers", tmp_path / "theirs")
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
