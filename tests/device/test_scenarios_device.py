"""The scenarios of sharded modules that the host's ranks run, on emulated GPUs: ranks
are threads, NCCL is beside torch's stream, and tensors and modules are made there."""

from __future__ import annotations

import functools

import any_gpu
import emulated_torch
import pytest
import rank_threads
import scenarios
import torch
from any_gpu import RANKS

from ctrainer import _C
from ctrainer.fsdp import options

DEFAULTS = "units are prefetched on a GPU unless told otherwise"
GLOBAL = "ranks that are threads share it"
LEFT_OUT = {
    "the_next_unit_is_begun_while_one_computes": DEFAULTS,
    "at_most_one_unit_more_takes_memory": DEFAULTS,
    "memory_is_everything_shared_and_one_unit": DEFAULTS,
    "what_trains_without_trains_with_it": GLOBAL,
    "changes_of_what_is_trained_are_logged": GLOBAL,
    "a_module_may_go_while_something_is_begun": "torch's thread of a GPU has the error",
}
FOUND = scenarios.found_in(
    "fsdp_scenarios", "fsdp_prefetch_scenarios", "fsdp_state_scenarios",
    "fairscale_scenarios", "fairscale_sharing_scenarios", "sharded_gradients_scenarios",
)  # fmt: skip

pytestmark = pytest.mark.skipif(any_gpu.REAL, reason="ranks are threads of one GPU")


@pytest.mark.parametrize("name", [name for name in FOUND if name not in LEFT_OUT])
def test_on_gpus(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    any_gpu.device()
    compare = functools.partial(torch.testing.assert_close, check_device=False)
    monkeypatch.setattr(torch.testing, "assert_close", compare)
    monkeypatch.setattr(options, "_usable", lambda device: device)
    count = staticmethod(lambda: RANKS)
    monkeypatch.setattr(emulated_torch.Module, "device_count", count)

    def work(group: _C.Communicator, device: torch.device) -> None:
        with any_gpu.TestsMakeTensorsOn(device):
            assert torch.ones(1).device == device
            FOUND[name](group)

    with rank_threads.nothing_global_changes():
        any_gpu.on_nccl_ranks(work)


def test_all_that_is_left_out_is_there() -> None:
    assert LEFT_OUT.keys() < FOUND.keys()
