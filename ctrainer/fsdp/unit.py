"""A unit as torch sees it: what the engine asks of autograd."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Variable

from ctrainer import _C
from ctrainer.fsdp import _frozen
from ctrainer.fsdp._tensors import new_zeros
from ctrainer.fsdp.state import TrainingState


class Unit(_C.FSDPUnit):
    """The engine of one module, with torch's answers to its questions."""

    owner: Callable[[], Any]  # a weak reference to the module
    path = ""  # of the module, from its root

    _grad_enabled = staticmethod(torch.is_grad_enabled)
    _graph_task = staticmethod(torch._C._current_graph_task_id)
    _current_node = staticmethod(torch._C._current_autograd_node)
    _next_sequence_nr = staticmethod(torch._C._autograd._get_sequence_nr)

    def _queue(self) -> Callable[[], Any]:
        """Have the backward that is under way end with the module's own ending.

        Returns a weak reference to what autograd keeps for it, and drops when the
        backward has ended, with an exception or without.
        """
        end = self.owner()._end_of_backward
        Variable._execution_engine.queue_callback(end)
        return weakref.ref(end)

    def _new_gradient(self, group: int) -> torch.Tensor:
        shard = self.shards[group]
        return new_zeros(shard.shape, shard.device)

    def _settle_trained(self) -> tuple[bool, ...]:
        return _frozen.settle(self.owner())

    def _check_order(self, what: str) -> None:
        """Raise ValueError on all ranks where they do not come to the same unit."""
        own = f"{what} {self.path!r}" if self.path else f"{what} the root"
        answers = self.communicator.gather_bytes(own.encode())
        told = [answer.decode() for answer in answers]
        if any(other != own for other in told):
            each = ", ".join(f"rank {rank} {text}" for rank, text in enumerate(told))
            raise ValueError(
                f"ranks use different units, or in different orders: {each}. All ranks "
                "have to call the same modules in the same order"
            )

    def assert_state(self, states: list[int]) -> None:
        self.owner().assert_state([TrainingState(state) for state in states])
