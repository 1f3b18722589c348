"""The machine code of the kernels: what is in registers, how much memory is on its way.

Memory is busy while enough bytes are on their way: CUB, whose copies reach the speed of
memory, wants 32 KB for each multiprocessor of an H100 (`BytesInFlight` of its tuning
policies). The bytes that a thread has loaded before it uses the first, times the
threads that registers leave room for, have to be as many."""

import functools
import re
from pathlib import Path
from typing import NamedTuple

import pytest
from nvcc import ARCHS, NVCC, NVDISASM, SOURCES, machine_code
from places import ROOT

pytestmark = pytest.mark.skipif(
    NVCC is None or NVDISASM is None, reason="needs nvcc and nvdisasm"
)

# Threads of a multiprocessor: CUDA C++ Programming Guide, compute capabilities.
MOST_THREADS = {"75": 1024, "86": 1536, "89": 1536, "120": 1536}
BLOCK = 256
ENOUGH = 32 * 1024
STATELESS, THREE_STATES = (
    re.findall(
        rf"CT_RULE\((\w+), \w+, {n}\)", (ROOT / "csrc/math/rules.def").read_text()
    )
    for n in (0, 3)
)


class Kernel(NamedTuple):
    registers: int
    stack: int
    spilled: int
    in_flight: int  # bytes of a thread


_PROPERTIES = re.compile(
    r"Function properties for (\w+)\n"
    r"\s*(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads\n"
    r".*Used (\d+) registers"
)
_SECTION = re.compile(r"\.section\s+\.text\.(\w+),(.*?)(?=\.section\s|\Z)", re.S)
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(@\S+ )?(\S+)(.*?);")
_WIDTHS = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}


def most_in_flight(code: str) -> int:
    """The most bytes that loads, one after another, fetch before the first of their
    registers is used."""
    most = 0
    loading: dict[int, int] = {}  # by its first register, the bytes of a load
    waiting: set[int] = set()
    for condition, name, operands in _INSTRUCTION.findall(code):
        registers = [int(r) for r in re.findall(r"\bR(\d+)\b", operands)]
        ends = not condition and name.startswith(("EXIT", "RET", "BRA"))
        is_load = name.startswith("LDG")
        if ends or waiting.intersection(registers[1:] if is_load else registers):
            loading.clear()
            waiting.clear()
        if is_load:
            width = re.search(r"\.(128|64|U16|S16|U8|S8)\b", name)
            size = _WIDTHS[width[1]] if width else 4
            loading[registers[0]] = size
            waiting.update(range(registers[0], registers[0] + (size + 3) // 4))
            most = max(most, sum(loading.values()))
    return most


@functools.cache
def kernels(source: Path, arch: str) -> dict[str, Kernel]:
    said, code = machine_code(source, arch)
    in_flight = {name: most_in_flight(body) for name, body in _SECTION.findall(code)}
    return {
        name: Kernel(
            int(registers), int(stack), int(stores) + int(loads), in_flight[name]
        )
        for name, stack, stores, loads, registers in _PROPERTIES.findall(said)
    }


def most_registers(name: str, arch: str) -> int:
    """64; where these do not hold the constants, sums and arrays, for sums of measured
    rules, Adafactor, compact state of Adam and rules in double, 80 or 128. From compute
    capability 12.0 on a kernel takes more, and 80 for every rule with state."""
    if re.match(r"_Z\d+compact_kernelI\d+ct_rule_adam", name):
        return 80
    kernel = re.match(
        r"_Z\d+(update|measure)_kernelI\d+(ct_rule|measured)_(\w+?)([fd])(E|Lb)", name
    )
    if kernel is None:
        return 64
    in_double = kernel[4] == "d"
    if kernel[1] == "measure":
        return 128 if in_double else 80
    if in_double:
        return 128 if kernel[3] in THREE_STATES else 80
    more = arch == "120" and kernel[3] not in STATELESS
    return 80 if more or kernel[3].startswith("adafactor") else 64


def resident(kernel: Kernel, arch: str) -> int:
    """The threads that run at a time; a warp takes registers by 256."""
    blocks = 65536 // (-(-kernel.registers // 8) * 8 * BLOCK)
    return min(blocks * BLOCK, MOST_THREADS.get(arch, 2048))


on_each = pytest.mark.parametrize("arch", ARCHS)


@on_each
@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.name)
def test_no_kernel_has_a_stack_spills_or_takes_more_registers(
    source: Path, arch: str
) -> None:
    found = kernels(source, arch)
    assert found
    bad = {
        name: kernel
        for name, kernel in found.items()
        if kernel.stack
        or kernel.spilled
        or kernel.registers > most_registers(name, arch)
    }
    assert not bad


# Kernels that are as fast as memory; of 8-bit state the search takes longer.
STREAMS = re.compile(
    r"_Z\d+(update_kernelI.*Lb0E|measure_kernel|norm_kernel|copy_kernel|scale_kernel"
    r"|average_kernel|add_kernel|compact_kernel)"
)


@on_each
@pytest.mark.parametrize("name", ["elementwise", "norm", "update"])
def test_a_multiprocessor_has_32_kilobytes_on_their_way(name: str, arch: str) -> None:
    source = next(p for p in SOURCES if p.stem == name)
    found = {k: v for k, v in kernels(source, arch).items() if STREAMS.match(k)}
    assert found
    few = {k: v for k, v in found.items() if v.in_flight * resident(v, arch) < ENOUGH}
    assert not few


def test_a_load_counts_until_its_registers_are_used() -> None:
    code = """
        /*0000*/ LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0010*/ @P0 LDG.E.64 R8, desc[UR4][R2.64+0x10] ;
        /*0020*/ FADD R1, R9, R9 ;
        /*0030*/ LDG.E R4, [R2] ;
        /*0040*/ LDG.E.U16 R6, [R4] ;
    """
    assert most_in_flight(code) == 24
    assert most_in_flight("\n".join(code.splitlines()[4:])) == 4
