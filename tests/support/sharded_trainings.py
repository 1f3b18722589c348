"""Runs of Trainer with a sharded model beside runs with the whole one, on each rank."""

from __future__ import annotations

import importlib.util
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import tiny
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

import ctrainer
from ctrainer.adapters.torch import checkpoints
from ctrainer.fsdp import (
    FullyShardedDataParallel,
    consolidate_sharded_model_checkpoints,
    save_shard,
    trained_model,
)

load_object = checkpoints.load_object


def updates(name: str) -> int:
    return 20 if name in ("gpt2", "bert") else 6


def bert() -> nn.Module:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 2, "intermediate_size": 32,
        "max_position_embeddings": 16, "num_labels": 3,
    }  # fmt: skip
    drop = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    config = transformers.BertConfig(**sizes, **drop)
    return transformers.BertForSequenceClassification(config)


def sentences(n: int = 31) -> list[dict[str, torch.Tensor]]:
    rows = tiny.tokens(n)
    return [{"input_ids": r["input_ids"], "labels": r["labels"][0] % 3} for r in rows]


def adapted_bert() -> nn.Module:
    """Its head is trained whole, above layers that are frozen but for adapters."""
    import peft

    torch.manual_seed(2)
    config = peft.LoraConfig(
        task_type="SEQ_CLS", r=2, target_modules=["query", "value"]
    )
    model: nn.Module = peft.get_peft_model(bert(), config)
    return model


