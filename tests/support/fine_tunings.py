"""A table of fine-tunings of a tiny Llama: what is trained, tied, computed anew and
sharded differs. transformers' Trainer runs them in one process, ours on the shards of
two, on the same rows.
"""

from __future__ import annotations

import warnings
from typing import Any

import peft
import tiny
import torch
import transformers
from dealing import Case, deal
from torch import nn

import ctrainer

COUNT, STEPS, ROWS, WORLD = 120, 3, 4, 2  # rows of a micro-batch of all ranks
Values = dict[str, torch.Tensor]

AXES: dict[str, tuple[Any, ...]] = {
    "task": ("CAUSAL_LM", "SEQ_CLS"),
    "trained": ("all", "lora", "lora", "dora", "modules_to_save", "above a frozen "
                "projector", "frozen embeddings", "head"),
    "tied": (False, True),
    "units": ("root", "LlamaDecoderLayer", "LlamaDecoderLayer",
              "LlamaAttention,LlamaMLP"),
    "fsdp": ("full_shard auto_wrap", "shard_grad_op auto_wrap"),
    "recompute": ("no", "no", "plain", "reentrant"),
    "micro": (1, 2),
    "max_grad_norm": (0.0, 0.5),
}  # fmt: skip


def table() -> list[Case]:
    return deal("fine-tunings", AXES, COUNT)


def build(case: Case) -> nn.Module:
    """The model, with gradients of all that is trained well above rounding."""
    torch.manual_seed(case.number)
    causal = case["task"] == "CAUSAL_LM"
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=16, initializer_range=0.2,
        tie_word_embeddings=case["tied"] and causal, pad_token_id=0, num_labels=3,
    )  # fmt: skip
    kind = "LlamaForCausalLM" if causal else "LlamaForSequenceClassification"
    model: Any = getattr(transformers, kind)(config)
    head = "lm_head" if causal else "score"
    trained = case["trained"]
    if trained in ("lora", "dora", "modules_to_save"):
        model = peft.get_peft_model(model, adapter(case, head))
    elif trained == "head":
        model.model.requires_grad_(False)
        getattr(model, head).requires_grad_(True)  # also where it is tied
    elif trained == "frozen embeddings":
        model.model.embed_tokens.requires_grad_(False)
    elif trained == "above a frozen projector":
        projector = nn.Linear(16, 16).requires_grad_(False)
        layers = (projector, nn.Tanh(), getattr(model, head))
        setattr(model, head, nn.Sequential(*layers))
    if case["recompute"] == "reentrant":
        model.enable_input_require_grads()  # such a checkpoint asks its input
    found: nn.Module = model
    return found


def adapter(case: Case, head: str) -> Any:
    return peft.LoraConfig(
        task_type=case["task"],
        r=2,
        target_modules=["q_proj", "v_proj", "down_proj"],
        use_dora=case["trained"] == "dora",
        modules_to_save=[head] if case["trained"] == "modules_to_save" else None,
        init_lora_weights=False,  # else half of the gradients would be zeros
    )


def data(case: Case) -> list[dict[str, torch.Tensor]]:
    rows = tiny.tokens(ROWS * STEPS * 2, padded=case["task"] == "CAUSAL_LM")
    if case["task"] == "CAUSAL_LM":
        return rows
    return [{"input_ids": r["input_ids"], "labels": r["labels"][0] % 3} for r in rows]


def options(case: Case, *, sharded: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "optim": "sgd", "learning_rate": 0.05, "lr_scheduler_type": "constant",
        "max_steps": STEPS, "gradient_accumulation_steps": case["micro"],
        "max_grad_norm": case["max_grad_norm"],
        "train_sampling_strategy": "sequential",
        "per_device_train_batch_size": ROWS // WORLD if sharded else ROWS,
    }  # fmt: skip
    if case["task"] == "SEQ_CLS" and not sharded:
        # The classifiers' losses are means of a micro-batch, of which transformers
        # adds up as many as there are.
        found["per_device_train_batch_size"] *= case["micro"]
        found["gradient_accumulation_steps"] = 1
    if case["recompute"] != "no":
        reentrant = case["recompute"] == "reentrant"
        found["gradient_checkpointing"] = True
        found["gradient_checkpointing_kwargs"] = {"use_reentrant": reentrant}
    if sharded:
        found |= {"fsdp": case["fsdp"], "ddp_timeout": 60}
        if case["units"] == "root":
            found["fsdp"] = case["fsdp"].split()[0]
        else:
            found["fsdp_transformer_layer_cls_to_wrap"] = case["units"]
    return found


class After(transformers.TrainerCallback):  # type: ignore[misc]
    """The whole parameters after each update."""

    def __init__(self) -> None:
        self.values: list[Values] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model = kwargs["model"]
        full = getattr(model, "full_state_dict", model.state_dict)()
        self.values.append({name: v.detach().clone() for name, v in full.items()})


def train(case: Case, folder: str, *, sharded: bool) -> tuple[list[Values], Any]:
    """The parameters after every update, and the norms of the gradients."""
    after = After()
    made = tiny.make(
        ctrainer.Trainer if sharded else transformers.Trainer, build(case), data(case),
        callbacks=[after], output_dir=folder, **options(case, sharded=sharded),
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        made.train()
    logs = made.state.log_history
    return after.values, [log["grad_norm"] for log in logs if "grad_norm" in log]


def compare(case: Case, found: Any, expected: Any, before: Values) -> None:
    """Raises AssertionError where an update or a norm differs by more than 1e-5 of the
    largest one."""
    assert len(found[0]) == len(expected[0]) == STEPS, case
    for norm, wanted in zip(found[1], expected[1], strict=True):
        assert abs(norm - wanted) <= 1e-5 * wanted, f"{norm}, not {wanted}: {case}"
    for step, (values, wanted) in enumerate(zip(found[0], expected[0], strict=True)):
        assert values.keys() == wanted.keys(), case
        moved = max((wanted[n] - before[n]).abs().max().item() for n in wanted)
        assert moved > 1e-3, f"nothing is trained: {case}"
        for name, value in values.items():
            off = (value.cpu() - wanted[name]).abs().max().item()
            assert off <= 1e-5 * max(moved, wanted[name].abs().max().item()), (
                f"{name} is off by {off} after update {step}: {case}"
            )
        frozen = [n for n in values if torch.equal(wanted[n], before[n])]
        assert all(torch.equal(values[n], before[n]) for n in frozen), case
