"""The attention of packed rows: logits, gradients and runs beside those of each
sequence alone, in transformers' eager attention, and of padded batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from draws import draws
from torch.overrides import TorchFunctionMode

from ctrainer.adapters import _torch_packing as packing

transformers = pytest.importorskip("transformers")
VOCABULARY, LONGEST = 60, 128
SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": LONGEST, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
SHARED = {"num_key_value_heads": 2, "head_dim": 8}
MIXED = ["sliding_attention", "full_attention"]
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", SHARED),
    "qwen2": ("Qwen2ForCausalLM", {"num_key_value_heads": 2}),
    "qwen3": ("Qwen3ForCausalLM", SHARED),
    "mistral": ("MistralForCausalLM", {**SHARED, "sliding_window": 9}),
    "gemma2": (
        "Gemma2ForCausalLM",
        {**SHARED, "attn_logit_softcapping": None, "sliding_window": 9},
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        {**SHARED, "sliding_window": 9, "layer_types": MIXED},
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    ),
    "gpt_neox": ("GPTNeoXForCausalLM", {}),
    "phi": ("PhiForCausalLM", {}),
}


def make(kind: str, attention: str = "sdpa", **given: Any) -> Any:
    torch.manual_seed(0)
    name, options = KINDS[kind]
    cls = getattr(transformers, name)
    config = cls.config_class(**{**SMALL, **options, **given}, use_cache=False)
    config._attn_implementation = attention
    return cls(config)


def drawn_lengths(seed: int) -> list[int]:
    """A length of 1, one sequence, all equal, very uneven ones, and drawn ones."""
    rng = np.random.default_rng(seed)
    named = [[1], [1, 1, 1], [7], [5] * 4, [1, 100, 2, 33, 3, 66, 1], [70, 71, 45, 9]]
    if seed < len(named):
        return named[seed]
    top = rng.choice([4, 12, 40, LONGEST])
    return [int(n) for n in rng.integers(1, top, rng.integers(1, 12))]


def rows_of(lengths: list[int]) -> list[dict[str, list[int]]]:
    rng = np.random.default_rng(len(lengths))
    return [{"input_ids": rng.integers(3, VOCABULARY, n).tolist()} for n in lengths]


class Attentions(TorchFunctionMode):
    """Of each call: shape of the queries, has it a mask, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[tuple[int, ...], bool, float]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            has_mask = kwargs.get("attn_mask") is not None
            self.calls.append((tuple(args[0].shape), has_mask, kwargs["dropout_p"]))
        return func(*args, **kwargs)


def packed_logits(model: Any, rows: list[dict[str, list[int]]]) -> torch.Tensor:
    batch = packing.PackedCollator(model)([dict(row) for row in rows])
    del batch["labels"]
    logits: torch.Tensor = model(**batch).logits[0]
    return logits


def logits_alone(model: Any, rows: list[dict[str, list[int]]]) -> torch.Tensor:
    ids = [torch.tensor([row["input_ids"]]) for row in rows]
    return torch.cat([model(input_ids=of).logits[0] for of in ids])


def gradients(model: Any, logits: torch.Tensor) -> list[torch.Tensor]:
    """Of a loss that weighs each logit differently."""
    weights = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype)
    loss = (logits.tanh() * weights.view_as(logits)).sum()
    named = [p for p in model.parameters() if p.requires_grad]
    return [
        g for g in torch.autograd.grad(loss, named, allow_unused=True) if g is not None
    ]


def begun(model: Any) -> packing.Packing:
    found = packing.check_packs(model, None)
    assert found is not None
    return found


def check_near(mine: torch.Tensor, other: torch.Tensor, norms: int) -> None:
    """Eager attention and norms round a float64 to float32 on their way, some ten times
    in two layers with five norms: 10 * 2**-24 of the largest value, and four times
    that; more norms round more often. Of a token that sees itself alone the gradients
    of query and key are 0, or float64's rounding.
    """
    roundings = 10 * (norms + 2) / 7  # an attention a layer
    bound = 4 * roundings * 2**-24 * other.abs().max() + 2**-44
    assert bool((mine - other).abs().max() <= bound)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_gradients_are_those_of_each_sequence_alone(kind: str) -> None:
    model = make(kind).double().train()
    eager = make(kind, "eager").double().train()
    eager.load_state_dict(model.state_dict())
    norms = sum("Norm" in type(module).__name__ for module in model.modules())
    begun(model)
    for seed in range(draws(8, 60)):
        rows = rows_of(drawn_lengths(seed))
        with Attentions() as seen:
            mine = packed_logits(model, rows)
        other = logits_alone(eager, rows)
        check_near(mine, other, norms)
        pairs = zip(gradients(model, mine), gradients(eager, other), strict=True)
        for own, alone in pairs:
            check_near(own, alone, norms)
        longest = max(len(row["input_ids"]) for row in rows)
        windowed = kind in ("mistral", "gemma2", "gemma3") and longest > 9
        if len(rows) > 1 and not windowed:
            assert max(shape[2] for shape, _, _ in seen.calls) <= max(longest, 32)