class Quantized(nn.Module):
    """A frozen linear layer whose weight is of 8 bits, as bitsandbytes has those of 4:
    a state_dict() has scales, which nothing loads, and an evaluation on a processor
    with bfloat16 replaces the weight by a packed one, here with its rows reversed."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        absmax = layer.weight.detach().abs().amax(1, keepdim=True) / 127
        weight = (layer.weight.detach() / absmax).round().to(torch.int8)
        self.weight: Any = nn.Parameter(weight, requires_grad=False)
        self.weight.quant_state = SimpleNamespace(
            absmax=absmax, packing_format_for_cpu=False
        )
        self.bias = nn.Parameter(layer.bias.detach(), requires_grad=False)
        self.support_avx512bf16_for_cpu = True

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        state = self.weight.quant_state
        state.absmax = fn(state.absmax)
        return super()._apply(fn, recurse)

    def _turn(self) -> None:
        """Pack the weight, or unpack it."""
        state = self.weight.quant_state
        state.packing_format_for_cpu = not state.packing_format_for_cpu
        state.absmax = state.absmax.flip(0)
        self.weight.data = self.weight.data.flip(0)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep: bool) -> None:
        if self.weight.quant_state.packing_format_for_cpu:
            self._turn()
        super()._save_to_state_dict(destination, prefix, keep)
        destination[prefix + "weight.absmax"] = self.weight.quant_state.absmax

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = self.weight.quant_state
        packs = self.support_avx512bf16_for_cpu and not self.training
        if packs and not (x.requires_grad or state.packing_format_for_cpu):
            self._turn()
        weight = self.weight.to(x.dtype) * state.absmax.to(x.dtype)
        if state.packing_format_for_cpu:
            weight = weight.flip(0)
        return nn.functional.linear(x, weight, self.bias.to(x.dtype))


def quantized_bert() -> nn.Module:
    """Adapters on a base of which layers are quantized, and others bfloat16."""
    model: Any = adapted_bert()
    for layer in model.base_model.model.bert.encoder.layer:
        for part in (layer.intermediate, layer.output):
            part.dense = Quantized(part.dense)
    model.base_model.model.bert.embeddings.position_embeddings.bfloat16()
    return model  # type: ignore[no-any-return]


def narrow_gpt2() -> nn.Module:
    return tiny.gpt2().bfloat16()


def frozen_above() -> nn.Module:
    """A frozen pooler between a trained head and trained layers."""
    model: Any = bert()
    model.bert.pooler.requires_grad_(False)
    return model  # type: ignore[no-any-return]


# A model, its data, arguments of both runs, and those of the sharded one
GPT2 = (tiny.gpt2, tiny.tokens(32, padded=True))
BERT = (bert, sentences())
FOREIGN = (torch.optim.AdamW, {"lr": 1e-2})
LAMB = (ctrainer.optim.LAMB, {"lr": 1e-2, "max_grad_norm": 0.1})
CASES: dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any]]] = {
    "gpt2": (*GPT2, {"gradient_accumulation_steps": 2, "weight_decay": 0.1},
             {"fsdp": "full_shard auto_wrap"}),
    "bert": (*BERT, {"label_smoothing_factor": 0.1, "gradient_checkpointing": True,
                     "log_layer_grad_norms": True, "max_grad_norm": 0.3},
             {"fsdp": True, "fsdp_config": {"reshard_after_forward": False,
                                            "fsdp_min_num_params": 2000}}),
    "recomputed": (*GPT2, {"ema_decay": 0.9, "grad_norm_type": float("inf")},
                   {"fsdp": "shard_grad_op",
                    "fsdp_config": {"activation_checkpointing": True}}),
    "foreign": (*GPT2, {"parts": {"optimizer_cls_and_kwargs": FOREIGN}},
                {"fsdp": ["full_shard"],
                 "fsdp_transformer_layer_cls_to_wrap": "GPT2MLP"}),
    "each": (*GPT2, {"gradient_accumulation_steps": 2}, {
        "fsdp": True, "accelerator_config": {
            "gradient_accumulation_kwargs": {"sync_each_batch": True}}}),
    "SEQ_CLS": (adapted_bert, sentences(), {"log_layer_grad_norms": True},
                {"fsdp": "full_shard auto_wrap",
                 "fsdp_transformer_layer_cls_to_wrap": "BertLayer"}),
    "frozen above": (frozen_above, sentences(), {},
                     {"fsdp": "full_shard auto_wrap",
                      "fsdp_transformer_layer_cls_to_wrap": "BertLayer"}),
    "quantized base": (quantized_bert, sentences(), {},
                       {"fsdp": "full_shard auto_wrap",
                        "fsdp_transformer_layer_cls_to_wrap": "BertLayer"}),
    "narrow": (narrow_gpt2, tiny.tokens(32, padded=True),
               {"stochastic_rounding": True}, {"fsdp": "full_shard auto_wrap"}),
    "hybrid": (*GPT2, {}, {"fsdp": "hybrid_shard"}),
    "lamb": (*GPT2, {"parts": {"optimizer_cls_and_kwargs": LAMB}}, {"fsdp": True}),
    "adafactor": (*GPT2, {"optim": "adafactor"}, {"fsdp": True}),
    "bf16": (*GPT2, {"bf16": True}, {"fsdp": True}),
    "fp16": (*GPT2, {"fp16": True}, {
        "fsdp": True, "fsdp_config": {"xla": True, "xla_fsdp_settings": {
            "compute_dtype": "float16", "buffer_dtype": "float32"}}}),
}  # fmt: skip


def trainer(folder: str, name: str, sharded: bool = True, **options: Any) -> Any:
    make, data, both, own = CASES[name]
    given = {**both, **(own if sharded else {}), **options}
    parts = {"eval_dataset": data[:7], **given.pop("parts", {})}
    defaults = {
        "max_steps": updates(name), "per_device_train_batch_size": 2,
        "learning_rate": 1e-2, "ddp_timeout": 60,
        "train_sampling_strategy": "sequential",
    }  # fmt: skip
    return tiny.make(
        ctrainer.Trainer, make(), data, parts=parts, output_dir=folder,
        **{**defaults, **given},
    )  # fmt: skip


def evaluated(made: Any) -> dict[str, Any]:
    """An evaluation and a prediction, and how many units the model has then."""
    predicted = made.predict(made.train_dataset[:5]).predictions
    return {
        "eval": made.evaluate()["eval_loss"],
        "predicted": predicted.ravel().tolist(),
        "units": _units(made.model),
    }


def told(made: Any) -> dict[str, Any]:
    """What a run logged, and an evaluation and a prediction after it."""
    logs = [log for log in made.state.log_history if "grad_norm" in log]
    layers = [{k: v for k, v in log.items() if "norm/" in k} for log in logs]
    return {
        "losses": [log["loss"] for log in logs],
        "norms": [log["grad_norm"] for log in logs],
        "layers": layers[-1],
        "flos": made.state.total_flos,
        "parameters": made.get_num_trainable_parameters(),
        **evaluated(made),
        "rates": made.get_learning_rates(),
        "names": [name for name, _ in made.model.named_parameters()],
        "world": getattr(made.model, "world_size", 0),
        "generated": _generated(made.model),
    }


def _generated(model: Any) -> list[int]:
    """By beams of different lengths on the two ranks."""
    if not hasattr(model, "lm_head"):
        return []
    length = 2 + 3 * ctrainer.comm.world().rank
    ids = model.generate(torch.tensor([[3, 4]]), max_new_tokens=length, num_beams=2)
    return ids.ravel().tolist()


def _units(model: Any) -> int:
    units = getattr(model, "units", None)
    return len(units()) if callable(units) else 0


def both(folder: str, name: str) -> list[Any]:
    """What the whole and the sharded run told, which are evaluated before they train,
    and how far their weights differ; those of the sharded one are in NAME.pt then."""
    results, weights = [], []
    for sharded in (False, True):
        made = trainer(f"{folder}/{name}-{sharded}", name, sharded)
        before = evaluated(made)
        made.train()
        results.append({**told(made), "before": before})
        full = getattr(made.model, "full_state_dict", made.model.state_dict)
        state = {k: v for k, v in full().items() if not k.endswith("absmax")}
        weights.append({k: v.detach().clone() for k, v in state.items()})
    if ctrainer.comm.world().rank == 0:
        torch.save(weights[1], f"{folder}/{name}.pt")
    return [*results, furthest(*weights)]


def furthest(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """By how much two state_dicts differ at most."""
    assert found.keys() == expected.keys()
    pairs = [(found[name].cpu(), expected[name].cpu()) for name in expected]
    return max((one - other).abs().max().item() for one, other in pairs)


def saved(folder: str) -> dict[str, Any]:
    """A run that saves shards every 5 updates and loads the best one, and one that goes
    on from the checkpoint in the middle."""
    options: dict[str, Any] = {
        "save_strategy": "steps", "save_steps": 5, "eval_strategy": "steps",
        "eval_steps": 5, "load_best_model_at_end": True, "ema_decay": 0.8,
        "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}, "fsdp": True,
    }  # fmt: skip
    first = trainer(f"{folder}/saved", "gpt2", **options)
    first.train()
    first.save_model(f"{folder}/whole")
    again = trainer(f"{folder}/again", "gpt2", **options)
    again.train(resume_from_checkpoint=f"{folder}/saved/checkpoint-10")
    halves = [told(made)["losses"][-10:] for made in (first, again)]
    weights = [torch.cat([p.flatten() for p in t.model.parameters()])
               for t in (first, again)]  # fmt: skip
    moved = trainer(f"{folder}/moved", "gpt2", **{**options, "ema_decay": None})
    of_plain = []
    for _ in range(2):
        moved.train(resume_from_checkpoint=f"{folder}/plain/checkpoint-10")
        of_plain.append(told(moved)["losses"][-10:])
    return {
        "losses": halves,
        "same": torch.equal(*weights),
        "evals": [t.evaluate()["eval_loss"] for t in (first, again)],
        "last": next(
            log["eval_loss"]
            for log in first.state.log_history
            if log["step"] == 20 and "eval_loss" in log
        ),
        "best": first.state.best_metric,
        "best step": first.state.best_global_step,
        "of plain": of_plain,
    }


def of_whole_parameters(folder: str) -> list[list[float]]:
    """What of Adafactor's runs is the same: one that saves shards, and one that goes on
    from them."""
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3}
    first = trainer(f"{folder}/factored", "adafactor", **options)
    first.train()
    again = trainer(f"{folder}/factored again", "adafactor")
    again.train(resume_from_checkpoint=f"{folder}/factored/checkpoint-3")
    return [told(made)["losses"][-3:] for made in (first, again)]


def of_quantized_state(folder: str) -> dict[str, tuple[bool, list[float]]]:
    """Whether a run with compact or 8-bit state that is resumed from its shards ends as
    the run that saved them, and the last losses of that."""
    same = {}
    for optim in ("adamw_compact", "adamw_bnb_8bit"):
        options = {"save_strategy": "steps", "save_steps": 10, "fsdp": True,
                   "optim": optim}  # fmt: skip
        first = trainer(f"{folder}/{optim}", "gpt2", **options)
        first.train()
        again = trainer(f"{folder}/{optim} again", "gpt2", **options)
        again.train(resume_from_checkpoint=f"{folder}/{optim}/checkpoint-10")
        weights = [torch.cat([p.flatten() for p in t.model.parameters()])
                   for t in (first, again)]  # fmt: skip
        same[optim] = torch.equal(*weights), told(first)["losses"][-10:]
    return same


def of_quantized_base(folder: str) -> dict[str, Any]:
    """What a run tells that evaluates and saves shards, one that resumes from them, and
    the whole one; whether weights are packed in the first; and the error of a run with
    another base."""
    name = "quantized base"
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3,
                               "eval_strategy": "steps", "eval_steps": 3}  # fmt: skip
    first = trainer(f"{folder}/{name}", name, **options)
    first.train()
    found: dict[str, Any] = {"saved": told(first)}
    layers = [m for m in first.model.modules() if isinstance(m, Quantized)]
    found["packed"] = [m.weight.quant_state.packing_format_for_cpu for m in layers]
    again = trainer(f"{folder}/{name} again", name, **options)
    again.train(resume_from_checkpoint=f"{folder}/{name}/checkpoint-3")
    found["resumed"] = told(again)
    whole = trainer(f"{folder}/{name} whole", name, sharded=False, **options)
    whole.train()
    found["whole"] = told(whole)
    other = trainer(f"{folder}/{name} other", name, **options)
    for module in other.model.modules():
        if isinstance(module, Quantized):
            module.weight.quant_state.absmax *= 2
    try:
        other.train(resume_from_checkpoint=f"{folder}/{name}/checkpoint-3")
    except ValueError as error:
        found["other"] = str(error)
    return found


def cut_on_blocks(folder: str) -> dict[str, Any]:
    """Whether sharded runs with 8-bit and compact state end as whole ones do, and the
    blocks of their shards; and the same of one that resumes from shards that were cut
    elsewhere, beside the run that saved them."""
    eight: dict[str, Any] = {"optim": "adamw_8bit", "optim_args": "min_8bit_size=1"}
    found = {}
    for options in (eight, {"optim": "adamw_compact"}):
        ends = [_end(_odd(folder, sharded, **options)) for sharded in (False, True)]
        found[options["optim"]] = _alike(*ends)

    class Overriding(ctrainer.Trainer):
        def create_optimizer(self, model: Any = None) -> Any:
            params = (self.model if model is None else model).parameters()
            self.optimizer = ctrainer.optim.AdamW8bit(params, **given)
            return self.optimizer

    class Named(ctrainer.Trainer):
        @staticmethod
        def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> Any:
            return ctrainer.optim.AdamW8bit, given

    class Elsewhere(ctrainer.optim.AdamW8bit):
        state_block = None

    given = {"lr": 1e-2, "min_8bit_size": 1, "weight_decay": 0.0}
    made = {"optimizer_cls_and_kwargs": (partial(ctrainer.optim.AdamW8bit), given)}
    for name, kind, parts in (
        ("create_optimizer", Overriding, {}),
        ("get_optimizer_cls_and_kwargs", Named, {}),
        ("a function", ctrainer.Trainer, made),
    ):
        ends = [
            _end(_odd(folder, sharded, kind, parts=parts)) for sharded in (False, True)
        ]
        found[name] = _alike(*ends)

    parts = {"optimizer_cls_and_kwargs": (Elsewhere, given)}
    first = _end(_odd(f"{folder}/cut", parts=parts, save_strategy="steps"))
    again = _end(_odd(folder, **eight), f"{folder}/cut/checkpoint-2")
    found["resumed"] = _alike(first, again)
    return found


def _odd(
    folder: str, sharded: bool = True, kind: Any = ctrainer.Trainer, **options: Any
) -> Any:
    """A run whose layers have cuts within scales, wherever nobody looks at these."""
    model = tiny.gpt2(n_embd=15, n_head=1)
    given: dict[str, Any] = {
        "max_grad_norm": 0.0, "max_steps": 4, "save_steps": 2, "learning_rate": 1e-2,
        "output_dir": folder, "fsdp": "full_shard auto_wrap" if sharded else None,
    }  # fmt: skip
    return tiny.make(kind, model, tiny.tokens(), **{**given, **options})


def _end(made: Any, checkpoint: str | None = None) -> tuple[int, dict[str, Any]]:
    made.train(resume_from_checkpoint=checkpoint)
    if not hasattr(made.model, "get_shard_metadata"):
        return 0, made.model.state_dict()
    full = made.model.full_state_dict()
    block = made.model.get_shard_metadata()["block_size"]
    return block, {name: value.clone() for name, value in full.items()}


def _alike(
    first: tuple[int, dict[str, Any]], again: tuple[int, dict[str, Any]]
) -> tuple[bool, int]:
    return furthest(first[1], again[1]) == 0.0, again[0]


def of_other_units(folder: str) -> list[float]:
    """A run that goes on from the shards of `saved` with other units."""
    config = {"transformer_layer_cls_to_wrap": "GPT2Attention,GPT2MLP"}
    made = trainer(f"{folder}/other", "gpt2", fsdp=True, fsdp_config=config)
    made.train(resume_from_checkpoint=f"{folder}/saved/checkpoint-10")
    return told(made)["losses"][-10:]


def older(folder: str) -> Any:
    """A run that goes on from a checkpoint with each parameter sharded by itself, made
    of that of `saved`: its last losses, and an evaluation of its average."""
    source, target = f"{folder}/saved/checkpoint-10", f"{folder}/older/checkpoint-10"
    group = ctrainer.comm.world()
    if group.rank == 0:
        kept = shutil.ignore_patterns("shard-*", "weight_average_*", "*_manifest.json")
        shutil.copytree(source, target, ignore=kept)
    group.barrier()
    _save_each_by_itself(source, target)
    group.barrier()
    made = trainer(f"{folder}/older", "gpt2", fsdp=True, ema_decay=0.8)
    made.train(resume_from_checkpoint=target)
    return [told(made)["losses"][-10:], made.evaluate()["eval_loss"]]


def _save_each_by_itself(source: str, target: str) -> None:
    """Write this rank's files of a checkpoint as releases did that had no flat rows."""
    model = FullyShardedDataParallel(
        tiny.gpt2(), on_neuron=False, auto_wrap_policy=_is_layer
    )
    weights, _ = consolidate_sharded_model_checkpoints(
        f"{source}/shard-", "*.safetensors", save_model=False
    )
    model.load_full_state_dict(weights)
    full = trained_model._whole_optimizer(source)
    assert full is not None
    shards = dict(model.get_original_names_and_sharded_parameters())
    groups = [
        {"params": [shards[n] for n in g["params"]]} for g in full["param_groups"]
    ]
    optimizer = torch.optim.AdamW(groups)
    state = model.shard_full_optim_state_dict(full, model, optim=optimizer)
    keys = {id(shard): key for key, shard in model.state_dict(keep_vars=True).items()}
    for own, group in zip(state["param_groups"], groups, strict=True):
        own["param_names"] = [keys[id(shard)] for shard in group["params"]]
    content = {"model": model.state_dict(), "optimizer": state,
               "shard_metadata": model.get_shard_metadata()}  # fmt: skip
    name = trained_model.file_name(model.rank, model.world_size)
    save_shard(content, f"{target}/{name}")
    average = ctrainer.average.EMA(model, 0.8)
    found = trained_model.average_state(model, average, source, load_object)
    torch.save(found, f"{target}/weight_average_{model.rank}.pt")


