"""What every rank does with gradients that go to the ranks that own them: as
fairscale_scenarios, whose modules these are."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from fairscale_scenarios import assert_close
from fsdp_scenarios import WIDTH, batch, linear, mse, tree
from rank_threads import seeded
from torch import nn

from ctrainer.compat.fairscale import OSS, ShardedDataParallel

UPDATES = 20
LR = 0.05


def sharded(
    group: Any, model: nn.Module | None = None, **options: Any
) -> tuple[ShardedDataParallel, OSS]:
    module = tree() if model is None else model
    optimizer = OSS(module.parameters(), torch.optim.SGD, group, lr=LR, momentum=0.9)
    return ShardedDataParallel(module, optimizer, group, **options), optimizer


def alone(model: nn.Module | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    module = tree() if model is None else model
    return module, torch.optim.SGD(module.parameters(), lr=LR, momentum=0.9)


def train(model: nn.Module, optimizer: Any, group: Any = None) -> None:
    for step in range(UPDATES):
        mse(model, step, group).backward()
        optimizer.step()
        optimizer.zero_grad()


def owned(optimizer: OSS, rank: int) -> set[torch.Tensor]:
    return {param for param, owner in optimizer.owners().items() if owner == rank}


def scenario_sharded_gradients_train_as_one_process(group: Any) -> None:
    plain, reference = alone()
    train(plain, reference)
    for size in (0, 40, 2**23):
        model, optimizer = sharded(group, reduce_buffer_size=size)
        train(model, optimizer, group)
        assert_close(model.module.state_dict(), plain.state_dict())


def scenario_a_rank_keeps_the_gradients_that_it_owns(group: Any) -> None:
    for size in (0, 2**23):
        model, optimizer = sharded(group, reduce_buffer_size=size)
        plain, _ = alone()
        mse(model, 0, group).backward()
        mse(plain, 0).backward()
        own = owned(optimizer, group.rank)
        assert 0 < len(own) < len(optimizer.owners())
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert (ours.grad is not None) == (ours in own)
            if ours.grad is not None:
                torch.testing.assert_close(ours.grad, theirs.grad)


def scenario_gradients_are_given_back_during_the_backward_pass(group: Any) -> None:
    """Sixteen layers of 1 MiB, half of which are another's. 8 MiB are on their way at
    most, beside the one that was sent last, and of those about half are another's."""
    layers, width = 16, 512
    model, optimizer = sharded(
        group, nn.Sequential(*[linear(width, width, bias=False) for _ in range(layers)])
    )
    own, most = owned(optimizer, group.rank), 0

    def note(_: torch.Tensor) -> None:
        nonlocal most
        held = {p for p in model.parameters() if p.grad is not None}
        most = max(most, len(held - own))

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(note)
    model(torch.ones(2, width)).sum().backward()
    assert 1 <= most <= 5 < layers // 2
    assert {p for p in model.parameters() if p.grad is not None} == own


def scenario_gradients_add_up_whether_they_were_averaged_or_not(group: Any) -> None:
    """Of three passes the last is averaged, or several, or none before reduce()."""
    plain, _ = alone()
    for step in range(3):
        mse(plain, step).backward()
    whole = {n: p.grad for n, p in plain.named_parameters()}
    for averaged in ((2,), (1, 2), (0, 2), (0, 1, 2), ()):
        model, optimizer = sharded(group, reduce_buffer_size=40)
        mse(model, 5, group).backward()
        model.zero_grad()
        for step in range(3):
            if step in averaged:
                mse(model, step, group).backward()
            else:
                with model.no_sync():
                    mse(model, step, group).backward()
        if not averaged:
            model.reduce()
        own = owned(optimizer, group.rank)
        for name, param in model.module.named_parameters():
            assert (param.grad is not None) == (param in own), (name, averaged)
            if param in own:
                torch.testing.assert_close(param.grad, whole[name])


def freeze(model: nn.Module, name: str, frozen: bool) -> None:
    for parameter, value in model.named_parameters():
        if parameter.startswith(name):
            value.requires_grad_(not frozen)


def scenario_parameters_may_be_frozen_and_thawed(group: Any) -> None:
    for automatic in (True, False):
        model, optimizer = sharded(group, auto_refresh_trainable=automatic)
        plain, reference = alone()
        for step in range(9):
            for net in (model.module, plain):
                freeze(net, "0.", 3 <= step < 6)
            if not automatic and step in (3, 6):
                model.refresh_trainable()
            mse(model, step, group).backward()
            mse(plain, step).backward()
            optimizer.step()
            reference.step()
            for net in (model, plain):
                net.zero_grad(set_to_none=True)
        assert_close(model.module.state_dict(), plain.state_dict())


