"""Shard files of the original and ours: consolidated, resharded, rejected."""

from __future__ import annotations

import pickle
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp_shards import (
    WRAPPED,
    Job,
    Unit,
    moment,
    nested_job,
    rank_content,
    save,
    values,
    whole,
    with_adam,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ranks import run_alone

from ctrainer import _C, __main__
from ctrainer.fsdp import (
    FullyShardedDataParallel,
    consolidate_sharded_model_checkpoints,
    consolidate_sharded_state_dicts,
    load_shard,
    reshard_checkpoints,
    save_shard,
)

LAYOUTS: list[dict[str, bool]] = [{}, {"flat": True}, {"by_rows": True}]


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda o: "_".join(o) or "elements")
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("result", ["", "x.safetensors"])
def test_files_of_the_original_become_the_unwrapped_modules_state_dict(
    world_size: int, layout: dict[str, bool], result: str, tmp_path: Path
) -> None:
    """Frozen parameters, nested units, buffers that were cast (to their own dtype)."""
    job = nested_job(world_size, **layout)
    prefix = save(job, tmp_path)
    path = str(tmp_path / result) if result else ""
    full, saved = consolidate_sharded_model_checkpoints(prefix, save_path=path)
    assert saved == (path or f"{prefix}_consolidated.pth")
    assert_same(full, whole(job))
    read, nowhere = consolidate_sharded_model_checkpoints(prefix, save_model=False)
    assert nowhere is None
    assert_same(read, whole(job))
    if not result:
        plain = torch.load(saved, weights_only=True)
        assert_same(plain["model"], whole(job))


def test_state_dicts_in_memory_are_consolidated_too() -> None:
    job = nested_job(3, flat=True)
    contents = [rank_content(job, rank) for rank in range(3)]
    states = [content["model"] for content in contents]
    metadata = contents[0]["shard_metadata"]
    assert_same(consolidate_sharded_state_dicts(states, metadata), whole(job))
    with pytest.raises(ValueError, match=r"of 3 ranks .* got 2"):
        consolidate_sharded_state_dicts(states[:2], metadata)
    states[2] = {name: t[:1] for name, t in states[2].items() if t.dim()}
    with pytest.raises(ValueError, match=r"needs .* elements of"):
        consolidate_sharded_state_dicts(states, metadata)


def test_the_adam_state_of_shards_becomes_that_of_whole_parameters(
    tmp_path: Path,
) -> None:
    job = nested_job(2, flat=True)
    prefix = save(job, tmp_path, adam=True)
    _, saved = consolidate_sharded_model_checkpoints(prefix, save_optimizer=True)
    optimizer = torch.load(saved, weights_only=True)["optimizer"]
    names = [name for unit in job.units for name in whole(Job([unit], 1))]
    parameters = {n: t for n, t in whole(job).items() if "weight" in n or "bias" in n}
    assert list(optimizer["state"]) == [n for n in names if n in parameters]
    for name, state in optimizer["state"].items():
        assert torch.equal(state["exp_avg"], moment(parameters[name])), name
        assert state["step"] == 7
    (group,) = optimizer["param_groups"]
    assert group["params"] == list(optimizer["state"])
    assert (group["lr"], group["betas"]) == (1e-3, (0.9, 0.999))


def check_reshard(job: Job, new: Job, folder: Path, ours: bool) -> None:
    prefix = save(job, folder, adam=True)
    suffix = "*.pth"
    if ours:
        suffix = "*.safetensors"
        for path in folder.glob("ckpt*.pth"):
            save_shard(load_shard(path), path.with_suffix(".safetensors"))
    paths = reshard_checkpoints(
        prefix, suffix, world_size=new.world_size, save_prefix=str(folder / "new")
    )
    for rank, path in enumerate(paths):
        found = load_shard(path)
        expected = with_adam(new, rank_content(new, rank))
        assert_same(found["model"], expected["model"])
        assert found["shard_metadata"]["rank"] == rank
        assert found["shard_metadata"]["world_size"] == new.world_size
        state = expected["optimizer"]["state"]
        assert found["optimizer"]["state"].keys() == state.keys()
        for index, values_ in state.items():
            assert_same(found["optimizer"]["state"][index], values_)
    assert_same(
        consolidate_sharded_model_checkpoints(
            str(folder / "new"), suffix, save_model=False
        )[0],
        whole(job),
    )


