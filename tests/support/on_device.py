"""A plugin of pytest, `-p on_device`: tests of the host run on the emulated device.

`use_cpu` and `--cpu` mean nothing there: Trainers choose the device. transformers'
Trainer does not know the device and stays on the host.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from typing import Any

import emulated_torch
import pytest
import rank_threads
import ranks_on_device
import scenarios
import torch
import transformers

import ctrainer
from ctrainer.adapters import torch_fairseq as tools

# Why tests cannot run there, by the beginning of their names.
PEERS_BITS = "transformers on the host has other bits than torch's operators one by one"
NO_BACKEND = "torch.distributed has no backend for the device"
NO_AUTOCAST = "accelerate's autocast does not know the device"
PREFETCHES = "units are prefetched on a GPU unless told otherwise"
PYTHONS_GROUP = "its group is Python's, for host memory"
NOT_WATCHED = "released memory of a GPU is not watched"
MEAN_OF_THREE = "NCCL rounds a mean of three ranks"
OTHER_NORMS = "norms of gradients in host memory are added in another order"
ONE_MEMORY = "the device's memory is the host's"
NO_BYTES = "groups over NCCL do not count bytes"
ON_RANKS = (
    "the_process_group_is_there_after_training_arguments",
    "the_accelerator_agrees_in_every_event_and_micro_batch",
    "gather_for_metrics_has_each_row_once",
    "losses_and_predictions_are_those_of_transformers",
    "everything_that_a_subclass_does_with_the_accelerator",
)
ONE_PROCESS = "test_fsdp_optimizers.py::test_updates_are_those_of_one_process"
LEFT_OUT = {
    **{
        f"parity/test_accelerator_parity.py::test_{name}[two ranks]": NO_BACKEND
        for name in ON_RANKS
    },
    "ddp/test_data_parallel.py::test_a_module_on_a_gpu": "torch's wrapper needs CUDA",
    "optim/test_optimizer_in_trainer.py::test_engine_and_step_agree": "host's batches",
    "optim/test_optimizer_in_trainer.py::test_the_norm_is_known": "it comes later",
    "checkpoint/test_trainer_checkpoints.py::test_an_override_that_does": "it forks",
    "callbacks/test_profiler.py::test_so_many_updates": "50 operators take longer",
    "evaluate/test_seq2seq.py::test_predictions_are_transformers": PEERS_BITS,
    "evaluate/test_ranks_evaluation.py": "its metrics are NumPy's",
    "evaluate/test_trainer_eval.py::test_model_is_evaluated": "host's batches",
    "evaluate/test_trainer_eval.py::test_memory": ONE_MEMORY,
    "trainer/test_default_device.py::test_optimizer_states": "host's batches",
    "trainer/test_trainer_failures.py::test_a_hook_may_replace": "a model on the host",
    "trainer/test_accelerator.py::test_backward_of_an": NO_AUTOCAST,
    "trainer/test_accelerator.py::test_an_optimizer_of": NO_AUTOCAST,
    "trainer/test_out_of_memory.py::test_ranks_fail": "ranks of GPUs are rejected",
    "trainer/test_ranks_training.py": "accelerate asks for torch's own NCCL",
    "fairseq/test_fairseq_ranks.py::test_a_rank_that_dies": "at the time-out",
    "fairseq/test_fairseq_ranks.py::test_slow_momentum_moves": "it is on the host",
    "fairseq/test_fairseq_ranks_differ": "ranks go on behind collectives of NCCL's",
    "fairseq/test_fairseq_facts.py::TestConstruction": "says that there is no device",
    "fairseq/test_fairseq_program.py::test_a_killed_run": "it is killed on the host",
    "parity/test_accelerator_calls.py": NO_BACKEND,
    "parity/test_evaluation.py": PEERS_BITS,
    "parity/test_generation.py": PEERS_BITS,
    "parity/test_no_silent_difference.py": "transformers stays on the host",
    "parity/test_ranks.py": NO_BACKEND,
    "parity/test_saved_weights.py": "torch has convolutions for its own devices alone",
    "parity/test_training.py::test_fifty_updates_in_bf16": "transformers refuses",
    "trainer/test_ranks_outlived.py": NO_BACKEND,
    "fsdp/test_fsdp.py::test_on_ranks[2-memory_is": PREFETCHES,
    "fsdp/test_fsdp.py::test_on_ranks[3-memory_is": PREFETCHES,
    "fsdp/test_fsdp_bits.py": MEAN_OF_THREE,
    "fsdp/test_fsdp_dtypes.py::test_batch_norm": "autocast is the host's",
    "fsdp/test_fsdp_exceptions.py::test_a_collective": PYTHONS_GROUP,
    "fsdp/test_fsdp_exceptions.py::test_a_failure_at_the_end": PYTHONS_GROUP,
    "fsdp/test_fsdp_exceptions.py::test_the_others_are_told": "at the time-out",
    f"fsdp/{ONE_PROCESS}[Muon-views of rows]": MEAN_OF_THREE,
    "fsdp/test_fsdp_memory_used.py": PREFETCHES,
    "fsdp/test_fsdp_prefetch.py::test_on_two_ranks[the_next_unit_is_begun": PREFETCHES,
    "fsdp/test_fsdp_prefetch.py::test_on_two_ranks[at_most_one_unit": PREFETCHES,
    "fsdp/test_fsdp_released.py::test_released_parameters_that": NOT_WATCHED,
    "fsdp/test_fsdp_released.py::test_poisoned": NOT_WATCHED,
    "fsdp/test_fsdp_threads.py::test_two_models": "a thread begins on the first GPU",
    "fsdp/test_deepspeed_training.py::test_state_on_nvme": OTHER_NORMS,
    "fsdp/test_deepspeed_training.py::test_shards_on_nvme": OTHER_NORMS,
    "fsdp/test_fsdp_meta.py::test_a_rank_without_values_never": ONE_MEMORY,
    "fsdp/test_fsdp_out_of_memory.py": "ranks of GPUs are rejected",
    "fsdp/test_fsdp_traffic.py": NO_BYTES,
    "fsdp/test_fsdp_quantized.py::test_codes_are": NO_BYTES,
    "fsdp/test_fsdp_world_sizes.py": "torch loads all on the GPU that it was saved on",
    "fsdp/test_shards_in_files.py::test_training": "its full state is on the host",
    "fsdp/test_shards_in_files.py::test_whatever": "its full state is on the host",
    "fsdp/test_secondary_shards.py": "NCCL's groups have no machines",
}
launched: list[str] = []


def pytest_configure() -> None:
    os.environ["CTRAINER_TEST_ON_DEVICE"] = "1"  # for the ranks that tests start
    emulate()
    rank_threads.on_ranks = ranks_on_device.on_ranks
    scenarios.outcomes = ranks_on_device.outcomes


def emulate() -> None:
    """Trainers of this process choose the emulated device."""
    emulated_torch.device()
    for arguments in (ctrainer.TrainingArguments, transformers.TrainingArguments):
        arguments.use_cpu = property(lambda _: False, lambda *_: None)
    transformers.training_args.is_torch_bf16_gpu_available = lambda: True

    def choose_device(use_cpu: bool, choose: Any = tools.choose_device) -> torch.device:
        return choose(False)

    tools.choose_device = choose_device
    torch.testing.assert_close = functools.partial(
        torch.testing.assert_close, check_device=False
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        found = [why for name, why in LEFT_OUT.items() if f"/{name}" in item.nodeid]
        for scenario, why in ranks_on_device.LEFT_OUT.items():
            found += [why] if item.nodeid.endswith(f"{scenario}]") else []
        for why in found:
            item.add_marker(pytest.mark.skip(reason=why))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[object]:
    before = emulated_torch.launches()
    try:
        return (yield)
    finally:
        if emulated_torch.launches() != before:
            launched.append(item.nodeid)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(
        f"kernels were launched in {len(launched)} of {terminalreporter._numcollected}"
        " tests"
    )


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not launched and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
