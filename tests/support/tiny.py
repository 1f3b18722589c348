"""Small models, data and runs for the tests of Trainer, ours and transformers'."""

from __future__ import annotations

import dataclasses
import tempfile
import warnings
from typing import Any

import torch
import transformers
from torch import nn

import ctrainer
from ctrainer.callbacks import TrainerCallback

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()


class Net(nn.Module):
    """A regression of the sum of 8 inputs; with `mean=False` the loss is a sum."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.layers = nn.Sequential(
            nn.Linear(8, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 1)
        )
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) / 4

    def forward(self, x: torch.Tensor, labels: Any = None) -> dict[str, torch.Tensor]:
        y = self.layers(x).squeeze(-1)
        if labels is None:
            return {"logits": y}
        return {"loss": nn.functional.mse_loss(y, labels), "logits": y}


def rows(n: int = 100) -> list[dict[str, torch.Tensor]]:
    x = torch.randn(n, 8, generator=torch.Generator().manual_seed(5))
    return [{"x": x[i], "labels": x[i].sum()} for i in range(n)]


def tokens(
    n: int = 32, length: int = 12, vocabulary: int = 50, padded: bool = False
) -> list[dict[str, torch.Tensor]]:
    """Rows for a language model; padded: of unequal counts of targets."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(1, vocabulary, (n, length), generator=generator)
    labels = ids.clone()
    if padded:
        for i in range(n):
            labels[i, 2 + (i * 5) % (length - 1) :] = -100
    return [{"input_ids": ids[i], "labels": labels[i]} for i in range(n)]


def gpt2(**config: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "n_positions": 16, "n_embd": 16, "n_layer": 2}
    drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    made = {**sizes, **drop, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**made, **config}))


def llama() -> nn.Module:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=2, max_position_embeddings=16,
        )
    )  # fmt: skip


class EventLog(TrainerCallback):
    """Every event, with step, epoch and the names of what it was given."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def event(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            given = tuple(sorted(kwargs))
            self.events.append((name, state.global_step, state.epoch, given))

        return event


@dataclasses.dataclass
class Run:
    """What a training run showed."""

    trainer: Any
    output: Any
    batches: list[dict[str, torch.Tensor]]
    events: list[tuple[Any, ...]]

    def logged(self, key: str) -> list[float]:
        return [h[key] for h in self.trainer.state.log_history if key in h]

    def weights(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.trainer.model.parameters()]


def arguments(cls: Any = None, **options: Any) -> Any:
    defaults = {
        "output_dir": tempfile.mkdtemp(prefix="ctrainer-test-"),
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return (cls or ctrainer.TrainingArguments)(**{**defaults, **options})


def make(
    cls: Any,
    model: Any,
    data: Any,
    *,
    callbacks: Any = (),
    parts: Any = None,
    **options: Any,
) -> Any:
    """A silent trainer of the class; options are TrainingArguments'."""
    theirs = cls.__module__.startswith("transformers") or not issubclass(
        cls, ctrainer.Trainer
    )
    args = arguments(transformers.TrainingArguments if theirs else None, **options)
    trainer = cls(
        model=model,
        args=args,
        train_dataset=data,
        callbacks=[*callbacks],
        **(parts or {}),
    )
    for callback in (transformers.PrinterCallback, ctrainer.PrinterCallback):
        trainer.remove_callback(callback)
    return trainer


def run(cls: Any, model: Any, data: Any, **options: Any) -> Run:
    """Train; every batch that the model sees is kept."""
    log = EventLog()
    batches: list[dict[str, torch.Tensor]] = []

    def keep(module: Any, args: Any, kwargs: Any) -> None:
        batches.append({k: v for k, v in kwargs.items() if k != "num_items_in_batch"})

    hook = model.register_forward_pre_hook(keep, with_kwargs=True)
    trainer = make(cls, model, data, callbacks=[log], **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        output = trainer.train()
    hook.remove()
    return Run(trainer, output, batches, log.events)
