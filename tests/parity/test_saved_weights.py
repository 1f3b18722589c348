"""Weights that are loaded are the ones that were trained, to the bit, whatever names
transformers saves them under."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

import ranks  # noqa: E402
import sharded_weights  # noqa: E402
import tiny  # noqa: E402
import tiny_architectures  # noqa: E402
import torch  # noqa: E402
from draws import draws  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

import ctrainer  # noqa: E402
from ctrainer.adapters import _torch_checkpoint as checkpoints  # noqa: E402
from ctrainer.trainer import shards  # noqa: E402

State = dict[str, torch.Tensor]


class Weights(ctrainer.Trainer):
    """Trains the weights alone, since each architecture has inputs of its own; the
    first of its evaluations is the best one. Keeps the weights of each step."""

    shards = "1GB"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: dict[int, State] = {}

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.seen.setdefault(self.state.global_step, state_of(model))
        trained = [p for p in model.parameters() if p.requires_grad]
        return sum((p**2).mean() for p in trained)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        metrics = {"eval_loss": float(self.state.global_step)}
        self.log(metrics)
        return metrics

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        self.model.save_pretrained(output_dir, max_shard_size=self.shards)


class Sharded(Weights):
    shards = "20KB"


class Whole(Weights):
    _save = ctrainer.Trainer._save


def state_of(model: Any) -> State:
    return {name: t.clone() for name, t in model.state_dict().items()}


def differing(found: State, expected: State) -> list[str]:
    assert found.keys() == expected.keys()
    return [n for n, t in found.items() if not same_bits(t, expected[n])]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    flat = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*flat)


def trainer(cls: Any, model: Any, folder: Path, **options: Any) -> Any:
    rows = [{"x": torch.zeros(1)} for _ in range(3)]
    return tiny.make(
        cls, model, rows, output_dir=str(folder), max_steps=3, save_strategy="steps",
        save_steps=1, per_device_train_batch_size=1, remove_unused_columns=False,
        learning_rate=1e-2, **options,
    )  # fmt: skip


def check(name: str, model: Any, cls: Any, folder: Path) -> bool:
    """Best model, resumed run, and save_model() read by from_pretrained(); whether that
    gives all weights back: transformers zeroes the padding's in a few models."""
    run = trainer(
        cls, model, folder, eval_strategy="steps", eval_steps=1,
        load_best_model_at_end=True, parts={"eval_dataset": [{}]},
    )  # fmt: skip
    run.train()
    assert not differing(state_of(run.model), run.seen[1]), f"{name}: best model"

    other = tiny_architectures.make(name, seed=1)
    addresses = [p.data_ptr() for p in other.parameters()]
    resumed = trainer(cls, other, folder / "on")
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-1"))
    assert not differing(resumed.seen[1], run.seen[1]), f"{name}: resumed"
    assert not differing(resumed.seen[2], run.seen[2]), f"{name}: trained on"
    assert addresses == [p.data_ptr() for p in other.parameters()], name

    run.save_model(str(folder / "saved"))
    if cls is Sharded:
        assert len(list((folder / "saved").glob("model-*.safetensors"))) > 1, name
    read = type(model).from_pretrained(folder / "saved").state_dict()
    if not differing(read, state_of(run.model)):
        return True
    run.model.save_pretrained(folder / "theirs")
    theirs = type(model).from_pretrained(folder / "theirs").state_dict()
    assert not differing(read, theirs), f"{name}: from_pretrained"
    return False


def test_every_architecture_gets_its_weights_back(tmp_path: Path) -> None:
    count = draws(8, 200)
    changed = []
    for number, (name, model) in enumerate(tiny_architectures.drawn(count)):
        cls = (Whole, Sharded)[number % 2]
        if not check(name, model, cls, tmp_path / name):
            changed.append(name)
        shutil.rmtree(tmp_path / name)
    assert len(changed) <= count // 20, changed


@pytest.mark.parametrize("cls", [Whole, Sharded])
@pytest.mark.parametrize("name", ["ViTForImageClassification", "MixtralForCausalLM"])
def test_a_model_that_was_read_goes_on_from_one_that_was_made(
    name: str, cls: Any, tmp_path: Path
) -> None:
    """A model remembers the conversions it was read with, and saves by them."""
    first = trainer(cls, tiny_architectures.make(name), tmp_path / "first")
    first.train()
    for original in (True, False):
        folder = tmp_path / f"saved-{original}"
        tiny_architectures.make(name, seed=1).save_pretrained(
            folder, save_original_format=original
        )
        read = type(first.model).from_pretrained(folder)
        other = trainer(cls, read, tmp_path / f"on-{original}")
        other.train(resume_from_checkpoint=str(tmp_path / "first/checkpoint-1"))
        assert not differing(other.seen[1], first.seen[1])
        back = tiny_architectures.make(name, seed=2)
        back = trainer(cls, back, tmp_path / f"back-{original}")
        back.train(resume_from_checkpoint=str(tmp_path / f"on-{original}/checkpoint-3"))
        assert not differing(state_of(back.model), state_of(other.model))


