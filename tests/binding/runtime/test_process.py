"""Threads, instruction set and allocator settings of the process."""

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from ranks import run_alone

from ctrainer import _C
from ctrainer.adapters.numpy import AdamW, Parameter


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    threads, isa = _C.get_num_threads(), _C.cpu_isa()
    yield
    _C.set_num_threads(threads)
    _C.set_cpu_isa(isa)


def updated() -> bytes:
    draw = np.random.default_rng(0).standard_normal
    params = [Parameter(draw(n).astype(np.float32)) for n in (7, 150_000, 33)]
    for parameter in params:
        parameter.grad = draw(parameter.data.shape).astype(np.float32)
    opt = AdamW(params)
    for _ in range(3):
        opt.step(max_norm=1.0)
    return b"".join(p.data.tobytes() for p in params)


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    results = set()
    for threads in (1, 2, 5):
        _C.set_num_threads(threads)
        assert _C.get_num_threads() == threads
        results.add(updated())
    assert len(results) == 1


@pytest.mark.parametrize("isa", ["v3", "v4"])
def test_results_do_not_depend_on_the_instruction_set(isa: str) -> None:
    _C.set_cpu_isa("base")
    expected = updated()
    try:
        _C.set_cpu_isa(isa)
    except ValueError:
        pytest.skip(f"this processor lacks {isa}")
    assert _C.cpu_isa() == isa
    assert updated() == expected


@pytest.mark.parametrize("n", [0, -1, 257, 2**70])
def test_bad_number_of_threads_keeps_the_old(n: int) -> None:
    before = _C.get_num_threads()
    with pytest.raises((ValueError, OverflowError)):
        _C.set_num_threads(n)
    assert _C.get_num_threads() == before


@pytest.mark.parametrize("value", ["a", None, 1.5])
def test_number_of_threads_is_an_integer(value: Any) -> None:
    with pytest.raises(TypeError):
        _C.set_num_threads(value)


def test_unknown_instruction_set_is_named() -> None:
    with pytest.raises(ValueError, match="'mmx'"):
        _C.set_cpu_isa("mmx")
    with pytest.raises(TypeError):
        _C.set_cpu_isa(3)  # type: ignore[arg-type]


def faults(function: str, value: int, **environ: str) -> tuple[bool, int]:
    """Whether tuning was applied, and page faults of 20 blocks of 16 MiB in turn."""
    done = run_alone("optim.page_faults", function, str(int(value)), **environ)
    done.check_returncode()
    applied, count = done.stdout.split()
    return applied == "True", int(count)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's settings")
def test_tuned_allocator_keeps_its_pages() -> None:
    applied, tuned = faults("malloc_tune", True)
    if not applied:
        pytest.skip("not glibc")
    _, plain = faults("malloc_tune", False)
    assert tuned < plain / 2
    _, kept = faults("malloc_keep", 1 << 25)
    _, mapped = faults("malloc_keep", 1 << 20)
    assert kept < plain / 2 < mapped
    own = {"MALLOC_MMAP_THRESHOLD_": "131072"}
    assert faults("malloc_tune", True, **own)[0] is False
    assert faults("malloc_keep", 1 << 20, **own)[0] is False


@pytest.mark.parametrize("nbytes", [0, 1 << 62])
def test_blocks_to_keep_are_of_a_sensible_length(nbytes: int) -> None:
    with pytest.raises(ValueError, match=rf"nbytes must be .*, got {nbytes}"):
        _C.malloc_keep(nbytes)


def test_blocks_of_a_library_that_is_not_loaded_are_not_recycled() -> None:
    assert _C.recycle_blocks("libnone.so") is False
    with pytest.raises(TypeError):
        _C.recycle_blocks(3)  # type: ignore[arg-type]
