"""ctrainer._C.CheckpointWriter and the readers: what the binding adds to the core."""

import errno
import gc
import inspect
import json
import mmap
import os
import random
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draws import draws
from ranks import run_alone
from safetensors.torch import load_file

from ctrainer import _C
from ctrainer.checkpoint import (
    MANIFEST_NAME,
    CheckpointWriter,
    last_whole_checkpoint,
    load_safetensors_into,
    read_safetensors,
    verify_checkpoint,
)
from ctrainer.comm import RankFailure

torch = pytest.importorskip("torch")


def save(folder: Path, tensors: dict[str, Any] | None = None) -> None:
    writer = CheckpointWriter()
    writer.begin(folder)
    writer.add_safetensors("model.safetensors", tensors or {"w": torch.ones(3)})
    writer.add_bytes("trainer_state.json", b"{}")
    writer.commit(wait=True)


EVERY_DTYPE = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64,
    torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip


def test_files_are_what_the_safetensors_library_writes(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch")
    tensors = {
        str(dtype): torch.arange(6).reshape(2, 3).to(dtype) for dtype in EVERY_DTYPE
    }
    tensors |= {
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
        'q"\n': tensors["torch.int8"].clone(),
    }
    save(tmp_path / "checkpoint-1", tensors)
    path = tmp_path / "checkpoint-1" / "model.safetensors"
    library.save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    loaded = library.load_file(path)
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)
    ours, theirs = path.read_bytes(), (tmp_path / "theirs").read_bytes()

    def data(content: bytes) -> bytes:
        return content[8 + int.from_bytes(content[:8], "little") :]

    assert data(ours) == data(theirs)


def test_live_tensors_are_filled_in_place(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(70, 1000), "b": torch.arange(5), "c": torch.zeros(0)}
    save(tmp_path / "checkpoint-1", tensors)
    targets = {name: torch.zeros_like(t) for name, t in tensors.items()}
    addresses = [t.data_ptr() for t in targets.values()]
    path = tmp_path / "checkpoint-1" / "model.safetensors"
    assert load_safetensors_into(path, targets) == ([], [])
    assert addresses == [t.data_ptr() for t in targets.values()]
    assert all(torch.equal(targets[n], tensors[n]) for n in tensors)


