"""torch_compile: graph breaks, recompilations, losses and checkpoints beside
transformers' Trainer and beside our own without compilation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import ranks  # noqa: E402
from compiled_trainings import Compiled, trained, trainer_of  # noqa: E402
from head_trainings import logged, model  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from tiny import make, rows  # noqa: E402
from torch import nn  # noqa: E402

import ctrainer  # noqa: E402

# Where another kernel adds in another order; of bfloat16, whose products also round
# in another order.
RTOL, RTOL_BF16 = 2e-5, 2e-2


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are compiled anew, in this process."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")


class Mlp(nn.Module):
    """Takes the count of targets by its signature, and divides by it or does not."""

    def __init__(self, divides: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 1))
        self.divides = divides
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Any, labels: Any, **kwargs: Any) -> dict[str, Any]:
        y = self.layers(self.norm(x)).squeeze(-1)
        error = (y - labels).square()
        count = kwargs.get("num_items_in_batch")
        if self.divides and count is not None:
            return {"loss": error.sum() / count, "logits": y}
        return {"loss": error.mean(), "logits": y}


def fitted(folder: Path, made: Any, runs: int = 1, **options: Any) -> Any:
    trainer = make(
        ctrainer.Trainer, made, rows(22), output_dir=str(folder), max_steps=6,
        per_device_train_batch_size=4, gradient_accumulation_steps=3, **options,
    )  # fmt: skip
    history = []
    for _ in range(runs):
        trainer.train()
        history += logged(trainer)
    return trainer, history


def check_same_weights(a: Any, b: Any) -> None:
    for mine, other in zip(
        a.model.state_dict().values(), b.model.state_dict().values(), strict=True
    ):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("divides", [False, True])
def test_micro_batches_weigh_the_same_with_and_without_torch_compile(
    divides: bool, tmp_path: Path
) -> None:
    compiled, losses = fitted(tmp_path, Mlp(divides), torch_compile_backend="eager")
    plain, wanted = fitted(tmp_path, Mlp(divides))
    assert losses == wanted
    check_same_weights(compiled, plain)


def test_a_second_training_is_under_mixed_precision_too(tmp_path: Path) -> None:
    options = {"bf16": True, "runs": 2}
    _, losses = fitted(tmp_path, Mlp(), torch_compile_backend="eager", **options)
    _, wanted = fitted(tmp_path, Mlp(), **options)
    assert losses == wanted


def check_beside(mine: Compiled, theirs: Compiled) -> None:
    assert mine.graphs > 0
    assert mine.breaks <= theirs.breaks
    assert len(mine.recompiled) <= len(theirs.recompiled), mine.recompiled


def check_near(a: Compiled, b: Compiled, rtol: float) -> None:
    torch.testing.assert_close(a.logged, b.logged, rtol=rtol, atol=0.0)
    torch.testing.assert_close(a.evaluated, b.evaluated, rtol=rtol, atol=0.0)


def test_graphs_and_losses_are_those_of_transformers(tmp_path: Path) -> None:
    options = {"torch_compile_backend": "eager", "max_steps": 6, "eval_steps": 2}
    mine = trained(tmp_path, "gpt2", **options)
    theirs = trained(tmp_path, "gpt2", theirs=True, **options)
    check_beside(mine, theirs)
    assert mine.breaks == 0
    check_near(mine, theirs, RTOL)


WAYS: dict[str, dict[str, Any]] = {
    "plain": {}, "bf16": {"bf16": True}, "smoothed": {"label_smoothing_factor": 0.1},
    "checkpointed": {"gradient_checkpointing": True},
    "reduce-overhead": {"torch_compile_mode": "reduce-overhead"},
}  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert"])
def test_every_model_has_no_more_graphs_than_on_transformers(
    kind: str, way: str, backend: str, tmp_path: Path
) -> None:
    if "torch_compile_mode" in WAYS[way] and backend != "inductor":
        pytest.skip("modes are inductor's")
    options = {"torch_compile_backend": backend, **WAYS[way]}
    mine = trained(tmp_path, kind, **options)
    theirs = trained(tmp_path, kind, theirs=True, **options)
    check_beside(mine, theirs)
    rtol = RTOL_BF16 if way == "bf16" else RTOL
    # transformers adds up the means that the losses of BERT are, and does not shift
    # the labels of a compiled model for label smoothing.
    beside = kind != "bert" and way != "smoothed"
    if beside:
        check_near(mine, theirs, rtol)
    # inductor rounds to bfloat16 in other places: a norm of Llama's gradient differs
    # from that without compilation by 4.7 %, on transformers by the same digits.
    if not (beside and way == "bf16"):
        check_near(mine, trained(tmp_path, kind, **WAYS[way]), rtol)


# Of a training, and of its trainer.
BACKENDS = ["eager", pytest.param("inductor", marks=pytest.mark.exhaustive)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_resumed_training_continues_to_the_bit(backend: str, tmp_path: Path) -> None:
    options = {
        "torch_compile_backend": backend, "max_steps": 6, "save_strategy": "steps",
        "save_steps": 2, "eval_steps": 2, "load_best_model_at_end": True,
    }  # fmt: skip
    whole = trained(tmp_path / "whole", "gpt2", **options)
    again = trained(
        tmp_path / "again", "gpt2", resume=str(tmp_path / "whole/checkpoint-2"),
        **options,
    )  # fmt: skip
    assert torch.equal(again.logged, whole.logged)
    assert torch.equal(again.evaluated, whole.evaluated)
    check_same_weights(again.trainer, whole.trainer)


def test_only_the_wrapped_model_is_compiled(tmp_path: Path) -> None:
    made = model("gpt2")
    seen = trained(
        tmp_path, made, torch_compile_backend="eager", max_steps=2, eval_steps=1,
        save_strategy="steps", save_steps=1, load_best_model_at_end=True,
    )  # fmt: skip
    trainer = seen.trainer
    assert trainer.model is made
    assert trainer.model_wrapped._orig_mod is made
    trainer.save_model(str(tmp_path / "saved"))
    own = set(made.state_dict()) - {"lm_head.weight"}  # tied
    for folder in ("checkpoint-1", "checkpoint-2", "saved"):
        assert set(load_file(tmp_path / folder / "model.safetensors")) == own
    best = seen.evaluated.min()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(float(best), rel=1e-6)
    found = trainer.predict(trainer.eval_dataset)
    assert found.metrics["test_loss"] == pytest.approx(float(best), rel=1e-6)
    loaded = type(made).from_pretrained(tmp_path / "saved")
    for mine, other in zip(loaded.parameters(), made.parameters(), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.exhaustive
def test_a_process_needs_no_more_memory_than_on_transformers(tmp_path: Path) -> None:
    """Most of it is torch.compile's own, during the compilation."""
    (mine,), (theirs,) = (
        ranks.told(
            ranks.run(
                tmp_path / str(theirs), "trainer.compiled_peak", 1, theirs=theirs
            )
        )
        for theirs in (False, True)
    )  # fmt: skip
    assert mine <= theirs


