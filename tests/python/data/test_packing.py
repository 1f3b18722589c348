"""Packed sequences: losses, weights and evaluations of a padded run, and models that
do not keep them apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ctrainer

transformers = pytest.importorskip("transformers")
VOCABULARY = 60
SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "intermediate_size": 64, "max_position_embeddings": 64,
}  # fmt: skip


def make(kind: str, **given: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SMALL, **given})
    suffix = "ForMaskedLM" if kind == "Bert" else "ForCausalLM"
    return getattr(transformers, kind + suffix)(config)


def rows(with_labels: bool = True) -> list[dict[str, Any]]:
    rng, made = np.random.default_rng(0), []
    for n in rng.integers(2, 30, 40):
        ids = rng.integers(1, VOCABULARY, n)
        labels = np.where(np.arange(n) < n // 3, -100, ids)
        row = {"input_ids": ids.tolist(), "attention_mask": [1] * int(n)}
        made.append({**row, "labels": labels.tolist()} if with_labels else row)
    return made


def pad(features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Padding as by transformers' collators, for the runs that do not pack."""
    width = max(len(row["input_ids"]) for row in features)
    filled = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    return {
        name: torch.tensor(
            [
                [
                    *row.get(name, row["input_ids"]),
                    *[fill] * (width - len(row["input_ids"])),
                ]
                for row in features
            ]
        )
        for name, fill in filled.items()
    }


def train(folder: Path, model: Any, dataset: Any, **given: Any) -> Any:
    packed = given.get("pack_sequences")
    args = ctrainer.TrainingArguments(
        str(folder), report_to="none", disable_tqdm=True, use_cpu=True, max_steps=8,
        logging_steps=1, learning_rate=1e-2, per_device_train_batch_size=4, **given,
    )  # fmt: skip
    trainer = ctrainer.Trainer(
        model, args, train_dataset=dataset, eval_dataset=rows(),
        data_collator=None if packed else pad,
    )  # fmt: skip
    trainer.train()
    return trainer


@pytest.mark.parametrize("kind", ["Llama", "GPTNeoX"])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("with_labels", [True, False])
def test_a_packed_run_is_the_padded_run(
    tmp_path: Path, kind: str, accumulation: int, with_labels: bool
) -> None:
    given = {"gradient_accumulation_steps": accumulation}
    data = rows(with_labels)
    packed = train(tmp_path, make(kind), data, **given, pack_sequences=True)
    padded = train(tmp_path, make(kind), data, **given)
    for mine, other in zip(
        packed.state.log_history, padded.state.log_history, strict=True
    ):
        for name in {"loss", "grad_norm"} & set(mine):
            assert mine[name] == pytest.approx(other[name], rel=2e-5)
    shape = next(iter(packed.get_train_dataloader()))["input_ids"].shape
    assert shape[0] == 1
    assert packed.evaluate()["eval_loss"] == pytest.approx(
        padded.evaluate()["eval_loss"], rel=2e-5
    )
    found = packed.predict(rows())
    assert found.predictions.shape[:2] == (40, max(len(r["labels"]) for r in rows()))


def adapted(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"]))


OTHERS: dict[str, dict[str, Any]] = {
    "PEFT": {},
    "chunked": {"chunked_cross_entropy": True},
    "checkpointed": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
    },
    "checkpointed anew": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
}


@pytest.mark.parametrize("way", OTHERS)
def test_other_arguments_pack_as_they_pad(tmp_path: Path, way: str) -> None:
    """Losses, evaluations on the way, and the configurations in checkpoints."""
    given: dict[str, Any] = {
        "eval_strategy": "steps", "eval_steps": 4, "save_steps": 4, **OTHERS[way],
    }  # fmt: skip

    def run(name: str, **more: Any) -> Any:
        model = make("Llama")
        if way == "PEFT":
            model = adapted(model)
        return train(tmp_path / name, model, rows(), **given, **more)

    packed, padded = run("packed", pack_sequences=True), run("padded")
    for mine, other in zip(
        packed.state.log_history, padded.state.log_history, strict=True
    ):
        for name in {"loss", "grad_norm", "eval_loss"} & set(mine):
            assert mine[name] == pytest.approx(other[name], rel=2e-5)
    assert packed.model.config._attn_implementation == "sdpa"
    files = sorted((tmp_path / "padded").glob("checkpoint-*/*config.json"))
    assert files
    for file in files:
        mine = tmp_path / "packed" / file.relative_to(tmp_path / "padded")
        assert mine.read_text() == file.read_text()