def test_what_does_not_fit_is_rejected_before_anything_changes(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint-1", {"a": torch.ones(3), "b": torch.ones(2)})
    path = tmp_path / "checkpoint-1" / "model.safetensors"
    a = torch.zeros(3)
    for wrong in (torch.zeros(3), torch.zeros(2, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"tensor 'b'.*does not fit"):
            load_safetensors_into(path, {"a": a, "b": wrong})
    with pytest.raises(ValueError, match=r"lacks \['x'\]"):
        load_safetensors_into(path, {"a": a, "b": torch.zeros(2), "x": a})
    with pytest.raises(ValueError, match="tensor 'a'"):
        load_safetensors_into(path, {"a": torch.zeros(3, 2).T[0], "b": a})
    assert not a.any()
    missing = load_safetensors_into(path, {"a": a, "x": torch.zeros(1)}, strict=False)
    assert missing == (["x"], ["b"])
    assert a.all()


def test_numpy_reads_and_writes_without_torch(tmp_path: Path) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    save(tmp_path / "checkpoint-1", {"w": array, "h": torch.ones(2).bfloat16()})
    found = read_safetensors(tmp_path / "checkpoint-1" / "model.safetensors")
    assert (found["w"] == array).all()
    assert found.dtypes == {"w": "F32", "h": "BF16"}
    assert found["h"].dtype == np.uint16
    assert found["h"].tolist() == [0x3F80, 0x3F80]


def test_snapshot_is_taken_when_a_file_is_added(tmp_path: Path) -> None:
    writer, tensor = CheckpointWriter(), torch.ones(100_000)
    writer.begin(tmp_path / "checkpoint-1")
    writer.add_safetensors("model.safetensors", {"w": tensor})
    writer.add_torch("optimizer.pt", {"w": tensor})
    tensor.zero_()
    writer.commit(wait=True)
    folder = tmp_path / "checkpoint-1"
    assert read_safetensors(folder / "model.safetensors")["w"].all()
    assert torch.load(folder / "optimizer.pt", weights_only=True)["w"].all()


@pytest.mark.parametrize("seed", range(draws(20, 400)))
def test_a_save_has_the_files_of_all_who_joined_it(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    writers = [CheckpointWriter() for _ in range(draw.randint(2, 5))]
    for turn in range(2):
        final, expected = tmp_path / f"checkpoint-{draw.choice([1, turn])}", {}
        was_there = final.exists()
        numbers = draw.sample(range(100), len(writers) - 1)
        publisher = draw.choice(writers)
        others = [writer for writer in writers if writer is not publisher]
        folder = publisher.begin(final)
        for writer, number in zip(others, numbers, strict=True):
            writer.join(folder, number)
        for i, writer in enumerate(writers):
            for j in range(draw.randint(0, 3)):
                name = draw.choice(["", "sub/", f"own-{i}/"]) + f"{turn}-{i}-{j}"
                value = torch.randn(draw.choice([0, 3, 70_000]))
                expected[name] = value.clone()
                writer.add_safetensors(name, {"w": value}, snapshot=draw.random() < 0.7)
                value.zero_()
            if draw.random() < 0.2:
                writer.flush()
        ends = [(writer, {}) for writer in others]
        ends.insert(draw.randint(0, len(ends)), (publisher, {"parts": numbers}))
        for i, (writer, options) in enumerate(ends):
            waits = draw.random() < 0.3 and (
                writer is not publisher or i == len(others)
            )
            writer.commit(wait=waits, **options)
            assert was_there or i == len(others) or not final.exists()
        for writer in draw.sample(writers, len(writers)):
            writer.wait()
        if not expected:
            continue
        assert verify_checkpoint(final) == []
        listed = json.loads((final / MANIFEST_NAME).read_text())["files"]
        assert listed.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(load_file(final / name)["w"], value)
    assert all(name.startswith("checkpoint-") for name in os.listdir(tmp_path))


def test_a_part_that_is_not_there_is_named(tmp_path: Path) -> None:
    writer, other = CheckpointWriter(), CheckpointWriter()
    with pytest.raises(FileNotFoundError, match=r"nowhere/\.part-1"):
        other.join(tmp_path / "nowhere/checkpoint-1", 1)
    folder = writer.begin(tmp_path / "checkpoint-1")
    other.join(folder, 1)
    with pytest.raises(FileNotFoundError, match=r"\.part-2"):
        writer.commit(parts=[1, 2])
    for wrong in ([-1], [1 << 40]):
        with pytest.raises(ValueError, match="from 0 on"):
            writer.commit(parts=wrong)
    with pytest.raises(TypeError):
        writer.commit(parts=["1"])
    with pytest.raises(ValueError, match="no save was begun here"):
        other.commit(parts=[1])
    writer.commit(parts=[1], timeout=0.01)
    with pytest.raises(RankFailure, match="rank 1 has not written its files of check"):
        writer.wait()
    other.abort()
    assert os.listdir(tmp_path) == []


def test_memory_of_a_shared_file_is_written_without_a_copy(tmp_path: Path) -> None:
    writer = CheckpointWriter()
    writer.begin(tmp_path / "checkpoint-1")
    expected = torch.randn(100_000)
    with tempfile.TemporaryFile(dir=tmp_path) as file:
        file.write(expected.numpy().tobytes())
        file.flush()
        with pytest.raises(OSError, match="cannot map shared data"):
            writer.share(-1, bytearray(8))
        memory = mmap.mmap(file.fileno(), 0)
        writer.share(file.fileno(), memory)
    there = torch.frombuffer(memory, dtype=torch.float32)
    other = torch.ones(3)
    writer.add_safetensors("a", {"w": there, "end": there[-5:], "other": other})
    writer.add_torch("b", {"w": there})
    assert writer.snapshot_bytes < 100 << 20  # the pickle and `other`
    other.zero_()
    del there
    memory.close()
    writer.commit(wait=True)
    found = load_file(tmp_path / "checkpoint-1/a")
    assert torch.equal(found["w"], expected)
    assert torch.equal(found["end"], expected[-5:])
    assert found["other"].all()
    again = torch.load(tmp_path / "checkpoint-1/b", weights_only=True)["w"]
    assert torch.equal(again, expected)


def test_archives_keep_views_sharing_and_odd_dtypes(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    content = {
        "base": base,
        "column": base[:, 1],
        "step": torch.tensor(3.0),
        "fp8": torch.ones(4).to(torch.float8_e4m3fn),
        "complex": torch.ones(2, dtype=torch.complex64),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "lr": [1e-3, (1, None, True)],
    }
    writer = CheckpointWriter()
    writer.begin(tmp_path / "checkpoint-1")
    writer.add_torch("x.pt", content)
    writer.commit(wait=True)
    path = tmp_path / "checkpoint-1" / "x.pt"
    for mapped in (False, True):
        back = torch.load(path, weights_only=True, mmap=mapped)
        assert torch.equal(back["base"], base)
        back["base"][0, 1] = 99.0
        assert back["column"][0] == 99.0  # one storage still
        assert back["fp8"].dtype == torch.float8_e4m3fn
        assert back["parameter"].requires_grad
        assert back["lr"] == content["lr"]
    _C.archive_index(path, None)


def test_damage_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-1"
    save(folder, {"w": torch.arange(1000.0)})
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    assert verify_checkpoint(folder) == []
    path.write_bytes(whole[:-4])
    (problem,) = verify_checkpoint(folder)
    assert str(path) in problem
    assert "was written as" in problem
    flipped = bytearray(whole)
    flipped[-7] ^= 4
    path.write_bytes(flipped)
    (problem,) = verify_checkpoint(folder)
    assert str(path) in problem
    assert "damaged" in problem
    with pytest.raises(ValueError, match="damaged"):
        read_safetensors(path)
    path.unlink()
    (problem,) = verify_checkpoint(folder)
    assert "No such file" in problem
    (folder / "ctrainer_manifest.json").write_text('{"version": 1, "files"')
    (problem,) = verify_checkpoint(folder)
    assert "ctrainer_manifest.json" in problem
    assert verify_checkpoint(tmp_path / "nothing") != []


def test_the_manifest_lists_files_by_name(tmp_path: Path) -> None:
    writer = _C.CheckpointWriter()
    writer.begin(tmp_path / "checkpoint-1")
    for name in ("b", "optimizer.pt", "a", "c/b", "model.safetensors", "c/a"):
        writer.add_bytes(name, b"1")
    writer.commit(True)
    text = (tmp_path / "checkpoint-1/ctrainer_manifest.json").read_text()
    names = list(json.loads(text)["files"])
    assert len(names) == 6
    assert names == sorted(names)


def test_newest_whole_checkpoint_is_found(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert last_whole_checkpoint(tmp_path) is None
    for step in (9, 10, 100):
        save(tmp_path / f"checkpoint-{step}")
    (tmp_path / "checkpoint-100" / "model.safetensors").write_bytes(b"")
    os.mkdir(tmp_path / "checkpoint-1000")
    os.mkdir(tmp_path / "checkpoint-best")
    os.utime(tmp_path / "checkpoint-9")
    assert last_whole_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")
    assert "checkpoint-1000: " in caplog.text
    assert "model.safetensors: is 0 bytes long" in caplog.text


def test_full_disk_raises_once_and_leaves_older_ones(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    save(tmp_path / "checkpoint-1")
    writer = CheckpointWriter()
    writer.begin(tmp_path / "checkpoint-2")
    writer.add_safetensors("model.safetensors", {"w": torch.ones(1_000_000)})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        writer.commit()
        with pytest.raises(OSError, match=r"model\.safetensors: File too large"):
            writer.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    writer.wait()
    assert os.listdir(tmp_path) == ["checkpoint-1"]
    assert verify_checkpoint(tmp_path / "checkpoint-1") == []
    writer.begin(tmp_path / "checkpoint-2")  # and it can go on
    writer.add_bytes("x", b"x")
    writer.commit(wait=True)
    assert verify_checkpoint(tmp_path / "checkpoint-2") == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_unwritable_folder_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError, match=str(tmp_path)):
        CheckpointWriter().begin(tmp_path / "checkpoint-1")


def test_file_where_a_folder_should_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        CheckpointWriter().begin(tmp_path / "file" / "checkpoint-1")


def test_bad_input_is_named(tmp_path: Path) -> None:
    writer = CheckpointWriter()
    with pytest.raises(ValueError, match="no save is open"):
        writer.add_bytes("x", b"")
    with pytest.raises(ValueError, match="no save is open"):
        writer.commit()
    writer.begin(tmp_path / "checkpoint-1")
    with pytest.raises(ValueError, match="still being saved"):
        writer.begin(tmp_path / "checkpoint-2")
    with pytest.raises(ValueError, match="inside its folder"):
        writer.add_bytes("../x", b"")
    with pytest.raises(TypeError, match="tensor 'w'"):
        writer.add_safetensors("m", {"w": [1.0]})
    with pytest.raises(ValueError, match="tensor 'w'"):
        writer.add_safetensors("m", {"w": torch.ones(2, 3).T})
    with pytest.raises(ValueError, match="no dtype 'F3'"):
        writer.add_safetensors("m", {"w": (torch.ones(4).byte(), "F3", (1,))})
    with pytest.raises(TypeError, match="metadata"):
        writer.add_safetensors("m", {}, {"a": 1})
    with pytest.raises(TypeError, match="names of tensors"):
        writer.add_safetensors("m", {1: torch.ones(1)})
    writer.abort()
    assert os.listdir(tmp_path) == []


def test_another_thread_is_rejected_while_one_is_inside(tmp_path: Path) -> None:
    writer, rejected = CheckpointWriter(), []
    writer.begin(tmp_path / "checkpoint-1")
    writer.add_safetensors("model.safetensors", {"w": torch.ones(20_000_000)})
    writer.commit()
    thread = threading.Thread(target=writer.wait)
    thread.start()
    while thread.is_alive():
        try:
            writer.flush()
        except RuntimeError as problem:
            rejected.append(str(problem))
    thread.join()
    assert all("another thread" in text for text in rejected)
    assert rejected
    assert verify_checkpoint(tmp_path / "checkpoint-1") == []


@pytest.mark.parametrize("fate", ["kept", "lost"])
def test_a_process_that_ends_finishes_its_save_or_says_why_not(
    tmp_path: Path, fate: str
) -> None:
    folder = tmp_path / "checkpoint-1"
    done = run_alone("checkpoint.at_exit", str(folder), fate)
    done.check_returncode()
    if fate == "kept":
        assert verify_checkpoint(folder) == []
        assert done.stderr == ""
    else:
        assert not folder.exists()
        assert "The last checkpoint could not be saved: " in done.stderr


def test_shards_that_an_index_names_and_that_are_missing_are_told(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "checkpoint-1"  # of another program: it has no manifest
    folder.mkdir()
    names = ["a.safetensors", "b.safetensors", "c.safetensors"]
    index = {"weight_map": {f"w{i}": name for i, name in enumerate(names)}}
    for i in (0, 2):
        _C.write_safetensors(folder / names[i], {f"w{i}": torch.ones(3)}, {})
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "trainer_state.json").write_text("{}")
    (problem,) = verify_checkpoint(folder)
    missing = folder / "b.safetensors"
    assert problem == f"{missing}: is missing; model.safetensors.index.json names it"


def test_reserved_memory_is_there_before_the_first_save(tmp_path: Path) -> None:
    writer = CheckpointWriter()
    writer.reserve(80 << 20)
    writer.wait()
    before = writer.snapshot_bytes
    assert before >= 80 << 20
    writer.begin(tmp_path / "checkpoint-1")
    writer.add_safetensors("model.safetensors", {"w": torch.ones(1000)})
    with pytest.raises(ValueError, match="is being saved"):
        writer.reserve(1)
    writer.commit(wait=True)
    assert writer.snapshot_bytes == before
    writer.release()
    assert writer.snapshot_bytes == 0
    with pytest.raises(OverflowError):
        writer.reserve(-1)


def test_dropped_writer_removes_its_folder(tmp_path: Path) -> None:
    writer = CheckpointWriter()
    writer.begin(tmp_path / "checkpoint-1")
    assert len(os.listdir(tmp_path)) == 1
    del writer
    gc.collect()
    assert os.listdir(tmp_path) == []


def test_signatures_are_introspectable() -> None:
    parameters = inspect.signature(CheckpointWriter.add_safetensors).parameters
    assert list(parameters) == ["self", "name", "tensors", "metadata", "snapshot"]
    commit = str(inspect.signature(CheckpointWriter.commit))
    assert commit == "(self, /, wait=False, parts=(), timeout=1800.0)"


def test_no_leaks(tmp_path: Path) -> None:
    tensors = {"w": torch.ones(10), "raw": (torch.ones(4).byte(), "F32", (1,))}

    def exercise() -> None:
        writer = _C.CheckpointWriter()
        writer.begin(tmp_path / "checkpoint-1")
        writer.add_safetensors("model.safetensors", tensors, {"a": "b"})
        writer.add_archive("x.pt", [("a/b", b"1"), ("a/c", tensors["w"])])
        with pytest.raises(ValueError, match="no dtype"):
            writer.add_safetensors("m", {"w": (tensors["raw"][0], "F3", (1,))})
        writer.commit(True)
        path = tmp_path / "checkpoint-1" / "model.safetensors"
        _C.safetensors_index(path)
        with pytest.raises(ValueError, match="does not fit"):
            _C.load_safetensors_into(path, {"w": torch.ones(3)}, False, True)
        _C.load_safetensors_into(path, {"w": tensors["w"]}, False, True)
        assert _C.verify_manifest(tmp_path / "checkpoint-1") == []

    def measure() -> tuple[int, int]:
        gc.collect()
        return sys.getrefcount(_C.CheckpointWriter), sys.getallocatedblocks()

    growth = []
    for _ in range(4):  # the first turn fills caches
        types, blocks = measure()
        for _ in range(100):
            exercise()
        types_after, blocks_after = measure()
        assert types_after == types
        growth.append(blocks_after - blocks)
    assert min(growth) < 50  # one leaked a call would be 100


def test_disk_that_is_really_full_leaves_the_older_whole(small_disk: Path) -> None:
    save(small_disk / "checkpoint-1", {"w": torch.ones(500_000)})
    writer = CheckpointWriter()
    writer.begin(small_disk / "checkpoint-2")
    writer.add_safetensors("model.safetensors", {"w": torch.ones(800_000)})
    writer.commit()
    with pytest.raises(OSError, match="No space left") as problem:
        writer.begin(small_disk / "checkpoint-3")
    assert problem.value.errno == errno.ENOSPC
    assert os.listdir(small_disk) == ["checkpoint-1"]
    assert verify_checkpoint(small_disk / "checkpoint-1") == []
    writer.begin(small_disk / "checkpoint-3")
    writer.add_safetensors("model.safetensors", {"w": torch.ones(100_000)})
    writer.commit(wait=True)
    assert last_whole_checkpoint(small_disk) == str(small_disk / "checkpoint-3")
