"""ctrainer._cuda, on a machine with or without a GPU."""

import ctypes
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import run_alone

cuda = pytest.importorskip("ctrainer._cuda", reason="ctrainer._cuda is not built")

ROOT = Path(__file__).resolve().parents[2]


def dynamic_symbols(which: str) -> list[str]:
    done = subprocess.run(
        ["nm", "-D", which, cuda.__file__], capture_output=True, text=True, check=True
    )
    return done.stdout.split("\n")


def test_no_device_is_explained() -> None:
    count, why = cuda.device_count(), cuda.why_no_device()
    assert count >= 0
    assert (why is None) == (count > 0)
    assert why is None or "driver" in why


def test_versions_are_numbers_or_none() -> None:
    versions = cuda.versions()
    assert list(versions) == ["runtime", "driver", "cublas", "nccl"]
    assert int(versions["runtime"].split(".")[0]) >= 13
    for version in versions.values():
        assert version is None or re.fullmatch(r"\d+\.\d+", version)


def test_a_missing_nccl_says_where_it_was_looked_for() -> None:
    if cuda.versions()["nccl"] is not None:
        pytest.skip("this machine has NCCL")
    with pytest.raises(RuntimeError, match=r"libnccl\.so\.2: .*pip install") as caught:
        cuda.comm_id()
    assert "nvidia/nccl/lib" in str(caught.value)


def test_libraries_are_looked_for_below_the_present_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if cuda.versions()["nccl"] is not None:
        pytest.skip("this machine has NCCL")
    monkeypatch.setattr(sys, "path", ["/nowhere", "", *sys.path, 7, b"/bytes"])
    cuda.find_libraries()
    strings = sum(isinstance(p, str) for p in sys.path)
    with pytest.raises(RuntimeError, match=rf"of {strings} folders of sys\.path"):
        cuda.comm_id()
    monkeypatch.undo()
    cuda.find_libraries()


def test_the_plugin_is_a_capsule_of_its_name() -> None:
    is_valid = ctypes.pythonapi.PyCapsule_IsValid
    is_valid.argtypes = [ctypes.py_object, ctypes.c_char_p]
    assert is_valid(cuda.plugin, b"ctrainer._cuda.plugin") == 1


def test_the_plugin_is_of_the_version_that_the_core_has() -> None:
    header = (ROOT / "csrc/core/device/device.h").read_text()
    expected = int(re.search(r"#define CT_DEVICE_VERSION (\d+)", header)[1])
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.argtypes, get.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_void_p
    address = get(cuda.plugin, b"ctrainer._cuda.plugin")
    assert ctypes.c_int.from_address(address).value == expected


def test_it_exports_its_init_function_alone() -> None:
    defined = [line for line in dynamic_symbols("--defined-only") if line]
    assert [line.split()[-1] for line in defined] == ["PyInit__cuda"]


def test_it_needs_neither_a_cuda_library_nor_the_cpp_runtime() -> None:
    done = subprocess.run(
        ["readelf", "-d", cuda.__file__], capture_output=True, text=True, check=True
    )
    needed = re.findall(r"NEEDED.*\[(.+)\]", done.stdout)
    assert needed
    assert not [n for n in needed if re.match(r"lib(cuda|cublas|nccl|stdc)", n)]


def test_importing_it_loads_no_driver() -> None:
    done = run_alone("cuda_libraries")
    done.check_returncode()
    assert done.stdout.strip() == "[]"
