"""Checkpoints go both ways between ctrainer and transformers."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from ctrainer.checkpoint import verify_checkpoint  # noqa: E402
from ctrainer.trainer import Trainer  # noqa: E402
from ctrainer.training_args import TrainingArguments  # noqa: E402

Losses = list[float]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_model() -> Any:
    torch.manual_seed(0)
    return transformers.BertForMaskedLM(  # its embedding and head are tied
        transformers.BertConfig(
            vocab_size=60, max_position_embeddings=16, hidden_size=16,
            num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        )
    )  # fmt: skip


def make_data() -> list[dict[str, Any]]:
    g = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, 60, (10,), generator=g) for _ in range(48)]
    return [{"input_ids": r, "labels": r.clone()} for r in rows]


OPTIONS: dict[str, Any] = {
    "max_steps": 10,
    "per_device_train_batch_size": 4,
    "save_steps": 4,
    "logging_steps": 1,
    "report_to": "none",
    "use_cpu": True,
    "disable_tqdm": True,
    "learning_rate": 1e-2,
    "max_grad_norm": 0.0,
    "optim": "adamw_torch",
}


def run(
    kind: str, folder: Path, resume: str | bool | None = None
) -> tuple[Any, Losses]:
    module: Any = transformers if kind == "theirs" else None
    trainer_cls = module.Trainer if module else Trainer
    args_cls = module.TrainingArguments if module else TrainingArguments
    args = args_cls(output_dir=str(folder), **OPTIONS)
    trainer = trainer_cls(model=make_model(), args=args, train_dataset=make_data())
    trainer.train(resume_from_checkpoint=resume)
    losses = [e["loss"] for e in trainer.state.log_history if "loss" in e]
    return trainer, losses


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run of each that was never interrupted."""
    runs = {}
    for kind in ("ours", "theirs"):
        folder = tmp_path_factory.mktemp(kind)
        runs[kind] = (folder, *run(kind, folder))
    return runs


@pytest.mark.parametrize("writer", ["ours", "theirs"])
@pytest.mark.parametrize("reader", ["ours", "theirs"])
def test_each_resumes_what_the_other_saved(
    finished: dict[str, Any], tmp_path: Path, writer: str, reader: str
) -> None:
    folder, trainer, losses = finished[writer]
    shutil.copytree(folder / "checkpoint-4", tmp_path / "checkpoint-4")
    resumed, after = run(reader, tmp_path, str(tmp_path / "checkpoint-4"))
    # The history of the first steps comes out of trainer_state.json; the weights after
    # it agree to the rounding of two different update kernels.
    assert len(after) == len(losses) == 10
    assert after == pytest.approx(losses, rel=1e-4)
    for a, b in zip(
        trainer.model.parameters(), resumed.model.parameters(), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_ours_resumed_by_ours_is_bit_equal(
    finished: dict[str, Any], tmp_path: Path
) -> None:
    folder, trainer, losses = finished["ours"]
    shutil.copytree(folder / "checkpoint-4", tmp_path / "checkpoint-4")
    resumed, after = run("ours", tmp_path, True)
    assert after == losses
    for a, b in zip(
        trainer.model.parameters(), resumed.model.parameters(), strict=True
    ):
        assert torch.equal(a, b)


def test_the_folders_hold_the_same_files(finished: dict[str, Any]) -> None:
    ours = set(os.listdir(finished["ours"][0] / "checkpoint-4"))
    theirs = set(os.listdir(finished["theirs"][0] / "checkpoint-4"))
    assert ours - theirs == {"ctrainer_manifest.json", "ctrainer_state.json"}
    assert theirs - ours == set()


def test_our_weights_are_what_from_pretrained_loads(finished: dict[str, Any]) -> None:
    folder, trainer, _ = finished["ours"]
    loaded = transformers.BertForMaskedLM.from_pretrained(folder / "checkpoint-10")
    for (name, a), b in zip(
        trainer.model.named_parameters(), loaded.parameters(), strict=True
    ):
        assert torch.equal(a, b), name


def test_optimizer_files_hold_the_same_values(finished: dict[str, Any]) -> None:
    states = [
        torch.load(
            finished[kind][0] / "checkpoint-4" / "optimizer.pt", weights_only=True
        )
        for kind in ("ours", "theirs")
    ]
    ours, theirs = states
    assert [g["params"] for g in ours["param_groups"]] == [
        g["params"] for g in theirs["param_groups"]
    ]
    assert ours["state"].keys() == theirs["state"].keys()
    for key, state in theirs["state"].items():
        for name, value in state.items():
            torch.testing.assert_close(
                ours["state"][key][name], value, rtol=1e-3, atol=1e-6
            )


def test_whole_and_damaged_folders_of_transformers_are_told_apart(
    finished: dict[str, Any], tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint-4"
    shutil.copytree(finished["theirs"][0] / "checkpoint-4", folder)
    assert verify_checkpoint(folder) == []
    for name in ("model.safetensors", "optimizer.pt", "trainer_state.json"):
        path = folder / name
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        assert [name in p for p in verify_checkpoint(folder)] == [True]
        path.unlink()
        assert verify_checkpoint(folder) != []
        path.write_bytes(whole)
    flipped = bytearray((folder / "optimizer.pt").read_bytes())
    flipped[len(flipped) // 2] ^= 1
    (folder / "optimizer.pt").write_bytes(flipped)
    assert "damaged" in verify_checkpoint(folder)[0]