def scenario_changes_of_what_is_trained_are_logged(group: Any) -> None:
    said: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logger, handler = logging.getLogger("ctrainer"), Handler()
    logger.addHandler(handler)
    for warns in (True, False):
        model, _ = sharded(group, warn_on_trainable_params_changed=warns)
        for frozen in (True, True, False):
            freeze(model.module, "0.", frozen)
            mse(model, 0, group)
        assert len(said) == 2
    logger.removeHandler(handler)
    assert said[0].startswith("requires_grad of parameters has changed")


class Partly(nn.Module):
    """Rank 0 uses `first`, rank 1 `second`, nobody `third`."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        with seeded(1):
            layers = [nn.Linear(WIDTH, 4) for _ in range(3)]
        self.first, self.second, self.third = layers
        self.rank = rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = (self.first, self.second)[self.rank](x)
        return result


def scenario_what_a_rank_does_not_use_counts_as_zeros(group: Any) -> None:
    model, optimizer = sharded(group, Partly(group.rank))
    own = owned(optimizer, group.rank)
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        model(torch.ones(2, WIDTH)).sum().backward()
        for name, param in model.module.named_parameters():
            if param in own and not name.startswith("third"):
                assert param.grad.unique().tolist() == [1.0]  # the mean of 2 and 0
            else:
                assert param.grad is None


def scenario_parameters_of_no_oss_have_averages_on_all_ranks(group: Any) -> None:
    """And those of an OSS that are not in the module are averaged, too."""
    module, extra = tree(), nn.Parameter(torch.ones(3))
    last = list(module[-1].parameters())
    first = [p for p in module.parameters() if all(p is not q for q in last)]
    optimizer = OSS([*first, extra], torch.optim.SGD, group, lr=LR)
    model = ShardedDataParallel(module, optimizer, group)
    (mse(model, 0, group) + (extra * (group.rank + 1)).sum()).backward()
    plain, _ = alone()
    mse(plain, 0).backward()
    for ours, theirs in zip(last, plain[-1].parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    if optimizer.owners()[extra] == group.rank:
        assert extra.grad.tolist() == [1.5] * 3
    else:
        assert extra.grad is None


def scenario_gradients_may_travel_in_16_bits(group: Any) -> None:
    for size in (0, 2**23):
        model, optimizer = sharded(group, reduce_fp16=True, reduce_buffer_size=size)
        plain, _ = alone()
        x, y = batch(0, group)
        (model(x) - y).square().mean().backward()
        (plain(x) - y).square().mean().backward()
        named = dict(plain.named_parameters())
        for name, param in model.module.named_parameters():
            halves = (named[name].grad / 2).half().double()
            group.all_reduce(halves)  # of both ranks, as the wire has them
            if param in owned(optimizer, group.rank):
                assert torch.equal(param.grad, halves.half().float())


def scenario_in_eval_mode_gradients_are_each_ranks_own(group: Any) -> None:
    model, _ = sharded(group)
    model.eval()
    model(torch.full((1, WIDTH), float(group.rank + 1))).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    own = model.module[0].weight.grad
    both = torch.zeros(2, *own.shape)
    group.all_gather(both, own)
    assert not torch.equal(both[0], both[1])


def scenario_a_model_is_cast_and_trains_on(group: Any) -> None:
    model, optimizer = sharded(group)
    assert model.to("cpu", torch.float64) is model
    x, y = (t.double() for t in batch(0, group))
    (model(x) - y).square().mean().backward()
    optimizer.step()
    assert all(p.dtype == torch.float64 for p in model.parameters())
    with pytest.raises(ValueError, match="device is cuda; gradients are exchanged in"):
        model.to("cuda")
    model.zero_grad()
    assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)


def scenario_what_needs_whole_averages_is_rejected(group: Any) -> None:
    model, optimizer = sharded(group)
    with pytest.raises(ValueError, match=r"join\(\) is not for gradients that go to"):
        with model.join():
            pass
    with pytest.raises(ValueError, match="cannot be compressed by 'power_sgd'"):
        model.register_comm_hook(None, "power_sgd")
    single = group.split(color=group.rank)
    with pytest.raises(ValueError, match="the OSS is of 2 ranks, process_group has 1"):
        ShardedDataParallel(tree(), optimizer, single)
    single.close()