# ---- with other arguments ------------------------------------------------------------

ALIKE: dict[str, dict[str, Any]] = {
    "neftune": {"neftune_noise_alpha": 5.0},
    "auto_find_batch_size": {"auto_find_batch_size": True},
    "crash_record": {"crash_record": True},
    "pack_sequences": {"pack_sequences": True},
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", ALIKE)
def test_other_arguments_train_the_same_with_it(way: str, tmp_path: Path) -> None:
    options = {"max_steps": 4, "eval_strategy": "no", **ALIKE[way]}
    mine = trained(tmp_path, "llama", torch_compile_backend="aot_eager", **options)
    assert mine.graphs > 0
    check_near(mine, trained(tmp_path, "llama", **options), RTOL)


def test_a_batch_that_does_not_fit_is_split(tmp_path: Path) -> None:
    class Full(Mlp):
        """Has no memory for more than 2 rows."""

        def forward(self, x: Any, labels: Any, **kwargs: Any) -> dict[str, Any]:
            if self.training and len(x) > 2:
                raise torch.OutOfMemoryError("out of memory")
            self.norm.eval()
            return super().forward(x, labels, **kwargs)

    options = {"auto_find_batch_size": True, "split_coupled_rows": True}
    _, losses = fitted(tmp_path, Full(), torch_compile_backend="eager", **options)
    _, wanted = fitted(tmp_path, Full(), **options)
    assert losses == wanted


@pytest.mark.exhaustive
def test_models_of_peft_train_the_same_with_it(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def made() -> Any:
        base = model("llama")
        config = peft.LoraConfig(
            r=2, target_modules=["q_proj"], init_lora_weights=False
        )
        torch.manual_seed(1)
        return peft.get_peft_model(base, config)

    options = {"max_steps": 4, "eval_steps": 2, "save_strategy": "steps"}
    mine = trained(
        tmp_path, made(), torch_compile_backend="aot_eager", save_steps=4, **options
    )
    check_near(mine, trained(tmp_path, made(), save_steps=4, **options), RTOL)
    file = tmp_path / "checkpoint-4" / "adapter_model.safetensors"
    assert not any("_orig_mod" in name for name in load_file(file))


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_two_ranks_train_the_same_with_it(kind: str, tmp_path: Path) -> None:
    told = ranks.told(
        ranks.run(
            tmp_path, "trainer.compiled", kind=kind, max_steps=4,
            eval_steps=2, torch_compile_backend="aot_eager", ddp_timeout=200,
        )
    )  # fmt: skip
    for rank in told:
        assert rank["wrapper"] == "DataParallel"
        assert rank["graphs"] > 0
        mine, plain = torch.tensor(rank["logged"]), torch.tensor(rank["plain"])
        torch.testing.assert_close(mine, plain, rtol=RTOL, atol=0.0)


def test_sharded_models_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="hooks that gather parameters cannot be com"):
        trainer_of(
            tmp_path, model("gpt2"), torch_compile_backend="eager", fsdp="full_shard"
        ).train()
