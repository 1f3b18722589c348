"""The memory and traffic that sharded training is said to need."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
import transformers
from draws import draws
from places import ROOT
from programs.fsdp.measured_memory import CASES, WIDTH
from ranks import run_alone
from torch import nn

from ctrainer import __main__
from ctrainer.fsdp import (
    FullyShardedDataParallel,
    UnitSize,
    memory_plan,
    units_of,
)
from ctrainer.fsdp.memory_plan import (
    DECODERS,
    _sizes,
    plan_of_stage,
    state_bytes,
)
from ctrainer.optim import AdamW


def test_the_models_have_the_parameters_that_were_published() -> None:
    """Source: the model cards of Llama 3.1 and 3.2."""
    counted = {name: model.parameters for name, model in DECODERS.items()}
    assert counted == {"1B": 1_235_814_400, "8B": 8_030_261_248, "70B": 70_553_706_496}


def test_a_plan_adds_up_for_units_worked_out_by_hand() -> None:
    """2 ranks, multiples of 128: groups are padded to 256 elements. The root's 300 and
    100 become 512 and 256, the inner units' 1000 and 600 become 1024 and 768."""
    units = [
        UnitSize((300,), (100,), kept=True),
        UnitSize((1000,)),
        UnitSize((), (600,)),
    ]
    plan = memory_plan(
        units, 2, compute_dtype="bfloat16", reduce_dtype="float32", prefetch=1
    )
    trainable, frozen = 512 + 1024, 256 + 768
    assert plan.parameters == (trainable + frozen) // 2 * 4
    assert plan.gradients == trainable // 2 * 4
    assert plan.optimizer == trainable // 2 * 8
    assert plan.gathered == (512 + 256 + 1024) * 2
    assert plan.prefetched == 1024 * 2
    assert plan.full_gradients == (512 + 1024) * 4
    assert plan.gather_traffic == (512 + 256 + 2 * (1024 + 768)) * 2 // 2
    assert plan.reduce_traffic == trainable * 4 // 2
    kept = memory_plan(units, 2, reshard_after_forward=False, prefetch=1)
    assert kept.gathered == (trainable + frozen) * 4
    assert kept.prefetched == 0
    assert kept.gather_traffic == (trainable + frozen) * 4 // 2
    assert memory_plan(units, 1).traffic == 0


def test_what_is_sharded_falls_with_the_ranks_and_the_rest_does_not() -> None:
    units = DECODERS["1B"].units()
    few, many = (memory_plan(units, n, compute_dtype="bfloat16") for n in (8, 1024))
    assert few.sharded / many.sharded == pytest.approx(128, rel=1e-2)
    assert few.transient == pytest.approx(many.transient, rel=1e-2)
    assert few.total == few.sharded + few.transient


def test_what_leaves_a_machine_is_counted_once_but_for_codes_of_gradients() -> None:
    """16 ranks of which 8 are a machine, and a group of 16 x 128 elements: a part has
    128, as 8-bit values 4 + 128 bytes. 8 parts are to leave, and come, gathered
    once as the root is; codes of gradients leave from each of the 8 ranks."""
    units = [UnitSize((16 * 128,), kept=True)]
    whole = memory_plan(units, 16)
    assert whole.machine_traffic == 2 * 8 * 128 * 4
    coded = memory_plan(units, 16, gather_bits=8, reduce_bits=8)
    part = 4 + 128 + 4  # up to a multiple of 8
    assert coded.gather_traffic == coded.reduce_traffic == 15 * part
    assert coded.machine_traffic == 8 * part + 8 * 8 * part
    alone = memory_plan(units, 16, gather_bits=8, reduce_bits=8, machine_size=1)
    assert alone.machine_traffic == alone.traffic
    assert memory_plan(units, 16, machine_size=16).machine_traffic == 0
    hybrid = memory_plan(units, 16, group_size=8)  # 2 / 2 of the whole, once
    assert hybrid.machine_traffic == 16 * 128 * 4
    assert hybrid.replica_traffic == 16 * 128 * 4 // 8
    small = memory_plan(units, 16, group_size=4)  # replicas on a machine meet there
    assert small.machine_traffic == hybrid.machine_traffic


