"""What every rank does with fairscale's names, and what has to come out.

As in fsdp_scenarios, whose module, batches and losses these are.
"""

from __future__ import annotations

import copy
import functools
import io
import tempfile
from typing import Any

import pytest
import torch
from fsdp_scenarios import WIDTH, batch, linear, mse, tree
from torch import nn

from ctrainer import _C, optim
from ctrainer.compat.fairscale import (
    OSS,
    FullyShardedDataParallel,
    ShardedDataParallel,
    ShardedGradScaler,
    auto_wrap,
    auto_wrap_bn,
    checkpoint_wrapper,
    default_auto_wrap_policy,
    enable_wrap,
    get_fsdp_instances,
    wrap,
)
from ctrainer.fsdp import (
    consolidate_sharded_model_checkpoints,
    load_shard,
    memory_plan,
    reshard_checkpoints,
    save_shard,
    units_of,
)
from ctrainer.fsdp.shard_files import with_keys

UPDATES = 3


def nested(group: Any, **options: Any) -> FullyShardedDataParallel:
    """The tree, its third module a unit of its own."""
    model = tree()
    model[2] = FullyShardedDataParallel(model[2], group, **options)
    return FullyShardedDataParallel(model, group, **options)


def train(model: nn.Module, optimizer: Any, group: Any = None) -> list[float]:
    losses = []
    for step in range(UPDATES):
        loss = mse(model, step, group)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def reference(kind: Any = optim.AdamW) -> tuple[nn.Module, Any]:
    model = tree()
    optimizer = kind(model.parameters(), lr=1e-2)
    train(model, optimizer)
    return model, optimizer


def assert_close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """The same but for the order in which two halves of a batch are added."""
    assert found.keys() == expected.keys(), (found.keys(), expected.keys())
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


def set_weights(module: nn.Module) -> None:
    """What depends on the whole shape, by means that only see values or `data`."""
    if isinstance(module, nn.Linear):
        n = module.weight.numel()
        with torch.no_grad():
            module.weight.copy_(torch.arange(n).view_as(module.weight) / n)
        module.bias.data.fill_(0.5)


def scenario_apply_has_whole_parameters_and_keeps_what_is_changed(group: Any) -> None:
    for options in ({}, {"flatten_parameters": False}, {"mixed_precision": True}):
        model, plain = nested(group, **options), tree()
        assert model.apply(set_weights) is model
        expected = plain.apply(set_weights).state_dict()
        assert_close(model.state_dict(), expected)
        with model.summon_full_params():
            model.apply(zero_biases)
        assert_close(model.state_dict(), plain.apply(zero_biases).state_dict())
        with model.summon_full_params(volatile=True):
            model.apply(set_weights)
        assert_close(model.state_dict(), plain.state_dict())