def _is_layer(module: nn.Module, recurse: bool, **unused: Any) -> bool:
    return recurse or type(module).__name__ == "GPT2Block"


def adapted(folder: str) -> Any:
    """Losses with adapters, and how far those that were saved differ; None: no peft."""
    if importlib.util.find_spec("peft") is None:
        return None
    import peft

    losses, weights = [], []
    for sharded in (False, True):
        torch.manual_seed(1)
        config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
        model = peft.get_peft_model(tiny.gpt2(), config)
        own = f"{folder}/adapted-{sharded}"
        made = tiny.make(
            ctrainer.Trainer, model, tiny.tokens(32), output_dir=own, max_steps=3,
            per_device_train_batch_size=2, learning_rate=1e-2, ddp_timeout=60,
            **({"fsdp": True} if sharded else {}),
        )  # fmt: skip
        made.train()
        made.save_model(f"{own}/saved")
        losses.append([log["loss"] for log in made.state.log_history if "loss" in log])
    ctrainer.comm.world().barrier()
    for sharded in (False, True):
        path = f"{folder}/adapted-{sharded}/saved/adapter_model.safetensors"
        weights.append(load_file(path))
    return [*losses, len(weights[0]), furthest(*weights)]


def coded(folder: str) -> dict[str, Any]:
    """A run in codes, one that goes on from its middle, and one that does without what
    they had missed until then."""
    config: dict[str, Any] = {"gather_bits": 8, "reduce_bits": "8"}
    options: dict[str, Any] = {
        "max_steps": 4, "save_strategy": "steps", "save_steps": 2, "fsdp": True,
        "fsdp_config": config,
    }  # fmt: skip
    made = [trainer(f"{folder}/coded", "gpt2", **options)]
    made[0].train()
    middle = f"{folder}/coded/checkpoint-2"
    for feedback in (True, False):
        config["error_feedback"] = feedback
        made.append(trainer(f"{folder}/coded-{feedback}", "gpt2", **options))
        made[-1].train(resume_from_checkpoint=middle)
    config["error_feedback"] = True
    made.append(trainer(f"{folder}/coded-older", "gpt2", **options))
    made[-1].train(resume_from_checkpoint=_with_older_names(middle))
    weights = [torch.cat([p.flatten() for p in t.model.parameters()]) for t in made]
    return {
        "same": [torch.equal(weights[0], other) for other in weights[1:]],
        "bits": [made[0].model.gather_bits, made[0].model.reduce_bits],
    }