def test_room_for_codes_counts_where_nothing_else_is_missing() -> None:
    """One unit of 2 x 128 elements on 2 ranks, the root: when its parameters are
    gathered there are no gradients yet, when gradients are reduced no parameters."""
    units = [UnitSize((256,), kept=True)]
    part = 4 + 128 + 4
    options = {"gather_bits": 8, "reduce_bits": 8, "compute_dtype": "bfloat16"}
    plan = memory_plan(units, 2, error_feedback=False, **options)
    gather = 3 * part + 128 * 4  # this rank's codes and both, and zeros for a part
    reduce = 4 * part + 128 * 4
    assert plan.quantized == max(gather, reduce) - 256 * 2
    assert plan.total == 128 * 16 + 2 * 256 * 2 + plan.quantized
    kept = memory_plan(units, 2, **options)
    assert kept.feedback == 256 * 4
    assert kept.quantized == gather - 256 * 2  # the zeros are needed here alone


def test_what_is_offloaded_is_what_a_model_has_outside_of_the_gpu() -> None:
    """Counted on a sharded model that has made an update with its state in a file."""
    torch.manual_seed(0)
    inner = [FullyShardedDataParallel(nn.Linear(200, 200)) for _ in range(2)]
    model = FullyShardedDataParallel(nn.Sequential(*inner, nn.Linear(200, 300)))
    optimizer = AdamW(model.parameters())
    optimizer.offload_state("/tmp")
    model(torch.ones(2, 200)).sum().backward()
    optimizer.step()
    shards = sum(p.nbytes + p.grad.nbytes for p in model.parameters())
    state = sum(
        t.nbytes
        for state in optimizer.state.values()
        for t in (state["exp_avg"], state["exp_avg_sq"])
    )
    units = units_of(model)
    whole, cpu, nvme = (
        memory_plan(units, 1, shard_size_multiple=1, offload_optimizer=place)
        for place in (None, "cpu", "nvme")
    )
    assert (whole.host, whole.disk) == (0, 0)
    assert (cpu.host, cpu.disk) == (shards + state, 0)
    assert nvme.disk == state
    assert nvme.host == shards + state  # of which there are fewer than 4 pieces
    assert 0 <= optimizer._disk_state.memory.nbytes - state < 4 * 4096  # type: ignore[union-attr]
    assert cpu.total == nvme.total == whole.total - whole.sharded
    large = memory_plan([UnitSize((10**8,), kept=True)], 2, offload_optimizer="nvme")
    assert large.host == large.parameters + large.gradients + 8 * 4 * 2**20
    assert large.disk == large.optimizer > 3 * 10**8


def test_sizes_that_make_no_sense_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"world_size.* got 0,"):
        memory_plan([], 0)
    with pytest.raises(ValueError, match=r"compute_dtype must be one of .*'int8'"):
        memory_plan([], 1, compute_dtype="int8")
    with pytest.raises(ValueError, match=r"gather_bits must be 8, 4 or None, not 5"):
        memory_plan([], 1, gather_bits=5)
    with pytest.raises(ValueError, match="offload_param must be 'cpu', 'nvme' or None"):
        memory_plan([], 1, offload_param="disk")
    with pytest.raises(ValueError, match="micro_batches must be 1 or more, not 0"):
        memory_plan([], 1, micro_batches=0)
    with pytest.raises(ValueError, match="prefetch=1 needs a stage above 0"):
        plan_of_stage(0, [], 1, prefetch=1)
    with pytest.raises(ValueError, match=r"12 must be a multiple of group_size 8"):
        memory_plan([], 12, group_size=8)
    with pytest.raises(ValueError, match=r"group_size 6 and machine_size 8 one must"):
        memory_plan([], 24, group_size=6)