@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    old=st.integers(1, 4),
    new=st.integers(1, 6),
    layout=st.sampled_from(LAYOUTS),
    ours=st.booleans(),
)
def test_shards_for_another_number_of_ranks_are_those_that_it_would_have_saved(
    old: int,
    new: int,
    layout: dict[str, bool],
    ours: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    if "by_rows" in layout and new == 5:
        new = 6  # 12 rows
    folder = tmp_path_factory.mktemp("shards")
    check_reshard(nested_job(old, **layout), nested_job(new, **layout), folder, ours)


@pytest.mark.parametrize("on_rows", [False, True])
def test_a_modules_metadata_tells_how_its_shards_were_cut(
    on_rows: bool, tmp_path: Path
) -> None:
    """Padded to multiples of 64 elements, where the original's files mean 128."""
    module = FullyShardedDataParallel(
        torch.nn.Linear(9, 100),
        flatten_parameters=not on_rows,
        on_neuron=on_rows,
        _shard_size_multiple=64,
        process_group=_C.Communicator(),
    )
    content = {
        "model": module.state_dict(),
        "shard_metadata": module.get_shard_metadata(),
    }
    save_shard(content, tmp_path / "r0.pth")
    reshard_checkpoints(
        str(tmp_path / "r"), world_size=3, save_prefix=str(tmp_path / "new")
    )
    shapes = [
        [tuple(t.shape) for t in load_shard(path)["model"].values()]
        for path in sorted(tmp_path.glob("new*"))
    ]
    assert shapes == [[(34, 9), (34,)] if on_rows else [(384,)]] * 3
    full, _ = consolidate_sharded_model_checkpoints(str(tmp_path / "new"))
    assert_same(full, module.full_state_dict())


def test_every_name_of_a_tied_parameter_is_listed_and_shares_its_memory(
    tmp_path: Path,
) -> None:
    job = Job([Unit("", {"embed.weight": values(4, 4)})], 2)
    for rank in range(2):
        content = rank_content(job, rank)
        content["shard_metadata"]["shared_info"] = {
            f"{WRAPPED}.decoder.weight": f"{WRAPPED}.embed.weight"
        }
        save_shard(content, tmp_path / f"r{rank}.safetensors")
    for result in ("out.pth", "out.safetensors"):
        full, _ = consolidate_sharded_model_checkpoints(
            str(tmp_path / "r"), "*.safetensors", str(tmp_path / result)
        )
        tied = torch.nn.ModuleDict(
            {"embed": torch.nn.Embedding(4, 4), "decoder": torch.nn.Linear(4, 4, False)}
        )
        tied["decoder"].weight = tied["embed"].weight
        tied.load_state_dict(full)  # strict
        assert torch.equal(tied["embed"].weight, whole(job)["embed.weight"])
    pickled = torch.load(tmp_path / "out.pth", weights_only=True)["model"]
    first, second = pickled.values()
    assert first.data_ptr() == second.data_ptr()


def test_missing_double_and_mixed_shards_are_named(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"Cannot find any files matching .*x\*\."):
        consolidate_sharded_model_checkpoints(str(tmp_path / "x"), "*.pth")
    job = nested_job(3)
    prefix = save(job, tmp_path)
    second = tmp_path / "ckpt-rank-1-of-3.pth"
    content = torch.load(second, weights_only=False)
    second.unlink()
    with pytest.raises(
        AssertionError,
        match=r"Expecting 3 files \(based on metadata in .*ckpt-rank-0-of-3.pth\) but "
        r"got 2 files\. .* missing are \[1\]",
    ):
        consolidate_sharded_model_checkpoints(prefix)
    torch.save(rank_content(job, 0), second)
    with pytest.raises(
        AssertionError,
        match=r"Expecting rank 0 for .*ckpt-rank-1-of-3.pth but it is ranked 1",
    ):
        consolidate_sharded_model_checkpoints(prefix)
    other = Job([Unit("", {"embed.weight": values(24, 12)})], 3)
    torch.save(rank_content(other, 1), second)
    with pytest.raises(ValueError, match=r"rank-1-of-3.pth: its shard_info is not"):
        consolidate_sharded_model_checkpoints(prefix)
    name = next(iter(content["model"]))
    content["model"][name] = content["model"][name].half()
    torch.save(content, second)
    with pytest.raises(ValueError, match=r"rank-1-of-3.pth: tensor .* is F16 of shape"):
        consolidate_sharded_model_checkpoints(prefix)
    torch.save({"model": content["model"]}, second)
    with pytest.raises(ValueError, match=r"rank-1-of-3.pth: holds no 'shard_metadata'"):
        consolidate_sharded_model_checkpoints(prefix)


@pytest.mark.parametrize("ending", [".pth", ".safetensors"])
def test_a_damaged_shard_is_named(ending: str, tmp_path: Path) -> None:
    job = nested_job(2)
    prefix = save(job, tmp_path)
    if ending == ".safetensors":
        for path in tmp_path.glob("ckpt*.pth"):
            save_shard(load_shard(path), path.with_suffix(ending))
    victim = tmp_path / f"ckpt-rank-1-of-2{ending}"
    whole_file = victim.read_bytes()
    value = rank_content(job, 1)["model"][next(iter(rank_content(job, 1)["model"]))]
    at = whole_file.index(value.numpy().tobytes()[:64]) + 7
    broken = bytearray(whole_file)
    broken[at] ^= 1
    for bytes_ in (broken, whole_file[: len(whole_file) // 2], b"", b"text"):
        victim.write_bytes(bytes_)
        with pytest.raises(ValueError, match=f"rank-1-of-2{ending}"):
            consolidate_sharded_model_checkpoints(prefix, f"*{ending}")
    assert not list(tmp_path.glob("*consolidated*"))


def test_a_pickle_that_would_run_code_is_rejected(tmp_path: Path) -> None:
    class Run:
        def __reduce__(self) -> Any:
            return print, ("run",)

    torch.save({"model": {}, "shard_metadata": Run()}, tmp_path / "ckpt0.pth")
    with pytest.raises(ValueError, match=r"ckpt0.pth: holds a .*print"):
        consolidate_sharded_model_checkpoints(str(tmp_path / "ckpt"))
    with open(tmp_path / "ckpt0.pth", "wb") as file:
        pickle.dump(Run(), file)
    with pytest.raises(ValueError, match=r"ckpt0.pth"):
        consolidate_sharded_model_checkpoints(str(tmp_path / "ckpt"))


def test_an_optimizer_whose_parameters_cannot_be_told_is_rejected_by_name(
    tmp_path: Path,
) -> None:
    job = nested_job(2)
    for rank in range(2):
        content = with_adam(job, rank_content(job, rank))
        content["optimizer"]["state"].pop(3)
        content["optimizer"]["param_groups"][0]["params"].pop()
        torch.save(content, tmp_path / f"a{rank}.pth")
        group = content["optimizer"]["param_groups"][0]
        group["param_names"] = [n for n in content["model"] if "_fsdp_shard" in n][:3]
        torch.save(content, tmp_path / f"b{rank}.pth")
    with pytest.raises(ValueError, match=r"a0.pth: .* 3 parameters .* the model 4"):
        consolidate_sharded_model_checkpoints(str(tmp_path / "a"), save_optimizer=True)
    _, saved = consolidate_sharded_model_checkpoints(
        str(tmp_path / "b"), save_optimizer=True
    )
    state = torch.load(saved, weights_only=True)["optimizer"]["state"]
    assert list(state) == ["embed.weight", "frozen.weight", "block.fc.weight"]
    content["optimizer"]["state"][1]["step"] = torch.tensor(8.0)
    torch.save(content, tmp_path / "b1.pth")
    with pytest.raises(ValueError, match=r"b1.pth: .*frozen.weight.*'step', is 8"):
        consolidate_sharded_model_checkpoints(str(tmp_path / "b"), save_optimizer=True)


def test_a_full_disk_leaves_the_earlier_file(tmp_path: Path) -> None:
    job = Job([Unit("", {"w": values(400, 1000)})], 2)
    prefix = save(job, tmp_path)
    result = tmp_path / "full.safetensors"
    result.write_bytes(b"earlier")
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(OSError, match=r"full.safetensors"):
            consolidate_sharded_model_checkpoints(prefix, save_path=str(result))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert result.read_bytes() == b"earlier"
    assert len(list(tmp_path.iterdir())) == 3


def test_a_process_killed_while_it_writes_leaves_the_earlier_file(
    tmp_path: Path,
) -> None:
    source, result = tmp_path / "source", tmp_path / "full.safetensors"
    source.write_bytes(bytes(1 << 22))
    result.write_bytes(b"earlier")
    done = run_alone("checkpoint.killed_in_write", str(source), str(result))
    assert done.returncode < 0  # by the signal that the limit sends
    assert result.read_bytes() == b"earlier"


def peak_kib() -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.split("VmHWM:")[1].split()[0])


@pytest.mark.parametrize("result", ["full.pth", "full.safetensors"])
def test_memory_stays_below_one_parameter(result: str, tmp_path: Path) -> None:
    """3 parameters of 24 MiB in 2 shards: a block at a time is held."""
    names = ("a", "b", "c")
    job = Job([Unit("", {n: torch.full((6, 1 << 20), 2.5) for n in names})], 2)
    prefix = save(job, tmp_path)
    del job
    (tmp_path / "warm").mkdir()
    warm = save(nested_job(2), tmp_path / "warm")
    consolidate_sharded_model_checkpoints(warm)  # all modules are imported by now
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = peak_kib()
    full, _ = consolidate_sharded_model_checkpoints(
        prefix, save_path=str(tmp_path / result)
    )
    assert peak_kib() - before < 16 << 10
    assert all(float(full[n][5, -1]) == 2.5 for n in names)


def test_the_command_consolidates_reshards_and_tells_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = nested_job(2, flat=True)
    prefix = save(job, tmp_path, adam=True)
    assert __main__.main(["consolidate", "--ckpt_prefix", prefix]) == 0
    saved = f"{prefix}_consolidated.pth"
    assert capsys.readouterr().out == f"saved to {saved}\n"
    assert_same(torch.load(saved, weights_only=True)["model"], whole(job))
    arguments = ["consolidate", "--ckpt_prefix", prefix, "--world_size", "3"]
    new = str(tmp_path / "new")
    assert __main__.main([*arguments, "--save_path", new]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    full, _ = consolidate_sharded_model_checkpoints(new, save_model=False)
    assert_same(full, whole(job))
    with pytest.raises(SystemExit) as left:
        __main__.main(["consolidate", "--ckpt_prefix", prefix + "x"])
    assert left.value.code == 1
    assert "Cannot find any files matching" in capsys.readouterr().err
