"""The original's errors, word for word, where a user may meet them in one process.

Those of groups, states, gradients and files are in test_fsdp, fsdp_scenarios and
test_fsdp_checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ctrainer import _C
from ctrainer.fsdp import FlatParameter, FlattenParamsWrapper, layout
from ctrainer.fsdp import FullyShardedDataParallel as FSDP
from ctrainer.fsdp.flatten import replace_by_prefix


def wrap(module: nn.Module, **options: Any) -> FSDP:
    return FSDP(module, process_group=_C.Communicator(), on_neuron=False, **options)


def linear() -> nn.Linear:
    return nn.Linear(2, 2)


def shared_by_two_flat_parameters() -> object:
    module = linear()
    lists = [[module.weight, module.bias], [module.bias]]
    return FlattenParamsWrapper(module, lists)


def of_two_dtypes() -> object:
    module = linear()
    module.bias.data = module.bias.data.double()
    return FlattenParamsWrapper(module)


ERRORS: list[tuple[type[Exception], str, Callable[[], object]]] = [
    (
        RuntimeError,
        "Cannot wrap a module that is already wrapped with FSDP. For nested FSDP, "
        "first wrap the inner child modules before wrapping the outer parent module.",
        lambda: wrap(wrap(linear())),
    ),
    (
        RuntimeError,
        "The module wrapped by FSDP *must define a `forward` method and call it during "
        "the module's forward pass for FSDP to work correctly.*",
        lambda: wrap(nn.ModuleList([linear()])),
    ),
    (
        TypeError,
        "1.weight is torch.float64; trained parameters may be float32, float16, "
        "bfloat16: convert it first",
        lambda: wrap(nn.Sequential(linear(), linear().double())),
    ),
    (
        ValueError,
        "compute_dtype must be one of [torch.float32, torch.float16, torch.bfloat16], "
        "not torch.int32",
        lambda: wrap(linear(), compute_dtype=torch.int32),
    ),
    (
        ValueError,
        "Incorrect external data list: 2 vs. 1",
        lambda: list(FlattenParamsWrapper(linear()).get_param_views([None, None])),
    ),
    (
        AssertionError,
        "there are parameters in params_to_shard not belonging to this module.",
        lambda: layout.entries_of(linear(), linear().parameters()),
    ),
    (AssertionError, "expects all parameters to have same dtype: ", of_two_dtypes),
    (
        ValueError,
        "An non-empty list or tuple argument is needed",
        lambda: FlatParameter([]),
    ),
    (
        ValueError,
        "List items need to be Parameter types",
        lambda: FlatParameter([1.0]),  # type: ignore[list-item]
    ),
    (
        ValueError,
        "Nesting FlatParameter is not supported",
        lambda: FlatParameter([FlatParameter([linear().weight])]),
    ),
    (
        ValueError,
        "Incorrect numel of supplied data: got 3 but expected 4",
        lambda: list(FlatParameter([linear().weight]).get_param_views(torch.ones(3))),
    ),
    (
        ValueError,
        "Names and number of param lists must be equal",
        lambda: FlattenParamsWrapper(linear(), flat_param_names=["a", "b"]),
    ),
    (ValueError, "Incorrect param groups 3 vs 2", shared_by_two_flat_parameters),
    (
        ValueError,
        "old_prefix and new_prefix must be distinct",
        lambda: replace_by_prefix({}, "a.", "a."),
    ),
]


@pytest.mark.parametrize(("kind", "text", "call"), ERRORS, ids=lambda v: str(v)[:30])
def test_errors_are_the_originals(
    kind: type[Exception], text: str, call: Callable[[], object]
) -> None:
    with pytest.raises(kind, match="^" + re.escape(text)):
        call()


class Adding(FSDP):
    """With a parameter that nobody has sharded."""

    def _set_shards(self) -> None:
        super()._set_shards()
        self.extra = nn.Parameter(torch.ones(2))


def test_parameters_that_are_not_sharded_are_named() -> None:
    text = re.escape("found unsharded parameter: extra ; torch.Size([2])")
    with pytest.raises(AssertionError, match=text):
        Adding(linear(), process_group=_C.Communicator(), on_neuron=False)


class Leaving:
    """Of two ranks the other gives the same, until gradients are exchanged."""

    rank, world_size = 0, 2
    fails = False

    def begin(
        self, what: str, out: memoryview, in_: memoryview, *unused: object
    ) -> Leaving:
        if what == "all_gather":
            out[: len(in_)], out[len(in_) :] = in_, in_
        self.fails = what == "reduce_scatter"
        return self

    def wait(self) -> None:
        if self.fails:
            raise RuntimeError("the other rank is gone")


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = linear(), linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.used(x)
        return found


def test_what_fails_after_a_backward_pass_is_explained(
    capsys: pytest.CaptureFixture[str],
) -> None:
    group = _C.Communicator(Leaving())
    model = FSDP(Half(), process_group=group, on_neuron=False, _debug_msg="mine")
    with pytest.raises(RuntimeError, match="reduce_scatter on rank 0 of 2: the other"):
        model(torch.ones(1, 2)).sum().backward()
    assert capsys.readouterr().out == (
        "Exception below occurred in post-backward (_debug_msg: mine). This is often "
        "due to some inner FSDP modules not being used in an outer FSDP module's "
        "forward pass. Please make sure that all inner FSDP modules participate in the "
        "forward pass when using nested FSDP.\n"
        "RankFailure: reduce_scatter on rank 0 of 2: the other rank is gone\n"
    )


def test_flat_parameters_need_names_of_their_own() -> None:
    module = linear()
    lists = [[module.weight], [module.bias]]
    with pytest.raises(ValueError, match=r"^Each flat param must be given a unique"):
        FlattenParamsWrapper(module, lists, flat_param_names=["a", "a"])