def test_sequences_over_32_tokens_have_no_mask_and_little_padding() -> None:
    model = make("llama", num_hidden_layers=1)
    begun(model)
    for seed in range(draws(10, 200)):
        rng = np.random.default_rng(seed)
        lengths = [int(n) for n in rng.integers(1, LONGEST, 12)]
        with Attentions() as seen:
            packed_logits(model, rows_of(lengths))
        long = [n for n in lengths if n > 32]
        short = [n for n in lengths if n <= 32]
        alone = [shape for shape, has_mask, _ in seen.calls if shape[2] > 32]
        joined = [shape for shape, _, _ in seen.calls if shape[2] <= 32]
        assert not any(has_mask for shape, has_mask, _ in seen.calls if shape[2] > 32)
        assert sum(shape[0] for shape in alone) == len(long)
        places = sum(shape[0] * shape[2] for shape in alone)
        assert sum(long) <= places < sum(long) * 4 / 3 + 1
        # Each row but the last is over half full.
        assert sum(shape[0] for shape in joined) <= 2 * sum(short) / 32 + 1


def test_attention_drops_what_sdpa_drops() -> None:
    model = make("llama", attention_dropout=0.25).train()
    begun(model)
    with Attentions() as seen:
        packed_logits(model, rows_of([3, 50]))
    assert seen.calls
    assert {dropout for _, _, dropout in seen.calls} == {0.25}


def test_padded_batches_and_other_masks_are_sdpas() -> None:
    """Bit for bit, in the forms that generation, evaluation and windows have."""
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCABULARY, (3, 20), generator=rng)
    padding = torch.ones_like(ids)
    padding[1, 12:] = padding[2, :5] = 0
    cached = {"past_key_values": None, "use_cache": True}
    positions = torch.cat([torch.arange(20), torch.arange(20)])[None]
    batches: list[dict[str, Any]] = [
        {"input_ids": ids, "attention_mask": padding},
        {"input_ids": ids},
        {"input_ids": ids[:1], "attention_mask": torch.ones_like(ids[:1])},
        {"input_ids": ids, **cached},
        {"input_ids": ids[:2].reshape(1, 40), "position_ids": positions},
    ]
    for kind in ("llama", "mistral", "gpt2"):
        model = make(kind).eval()
        with torch.no_grad():
            before = [model(**batch).logits for batch in batches]
            one = model(input_ids=ids[:, :6], **cached)
            one = model(input_ids=ids[:, 6:], past_key_values=one.past_key_values)
            held = begun(model)
            same = 5 if kind == "mistral" else 4  # its window cuts the packed row
            for logits, batch in zip(before[:same], batches[:same], strict=True):
                assert torch.equal(model(**batch).logits, logits)
            two = model(input_ids=ids[:, :6], **cached)
            two = model(input_ids=ids[:, 6:], past_key_values=two.past_key_values)
            assert torch.equal(one.logits, two.logits)
            held.end()
            for logits, batch in zip(before, batches, strict=True):
                assert torch.equal(model(**batch).logits, logits)


def test_configs_within_the_model_get_their_attention_back() -> None:
    model = make("gemma3")
    other = make("llama", "eager")
    model.other = other
    held = begun(model)
    assert model.config._attn_implementation != "sdpa"
    held.end()
    assert model.config._attn_implementation == "sdpa"
    assert other.config._attn_implementation == "eager"


def test_a_model_that_computes_with_its_mask_keeps_its_attention() -> None:
    """Its mask is a tensor, as it is without packing."""
    model = make("llama")

    def halve(module: Any, args: Any, given: dict[str, Any]) -> Any:
        mask = given["attention_mask"]
        return args, {**given, "attention_mask": None if mask is None else mask & True}

    for layer in model.model.layers:
        layer.register_forward_pre_hook(halve, with_kwargs=True)
    assert packing.check_packs(model, None) is None
    assert model.config._attn_implementation == "sdpa"


def test_an_error_of_the_check_leaves_the_config_as_it_was() -> None:
    model = make("llama")

    def fail(module: Any, args: Any) -> None:
        if model.config._attn_implementation != "sdpa":
            raise RuntimeError("of the model")

    model.model.norm.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="of the model"):
        packing.check_packs(model, None)
    assert model.config._attn_implementation == "sdpa"
