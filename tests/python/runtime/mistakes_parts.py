"""Mistakes with BMUF, FSDP, schedules and optimizers on their own."""

from __future__ import annotations

from typing import Any

import torch
from mistakes import mistake
from rank_threads import on_ranks
from torch import nn

from ctrainer import _C, BMUF
from ctrainer import optim as ours
from ctrainer.fsdp import FullyShardedDataParallel as FSDP
from ctrainer.optim import SGD, AdamW, get_scheduler


def sgd(**options: Any) -> Any:
    return SGD(nn.Linear(3, 2).parameters(), **{"lr": 0.1, **options})


def sharded(module: Any = None, **options: Any) -> object:
    group = _C.Communicator()
    wrapped = nn.Linear(6, 3) if module is None else module
    return FSDP(wrapped, process_group=group, **options)


# BMUF


@mistake("global_sync_iter", "0")
def blocks_of_no_step() -> object:
    return BMUF({"global_sync_iter": 0}, sgd())


@mistake("block_momentum", "-1.5")
def a_negative_block_momentum() -> object:
    return BMUF({"block_momentum": -1.5}, sgd())


@mistake("block_momentun", "block_momentun")
def a_misspelt_option_of_bmuf() -> object:
    return BMUF({"block_momentun": 0.5}, sgd())


@mistake("optimizer", "Linear")
def a_model_in_place_of_an_optimizer() -> object:
    return BMUF({}, nn.Linear(3, 2))


# FSDP


@mistake("on_neuron", "weight")
def rows_that_the_ranks_do_not_divide() -> object:
    layers = [nn.Linear(7, 3), nn.Linear(7, 3)]

    def rank(group: Any) -> Exception | None:
        try:
            FSDP(layers[group.rank], process_group=group, on_neuron=True)
        except Exception as error:
            return error
        return None

    error, _ = on_ranks(2, rank)
    raise error


@mistake("FullyShardedDataParallel", "on_neurons")
def a_misspelt_option_of_fsdp() -> object:
    return sharded(on_neurons=True)


@mistake("compute_dtype", "float8")
def a_dtype_that_nobody_computes_in() -> object:
    return sharded(compute_dtype="float8")


@mistake("flatten_parameters", "'false'")
def a_flag_of_fsdp_as_text() -> object:
    return sharded(flatten_parameters="false")


@mistake("gather_bits", "5")
def bits_that_are_not_known() -> object:
    return sharded(gather_bits=5)


@mistake("ModuleList", "forward")
def a_list_of_modules_that_is_wrapped() -> object:
    return sharded(nn.ModuleList([nn.Linear(6, 3)]))


@mistake("weight", "float64")
def parameters_of_double_precision() -> object:
    return sharded(nn.Linear(6, 3).double())


@mistake("module", "Tensor")
def a_tensor_in_place_of_a_module() -> object:
    return sharded(torch.ones(6, 3))


# Schedules


@mistake("name", "'cosin'")
def a_misspelt_schedule_by_itself() -> object:
    return get_scheduler("cosin", sgd(), num_warmup_steps=0, num_training_steps=10)


@mistake("num_warmup_steps", "-3")
def a_negative_warm_up() -> object:
    return get_scheduler("linear", sgd(), num_warmup_steps=-3, num_training_steps=10)


@mistake("num_training_steps", "linear")
def a_schedule_without_its_length() -> object:
    return get_scheduler("linear", sgd(), num_warmup_steps=0)


@mistake("num_cycle", "num_cycle")
def a_misspelt_option_of_a_schedule() -> object:
    return get_scheduler(
        "cosine", sgd(), 0, 10, scheduler_specific_kwargs={"num_cycle": 2}
    )


# Optimizers


@mistake("lr", "-1")
def an_optimizer_that_climbs() -> object:
    return sgd(lr=-1.0)


@mistake("betas", "(0.9,)")
def one_beta() -> object:
    return AdamW(nn.Linear(3, 2).parameters(), betas=(0.9,))


@mistake("betas", "1.0")
def a_beta_of_one() -> object:
    return AdamW(nn.Linear(3, 2).parameters(), betas=(0.9, 1.0))


@mistake("lr_rate", "AdamW")
def a_misspelt_option_of_an_optimizer() -> object:
    return AdamW(nn.Linear(3, 2).parameters(), lr_rate=0.1)  # type: ignore[call-arg]


@mistake("param", "empty")
def an_optimizer_without_parameters() -> object:
    return AdamW([])


@mistake("param", "Linear")
def a_model_in_place_of_parameters() -> object:
    return AdamW(nn.Linear(3, 2))  # type: ignore[arg-type]


@mistake("param_groups", "2")
def the_state_of_other_groups() -> object:
    layer = nn.Linear(3, 2)
    groups = [{"params": [layer.weight]}, {"params": [layer.bias]}]
    state = ours.SGD(groups, lr=0.1, momentum=0.9).state_dict()
    return sgd(momentum=0.9).load_state_dict(state)
