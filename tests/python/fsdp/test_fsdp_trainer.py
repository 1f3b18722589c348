"""HF's Trainer with fsdp: on two ranks, and checkpoints taken to one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ranks
import sharded_trainings as runs
import torch
import transformers

from ctrainer.fsdp import consolidate_sharded_model_checkpoints
from ctrainer.runtime.torch_process import accelerator


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def told(folder: Path) -> list[Any]:
    return ranks.told(ranks.run(folder, "fsdp.training"))


ALIKE = ["gpt2", "bert", "recomputed", "foreign", "each", "hybrid"]
ALIKE += ["SEQ_CLS", "frozen above"]  # frozen layers above those that learn
ALIKE += ["quantized base", "narrow"]  # of int8 and bfloat16; all of bfloat16
OF_WHOLE_PARAMETERS = ["lamb", "adafactor"]


@pytest.mark.parametrize("name", [*ALIKE, *OF_WHOLE_PARAMETERS])
def test_a_sharded_model_trains_as_the_whole_one(told: list[Any], name: str) -> None:
    for rank in told:
        whole, sharded, differ = rank[name]
        # The gradients of two ranks are added in one order or the other, with the same
        # result; norms are sums of doubles in another order, and clip by less than an
        # ulp of float32 differently.
        assert sharded["losses"] == pytest.approx(whole["losses"], rel=1e-6)
        assert sharded["norms"] == pytest.approx(whole["norms"], rel=1e-6)
        assert sharded["layers"] == pytest.approx(whole["layers"], rel=1e-6)
        for key in ("flos", "parameters", "rates", "names", "generated"):
            assert sharded[key] == whole[key], key
        assert sharded["eval"] == pytest.approx(whole["eval"], rel=1e-6)
        # The sums of each micro-batch over ranks are added in another order than the
        # sums of ranks over micro-batches; where they cancel out, Adam makes steps of
        # what rounding leaves, of at most its rate.
        bound = 1e-4 if name == "each" else 1e-6
        assert sharded["predicted"] == pytest.approx(whole["predicted"], abs=bound)
        assert differ < bound
        before = sharded["before"]
        assert before["units"] == sharded["units"] > 0
        assert before["eval"] == pytest.approx(whole["before"]["eval"], rel=1e-6)
        expected = whole["before"]["predicted"]
        assert before["predicted"] == pytest.approx(expected, abs=1e-6)
        assert len(whole["losses"]) == runs.updates(name)
    assert told[0][name][0]["layers"] or name != "bert"


def test_two_sharded_ranks_train_as_one_process_that_knows_nothing_of_it(
    told: list[Any], folder: Path
) -> None:
    """20 updates of both ranks' rows in one batch; sums over rows are in other orders.

    Adam's steps are at most its rate, of which rounding takes a part.
    """
    made = runs.trainer(f"{folder}/alone", "gpt2", False, per_device_train_batch_size=4)
    made.train()
    alone, sharded = runs.told(made), told[0]["gpt2"][1]
    assert len(alone["losses"]) == 20
    assert sharded["losses"] == pytest.approx(alone["losses"], rel=2e-5)
    assert sharded["norms"] == pytest.approx(alone["norms"], rel=2e-4)
    assert sharded["eval"] == pytest.approx(alone["eval"], rel=2e-5)
    found = torch.load(f"{folder}/gpt2.pt", weights_only=True)
    assert runs.furthest(found, made.model.state_dict()) < 1e-4


def test_units_are_the_layers_that_the_model_or_the_config_names(
    told: list[Any],
) -> None:
    # With the root: 2 blocks; 2 layers of 2,224 parameters each; 2 MLPs.
    found = {name: told[0][name][1]["units"] for name in ("gpt2", "bert", "foreign")}
    assert found == {"gpt2": 3, "bert": 3, "foreign": 3}
    assert told[0]["gpt2"][0]["units"] == 0


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_parameters_are_of_16_bits_while_they_compute(
    told: list[Any], name: str
) -> None:
    whole, sharded, _ = told[0][name]
    # The residual stream is of 8 bits of mantissa here, and of float32 there.
    assert sharded["losses"] == pytest.approx(whole["losses"], rel=2e-2)
    assert sharded["losses"] != whole["losses"]
    assert sharded["losses"][-1] < sharded["losses"][0]


def test_a_run_goes_on_from_its_shards_to_the_bit(told: list[Any]) -> None:
    for rank in told:
        saved = rank["saved"]
        assert saved["losses"][0] == saved["losses"][1]
        assert saved["same"]
        assert saved["evals"][0] == saved["evals"][1]


def test_adafactor_goes_on_from_its_shards_on_any_number_of_ranks(
    told: list[Any], folder: Path
) -> None:
    for rank in told:
        first, again = rank["factored"]
        assert first == again
    alone = runs.trainer(
        str(folder / "alone"), "adafactor", False, gradient_accumulation_steps=2
    )
    alone.train(resume_from_checkpoint=str(folder / "factored" / "checkpoint-3"))
    assert runs.told(alone)["losses"][-3:] == pytest.approx(first, rel=1e-5)


@pytest.mark.parametrize("optim", ["adamw_compact", "adamw_bnb_8bit"])
def test_quantized_state_is_resumed_by_as_many_ranks_and_by_one(
    told: list[Any], folder: Path, optim: str
) -> None:
    """Of parameters that are cut on groups. A gradient that is rounded another way may
    take the next 8-bit value: losses stay within a hundredth."""
    for rank in told:
        assert rank["quantized"][optim][0]
    losses = told[0]["quantized"][optim][1]
    alone = runs.trainer(
        f"{folder}/alone {optim}", "gpt2", False, optim=optim,
        per_device_train_batch_size=4,
    )  # fmt: skip
    alone.train(resume_from_checkpoint=f"{folder}/{optim}/checkpoint-10")
    assert runs.told(alone)["losses"][-10:] == pytest.approx(losses, rel=1e-2)


def test_a_run_on_a_quantized_base_is_resumed_by_as_many_ranks_and_by_one(
    told: list[Any], folder: Path
) -> None:
    for rank in told:
        found = rank["of 8 bits"]
        saved, resumed, whole = (found[key] for key in ("saved", "resumed", "whole"))
        assert resumed["losses"][-3:] == saved["losses"][-3:]
        for key in ("eval", "predicted"):
            assert resumed[key] == saved[key], key
            assert saved[key] == pytest.approx(whole[key], rel=1e-6, abs=1e-6), key
        assert saved["losses"] == pytest.approx(whole["losses"], rel=1e-6)
        assert found["packed"] == [False] * 4
        assert "weight.absmax was saved with other values" in found["other"]
    name = "quantized base"
    one_unit = {"fsdp": "full_shard", "fsdp_transformer_layer_cls_to_wrap": None}
    for sharded, options in ((False, {}), (True, {}), (True, one_unit)):
        alone = runs.trainer(f"{folder}/{name} alone", name, sharded,
                             per_device_train_batch_size=4, **options)  # fmt: skip
        alone.train(resume_from_checkpoint=f"{folder}/{name}/checkpoint-3")
        losses = runs.told(alone)["losses"][-3:]
        assert losses == pytest.approx(saved["losses"][-3:], rel=2e-5)


def test_ranks_cut_parameters_where_scales_of_the_state_begin(told: list[Any]) -> None:
    """Updates have the bits of those of whole parameters, which are not clipped."""
    for rank in told:
        assert rank["blocks"]["adamw_8bit"] == [True, 256]
        assert rank["blocks"]["adamw_compact"] == [True, 32]
        for maker in ("create_optimizer", "get_optimizer_cls_and_kwargs", "a function"):
            assert rank["blocks"][maker] == [True, 256]


def test_a_run_with_8_bit_state_keeps_the_cuts_of_its_checkpoint(
    told: list[Any],
) -> None:
    for rank in told:
        assert rank["blocks"]["resumed"] == [True, 1]


def test_a_run_in_codes_goes_on_with_what_they_have_missed(
    told: list[Any], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for rank in told:
        assert rank["coded"] == {"same": [True, False, True], "bits": [8, 8]}
    options: dict[str, Any] = {"fsdp_config": {"reduce_bits": 8}, "max_steps": 3}
    made = runs.trainer(f"{folder}/coded-alone", "gpt2", **options)
    made.train(resume_from_checkpoint=f"{folder}/coded/checkpoint-2")
    assert "has no residual_00000-of-00001.pt: error feedback begins" in caplog.text
    with pytest.raises(ValueError, match="reduce_bits must be 8, 4 or 32, not 16"):
        runs.trainer(str(folder), "gpt2", fsdp_config={"reduce_bits": 16})


def test_the_best_weights_are_loaded_at_the_end(told: list[Any]) -> None:
    # The state of the average is the best one's too, which evaluates.
    for rank in told:
        assert rank["saved"]["evals"][0] == pytest.approx(rank["saved"]["best"])


def test_a_run_goes_on_from_shards_of_other_units(told: list[Any]) -> None:
    for rank in told:
        assert rank["other"] == pytest.approx(rank["saved"]["losses"][0], rel=1e-6)


def test_a_run_goes_on_to_the_bit_where_each_parameter_was_sharded_by_itself(
    told: list[Any],
) -> None:
    for rank in told:
        losses, evaluated = rank["older"]
        assert losses == rank["saved"]["losses"][0]
        assert evaluated == rank["saved"]["last"]


def test_adapters_are_trained_and_saved_alone(told: list[Any]) -> None:
    pytest.importorskip("peft")
    for rank in told:
        whole, sharded, count, differ = rank["adapted"]
        assert sharded == pytest.approx(whole, rel=1e-6)
        assert count == 4
        assert differ < 1e-6


def test_hybrid_sharding_keeps_whole_models_on_machines_of_one_rank(
    told: list[Any],
) -> None:
    assert told[0]["hybrid"][1]["world"] == 1
    assert told[0]["gpt2"][1]["world"] == 2


def test_a_sharded_run_goes_on_from_a_checkpoint_of_whole_models(
    told: list[Any],
) -> None:
    for rank in told:
        first, again = rank["saved"]["of plain"]  # of the same trainer
        assert first == again == pytest.approx(rank["plain"][10:], rel=1e-6)


def test_a_trainer_goes_on_after_a_failure_unless_its_model_is_sharded(
    told: list[Any],
) -> None:
    for rank in told:
        assert rank["failed"]["whole"] == rank["plain"][10:]
        sharded = rank["failed"]["sharded"]
        if accelerator() is None:
            assert "or pass model_init, which makes the model anew" in sharded
        else:  # units over NCCL have a group of their own
            assert sharded == pytest.approx(rank["plain"][10:], rel=1e-6)
        anew = rank["failed"]["made anew"]
        assert anew == pytest.approx(rank["plain"][10:], rel=1e-6)


def test_an_override_that_loads_a_checkpoint_finds_whole_models(
    told: list[Any],
) -> None:
    for rank in told:
        for losses in rank["loaded"]:
            assert losses == pytest.approx(rank["plain"][10:], rel=1e-6)


def test_gradients_that_are_nan_on_one_rank_skip_the_update_on_all(
    told: list[Any],
) -> None:
    assert [rank["spoiled"] for rank in told] == [[1, True], [1, True]]


def test_an_override_of_save_finds_the_model_whole(told: list[Any]) -> None:
    assert [rank["saved by others"] for rank in told] == [[0.0] * 4] * 2


def test_checkpoints_have_a_file_of_each_rank_and_whole_weights_where_asked(
    told: list[Any], folder: Path
) -> None:
    shards = {"shard-00000-of-00002.safetensors", "shard-00001-of-00002.safetensors"}
    found = set(runs.files(f"{folder}/saved/checkpoint-10"))
    assert shards < found
    assert "config.json" in found
    assert "model.safetensors" not in found
    assert "optimizer.pt" not in found
    names = [name for name in runs.files(f"{folder}/saved") if "checkpoint" not in name]
    assert not [name for name in names if name.startswith(".")]


def test_a_saved_model_is_what_the_best_shards_are_together(
    told: list[Any], folder: Path
) -> None:
    step = told[0]["saved"]["best step"]
    shards = f"{folder}/saved/checkpoint-{step}/shard-"
    expected, _ = consolidate_sharded_model_checkpoints(
        shards, "*.safetensors", save_model=False
    )
    model = transformers.GPT2LMHeadModel.from_pretrained(f"{folder}/whole")
    found = model.state_dict()
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("sharded", [True, False])
def test_one_process_goes_on_from_the_shards_of_two(
    told: list[Any], folder: Path, sharded: bool
) -> None:
    """With both ranks' rows in a batch, up to the rounding of their sums; with the
    average of the weights, which evaluates."""
    options: dict[str, Any] = {"per_device_train_batch_size": 4, "ema_decay": 0.8}
    made = runs.trainer(f"{folder}/one-{sharded}", "gpt2", sharded, **options)
    made.train(resume_from_checkpoint=f"{folder}/saved/checkpoint-10")
    found = runs.told(made)
    assert found["losses"][-10:] == pytest.approx(
        told[0]["saved"]["losses"][0], rel=2e-5
    )
    assert made.weight_average.core.n_averaged == 20  # 10 of them by the two ranks
    assert found["eval"] == pytest.approx(told[0]["saved"]["last"], rel=2e-5)


def test_an_average_begins_at_shards_that_were_saved_without_one(
    told: list[Any], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"ema_decay": 0.8, "max_steps": 3}
    made = runs.trainer(f"{folder}/begun", "gpt2", False, **options)
    made.train(resume_from_checkpoint=f"{folder}/others/checkpoint-2")
    assert made.weight_average.core.n_averaged == 1
    assert "the average starts from its weights" in caplog.text
