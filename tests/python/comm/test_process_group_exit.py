"""The end of a process whose group's threads may still hold tensors."""

from __future__ import annotations

import threading

import torch

from ctrainer.comm import process_group


def test_the_end_of_a_process_waits_for_tensors_that_threads_hold() -> None:
    tensor = torch.ones(3)
    keeps = [torch.ones(3, requires_grad=True) * tensor]  # saved for its backward
    process_group._hold(tensor)
    process_group._hold(torch.ones(2))
    assert any(each is tensor for each in process_group._held)
    threading.Timer(0.05, keeps.clear).start()
    process_group._wait_for_threads()
    assert not keeps
    process_group._hold()
    assert not any(each is tensor for each in process_group._held)