class Failing(ctrainer.TrainerCallback):
    """Sees the attention of the run, and raises."""

    seen = ""

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.seen = given["model"].config._attn_implementation
        raise RuntimeError("of the callback")


def test_a_run_that_fails_leaves_the_attention_as_it_was(tmp_path: Path) -> None:
    args = ctrainer.TrainingArguments(
        str(tmp_path), report_to="none", disable_tqdm=True, use_cpu=True,
        pack_sequences=True,
    )  # fmt: skip
    failing, model = Failing(), make("Llama")
    trainer = ctrainer.Trainer(model, args, train_dataset=rows(), callbacks=[failing])
    with pytest.raises(RuntimeError, match="of the callback"):
        trainer.train()
    assert failing.seen != "sdpa"
    assert model.config._attn_implementation == "sdpa"


def test_a_limit_of_tokens_is_of_their_sum(tmp_path: Path) -> None:
    trainer = train(
        tmp_path, make("Llama"), rows(), pack_sequences=True, max_tokens_per_batch=64
    )
    sizes = [b["input_ids"].shape[1] for b in trainer.get_train_dataloader()]
    assert max(sizes) <= 64
    assert sum(sizes) == sum(len(row["input_ids"]) for row in rows())


@pytest.mark.parametrize("kind", ["OPT", "Falcon", "Bloom"])
def test_models_that_mix_sequences_are_rejected(tmp_path: Path, kind: str) -> None:
    """In these the loss of packed rows is another than that of the rows alone."""
    model = make(kind)
    model.train()
    collate = transformers.DataCollatorWithFlattening()
    pair = rows()[:2]
    with torch.no_grad():
        together = model.eval()(**collate([dict(r) for r in pair])).logits[0]
        n = len(pair[0]["input_ids"])
        alone = model(**collate([dict(pair[1])])).logits[0]
    assert not torch.allclose(together[n:], alone, rtol=1e-3)
    model.train()
    model.model.eval() if kind == "OPT" else None
    modes = [module.training for module in model.modules()]
    with pytest.raises(ValueError, match=f"{kind}ForCausalLM .* they see each other"):
        train(tmp_path, model, rows(), pack_sequences=True)
    assert [module.training for module in model.modules()] == modes


def test_models_with_other_positions_are_rejected(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=2, n_head=2,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    train(tmp_path, model, rows(), pack_sequences=True)
    model.transformer.wpe.register_forward_pre_hook(
        lambda module, given: (torch.arange(given[0].shape[-1])[None],)
    )
    with pytest.raises(ValueError, match="they have other positions than alone"):
        train(tmp_path, model, rows(), pack_sequences=True)


def test_what_cannot_be_packed_is_named(tmp_path: Path) -> None:
    def fails(match: str, model: Any, data: Any) -> None:
        with pytest.raises(ValueError, match=match):
            train(tmp_path, model, data, pack_sequences=True)

    fails("the model is a BertForMaskedLM", make("Bert"), rows())
    padded = [
        {**row, "attention_mask": [0, *row["attention_mask"][1:]]} for row in rows()
    ]
    fails("padding=False", make("Llama"), padded)
    scored = [{**row, "position_ids": [0]} for row in rows()]
    fails("a row has position_ids", make("Llama"), scored)
    args = ctrainer.TrainingArguments(str(tmp_path), pack_sequences=True, use_cpu=True)
    own = ctrainer.Trainer(make("Llama"), args, train_dataset=rows(), data_collator=pad)
    with pytest.raises(ValueError, match="data_collator is a function"):
        own.train()
