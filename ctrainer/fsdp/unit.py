"""A unit as torch sees it: what the engine asks of autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Variable

from ctrainer import _C
from ctrainer.fsdp._tensors import new_zeros
from ctrainer.fsdp.state import TrainingState


class Unit(_C.FSDPUnit):
    """The engine of one module, with torch's answers to its questions."""

    owner: Callable[[], Any]  # a weak reference to the module

    _grad_enabled = staticmethod(torch.is_grad_enabled)
    _graph_task = staticmethod(torch._C._current_graph_task_id)

    def _queue(self) -> None:
        """Have the backward that is under way end with the module's own ending."""
        module = self.owner()
        Variable._execution_engine.queue_callback(module._end_of_backward)

    def _new_gradient(self, group: int) -> torch.Tensor:
        return new_zeros(self.shards[group].shape)

    def assert_state(self, states: list[int]) -> None:
        self.owner().assert_state([TrainingState(state) for state in states])