def zero_biases(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


def scenario_training_gives_the_state_dict_of_one_process(group: Any) -> None:
    model = nested(group)
    train(model, optim.AdamW(model.parameters(), lr=1e-2), group)
    expected, _ = reference()
    assert_close(model.state_dict(), expected.state_dict())
    assert model.state_dict(prefix="x.").keys() == {
        f"x.{name}" for name in expected.state_dict()
    }
    local = model.local_state_dict()
    fresh = nested(group)
    assert fresh.load_state_dict(expected.state_dict()) == ([], [])
    assert_close(fresh.state_dict(), expected.state_dict())
    fresh.load_local_state_dict(local)
    assert_close(fresh.state_dict(), model.state_dict())
    loaded = fresh.load_state_dict({"unknown": torch.ones(1)}, strict=False)
    assert loaded.unexpected_keys == ["unknown"]
    assert sorted(expected.state_dict()) == loaded.missing_keys


def scenario_shards_are_named_and_divided_as_fairscales(group: Any) -> None:
    """As torch.chunk divides, with zeros at the end."""

    def own(*tensors: torch.Tensor) -> torch.Tensor:
        flat = torch.cat([t.detach().reshape(-1) for t in tensors])
        chunks = flat.chunk(group.world_size)
        mine = chunks[group.rank] if group.rank < len(chunks) else flat[:0]
        return nn.functional.pad(mine, (0, chunks[0].numel() - mine.numel()))

    plain = tree()
    inner = [f"2.{name}" for name, _ in plain[2].named_parameters()]
    whole = dict(plain.named_parameters())
    outer = [name for name in whole if name not in inner]
    flat = {"flat_param_0": outer, "2.flat_param_0": inner}
    for options, expected in (
        ({}, flat),
        ({"flatten_parameters": False}, {name: [name] for name in whole}),
    ):
        model = nested(group, **options)
        state = model.local_state_dict(prefix="x.")
        assert state.keys() == {f"x.{name}" for name in expected}
        for name, names in expected.items():
            mine = own(*(whole[each] for each in names))
            assert torch.equal(state[f"x.{name}"], mine), name
        fresh = nested(group, **options)
        with fresh.summon_full_params(), torch.no_grad():
            fresh.module[0].weight.zero_()
        fresh.load_local_state_dict(model.local_state_dict())
        assert_close(fresh.state_dict(), plain.state_dict())


def scenario_rank_0_alone_may_have_the_state_dict(group: Any) -> None:
    model = FullyShardedDataParallel(tree(), group, state_dict_on_rank_0_only=True)
    assert bool(model.state_dict()) == (group.rank == 0)


def scenario_mixed_precision_computes_in_half_and_keeps_float32(group: Any) -> None:
    model = nested(group, mixed_precision=True, fp32_reduce_scatter=True)
    assert model.compute_dtype == torch.float16
    output = model(batch(0, group)[0])
    assert output.dtype == torch.float16
    output.float().square().mean().backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    with pytest.raises(ValueError, match="fp32_reduce_scatter"):
        FullyShardedDataParallel(tree(), group, fp32_reduce_scatter=True)


def scenario_clipping_can_leave_parameters_out(group: Any) -> None:
    model, plain = nested(group), tree()
    mse(model, 0, group).backward()
    mse(plain, 0).backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
    everything = model.clip_grad_norm_(1e9, 2)
    torch.testing.assert_close(everything, expected, rtol=1e-4, atol=0)
    inner = {id(p) for p in get_fsdp_instances(model)[1].parameters()}
    chosen = model.clip_grad_norm_(
        1e9, filter_params_fn=lambda params: [p for p in params if id(p) in inner]
    )
    grads = [p.grad for p in plain[2].parameters()]
    expected = nn.utils.get_total_norm(grads)
    torch.testing.assert_close(chosen, expected, rtol=1e-4, atol=0)


def scenario_summoned_changes_are_kept_unless_volatile(group: Any) -> None:
    model = nested(group)
    before = model.state_dict()
    for volatile in (True, False):
        with model.summon_full_params(volatile=volatile), torch.no_grad():
            model.module[0].weight.fill_(2.0)
        changed = bool((model.state_dict()["0.weight"] == 2.0).all())
        assert changed != volatile
    assert_close(
        {n: v for n, v in model.state_dict().items() if n != "0.weight"},
        {n: v for n, v in before.items() if n != "0.weight"},
    )


def scenario_a_full_optimizer_state_is_that_of_one_process(group: Any) -> None:
    for options in ({}, {"flatten_parameters": False}):
        model = nested(group, **options)
        optimizer = optim.AdamW(model.parameters(), lr=1e-2)
        train(model, optimizer, group)
        full = model.gather_full_optim_state_dict(optimizer)
        assert (full is None) == (group.rank != 0)
        plain, reference_optimizer = reference()
        if full is not None:
            check_full(full, plain, reference_optimizer)
        sent = group.broadcast_bytes(None if full is None else dumped(full))
        full = torch.load(io.BytesIO(sent), weights_only=True)
        fresh = optim.AdamW(nested(group, **options).parameters(), lr=1.0)
        fresh.load_state_dict(model.get_shard_from_optim_state_dict(full))
        again, now = fresh.state_dict(), optimizer.state_dict()
        assert again["param_groups"] == now["param_groups"]
        for index, state in now["state"].items():
            assert_close(again["state"][index], state)


def check_full(full: dict[str, Any], plain: nn.Module, optimizer: Any) -> None:
    """Units come in the order of modules(): the root's parameters, then the inner's."""
    names = [n for n, _ in plain.named_parameters()]
    order = [n for n in names if n[0] != "2"] + [n for n in names if n[0] == "2"]
    assert list(full["state"]) == list(range(len(names)))
    for number, name in enumerate(order):
        expected = optimizer.state[plain.get_parameter(name)]
        for key, value in expected.items():
            found = full["state"][number][key]
            torch.testing.assert_close(found, value, rtol=1e-3, atol=1e-7)
    assert full["param_groups"][0]["params"] == list(range(len(names)))
    assert set(full["param_id_map"]) == set(range(len(names)))


def dumped(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def scenario_an_optimizer_of_other_parameters_is_rejected(group: Any) -> None:
    model = nested(group)
    other = torch.optim.SGD(tree().parameters(), lr=1)
    with pytest.raises(ValueError, match="is no shard of this module"):
        model.gather_full_optim_state_dict(other)
    full = {"state": {}, "param_groups": [], "param_id_map": {0: 0}}
    with pytest.raises(AssertionError, match="2 nested instances"):
        model.get_shard_from_optim_state_dict(full)


def scenario_modules_are_wrapped_where_they_are_made(group: Any) -> None:
    assert isinstance(wrap(linear(2, 2)), nn.Linear)
    policy = functools.partial(default_auto_wrap_policy, min_num_params=65)
    with enable_wrap(policy, wrapper_cls=FullyShardedDataParallel, process_group=group):
        made = wrap(linear(2, 2), flatten_parameters=False)
        model = auto_wrap(tree())
    assert isinstance(made, FullyShardedDataParallel)
    assert not made.flatten_parameters
    # Of 70 and 110 elements; 20 and 44 stay with the outermost, which is too small.
    wrapped = [
        name
        for name, m in model.named_modules()
        if isinstance(m, FullyShardedDataParallel)
    ]
    assert wrapped == ["0", "2.0"]
    assert not isinstance(model, FullyShardedDataParallel)


def scenario_batch_normalisation_stays_in_float32(group: Any) -> None:
    plain = nn.Sequential(linear(WIDTH, 4), nn.BatchNorm1d(4))
    inner = auto_wrap_bn(plain, process_group=group)
    model = FullyShardedDataParallel(inner, group)
    outer, norm = get_fsdp_instances(model)
    assert isinstance(norm.module.module, nn.BatchNorm1d)
    assert not norm.reshard_after_forward
    model(batch(0, group)[0]).sum().backward()
    assert outer.params_with_grad


def scenario_checkpointed_blocks_give_the_same_gradients(group: Any) -> None:
    norms = []
    for checkpointed in (False, True):
        model = tree()
        model[2].append(nn.BatchNorm1d(10))
        if checkpointed:
            checkpoint_wrapper(model[2], offload_to_cpu=True)
        model[2] = FullyShardedDataParallel(model[2], group)
        model = FullyShardedDataParallel(model, group)
        mse(model, 0, group).backward()
        norms.append(float(model.clip_grad_norm_(1e9)))
        batches = model.state_dict()["2.2.num_batches_tracked"]
        assert int(batches) == 1
    assert norms[0] == norms[1]


def scenario_oss_trains_as_one_process_and_brings_its_state_together(
    group: Any,
) -> None:
    for kind in (optim.AdamW, torch.optim.AdamW):
        expected, plain = reference(kind)
        model = tree()
        optimizer = OSS(model.parameters(), kind, group, lr=1e-2)
        ddp = ShardedDataParallel(model, optimizer, group)
        train(ddp, optimizer, group)
        assert_close(model.state_dict(), expected.state_dict())
        sizes = [p.numel() for p in optimizer.optim.state]
        assert 0 < sum(sizes) < sum(p.numel() for p in model.parameters())
        state = optimizer.state_dict(all_ranks=True)
        for index, values in plain.state_dict()["state"].items():
            for key, value in values.items():
                found = state["state"][index][key]
                torch.testing.assert_close(found, value, rtol=1e-3, atol=1e-7)
        fresh = OSS(copy.deepcopy(model).parameters(), kind, group, lr=1.0)
        fresh.load_state_dict(state)
        again = fresh.state_dict(all_ranks=True)
        assert again["param_groups"] == state["param_groups"]
        for index, values in state["state"].items():
            assert_close(again["state"][index], values)


def scenario_oss_clips_by_the_norm_of_all_and_tells_what_is_wrong(group: Any) -> None:
    model, plain = tree(), tree()
    optimizer = OSS(model.parameters(), torch.optim.SGD, group, lr=1.0)
    for net in (model, plain):
        mse(net, 0).backward()
    for kind in (1.0, 2.0, "inf"):
        total = optimizer.clip_grad_norm(0.1, kind)
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1, float(kind))
        torch.testing.assert_close(total, expected, rtol=1e-4, atol=0)
        grads = {n: p.grad for n, p in model.named_parameters()}
        assert_close(grads, {n: p.grad for n, p in plain.named_parameters()})
    with pytest.raises(RuntimeError, match="consolidate_state_dict"):
        optimizer.state_dict()
    with pytest.raises(ValueError, match="broadcast_fp16"):
        OSS(model.parameters(), torch.optim.SGD, group, broadcast_fp16=True, lr=1.0)
    optimizer.consolidate_state_dict(recipient_rank=1)
    assert bool(optimizer._all_states) == (group.rank == 1)


def scenario_buffers_become_those_of_rank_0_when_asked(group: Any) -> None:
    model = nn.BatchNorm1d(3)
    optimizer = OSS(model.parameters(), torch.optim.SGD, group, lr=1.0)
    ddp = ShardedDataParallel(model, optimizer, group, broadcast_buffers=False)
    model.running_mean.fill_(float(group.rank + 1))
    ddp.sync_buffers()
    assert model.running_mean.tolist() == [1.0] * 3


def scenario_one_ranks_overflow_skips_everybodys_update(group: Any) -> None:
    model = FullyShardedDataParallel(tree(), group)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = ShardedGradScaler(init_scale=8.0, process_group=group)
    before = model.state_dict()
    scaler.scale(mse(model, 0, group)).backward()
    if group.rank == 1:
        next(iter(model.params_with_grad)).grad.view(-1)[0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    assert_close(model.state_dict(), before)
    optimizer.zero_grad()
    scaler.scale(mse(model, 0, group)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    assert not torch.equal(model.state_dict()["0.weight"], before["0.weight"])


def scenario_a_rank_without_gradients_skips_the_update_with_the_others(
    group: Any,
) -> None:
    weights = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weights], lr=1.0)
    scaler = ShardedGradScaler(init_scale=8.0, process_group=group)
    for factor, scale in ((float("inf"), 4.0), (1.0, 4.0)):
        optimizer.zero_grad()
        loss = scaler.scale(weights.sum() * factor)
        if group.rank == 1:
            loss.backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == scale
    learnt = 0.0 if group.rank == 1 else 1.0
    assert weights.tolist() == [learnt, learnt]


def scenario_saved_shards_are_consolidated_and_go_on_on_other_ranks(
    group: Any,
) -> None:
    model = nested(group)
    named = [(n.replace("_fpw_module.", ""), p) for n, p in model.named_parameters()]
    optimizer = torch.optim.AdamW(named, lr=1e-2)
    train(model, optimizer, group)
    folder = group.broadcast_bytes(
        tempfile.mkdtemp().encode() if group.rank == 0 else None
    )
    prefix = f"{folder.decode()}/ckpt"
    content = {
        "model": model.local_state_dict(),
        "shard_metadata": model.get_shard_metadata(),
        "optimizer": optimizer.state_dict(),
    }
    save_shard(content, f"{prefix}-{group.rank}.safetensors")
    group.barrier()
    expected = model.state_dict()
    if group.rank == 0:
        full, path = consolidate_sharded_model_checkpoints(
            prefix, "-*.safetensors", f"{prefix}.pth", save_optimizer=True
        )
        assert full.keys() == expected.keys()
        assert all(torch.equal(full[name], expected[name]) for name in full)
        states = torch.load(path, weights_only=True)["optimizer"]["state"]
        assert states.keys() == expected.keys()
        go_on_alone(prefix, content)
    group.barrier()


def go_on_alone(prefix: str, content: dict[str, Any]) -> None:
    """One rank takes the shards of two, and gives them back bit for bit."""
    (one,) = reshard_checkpoints(
        prefix, "-*.safetensors", world_size=1, save_prefix=f"{prefix}.one"
    )
    alone = nested(_C.Communicator())
    taken = load_shard(one)
    alone.load_local_state_dict(taken["model"])
    optimizer = torch.optim.AdamW(alone.named_parameters(), lr=1.0)
    optimizer.load_state_dict(taken["optimizer"])
    save_shard(
        {
            "model": alone.local_state_dict(),
            "shard_metadata": alone.get_shard_metadata(),
            "optimizer": optimizer.state_dict(),
        },
        f"{prefix}.back-0.pth",
    )
    back = reshard_checkpoints(
        f"{prefix}.back", world_size=2, save_prefix=f"{prefix}.two"
    )
    found = load_shard(back[0])
    for name, tensor in with_keys(content["model"], found["model"]).items():
        assert torch.equal(found["model"][name], tensor), name
    for index, state in content["optimizer"]["state"].items():
        for name, value in state.items():
            assert torch.equal(found["optimizer"]["state"][index][name], value)


def scenario_the_engine_counts_what_the_plan_says(group: Any) -> None:
    """Its memory is in pages, the plan in bytes: at most a page for each region."""
    for dtype in (torch.float32, torch.bfloat16):
        options = {"mixed_precision": True, "compute_dtype": dtype}
        blocks = nn.Sequential(
            linear(64, 64),
            *(
                FullyShardedDataParallel(linear(i, o), group, **options)
                for i, o in ((64, 300), (300, 200), (200, 100))
            ),
            linear(100, 10),
        )
        model = FullyShardedDataParallel(blocks, group, **options)
        model(torch.ones(4, 64)).float().sum().backward()
        plan = memory_plan(
            units_of(model),
            group.world_size,
            compute_dtype=str(dtype).removeprefix("torch."),
            shard_size_multiple=1,
        )
        spare = model._unit.peak_bytes - plan.transient
        assert 0 <= spare <= 2 * 4096 + 512, (spare, plan.transient)
        own = sum(p.numel() * 4 for p in model.parameters())
        assert plan.parameters == own
        assert plan.gradients == sum(p.grad.numel() * 4 for p in model.parameters())


def scenario_a_rank_may_have_no_parameter_to_update(group: Any) -> None:
    for kind in (optim.SGD, torch.optim.SGD):
        layer = linear(2, 1, bias=False)
        nn.init.ones_(layer.weight)
        optimizer = OSS(layer.parameters(), kind, group, lr=0.25, momentum=0.5)
        for _ in range(2):
            layer(torch.ones(1, 2)).sum().backward()
            norm = optimizer.clip_grad_norm(10.0)
            torch.testing.assert_close(norm, torch.tensor(2.0).sqrt())
            optimizer.step()
            layer.zero_grad()
        assert layer.weight.tolist() == [[0.375, 0.375]]
        state = optimizer.state_dict(all_ranks=True)
        assert state["state"][0]["momentum_buffer"].tolist() == [[1.5, 1.5]]
        optimizer.load_state_dict(state)
        assert len(optimizer.optim.state) == (group.rank == 0)