@pytest.mark.parametrize("name", ["ViTForImageClassification", "MixtralForCausalLM"])
def test_a_sharded_model_reads_and_writes_the_same_names(
    name: str, tmp_path: Path
) -> None:
    model = tiny_architectures.make(name)
    model.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    other = tiny_architectures.make(name, seed=1)
    options = {"fsdp": True, "malloc_tuning": False, "ddp_timeout": 60}
    made = tiny.make(ctrainer.Trainer, other, [], output_dir=str(tmp_path), **options)
    shards.shard_model(made, None)
    shards.load_sharded(made, str(tmp_path / "saved"))
    assert not differing(made.model.full_state_dict(), state_of(model))
    made.save_model(str(tmp_path / "again"))
    again = type(model).from_pretrained(tmp_path / "again")
    assert not differing(state_of(again), state_of(model))
    (tmp_path / "saved/model.safetensors.index.json").unlink()
    save_file({"x": torch.ones(2)}, tmp_path / "saved/model.safetensors")
    with pytest.raises(ValueError, match=r"lacks weights of the model: .* and has"):
        shards.load_sharded(made, str(tmp_path / "saved"))


def test_a_model_of_8_bit_floats_is_not_sharded(tmp_path: Path) -> None:
    model = tiny.gpt2()
    weight = model.transformer.h[0].mlp.c_fc.weight
    weight.requires_grad_(False)
    weight.data = torch.zeros(weight.shape).to(torch.float8_e4m3fn)
    made = tiny.make(
        ctrainer.Trainer, model, [], output_dir=str(tmp_path), fsdp=True, bf16=True
    )
    with pytest.raises(
        TypeError, match=r"mlp\.c_fc\.weight is torch\.float8_e4m3fn; fr"
    ):
        shards.shard_model(made, None)


def test_two_sharded_ranks_get_their_weights_back(tmp_path: Path) -> None:
    kinds, models = sharded_weights.KINDS, list(sharded_weights.MODELS)
    named = [(m, kinds[(i + j) % 2]) for j in (0, 1) for i, m in enumerate(models)]
    named = named[: draws(3, 6)]
    found = ranks.told(ranks.run(tmp_path, "parity.saved_weights", named=named))
    for told in found:
        assert len(told) == len(named)
        for name, differs in told.items():
            assert not any(differs.values()), (name, differs)
    assert "checkpoint" in found[0]["ViTForImageClassification FULL_STATE_DICT"]
    assert "consolidated" in found[0]["MixtralForCausalLM SHARDED_STATE_DICT"]


@pytest.mark.parametrize("kind", ["peft", "bfloat16", "transformers", "whole modules"])
def test_adapters_come_back_or_raise(kind: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    whole = ["classifier"] if kind == "whole modules" else None
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj"], init_lora_weights=False, modules_to_save=whole
    )
    model = tiny_architectures.make("ViTForImageClassification")
    if kind == "transformers":
        model.add_adapter(config)
    else:
        model = model.bfloat16() if kind == "bfloat16" else model
        model = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    run = trainer(Whole, model, tmp_path)
    run.train()
    expected, folder = state_of(model), tmp_path / "checkpoint-3"
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.zero_()
    run._load_from_checkpoint(str(folder))
    assert not differing(state_of(model), expected)
    (folder / "ctrainer_manifest.json").unlink()  # which would tell of other bytes
    saved = load_file(folder / "adapter_model.safetensors")
    name = next(name for name in saved if "lora_A" in name)
    value = saved.pop(name)
    save_file(saved, folder / "adapter_model.safetensors")
    lost = name.removeprefix("base_model.model.").removesuffix(".weight")
    with pytest.raises(ValueError, match=f"lacks weights of the model: .*{lost}"):
        run._load_from_checkpoint(str(folder))
    save_file({**saved, name: value, "n.lora_A.weight": value.clone()},
              folder / "adapter_model.safetensors")  # fmt: skip
    with pytest.raises(ValueError, match=r"has weights that .*lacks: .*n\.lora_A"):
        run._load_from_checkpoint(str(folder))


@pytest.mark.parametrize("kind", ["PromptTuning", "PrefixTuning"])
def test_prompts_of_peft_come_back_or_raise(kind: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = getattr(peft, f"{kind}Config")(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(tiny_architectures.make("LlamaForCausalLM"), config)
    model.save_pretrained(tmp_path)
    expected = model.get_prompt_embedding_to_save("default").clone()
    model.prompt_encoder["default"].embedding.weight.data.zero_()
    checkpoints.load_model(model, str(tmp_path))
    assert torch.equal(model.get_prompt_embedding_to_save("default"), expected)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    save_file({**saved, "n.more": saved["prompt_embeddings"].clone()},
              tmp_path / "adapter_model.safetensors")  # fmt: skip
    with pytest.raises(ValueError, match=r"has weights that .*lacks: .*n\.more"):
        checkpoints.load_model(model, str(tmp_path))
