"""DeepSpeed's engine and module zero over ours, on 2 ranks, against DeepSpeed 0.19.8's
own trainings and plain torch."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import deepspeed_engines as runs
import pytest
import ranks
import torch

from ctrainer.compat import deepspeed


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("engine")
    return ranks.told(ranks.run(folder, "compat.deepspeed_engine"))


# Float32 differs by orders of sums. In bf16 and fp16 DeepSpeed adds the gradients of
# two passes and of two ranks in that type, of 8 and 11 bits, we in float32: the first
# loss is the same, and later ones differ by a few roundings of gradients that AdamW,
# which divides them by their size, takes to the parameters.
_NEAR = {"fp32": 1e-6, "bf16": 2e-2, "fp16": 3e-3}


@pytest.mark.parametrize("name", runs.CASES)
def test_two_ranks_train_as_deepspeed_does(found: list[Any], name: str) -> None:
    stage, dtype, _ = runs.CASES[name]
    # Our stage 0 of fp16 is sharded; DeepSpeed's overflows at other scales.
    peer = "1 fp16" if name == "0 fp16" else name
    for ours, theirs in zip(found[0][name], runs.kept(peer), strict=True):
        near = {"rel": _NEAR[dtype]}
        if not stage and dtype == "fp32":  # where DeepSpeed has no norm
            theirs["norm"] = ours["norm"]
        assert ours.pop("loss") == pytest.approx(theirs.pop("loss"), **near)
        norms = ours.pop("norm"), theirs.pop("norm")
        assert norms[0] == (norms[1] and pytest.approx(norms[1], **near))
        assert ours.pop("lr") == pytest.approx(theirs.pop("lr"), rel=1e-12)
        assert ours == theirs
    assert [r[name][-1]["steps"] for r in found] == [6, 6]


def test_fp16_skips_updates_that_overflow(found: list[Any]) -> None:
    for stage in range(4):
        last = found[0][f"{stage} fp16"][-1]
        assert 0 < last["skipped"] < last["steps"]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", runs.SKIPPING)
def test_updates_that_are_not_finite_are_skipped_as_deepspeed_does(
    found: list[Any], name: str, world: int
) -> None:
    ours = (
        found[0][f"skipping {name}"]
        if world == 2
        else runs.skipping(deepspeed.initialize, name)
    )
    near = {"rel": _NEAR[name.split()[1]], "nan_ok": True}
    for mine, theirs in zip(ours, runs.kept(str(world), "skipping")[name], strict=True):
        if name.startswith("0"):  # where DeepSpeed has no norm, or one of scaled ones
            theirs["norm"] = mine["norm"]
        assert mine.pop("loss") == pytest.approx(theirs.pop("loss"), **near)
        norms = mine.pop("norm"), theirs.pop("norm")
        assert norms[0] == (norms[1] and pytest.approx(norms[1], **near))
        assert mine.pop("lr") == pytest.approx(theirs.pop("lr"), rel=1e-12)
        assert mine == theirs


def gradients(passes: int) -> dict[str, torch.Tensor]:
    """The mean over the first passes of both ranks, in one process."""
    model = runs.Model()
    for batch in runs.batches("fp32")[: 2 * passes]:
        (model(*batch) / (2 * passes)).backward()
    named = model.named_parameters()
    return {name: p.grad for name, p in named if p.grad is not None}


@pytest.mark.parametrize("stage", range(4))
def test_no_sync_adds_up_gradients_in_every_stage(found: list[Any], stage: int) -> None:
    grads = [grad.double().norm() for grad in gradients(4).values()]
    wanted = torch.stack(grads).norm().item()
    for rank, block in itertools.product(found, ("no_sync", "synced")):
        norm, reduced = rank[f"{block} {stage}"]
        assert norm == pytest.approx(wanted, rel=1e-6)
        # Shards get a gradient when ranks have exchanged theirs.
        assert stage == 0 or reduced == (block == "synced")
    assert "call it after the block" in found[0]["step in no_sync"]


def test_an_optimizer_that_is_passed_updates_this_ranks_parts(
    found: list[Any],
) -> None:
    model, grads = runs.Model(), gradients(2)
    norm = torch.stack([grad.double().norm() for grad in grads.values()]).norm()
    for name, param in model.named_parameters():
        if name in grads:
            param.data -= 0.1 * grads[name] * min(1.0, 0.5 / (norm.item() + 1e-6))
        ours = torch.tensor(found[0]["own SGD"][name])
        torch.testing.assert_close(ours, param.data, rtol=1e-5, atol=1e-6)
    assert found[0]["own optimizer"]
    assert found[0]["scheduler"] == [[0.1], [0.05], [0.05], [0.025]]


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("optimizer with state", "state of whole parameters already"),
        ("optimizer of others", "is not the model's"),
        ("mpu", "mpu is not supported"),
        ("mesh_param", "mesh_device is not supported"),
        ("no model", "deepspeed.initialize requires a model"),
        ("no config", "requires --deepspeed_config"),
        ("without optimizer", "backward() needs an optimizer"),
        ("external late", "before initialize()"),
    ],
)
def test_what_cannot_be_done_is_rejected(
    found: list[Any], name: str, part: str
) -> None:
    assert part in found[0][name]


def test_ranks_read_different_rows_of_the_data(found: list[Any]) -> None:
    assert sorted(found[0]["data"] + found[1]["data"]) == list(range(10))


def test_a_model_made_in_init_begins_with_new_values_or_those_written(
    found: list[Any],
) -> None:
    for rank in found:
        assert rank["on meta"]
        assert rank["units"] == 4
        assert rank["values of rank 1"]
        weight, bias = (torch.tensor(value) for value in rank["new values"])
        bound = 5**-0.5  # of nn.Linear's own initialization
        assert 0 < weight.abs().max() <= bound
        assert 0 < bias.abs().max() <= bound
    assert found[0]["new values"] == found[1]["new values"]


def test_gathered_parameters_are_whole_and_take_the_modifiers_values(
    found: list[Any],
) -> None:
    model = runs.Model()
    for rank in found:
        weight, bias = (torch.tensor(value) for value in rank["read"])
        assert torch.equal(weight, model.head.weight)
        assert torch.equal(bias, model.first.bias)
        weight, bias = (torch.tensor(value) for value in rank["written"])
        assert (weight == 2.0).all()
        assert (bias == 3.0).all()
        assert torch.equal(torch.tensor(rank["not written"]), model.head.bias)
        assert rank["sizes"][1] == rank["alone"] == 21
    assert [r["sizes"][0] for r in found] == [r["sizes"][2] for r in found]
    assert sum(r["sizes"][0] for r in found) == 21


def test_an_external_parameter_is_gathered_for_its_reader(found: list[Any]) -> None:
    assert len(set(found[0]["external 0"])) > 1
    assert found[0]["external 3"] == pytest.approx(found[0]["external 0"], rel=1e-6)
    # Its own module is a unit unless the parameter is registered.
    assert found[0]["external units"] == found[0]["external units without"] - 1


def test_blocks_of_init_need_stage_3() -> None:
    config = {"zero_optimization": {"stage": 2}}
    for options in ({"enabled": False}, {"config_dict_or_path": config}):
        with deepspeed.zero.Init(**options):
            assert not torch.nn.Linear(2, 2).weight.is_meta
    with pytest.raises(ValueError, match="mpu is not supported"):
        deepspeed.zero.Init(mpu=object())
    with deepspeed.zero.Init():
        weight = torch.nn.Linear(2, 2).weight
    with (
        pytest.raises(ValueError, match="modifier_rank"),
        deepspeed.zero.GatheredParameters(weight),
    ):
        pass


# In DeepSpeed an update after a change has fewer passes, each divided as if of all,
# where the passes before are no multiple of the new number.
@pytest.mark.parametrize("stage", range(4))
def test_the_batch_of_an_update_may_change(stage: int) -> None:
    rows, passes = 2, (1, 3, 2, 1)
    whole = torch.nn.Linear(3, 2)
    sharded = copy.deepcopy(whole)
    update = {"lr": 0.1, "eps": 1e-3, "weight_decay": 0}
    config = {"train_micro_batch_size_per_gpu": rows, "gradient_clipping": 0,
              "optimizer": {"type": "AdamW", "params": update},
              "zero_optimization": {"stage": stage}}  # fmt: skip
    engine, *_ = deepspeed.initialize(model=sharded, config=config)
    optimizer = torch.optim.AdamW(whole.parameters(), **update)
    for number, n in enumerate(passes):
        engine.set_train_batch_size(n * rows)
        assert engine.train_batch_size() == n * rows
        data = torch.randn(n, rows, 3)
        for i, batch in enumerate(data):
            loss = engine(batch.to(engine.device)).square().mean()
            assert loss.item() == pytest.approx(whole(batch).square().mean().item())
            engine.backward(loss)
            engine.step()
            assert engine.was_step_applied() == (i == n - 1)
        assert engine.global_steps == number + 1
        (sum(whole(batch).square().mean() for batch in data) / n).backward()
        optimizer.step()
        optimizer.zero_grad()
    with pytest.raises(ValueError, match="5 is no multiple of 2"):
        engine.set_train_batch_size(5)


@pytest.mark.parametrize("stage", range(4))
def test_an_update_begins_anew_with_what_is_loaded(tmp_path: Path, stage: int) -> None:
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3,
              "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "eps": 1.0}},
              "zero_optimization": {"stage": stage}}  # fmt: skip
    engine, *_ = deepspeed.initialize(model=torch.nn.Linear(3, 2), config=config)
    engine.save_checkpoint(str(tmp_path))

    def train(passes: int, rows: torch.Tensor) -> list[bool]:
        ends = []
        for _ in range(passes):
            engine.backward(engine(rows.to(engine.device)).square().mean())
            ends.append(engine.is_gradient_accumulation_boundary())
            engine.step()
        return ends

    found = []
    for before in (0, 1, 2):
        train(before, torch.randn(2, 3))
        engine.load_checkpoint(str(tmp_path))
        assert train(3, torch.ones(2, 3)) == [False, False, True]
        found.append([p.detach().clone() for p in engine.module.parameters()])
    torch.testing.assert_close(found[1:], found[:1] * 2, rtol=0, atol=0)


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(5, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.head = torch.nn.Linear(4, 5, bias=False)
        self.head.weight = self.table.weight

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.table(rows)))


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_weights_of_16_bits_are_saved_once(
    tmp_path: Path, precision: str, stage: int
) -> None:
    plain = Tied()
    config = {"train_micro_batch_size_per_gpu": 2, precision: {"enabled": True},
              "optimizer": {"type": "AdamW", "params": {}},
              "zero_optimization": {"stage": stage}}  # fmt: skip
    engine, *_ = deepspeed.initialize(model=copy.deepcopy(plain), config=config)
    engine.save_16bit_model(tmp_path, "low.bin")
    saved = torch.load(tmp_path / "low.bin", weights_only=True)
    low = torch.float16 if precision == "fp16" else torch.bfloat16
    parameters = dict(plain.named_parameters(remove_duplicate=False))
    assert saved.keys() == plain.state_dict().keys()
    for name, value in plain.state_dict().items():
        expected = value.to(low) if name in parameters else value
        torch.testing.assert_close(saved[name], expected, rtol=0, atol=0)
    assert saved["head.weight"].data_ptr() == saved["table.weight"].data_ptr()


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_batch_norm_trains_in_16_bits(precision: str, stage: int) -> None:
    config = {"train_micro_batch_size_per_gpu": 2, precision: {"enabled": True},
              "optimizer": {"type": "AdamW", "params": {}},
              "zero_optimization": {"stage": stage}}  # fmt: skip
    model = Tied()
    engine, *_ = deepspeed.initialize(model=model, config=config)
    loss = engine(torch.tensor([1, 2], device=engine.device)).float().square().mean()
    engine.backward(loss)
    engine.step()
    assert torch.isfinite(loss)
    # As DeepSpeed's buffers, whatever layers compute in.
    assert model.norm.running_mean is not None
    assert model.norm.running_mean.dtype == torch.float32
    assert model.norm.running_mean.count_nonzero() == 4
