"""The arguments that several optimizers share, and an example, for their docstrings."""

from __future__ import annotations

from functools import partial

from ctrainer.arguments.docstrings import compose, parameters

_NO_EFFECT = "Accepted for torch's sake, without effect: there is one implementation."
_ARGUMENTS = {
    "params": "Parameters on the CPU, or dicts with parameters under 'params' and "
    "options of their own.",
    "lr": "Learning rate, >= 0.",
    "betas": "Decays of the mean of gradients and of that of their squares, in [0, 1).",
    "eps": "Added to the root of the mean square, >= 0.",
    "weight_decay": "Strength of the weight decay, >= 0.",
    "amsgrad": "Divide by the largest second moment so far.",
    "maximize": "Step up the gradient, not down.",
    "momentum": "Decay of the momentum, >= 0; 0 keeps none.",
    "dampening": "The gradient enters the momentum times 1 - dampening.",
    "nesterov": "Take Nesterov's momentum: look one step ahead.",
    "bias_correction": "Correct the means for their start at 0.",
    "decoupled_weight_decay": "Shrink parameters by lr * weight_decay, as AdamW, "
    "instead of adding the decay to the gradient.",
    "foreach": _NO_EFFECT,
    "fused": _NO_EFFECT,
    "capturable": "On a GPU, let torch.cuda.graph() capture step(): see "
    "prepare_replay(). On the CPU, and for optimizers that look at whole parameters or "
    "keep numbers on the host (NAdam), step() raises ValueError.",
    "differentiable": "True raises ValueError: autograd does not see the update.",
    "precision": "master_weights, fp32_state, stochastic_rounding and rounding_seed "
    "for bf16 and fp16 parameters: see Precision.",
    "options": "optim_bits, min_8bit_size, keep_32bit, maximize, and the options of "
    "Precision but for fp32_state: optim_bits=32 keeps a group's state in float32; "
    "parameters of fewer than min_8bit_size elements (4096), and those in keep_32bit, "
    "have float32 state too; maximize steps up the gradient.",
    "alpha": "Weight of the slow average, >= 0.",
    "t_alpha": "Updates over which alpha grows from 0; None: it is alpha from the "
    "start. The paper takes the length of the run.",
    "t_beta3": "Updates over which the slow average's half-life grows from the fast "
    "one's; None: it is the slow one's from the start.",
    "warmup_steps": "Updates over which the learning rate grows linearly, >= 0.",
    "r": "Update k weighs k**r in the average, >= 0.",
    "weight_lr_power": "An update also weighs (largest learning rate so far)**"
    "weight_lr_power, >= 0.",
}
TORCH = """\
Example:
    >>> import torch
    >>> from ctrainer.optim import {name}
    >>> layer = torch.nn.Linear(3, 2, bias=False)
    >>> optimizer = {name}(layer.parameters(), lr=1e-3)
    >>> layer(torch.ones(1, 3)).sum().backward()
    >>> optimizer.step(max_norm=1.0, zero_grads=True)
    >>> layer.weight.grad.norm().item()
    0.0"""
NUMPY = """\
Example:
    >>> import numpy as np
    >>> from ctrainer.adapters.numpy import {name}, Parameter
    >>> weight = Parameter(np.ones(3, np.float32))
    >>> optimizer = {name}([weight], lr=0.1)
    >>> weight.accumulate(np.ones(3))
    >>> optimizer.step(zero_grads=True)
    >>> weight.grad
    array([0., 0., 0.], dtype=float32)"""


def describe(cls: type, example: str = TORCH) -> None:
    """Let an optimizer's docstring list its arguments and show how it is used."""
    compose(
        cls, partial(parameters, cls, _ARGUMENTS), example.format(name=cls.__name__)
    )
