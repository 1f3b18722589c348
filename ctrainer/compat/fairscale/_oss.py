"""OSS: an optimizer whose state is divided among the ranks, parameter by parameter."""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import SGD, Optimizer

from ctrainer import _C
from ctrainer.compat.fairscale._groups import communicator_of

Group = dict[str, Any]


class OSS(Optimizer):
    """An optimizer of which each rank updates some of the parameters and sends them to
    the others.

    Parameters go, in order, to the rank with the fewest elements so far. Gradients must
    be the same on all ranks, or at least right where the parameter is updated.

    Args:
        params: As any optimizer's.
        optim (type[Optimizer], default SGD): The class that updates, of torch or of
            ctrainer.optim, made of this rank's parameters with `default`.
        group (default None): A Communicator, a group of torch.distributed, or None for
            all ranks.
        broadcast_buffer_size (int, default -1): No effect: tensors are sent in C
            through one buffer.
        broadcast_fp16 (bool, default False): True is rejected: the ranks' parameters
            would come apart.
        force_broadcast_object (bool, default False): No effect.
        **default: Options of `optim`.

    Raises:
        ValueError: broadcast_fp16, or there is nothing to optimise on any rank.

    Source: Rajbhandari et al., "ZeRO", 2020, stage 1; names of fairscale,
    fairscale/optim/oss.py.

    Example:
        >>> import torch
        >>> from ctrainer.compat.fairscale import OSS
        >>> optimizer = OSS(torch.nn.Linear(3, 2).parameters(), torch.optim.SGD, lr=0.1)
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: Any,
        optim: type[Optimizer] = SGD,
        group: Any = None,
        broadcast_buffer_size: int = -1,
        broadcast_fp16: bool = False,
        force_broadcast_object: bool = False,
        **default: Any,
    ) -> None:
        if broadcast_fp16:
            raise ValueError(
                "broadcast_fp16=True would leave other ranks with rounded parameters; "
                "leave it out"
            )
        self._building = True
        super().__init__(params, default)
        self._building = False
        self._optim_constructor, self._optim_defaults = optim, default
        self.group = group
        self.communicator: _C.Communicator = communicator_of(group)
        self.rank = self.communicator.rank
        self.world_size = self.communicator.world_size
        self._owners: dict[torch.Tensor, int] = {}
        self._all_states: list[dict[str, Any]] = []
        self._optim: Optimizer | None = None
        self.refresh_trainable()

    # ---- who has which

    def partition_parameters(self) -> list[list[Group]]:
        """Return the parameter groups of each rank. A parameter stays where it is."""
        sizes = [0] * self.world_size
        parts: list[list[Group]] = [[] for _ in sizes]
        for group in self.param_groups:
            mine: list[list[torch.Tensor]] = [[] for _ in sizes]
            for param in group["params"]:
                rank = self._owners.setdefault(param, sizes.index(min(sizes)))
                mine[rank].append(param)
                sizes[rank] += param.numel() if param.requires_grad else 1
            for rank, params in enumerate(mine):
                parts[rank].append({**group, "params": params})
        return parts

    def refresh_trainable(self) -> None:
        """Partition parameters that have been added. requires_grad may change:
        parameters and their state stay with their ranks."""
        kept = {} if self._optim is None else self._optim.state
        self._parts = self.partition_parameters()
        self._optim = self._optim_constructor(
            self._parts[self.rank], **self._optim_defaults
        )
        for param in self._of_rank(self.rank):
            if param in kept:
                self.optim.state[param] = kept[param]

    def _of_rank(self, rank: int) -> list[torch.Tensor]:
        return [param for group in self._parts[rank] for param in group["params"]]

    def owners(self) -> dict[torch.Tensor, int]:
        """Return the rank that updates each parameter."""
        ranks = range(self.world_size)
        return {param: rank for rank in ranks for param in self._of_rank(rank)}

    def add_param_group(self, param_group: Group) -> None:
        """Add a group, and partition it.

        Args:
            param_group (Group): "params" and options.
        """
        super().add_param_group(param_group)
        if not self._building:
            self.refresh_trainable()

    @property
    def optim(self) -> Optimizer:
        """The optimizer of this rank's parameters."""
        assert self._optim is not None
        return self._optim

    # ---- updates

    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, **kwargs: Any
    ) -> float | None:
        """Update this rank's parameters and receive the others'; return the closure's
        loss, or None. Collective.

        Args:
            closure (Callable[[], float] | None, default None): Computes the loss and
                its gradients before the update.
            **kwargs: Of the inner optimizer's step().
        """
        _copy_options(self.param_groups, self.optim.param_groups)
        options = kwargs if closure is None else {**kwargs, "closure": closure}
        loss: float | None = self.optim.step(**options)
        for root in range(self.world_size):
            tensors = [param.detach() for param in self._of_rank(root)]
            _C.broadcast_tensors(self.communicator, tensors, root)
        _copy_options(self.optim.param_groups, self.param_groups)
        return loss

    @torch.no_grad()
    def clip_grad_norm(
        self,
        max_norm: float,
        norm_type: float | str = 2.0,
        filter_params_fn: Callable[[Any], Iterable[Any]] | None = None,
    ) -> torch.Tensor:
        """Scale the gradients of all ranks' parameters to a norm of at most max_norm;
        return the norm before. Collective.

        Args:
            max_norm (float): The largest norm.
            norm_type (float | str, default 2.0): p > 0, or inf.
            filter_params_fn (Callable[[Any], Iterable[Any]] | None, default None):
                Chooses of this rank's parameters those that count.
        """
        params: Any = self._of_rank(self.rank)
        if filter_params_fn is not None:
            params = list(filter_params_fn(params))
        grads = [p.grad for p in params if p.grad is not None]
        kind = float(norm_type)
        total = self._total_norm(grads, kind)
        if max_norm / (total + 1e-6) < 1:
            for param in self._numbers():
                if param.grad is not None:
                    param.grad.mul_(max_norm / (total + 1e-6))
        return torch.tensor(total, dtype=torch.float32, device="cpu")

    def _total_norm(self, grads: list[torch.Tensor], kind: float) -> float:
        norm = functools.partial(torch.linalg.vector_norm, dtype=torch.float64)
        own = [float(norm(grad, kind)) for grad in grads]
        worst = math.isinf(kind)
        mine = max(own, default=0.0) if worst else sum(n**kind for n in own)
        total = torch.tensor([mine], dtype=torch.float64, device="cpu")
        self.communicator.all_reduce(total, "max" if worst else "sum")
        return float(total) if worst else math.pow(float(total), 1.0 / kind)

    # ---- state

    def consolidate_state_dict(self, recipient_rank: int = 0) -> None:
        """Bring the ranks' states together. Collective.

        Args:
            recipient_rank (int, default 0): To which; -1: to all.
        """
        _copy_options(self.param_groups, self.optim.param_groups)
        file = io.BytesIO()
        torch.save(self.optim.state_dict(), file)
        everyone = self.communicator.gather_bytes(file.getvalue())
        self._all_states = [
            torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
            for data in (everyone if recipient_rank in (-1, self.rank) else [])
        ]

    def state_dict(self, all_ranks: bool = False) -> dict[str, Any]:
        """Return the whole state, as the inner optimizer alone would have it.

        Args:
            all_ranks (bool, default False): Bring it together now; then all ranks call
                this.

        Raises:
            RuntimeError: consolidate_state_dict() has not brought it here.
        """
        if all_ranks:
            self.consolidate_state_dict(recipient_rank=-1)
        if not self._all_states:
            raise RuntimeError(
                "the optimizer's state has not been brought to this rank: have all "
                "ranks call consolidate_state_dict() before state_dict()"
            )
        whole = super().state_dict()
        numbers = self._numbers()
        state: dict[int, Any] = {}
        for rank, part in enumerate(self._all_states):
            for index, param in enumerate(self._of_rank(rank)):
                if index in part["state"]:
                    state[numbers[param]] = part["state"][index]
        whole["state"] = dict(sorted(state.items()))
        return whole

    def _numbers(self) -> dict[torch.Tensor, int]:
        params = (p for group in self.param_groups for p in group["params"])
        return {param: number for number, param in enumerate(params)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state.

        Args:
            state_dict (dict[str, Any]): What state_dict() returned, on any number of
                ranks, or the inner optimizer's own.
        """
        super().load_state_dict({**state_dict, "state": {}})
        _copy_options(self.param_groups, self.optim.param_groups)
        numbers = self._numbers()
        mine = self.optim.state_dict()
        mine["state"] = {
            index: state_dict["state"][numbers[param]]
            for index, param in enumerate(self._of_rank(self.rank))
            if numbers[param] in state_dict["state"]
        }
        self.optim.load_state_dict(mine)


def _copy_options(source: list[Group], target: list[Group]) -> None:
    for given, taken in zip(source, target, strict=True):
        taken.update({key: v for key, v in given.items() if key != "params"})