def _with_older_names(checkpoint: str) -> str:
    """A copy of a checkpoint whose residuals have the file name of older releases."""
    copy, group = f"{checkpoint}-older", ctrainer.comm.world()
    if group.rank == 0:
        shutil.copytree(checkpoint, copy, ignore=shutil.ignore_patterns("*manifest*"))
        for file in sorted(Path(copy).glob("residual_*.pt")):
            file.rename(file.with_name(f"code_feedback_{file.name[9:]}"))
    group.barrier()
    return copy


def plain(folder: str) -> list[float]:
    """A run with the whole model that saves, for a sharded one to go on from."""
    made = trainer(f"{folder}/plain", "gpt2", False, save_strategy="steps",
                   save_steps=10)  # fmt: skip
    made.train()
    return told(made)["losses"]


class Failing(ctrainer.TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 12:
            raise ArithmeticError


def failed(folder: str) -> dict[str, Any]:
    """The losses of the trainer of a run that has failed, as it goes on from a
    checkpoint of `plain`, or what it says instead."""
    found: dict[str, Any] = {}
    for name in ("whole", "sharded", "made anew"):
        made = trainer(f"{folder}/failed", "gpt2", name != "whole")
        made.model_init = (lambda: tiny.gpt2()) if name == "made anew" else None
        made.add_callback(Failing)
        errors = []
        for _ in range(2):
            try:
                made.train(resume_from_checkpoint=f"{folder}/plain/checkpoint-10")
            except (ArithmeticError, RuntimeError) as error:
                errors.append(error)  # whose frames have the run's objects
            made.remove_callback(Failing)
        found[name] = str(errors[1]) if errors[1:] else told(made)["losses"][-10:]
    return found


class Loading(ctrainer.Trainer):
    def _load_from_checkpoint(self, folder: str) -> None:  # type: ignore[override]
        self.model.load_state_dict(load_file(f"{folder}/model.safetensors"), False)


def loaded(folder: str) -> list[list[float]]:
    """The losses behind a checkpoint that an override loads into whole models: into one
    that is not yet sharded, and into the sharded one of the run before."""
    made = trainer(f"{folder}/loaded", "gpt2")
    made.__class__ = Loading
    losses = []
    for _ in range(2):
        made.train(resume_from_checkpoint=f"{folder}/plain/checkpoint-10")
        losses.append(told(made)["losses"][-10:])
    return losses


class Spoiling(ctrainer.Trainer):
    """Rank 1's third batch gives a loss that is not a number."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kw: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **kw)
        spoils = self.args.process_index == 1 and self.state.global_step == 2
        return loss * float("nan") if spoils else loss


def spoiled(folder: str) -> Any:
    """How many updates were skipped, and are the weights numbers?"""
    args = trainer(f"{folder}/spoiled", "gpt2", max_steps=4).args
    args.gradient_accumulation_steps = 1
    made = Spoiling(tiny.gpt2(), args, train_dataset=tiny.tokens(32))
    made.remove_callback(ctrainer.PrinterCallback)
    metrics = made.train().metrics
    finite = all(p.isfinite().all() for p in made.model.parameters())
    return [metrics["nonfinite_steps"], bool(finite)]


class Saving(ctrainer.Trainer):
    """Saves as other packages' trainers do, which know nothing of sharding."""

    def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
        self.model.save_pretrained(output_dir)
        torch.save(self.model.state_dict(), f"{output_dir}/own.pt")


def saved_by_others(folder: str) -> list[float]:
    """How far what they saved is from the weights at the end; it is evaluated after
    that, to see that the model is sharded as before."""
    config = {"state_dict_type": "SHARDED_STATE_DICT"}
    args = trainer(f"{folder}/others", "gpt2", max_steps=2, fsdp_config=config).args
    args.save_strategy, args.save_steps = "steps", 2
    data = tiny.tokens(32)
    made = Saving(tiny.gpt2(), args, train_dataset=data, eval_dataset=data[:4])
    made.remove_callback(ctrainer.PrinterCallback)
    made.train()
    before = made.evaluate()["eval_loss"]
    together, checkpoint = f"{folder}/together", f"{folder}/others/checkpoint-2"
    load = transformers.GPT2LMHeadModel.from_pretrained
    made.model.save_pretrained(together)
    # At once: no rank comes back before the first has written the files.
    found = [load(path).state_dict() for path in (together, checkpoint)]
    found.append(torch.load(f"{checkpoint}/own.pt", weights_only=True))
    weights = made.model.full_state_dict()
    after = made.evaluate()["eval_loss"]
    return [abs(after - before), *(furthest(state, weights) for state in found)]


def files(folder: str) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())
