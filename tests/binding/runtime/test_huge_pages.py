"""prefer_huge_pages() against what the system says of the process's memory."""

from pathlib import Path

import pytest
import torch
from torch.nn import Parameter

from ctrainer import optim
from ctrainer._C import prefer_huge_pages

MIB = 1 << 20
huge_pages = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(),
    reason="this system has no transparent huge pages",
)


def flags_at(address: int) -> list[str]:
    """The VmFlags of the mapping that holds the address, in /proc/self/smaps."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(" ", 1)[0]
        if not first.endswith(":"):
            begin, end = (int(number, 16) for number in first.split("-"))
            inside = begin <= address < end
        elif inside and first == "VmFlags:":
            return line.split()[1:]
    return []


def middle(tensor: torch.Tensor) -> int:
    return tensor.data_ptr() + tensor.numel() * tensor.element_size() // 2


@huge_pages
def test_large_tensor_gets_the_advice_and_its_ends_do_not() -> None:
    tensor = torch.empty(64 * MIB, dtype=torch.uint8)
    before = flags_at(middle(tensor))
    prefer_huge_pages(tensor)
    assert "hg" not in before
    assert "hg" in flags_at(middle(tensor))
    assert "hg" not in flags_at(tensor.data_ptr())


@huge_pages
def test_state_of_a_large_parameter_gets_the_advice() -> None:
    param = Parameter(torch.randn(16 * MIB))
    param.grad = torch.randn(16 * MIB)
    opt = optim.AdamW([param])
    opt.step()
    for name in ("exp_avg", "exp_avg_sq"):
        assert "hg" in flags_at(middle(opt.state[param][name]))


def test_tensors_without_memory_of_the_host_are_left_alone() -> None:
    prefer_huge_pages(torch.empty(4 * MIB, device="meta"))
    prefer_huge_pages(torch.eye(3).to_sparse())
    prefer_huge_pages(torch.empty(0))
