"""An update in a graph of the device: replays make of parameters, state and step counts
what step() makes of them, bit for bit, whatever has changed between two replays."""

from __future__ import annotations

import math
import random
from typing import Any

import any_gpu
import pytest
import torch
from draws import draws
from torch import nn

from ctrainer import optim

KINDS: dict[str, dict[str, Any]] = {
    "AdEMAMix": {}, "AdEMAMix8bit": {}, "Adadelta": {"lr": 0.5}, "Adagrad": {},
    "Adam": {"amsgrad": True}, "Adam8bit": {}, "AdamW": {}, "AdamW8bit": {},
    "AdamWCompact": {}, "Adamax": {}, "FairseqAdam": {}, "Lion": {}, "LionCompact": {},
    "RAdam": {}, "RMSprop": {"momentum": 0.5, "centered": True},
    "SGD": {"lr": 0.1, "momentum": 0.9},
}  # fmt: skip
SHAPES = [(3, 5), (7,), (), (0,), (2, 3, 4), (65, 70)]


@pytest.fixture(scope="module")
def gpu() -> torch.device:
    return any_gpu.device()


def parameters(
    gpu: torch.device, seed: int, shapes: Any, dtype: torch.dtype = torch.float32
) -> list[nn.Parameter]:
    """With gradients, which stay where they are."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for shape in shapes:
        param = nn.Parameter(torch.randn(shape, generator=generator).to(dtype).to(gpu))
        param.grad = torch.zeros_like(param)
        found.append(param)
    return found


def make(name: str, params: list[nn.Parameter], options: dict[str, Any]) -> Any:
    half = len(params) // 2
    groups = [{"params": params[:half]}, {"params": params[half:], "lr": 0.02}]
    optimizer = getattr(optim, name)(groups, **options)
    for group in optimizer.param_groups:
        group["capturable"] = True
    return optimizer


def fill(params: list[nn.Parameter], seed: int, bad: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        assert param.grad is not None
        param.grad.copy_(torch.randn(param.shape, generator=generator))
        if bad and param.grad.numel() > 1:
            param.grad.view(-1)[1] = math.inf


def on_host(optimizer: Any) -> list[torch.Tensor]:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    found = [p.detach().cpu() for p in params]
    for param in params:
        state = sorted(optimizer.state[param].items())
        found += [torch.as_tensor(value).cpu() for _, value in state]
    return found


@pytest.mark.parametrize("seed", range(draws(40, 1000)))
def test_replays_are_steps(gpu: torch.device, seed: int) -> None:
    draw = random.Random(seed)
    name = draw.choice(list(KINDS))
    shapes = draw.sample(SHAPES, 4)
    clips = draw.random() < 0.6
    keywords: dict[str, Any] = {"loss_scale": draw.choice([1.0, 8.0])}
    if clips:
        keywords["max_norm"] = draw.choice([0.5, 100.0])
        keywords["nonfinite"] = draw.choice(["keep", "skip"])
    if keywords.get("nonfinite") != "skip":
        keywords["zero_grads"] = draw.random() < 0.5
    dtype, options = torch.float32, dict(KINDS[name])
    if draw.random() < 0.4:
        dtype = torch.bfloat16
        if "8bit" not in name and "Compact" not in name:
            options[draw.choice(["master_weights", "fp32_state"])] = True
    params = [parameters(gpu, seed, shapes, dtype) for _ in "12"]
    steps, replays = (make(name, each, options) for each in params)
    graph = any_gpu.Graph()
    for each in params:
        fill(each, seed, False)
    steps.step(**keywords)
    replays.step(**keywords)
    before = on_host(replays)
    with graph.captured():
        replays.step(**keywords)
    for a, b in zip(on_host(replays), before, strict=True):
        assert torch.equal(a, b)  # a capture updates and counts nothing
    for turn in range(draw.randint(3, 6)):
        bad = clips and draw.random() < 0.1
        for each in params:
            fill(each, 100 * seed + turn, bad)
        if draw.random() < 0.5:
            factor = draw.uniform(0.5, 1.5)
            for group in (*steps.param_groups, *replays.param_groups):
                group["lr"] *= factor
        steps.step(**keywords)
        if draw.random() < 0.2:
            replays.step(**keywords)
        else:
            replays.prepare_replay()
            graph.replay()
        if draw.random() < 0.5 and clips:
            assert replays.grad_norm == pytest.approx(steps.grad_norm, nan_ok=True)
    replays.state_dict()  # awaits the last one, as step counts may be taken back
    steps.state_dict()
    for a, b in zip(on_host(replays), on_host(steps), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a.double().nan_to_num(7.0), b.double().nan_to_num(7.0))


def test_a_replay_makes_the_host_wait_for_nothing(gpu: torch.device) -> None:
    params = parameters(gpu, 0, SHAPES)
    optimizer = make("AdamW", params, {})
    graph = any_gpu.Graph()
    fill(params, 0, False)
    optimizer.step()
    with graph.captured():
        optimizer.step()
    waits, allocations = any_gpu.waits(), any_gpu.allocations()
    for _ in range(10):
        optimizer.prepare_replay()
        graph.replay()
    assert (any_gpu.waits(), any_gpu.allocations()) == (waits, allocations)
    assert optimizer.state[params[0]]["step"] == 11


class TestRefusals:
    def test_without_a_step_before(self, gpu: torch.device) -> None:
        params = parameters(gpu, 0, SHAPES)
        optimizer = make("AdamW", params, {})
        with pytest.raises(RuntimeError, match="no update has been captured"):
            optimizer.prepare_replay()
        with (
            pytest.raises(ValueError, match=r"\[0\] state is missing.* call step"),
            any_gpu.Graph().captured(),
        ):
            optimizer.step()

    @pytest.mark.parametrize("change", ["loaded", "gradient", "group", "eager"])
    def test_after_memory_has_changed(self, gpu: torch.device, change: str) -> None:
        params = parameters(gpu, 0, SHAPES)
        optimizer = make("AdamW", params, {})
        optimizer.step()
        with any_gpu.Graph().captured():
            optimizer.step()
        if change == "loaded":
            optimizer.load_state_dict(optimizer.state_dict())
            optimizer.state[params[0]]["exp_avg"] = torch.zeros_like(params[0])
        elif change == "gradient":
            params[0].grad = None
        elif change == "group":
            more = parameters(gpu, 1, [(4, 4)])
            optimizer.add_param_group({"params": more, "capturable": True})
        else:  # all have had two updates in the end, and another table was in between
            grads = [p.grad for p in params]
            for some in (range(1, len(params)), range(1)):
                for i, param in enumerate(params):
                    param.grad = grads[i] if i in some else None
                optimizer.step()
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad
        before = on_host(optimizer)
        with pytest.raises(ValueError, match=r"not the one captured|is missing"):
            optimizer.prepare_replay()
        for a, b in zip(on_host(optimizer), before, strict=True):
            assert torch.equal(a, b)

    def test_what_a_graph_cannot_have(self, gpu: torch.device) -> None:
        params = parameters(gpu, 0, [(4, 4)])
        with pytest.raises(ValueError, match="whole parameters"):
            make("LAMB", params, {}).step()
        for keywords in (
            {"clip_value": 1.0}, {"max_norm": 1.0, "norm_type": 3.0},
            {"max_norm": 1.0, "clip_by_group": True}, {"nonfinite": "stop"},
            {"nonfinite": "skip", "zero_grads": True},
        ):  # fmt: skip
            with pytest.raises(ValueError, match="a graph cannot have clip_value"):
                make("AdamW", params, {}).step(**keywords)

    def test_parameters_on_the_cpu(self) -> None:
        param = nn.Parameter(torch.zeros(3))
        param.grad = torch.ones(3)
        optimizer = optim.AdamW([param], capturable=True)
        with pytest.raises(ValueError, match="on the CPU"):
            optimizer.step()
        assert param.tolist() == [0.0] * 3