def test_the_page_is_current_and_the_command_prints_its_rows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    place = ROOT / "docs" / "make_fsdp_memory.py"
    spec = importlib.util.spec_from_file_location("make_fsdp_memory", place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text() == module.page()
    options = ["--prefetch", "1", "--world_size", "64"]
    assert __main__.main(["memory", "70B", *options]) == 0
    assert capsys.readouterr().out.splitlines()[-1] in module.page()
    assert printed(capsys, "8B", "--zero", "1") == printed(capsys, "8B", "--zero", "2")
    row = printed(capsys, "8B", "--offload_optimizer", "nvme", "--world_size", "8")
    assert row["disk"] == row["optimizer"] == "8.03"
    row = printed(capsys, "8B", "--offload_param", "nvme", "--world_size", "8")
    assert row["disk"] == row["parameters"] == "4.02"
    with pytest.raises(SystemExit):
        __main__.main(["memory", "8B", "--group_size", "5"])
    assert "world_size 8 must be a multiple of" in capsys.readouterr().err


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, str]:
    """The last row of the table, by the names of its columns."""
    assert __main__.main(["memory", *arguments]) == 0
    heads, _, *rows = capsys.readouterr().out.splitlines()[1:]
    cells = ([cell.strip() for cell in line.split("|")] for line in (heads, rows[-1]))
    return dict(zip(*cells, strict=True))


def test_a_model_that_is_not_sharded_is_what_every_rank_has(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """8.030261248e9 parameters, gradients and two moments, of float32, and with
    bfloat16 what autocast keeps beside them; an all-reduce of the gradients."""
    options = ["--zero", "0", "--world_size", "4", "--compute_dtype", "float32"]
    row = printed(capsys, "8B", *options)
    assert (row["parameters"], row["gradients"], row["optimizer"]) == (
        *("32.1", "32.1"), "64.2",
    )  # fmt: skip
    assert row["total"] == "128"
    assert row["replica traffic"] == "48.2"  # 2 * 3 / 4
    row = printed(capsys, "8B", "--zero", "0", "--gradient_accumulation_steps", "2")
    assert (row["gathered"], row["total"]) == ("16.1", "145")


def test_the_command_reads_the_units_of_a_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """2 blocks of a GPT-2 of 64 features, 300 tokens and 32 positions, and tables of
    the root, which the head shares."""
    config = transformers.GPT2Config(
        vocab_size=300, n_positions=32, n_embd=64, n_layer=2, n_head=2,
        architectures=["GPT2LMHeadModel"],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    block = 2 * 128 + 64 * 192 + 192 + 64 * 64 + 64 + 2 * 64 * 256 + 256 + 64
    assert _sizes(str(tmp_path)) == [332 * 64 + 128, block, block]
    with pytest.raises(SystemExit):
        __main__.main(["memory", str(tmp_path / "none")])
    assert "none" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("optim", "dtype", "expected"),
    [
        ("adamw_torch", "float32", 8), ("adamw_torch", "bfloat16", 4),
        ("adamw_8bit", "float32", 2 + 2 * 4 / 256), ("sgd", "float32", 0),
        ("lion_32bit", "float32", 4), ("adafactor", "float32", 2 * 4 / 4096),
    ],
)  # fmt: skip
def test_the_state_of_an_optimizer_is_that_of_its_paper(
    optim: str, dtype: str, expected: float
) -> None:
    """Kingma and Ba, 2015; Dettmers et al., 2022; Chen et al., 2023; Shazeer and Stern,
    2018. Of 8 bits there are maps of 256 numbers, too."""
    assert state_bytes(optim, dtype) == pytest.approx(expected, abs=2e-4)


READ_AHEAD = {"shards in files": 3, "all in files": 5}  # units
MEASURED = ["1:shards in files", "2:all in files", "2:accumulated", "2:quantized"]
ALL = [f"{world}:{name}" for world in (1, 2) for name in CASES]


@pytest.mark.timeout(3600)
def test_ranks_take_the_memory_that_the_plan_says() -> None:
    """But for two layers of 12: torch has gradients beside those of units. Gaps in
    malloc's heap are not there, and 2 MiB are shared with the other rank. Units that
    are prefetched from files may come later than the fullest moment."""
    runs = draws(len(MEASURED), len(ALL))
    done = run_alone(
        "fsdp.measured_memory",
        *(MEASURED if runs < len(ALL) else ALL),
        MALLOC_MMAP_THRESHOLD_="131072",
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == runs
    layer = 4 * WIDTH * (WIDTH + 1)
    for name, world, peak, said in lines:
        shared = 2**21 * (world - 1)
        late = READ_AHEAD.get(name, 0) * layer // world
        least, more = -layer - late, peak - shared - said
        assert least < more < 2 * layer, (name, world, peak, said)
