"""Sharded modules on several ranks, in one run of their processes for all scenarios."""

import copy
import gc
import inspect
import math
import re
import resource
import signal
import weakref
from pathlib import Path
from typing import Any

import pytest
import scenarios
import torch
from places import ROOT
from ranks import run_alone
from torch import nn

from ctrainer import _C
from ctrainer.fsdp import FullyShardedDataParallel as FSDP
from ctrainer.fsdp import TrainingState

SCENARIOS = "fsdp_scenarios"


@pytest.fixture(scope="module", params=[2, 3])
def outcomes(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> list[dict[str, str]]:
    folder: Path = tmp_path_factory.mktemp("fsdp")
    found = scenarios.outcomes(folder, request.param, SCENARIOS)
    assert len(found) == request.param
    return found


@pytest.mark.parametrize("name", scenarios.found_in(SCENARIOS))
def test_on_ranks(outcomes: list[dict[str, str]], name: str) -> None:
    assert [told[name] for told in outcomes] == [""] * len(outcomes)


# ---- in a group of one


@pytest.mark.parametrize("group", [3, None, [4, True]])
def test_a_group_of_a_unit_is_a_tuple(group: Any) -> None:
    with pytest.raises(TypeError, match="group 0 must be a tuple"):
        _C.FSDPUnit(_C.Communicator(), (group,))


def wrap(module: nn.Module, **options: Any) -> FSDP:
    return FSDP(module, process_group=_C.Communicator(), **options)


def test_the_arguments_have_the_order_and_the_defaults_of_the_original() -> None:
    found = list(inspect.signature(FSDP.__init__).parameters.values())[1:]
    positional = [p for p in found if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [(p.name, p.default) for p in positional[1:]] == [
        ("reshard_after_forward", True),
        ("flatten_parameters", False),
        ("execute_sharding_on_init", True),
        ("optimization_barrier_in_forward", True),
        ("optimization_barrier_in_backward", True),
        ("mark_step_on_finalization", False),
        ("disable_reshard_on_root", True),
        ("compute_dtype", None),
        ("buffer_dtype", None),
        ("fp32_reduce_scatter", False),
        ("sharding_groups", None),
        ("sharding_rank", None),
        ("sharding_world_size", None),
        ("on_neuron", True),
        ("_shard_size_multiple", 128),
        ("_pin_layout_in_all_reduce", False),
        ("_pin_layout_in_all_gather", False),
        ("_pin_layout_in_reduce_scatter", False),
        ("_debug_dummy_forward_pass", False),
        ("_debug_msg", "xla_fsdp"),
        ("_debug_print", False),
        ("_debug_dummy_all_gather_op", False),
        ("_debug_dummy_all_reduce_op", False),
        ("_debug_dummy_reduce_scatter_op", False),
        ("_debug_dummy_optimization_barrier_op", False),
    ]


@pytest.mark.parametrize(
    ("module", "options", "error", "text"),
    [
        (lambda: wrap(nn.Linear(2, 2)), {}, RuntimeError, "^Cannot wrap a module that"),
        (nn.ModuleList, {}, RuntimeError, r"^The module wrapped by FSDP \*must define"),
        (
            lambda: nn.Linear(2, 2),
            {"compute_dtype": torch.float64},
            ValueError,
            r"^compute_dtype must be one of \[torch.float32, torch.float16, "
            r"torch.bfloat16\], not torch.float64$",
        ),
        (
            lambda: nn.Linear(2, 2),
            {"buffer_dtype": "int8"},
            ValueError,
            "^buffer_dtype must be one of .* not torch.int8$",
        ),
        (
            lambda: nn.Linear(2, 2).double(),
            {},
            TypeError,
            "^weight is torch.float64; trained parameters may be float32, float16, bf",
        ),
        (
            lambda: nn.Linear(2, 2).requires_grad_(False).to(torch.float8_e4m3fn),
            {},
            TypeError,
            "^weight is torch.float8_e4m3fn; frozen parameters may be float32, floa",
        ),
    ],
)
def test_what_cannot_be_wrapped_is_rejected(
    module: Any, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        wrap(module(), **options)


def test_groups_need_a_rank_and_a_size() -> None:
    text = (
        "^sharding_rank and sharding_world_size must be provided when sharding_groups "
        "is specified$"
    )
    with pytest.raises(ValueError, match=text):
        FSDP(nn.Linear(2, 2), sharding_groups=[[0]])


def test_states_are_asserted_as_in_the_original(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = wrap(nn.Linear(2, 2))
    model.training_state = TrainingState.BACKWARD_PRE
    text = (
        r"^expected to be in states \[<TrainingState.IDLE: 1>\] but current state is "
        "TrainingState.BACKWARD_PRE$"
    )
    with pytest.raises(ValueError, match=text):
        model.set_gradient_divide_factors(1.0, 1.0, False)
    printed = capsys.readouterr().out
    assert printed.startswith("Asserting FSDP instance is: FullyShardedDataParallel(")
    assert "ERROR: expected to be in states" in printed


def test_a_root_tells_what_it_has(capsys: pytest.CaptureFixture[str]) -> None:
    inner = wrap(nn.Linear(2, 2), _debug_print=True)
    model = wrap(nn.Sequential(inner), _debug_print=True, _debug_msg="here")
    model(torch.ones(1, 2))
    printed = capsys.readouterr().out
    assert printed == "root FSDP got 2 total params (_debug_msg: here).\n"


def test_a_state_that_there_is_not_is_told() -> None:
    model = wrap(nn.Linear(2, 2))
    model._unit.state = 99
    with pytest.raises(ValueError, match="99 is not a valid TrainingState"):
        model(torch.ones(1, 2))


def test_only_a_root_clips_and_accumulates() -> None:
    inner = wrap(nn.Linear(2, 2))
    model = wrap(nn.Sequential(inner, nn.Linear(2, 2)))
    text = r"^clip_grad_norm should only be called on the root \(parent\) instance"
    with pytest.raises(AssertionError, match=text):
        model.clip_grad_norm_(1.0)  # before the first forward
    with model.no_sync():
        pass
    assert model.clip_grad_norm_(1.0) == 0.0
    with pytest.raises(AssertionError, match=text):
        inner.clip_grad_norm_(1.0)
    with (
        pytest.raises(AssertionError, match=r"^no_sync on inner FSDP is not supported"),
        inner.no_sync(),
    ):
        pass


def test_clipping_survives_every_failed_allocation() -> None:
    testcapi = pytest.importorskip("_testcapi")
    model = wrap(nn.Linear(3, 2))
    model(torch.ones(1, 3)).sum().backward()
    shards, unit = list(model.params_with_grad), model._unit
    before = [shard.grad.clone() for shard in shards]
    ended = []
    for start in range(60):
        for shard, grad in zip(shards, before, strict=True):
            shard.grad.copy_(grad)
        norm = None
        testcapi.set_nomemory(start, start + 1)
        try:
            norm = unit.clip(shards, 1.0, 2.0, False)
        except MemoryError:
            pass
        finally:
            testcapi.remove_mem_hooks()
        grads = [shard.grad for shard in shards]
        ended.append(norm is not None)
        if norm is None:
            assert all(map(torch.equal, before, grads))
        else:
            assert norm == pytest.approx(math.sqrt(8.0))  # 3 inputs, a bias; 2 outputs
            clipped = torch.cat([grad.flatten() for grad in grads])
            assert clipped.norm().item() == pytest.approx(1.0, abs=1e-5)
    assert ended[-1]
    assert not all(ended)


def test_a_frozen_unit_stays_until_the_only_node_of_its_forward_has_run() -> None:
    """Its output is that of the unit around it, whose hook comes in between."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2).requires_grad_(False))
    inner = wrap(copy.deepcopy(plain[1]), on_neuron=False)
    model = wrap(
        nn.Sequential(copy.deepcopy(plain[0]), wrap(nn.Sequential(inner))),
        on_neuron=False,
    )
    x = torch.randn(4, 3)
    for each in (plain, model):
        each(x).square().sum().backward()
    for shard, param in zip(model.sharded_params, plain[0].parameters(), strict=True):
        expected = param.grad.flatten()
        torch.testing.assert_close(shard.grad.flatten()[: len(expected)], expected)


def test_shards_have_the_names_and_attributes_of_the_original() -> None:
    separator = "_FSDP_SHARD_SEPARATOR_"
    options = {"flatten_parameters": True, "on_neuron": False}
    model = wrap(nn.Sequential(wrap(nn.Linear(3, 2), **options), nn.Linear(2, 2)))
    flat = f"_fsdp_shard{separator}_fsdp_wrapped_module{separator}flat_param_0"
    own = f"_fsdp_shard{separator}_fsdp_wrapped_module{separator}_fpw_module"
    assert list(model.state_dict()) == [
        f"{own}{separator}1{separator}weight",
        f"{own}{separator}1{separator}bias",
        f"_fsdp_wrapped_module.0.{flat}",
    ]
    shard = model[0].sharded_params[0]
    assert shard._orig_size == torch.Size([8])
    assert shard._orig_name == "_fsdp_wrapped_module.flat_param_0"
    assert shard.shape == (128,)
    assert model[0].module.metadata(0) == (
        ["_fpw_module.weight", "_fpw_module.bias"],
        [torch.Size([2, 3]), torch.Size([2])],
        [6, 2],
    )
    names, params = zip(*model.get_original_names_and_sharded_parameters(), strict=True)
    assert names == ("1.weight", "1.bias", "0.flat_param_0")
    assert [*map(id, params)] == [
        *map(id, model.sharded_params + model[0].sharded_params)
    ]
    info = model.get_shard_metadata()
    assert list(info["shard_info"]) == ["", "_fsdp_wrapped_module.0"]
    assert info["shard_info"]["_fsdp_wrapped_module.0"] == {
        flat: {"_orig_size": torch.Size([8]), "_orig_name": shard._orig_name}
    }
    key = "_fsdp_wrapped_module.0._fsdp_wrapped_module.flat_param_0"
    assert list(info["flatten_info"]) == [key]
    assert (info["world_size"], info["rank"]) == (1, 0)


def test_buffers_are_cast_and_known_by_their_first_dtype() -> None:
    model = wrap(
        nn.Sequential(wrap(nn.BatchNorm1d(2), compute_dtype=torch.bfloat16)),
        compute_dtype=torch.float16,
    )
    assert model[0].running_mean.dtype == torch.float16
    info = model.get_shard_metadata()["buffer_info"]
    assert info["_fsdp_wrapped_module.0._fsdp_wrapped_module.running_mean"] == {
        "_orig_dtype": torch.float32
    }
    assert set(info) <= set(model.state_dict())
    assert model.full_state_dict()["0.running_mean"].dtype == torch.float32


def test_a_policy_wraps_the_modules_below() -> None:
    def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        return nonwrapped_numel >= 6

    body = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.LayerNorm(2), nn.Tanh()))
    model = wrap(body, auto_wrap_policy=policy)
    assert [type(child) for child in model.module.module] == [FSDP, nn.Sequential]
    assert model(torch.ones(1, 2)).shape == (1, 2)


def test_the_cpu_is_a_device_by_any_name() -> None:
    for device in ("cpu", "cpu:0", torch.device("cpu", 0)):
        model = FSDP(nn.Linear(2, 2, device="cpu"), device_id=device)
        assert model.to(device) is model
        assert model.home.device == torch.device("cpu")
    with pytest.raises(ValueError, match="device_id is False; expected a"):
        FSDP(nn.Linear(2, 2, device="cpu"), device_id=False)


def test_modules_on_the_meta_device_are_given_values() -> None:
    def init(module: nn.Module) -> None:
        module.to_empty(device="cpu", recurse=False)
        nn.init.ones_(module.weight)
        nn.init.zeros_(module.bias)

    model = wrap(nn.Linear(2, 2, device="meta"), param_init_fn=init)
    assert torch.equal(model(torch.ones(1, 2)), torch.full((1, 2), 2.0))
    with pytest.raises(ValueError, match="has left parameters of a Linear on the meta"):
        wrap(nn.Linear(2, 2, device="meta"), param_init_fn=lambda m: None)


def test_a_released_parameter_ends_the_process_where_it_is_watched() -> None:
    done = run_alone("fsdp.released", flags=["-X", "faulthandler"])
    assert done.stdout == "alive\n"
    assert done.returncode == -signal.SIGSEGV
    program = (ROOT / "tests/programs/fsdp/released.py").read_text()
    last = program.count("\n")  # Python tells the line that has used the parameter
    assert re.search(rf'Segmentation fault.*released.py", line {last} in <module>',
                     done.stderr, re.DOTALL)  # fmt: skip


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def test_freed_tensors_become_tensors_of_other_lengths() -> None:
    """Each page would be a fault otherwise, and zeroed."""
    wrap(nn.Linear(2, 2))
    if not _C.recycle_blocks("libc10.so"):
        pytest.skip("torch allocates otherwise")
    rows = [torch.ones(1 << 18) for _ in range(16)]
    del rows
    before = faults()
    for n in (16, 5, 16, 3, 1) * 4:  # MiB
        assert torch.ones(n << 18).sum().item() == n << 18
    assert faults() - before < 256  # the pages of a MiB


def test_steps_after_the_first_take_no_pages_of_the_system(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A released unit's become activations, other units' and gradients."""
    monkeypatch.delenv("CTRAINER_FSDP_POISON")  # which takes all the pages
    if not _C.recycle_blocks("libc10.so"):
        pytest.skip("torch allocates otherwise")
    width = 512  # a MiB of parameters a layer, and of activations
    layers = [wrap(nn.Linear(width, width)) for _ in range(4)]
    model = wrap(nn.Sequential(*layers, nn.Linear(width, 3)))
    for step in range(6):
        if step == 3:
            before = faults()
        model(torch.ones(width, width)).sum().backward()
        model.zero_grad()
    assert faults() - before < 256


@pytest.mark.parametrize("option", ["", "flatten_parameters", "use_orig_params"])
def test_units_are_collected(option: str) -> None:
    options = {option: True} if option else {}
    inner = wrap(nn.Linear(2, 2), **options)
    model = wrap(nn.Sequential(inner, nn.Linear(2, 2)), **options)
    model(torch.ones(1, 2)).sum().backward()
    watched = weakref.ref(inner._unit)
    del inner, model
    gc.collect()
    assert watched() is None
