"""Local steps, synchronized at the ends of blocks: BMUF, DiLoCo and SlowMo."""

from __future__ import annotations

import copy
import warnings
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Self

from ctrainer import _C
from ctrainer.adapters import blocks
from ctrainer.arguments.settings import Range, read_options
from ctrainer.comm import from_environment

__all__ = ["BMUF"]

_KEY = "bmuf"  # in a state_dict, beside those of the inner optimizer


@dataclass(kw_only=True, slots=True)
class _Options:
    global_sync_iter: int = 50
    block_lr: float = 1.0
    block_momentum: float = 0.875
    warmup_iterations: int = 500
    use_nbm: bool = False
    average_sync: bool = False
    delta_bits: Annotated[int, Range("[4, 32]")] = 32
    overlap_steps: int = 0
    distributed_world_size: int | None = None


class BMUF(_C.BMUF):
    """An optimizer whose ranks run blocks of local steps, then synchronize.

    Every rank updates its own model with `optimizer`. At the end of the warm-up all
    take over the model of rank 0. From then on they synchronize at each update that
    global_sync_iter divides: the average of the parameter deltas from the global model,
    times block_lr, goes into the block momentum, and that moves the global model, from
    which all continue. With block_momentum 0 the models are averaged and nothing else.

    Parameters are in host memory, of any float dtype. The global model and the momentum
    are float64 for float64 ones and float32 for all others; where the optimizer updates
    float32 copies of bf16 and fp16 parameters, those are averaged. Other attributes,
    like backward() and scaler, are the optimizer's.

    Args:
        cfg (dict | object): FairseqBMUFConfig's fields, each of which may be missing; a
            dict has no others, of an object only these are read: global_sync_iter=50,
            block_lr=1, block_momentum=0.875, warmup_iterations=500, use_nbm=False,
            average_sync=False (average Adam's moments at each synchronization, rather
            than start them anew at the end of the warm-up), delta_bits=32 (8 or 4:
            parameter deltas are quantized, and their error-feedback residual goes with
            the next block's; block_momentum is above 0), overlap_steps=0 (updates after
            the end of a block in which its average is taken), distributed_world_size.
        optimizer: One of ctrainer.optim or torch.optim, or an object with fairseq's
            interface of an optimizer.
        communicator (_C.Communicator | None, default None): The ranks; None: the group
            of from_environment() where distributed_world_size is above 1.
        look (str | None, default None): "nesterov" takes the outer step of DiLoCo in
            place of BMUF's, "slowmo" that of SlowMo; None: BMUF's.

    Raises:
        ValueError: options that are not known, of another type or out of range; a
            schedule-free optimizer; on all ranks in step(), where a first block did not
            begin with the same parameters on all.
        RuntimeError: in step(), another rank fails or stays away. A NaN or Inf in one
            rank's parameters is in those of all after the block.

    Source: Chen and Huo, "Scalable training of deep learning machines by incremental
    block training with intra-block parallel optimization and blockwise model-update
    filtering", 2016; fairseq's optim/bmuf.py. With 2 ranks the parameters are the
    latter's, bit for bit.

    Example:
        >>> import torch
        >>> from ctrainer import BMUF
        >>> from ctrainer.optim import SGD
        >>> layer = torch.nn.Linear(3, 2)
        >>> cfg = {"global_sync_iter": 8, "warmup_iterations": 0}
        >>> optimizer = BMUF(cfg, SGD(layer.parameters(), lr=0.1))
        >>> layer(torch.ones(1, 3)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.get_num_updates()
        1
    """

    def __init__(
        self,
        cfg: Any,
        optimizer: Any,
        communicator: _C.Communicator | None = None,
        *,
        look: str | None = None,
    ) -> None:
        if any("train_mode" in g for g in getattr(optimizer, "param_groups", ())):
            raise ValueError(
                "BMUF averages parameters, and a schedule-free optimizer moves them "
                'towards a "z" of its own on each rank: use another one, such as AdamW'
            )
        options = asdict(read_options(_Options, cfg, "BMUF"))
        nbm = "nbm" if options.pop("use_nbm") else "plain"
        group = _group(options.pop("distributed_world_size"), communicator)
        super().__init__(
            _with_interface(cfg, optimizer), group, look=look or nbm, **options
        )
        self.cfg = cfg
        self.initial_state = copy.deepcopy(self._optimizer.state_dict())
        self._start()

    @classmethod
    def diloco(
        cls,
        optimizer: Any,
        communicator: _C.Communicator | None = None,
        *,
        every: int = 500,
        lr: float = 0.7,
        momentum: float = 0.9,
        delta_bits: int = 32,
        overlap_steps: int = 0,
    ) -> Self:
        """Return one of DiLoCo: AdamW within blocks, SGD with Nesterov momentum between
        them.

        All ranks have to start from the same parameters.

        Args:
            optimizer: The inner one, AdamW in the paper.
            communicator (_C.Communicator | None, default None): The ranks; None: the
                group of from_environment().
            every (int, default 500): Local steps of a block.
            lr (float, default 0.7): Learning rate of the outer step.
            momentum (float, default 0.9): Of the outer step.
            delta_bits (int, default 32): 32, or 8 or 4 to quantize parameter deltas.
            overlap_steps (int, default 0): Updates after the end of a block in which
                its average is taken.

        Source: Douillard et al., "DiLoCo: Distributed Low-Communication Training of
        Language Models", 2023, whose numbers are the defaults.
        """
        return cls._from_the_start(
            "nesterov", optimizer, communicator,
            global_sync_iter=every, block_lr=lr, block_momentum=momentum,
            delta_bits=delta_bits, overlap_steps=overlap_steps,
        )  # fmt: skip

    @classmethod
    def slowmo(
        cls,
        optimizer: Any,
        communicator: _C.Communicator | None = None,
        *,
        every: int = 48,
        lr: float = 1.0,
        momentum: float = 0.5,
        delta_bits: int = 32,
        overlap_steps: int = 0,
    ) -> Self:
        """Return one of SlowMo: the momentum is of the average parameter delta over the
        optimizer's learning rate.

        With g the optimizer's lr where a block ends and d the average delta, u =
        momentum * u + d / g, and the model moves by lr * g * u. g is the first group's:
        where all groups follow one schedule that is the same as each group's own. All
        ranks have to start from the same parameters.

        Args:
            optimizer: The inner one.
            communicator (_C.Communicator | None, default None): The ranks; None: the
                group of from_environment().
            every (int, default 48): Local steps of a block.
            lr (float, default 1.0): Factor of the outer step.
            momentum (float, default 0.5): Of the outer step.
            delta_bits (int, default 32): 32, or 8 or 4 to quantize parameter deltas.
            overlap_steps (int, default 0): Updates after the end of a block in which
                its average is taken.

        Raises:
            ValueError: in step(), g is 0.

        Source: Wang et al., "SlowMo: Improving Communication-Efficient Distributed SGD
        with Slow Momentum", 2020; every and lr are fairscale's defaults.
        """
        return cls._from_the_start(
            "slowmo", optimizer, communicator,
            global_sync_iter=every, block_lr=lr, block_momentum=momentum,
            delta_bits=delta_bits, overlap_steps=overlap_steps,
        )  # fmt: skip

    @classmethod
    def _from_the_start(
        cls, look: str, optimizer: Any, communicator: Any, **options: Any
    ) -> Self:
        cfg = _Options(warmup_iterations=0, **options)
        group = from_environment() if communicator is None else communicator
        return cls(cfg, optimizer, group, look=look)

    def __getattr__(self, name: str) -> Any:
        if name in ("_optimizer", "communicator"):
            raise AttributeError(f"{name}: BMUF.__init__() was not called")
        return getattr(self._optimizer, name)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, and under "bmuf" the updates, model and
        momentum."""
        return {**self._optimizer.state_dict(), _KEY: self.blocks_state_dict()}

    def blocks_state_dict(self) -> dict[str, Any]:
        """Return the number of updates, and with a block momentum the global model and
        that."""
        state: dict[str, Any] = {"num_updates": self.get_num_updates()}
        if self.block_momentum != 0:
            state["model"] = self._saved("model")
            state["momentum"] = self._saved("momentum")
        return {**state, **self.own_state_dict()}

    def own_state_dict(self) -> dict[str, Any]:
        """Return the part of blocks_state_dict() that differs between ranks.

        "left": the parameters at the end of a block whose average is on its way;
        "residual" and "place": with delta_bits 8 or 4, the error-feedback residual, and
        of which rank.
        """
        state: dict[str, Any] = {}
        if self.is_pending:
            state["pending"] = self._saved("pending")
        if self.delta_bits < 32:
            state.update(residual=self._saved("residual"), place=self._place())
        return state

    def load_blocks_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from what blocks_state_dict() returned.

        The residual of another rank, or of a group of another size, is not taken over.

        Args:
            state_dict (dict[str, Any]): The state; from an empty one a block begins
                with the parameters as they are.
        """
        self._start()
        updates = state_dict.get("num_updates", self.get_num_updates())
        self.set_num_updates(updates)
        if "model" in state_dict and self.block_momentum != 0:
            self._load("model", state_dict["model"])
            self._load("momentum", state_dict["momentum"])
            if self.delta_bits < 32 and self._is_own(state_dict):
                self._load("residual", state_dict["residual"])
        # "left" in checkpoints from before the key was renamed
        pending = state_dict.get("pending", state_dict.get("left"))
        if pending is not None and self.block_momentum != 0:
            self._load("pending", pending)

    def load_state_dict(
        self, state_dict: dict[str, Any], optimizer_overrides: Any = None
    ) -> None:
        """Resume from a state; parameters are expected to be loaded already.

        Args:
            state_dict (dict[str, Any]): What state_dict() returned; from the state of
                an optimizer alone, as fairseq saves it, a block begins with the
                parameters as they are.
            optimizer_overrides (default None): Passed to the optimizer's
                load_state_dict, unless None.
        """
        inner = {k: v for k, v in state_dict.items() if k != _KEY}
        if optimizer_overrides is None:
            self._optimizer.load_state_dict(inner)
        else:
            self._optimizer.load_state_dict(inner, optimizer_overrides)
        self.load_blocks_state_dict(state_dict.get(_KEY, {}))

    def remaining_ranks(self, stays: bool = True) -> list[int]:
        """Return the ranks of the group that stay in it, in their order; all ranks call
        this.

        A rank that leaves calls nothing of the group afterwards; the others make a
        group of those who stay, and continue with regroup().

        Args:
            stays (bool, default True): False on a rank that is about to leave.
        """
        answers = self.communicator.gather_bytes(b"\1" if stays else b"\0")
        return [rank for rank, answer in enumerate(answers) if answer == b"\1"]

    def roll_call(self, stays: bool = True) -> list[int]:
        """Return remaining_ranks(stays): the former name, which is deprecated.

        Args:
            stays (bool, default True): False on a rank that is about to leave.
        """
        warnings.warn(
            "BMUF.roll_call is called remaining_ranks; the old name stays until 0.3",
            DeprecationWarning,
            stacklevel=2,
        )
        return self.remaining_ranks(stays)

    def regroup(self, communicator: _C.Communicator) -> None:
        """Continue in another group; all ranks of it call this at the end of a block.

        All take over the parameters, the block momentum and the number of updates of
        the rank with the most updates, the first of these. A rank that is new has
        moments of its own optimizer that begin at 0, and sets its schedule by
        get_num_updates(). What a rank has learnt since its last block is lost, unless
        it is the one that the others take over.

        Args:
            communicator (_C.Communicator): The new group.
        """
        counts = communicator.gather_bytes(self.get_num_updates().to_bytes(8, "little"))
        updates = [int.from_bytes(count, "little") for count in counts]
        most = max(updates)
        self._adopt(communicator, updates.index(most), most)

    def average_params(self) -> None:
        """Average the optimizer's moments over the ranks: Adam's, and no others; of a
        parameter that one of the ranks has not updated yet, each keeps its own."""
        if _is_foreign(self._optimizer):
            self._optimizer.average_params()
        else:
            self._average_moments()

    # ---- hooks that C calls ----

    def _synced_tensors(self) -> tuple[list[Any], list[Any]]:
        inner = self._optimizer
        return blocks.synced_tensors(inner if _is_foreign(inner) else inner.optimizer)

    def _moments(self) -> tuple[list[Any], None]:
        inner = self._optimizer.optimizer
        ranks = self.communicator.gather_bytes(blocks.have_moments(inner))
        return blocks.moments(inner, ranks), None

    def _reset_optimizer(self) -> None:
        """Load the state of the beginning, but for what a schedule has set."""
        groups = getattr(self._optimizer, "param_groups", [])
        kept = [{"lr": group["lr"]} if "lr" in group else {} for group in groups]
        self._optimizer.load_state_dict(self.initial_state)
        for number, own in enumerate(kept):
            self._optimizer.param_groups[number].update(own)

    def _after_sync(self) -> None:
        """Have a foreign optimizer copy its float32 parameters to the model."""
        sync = getattr(self._optimizer, "_sync_fp32_params_to_fp16", None)
        if sync is not None and _is_foreign(self._optimizer):
            sync()

    def _is_own(self, state_dict: dict[str, Any]) -> bool:
        return list(state_dict.get("place", ())) == self._place()

    def _place(self) -> list[int]:
        return [self.communicator.rank, self.world_size]

    def _load(self, name: str, values: list[Any]) -> None:
        self._load_values(name, blocks.moved(values, self._synced_tensors()[0]))

    def _saved(self, name: str) -> list[Any]:
        values = blocks.blanks_like(self._synced_tensors()[0])
        self._save_values(name, values)
        return values


def _is_foreign(optimizer: Any) -> bool:
    return not isinstance(optimizer, _C.FairseqOptimizer)


def _with_interface(cfg: Any, optimizer: Any) -> Any:
    """The optimizer if it has fairseq's interface, or one over it that has."""
    if hasattr(optimizer, "get_lr") and hasattr(optimizer, "optimizer"):
        return optimizer
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(
            "optimizer must be one with param_groups, as torch's and ctrainer.optim's "
            f"have them, not a {type(optimizer).__name__}"
        )
    from ctrainer.adapters.fairseq_optimizer import FairseqOptimizer

    return FairseqOptimizer(cfg, optimizer)


def _group(wanted: int | None, communicator: _C.Communicator | None) -> _C.Communicator:
    if communicator is None:
        communicator = (
            from_environment()
            if wanted is not None and wanted > 1
            else _C.Communicator()
        )
    if wanted is not None and wanted != communicator.world_size:
        raise ValueError(
            f"distributed_world_size is {wanted}, and the group has "
            f"{communicator.world_size} ranks; they must be the same"
        )
    return communicator
