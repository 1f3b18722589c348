"""Every kernel of the CPU has a twin on CUDA, and every twin is run by a test."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# How the CPU's kernels cut their work and choose an instruction set is theirs alone.
CPU_ONLY = {"kernels"}


def table_entries() -> list[str]:
    header = (ROOT / "csrc/core/device/device.h").read_text()
    struct = re.search(r"typedef struct ct_device \{(.*?)\} ct_device;", header, re.S)
    assert struct is not None
    return re.findall(r"ct_\w+_fn \*(\w+);", struct[1])


def test_the_table_has_entries() -> None:
    assert {"norm", "update", "scale", "zero", "copy"} <= set(table_entries())


def test_every_cpu_file_has_a_cuda_twin() -> None:
    cpu = {p.stem for p in (ROOT / "csrc/cpu").glob("*.c")}
    cuda = {p.stem for p in (ROOT / "cuda").glob("*.cu")}
    assert cpu - CPU_ONLY == cuda


@pytest.mark.parametrize("entry", table_entries())
def test_an_entry_is_filled_in_for_both_devices(entry: str) -> None:
    cpu = (ROOT / "csrc/cpu/device.c").read_text()
    cuda = (ROOT / "cuda/device.cu").read_text()
    table = cuda[cuda.index("const ct_device ct_device_cuda") :]
    assert re.search(rf"\.{entry} = \w+,", cpu)
    assert re.search(rf"\bct_cuda_{entry},", table)


@pytest.mark.parametrize("entry", table_entries())
def test_an_entry_is_called_by_a_test(entry: str) -> None:
    tests = [p.read_text() for p in (ROOT / "tests/cuda").glob("*.cpp")]
    assert any(f"ct_device_cuda.{entry}(" in text for text in tests)


def test_every_kernel_file_says_whose_twin_it_is() -> None:
    for path in (ROOT / "cuda").glob("*.cu"):
        head = path.read_text().split("*/")[0]
        assert f"csrc/cpu/{path.stem}.c" in " ".join(head.replace("\n *", " ").split())
