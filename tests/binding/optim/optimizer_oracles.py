"""Optimizers that torch lacks, written down from their papers and sources with one
tensor operation after the other: what the engine's are compared with."""

import math
from typing import Any, ClassVar

import torch

State = dict[str, Any]


class Oracle(torch.optim.Optimizer):
    """defaults: the options and their values; update(): one parameter's step."""

    options: ClassVar[State]

    def __init__(self, params: Any, **options: Any) -> None:
        assert options.keys() <= self.options.keys()
        super().__init__(params, {**self.options, **options})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            self.prepare(group)
            for param in group["params"]:
                if param.grad is not None:
                    sign = -1 if group.get("maximize") else 1
                    self.update(param, sign * param.grad, self.state[param], group)
            self.finish(group)

    def prepare(self, group: State) -> None: ...

    def finish(self, group: State) -> None: ...

    def update(
        self, p: torch.Tensor, g: torch.Tensor, s: State, group: State
    ) -> None: ...


class Lion(Oracle):
    """Chen et al., 2023, algorithm 2."""

    options: ClassVar[State] = {
        "lr": 1e-4,
        "betas": (0.9, 0.99),
        "weight_decay": 0.0,
        "maximize": False,
    }

    def update(self, p: torch.Tensor, g: torch.Tensor, s: State, group: State) -> None:
        m = s.setdefault("exp_avg", torch.zeros_like(p))
        (b1, b2), lr = group["betas"], group["lr"]
        direction = (b1 * m + (1 - b1) * g).sign()
        p.copy_(p * (1 - lr * group["weight_decay"]) - lr * direction)
        m.copy_(b2 * m + (1 - b2) * g)


class AdEMAMix(Oracle):
    """Pagliardini et al., 2024, algorithm 1, and its growing alpha and beta3."""

    options: ClassVar[State] = {
        "lr": 1e-3,
        "betas": (0.9, 0.999, 0.9999),
        "alpha": 5.0,
        "t_alpha": None,
        "t_beta3": None,
        "eps": 1e-8,
        "weight_decay": 1e-2,
        "maximize": False,
    }

    def slow_beta(self, step: int, group: State) -> float:
        b1, _, b3 = group["betas"]
        part = min(1.0, step / (group["t_beta3"] or step))
        life1, life3 = (math.log(0.5) / math.log(b) for b in (b1, b3))
        return float(0.5 ** (1 / ((1 - part) * life1 + part * life3)))

    def update(self, p: torch.Tensor, g: torch.Tensor, s: State, group: State) -> None:
        if not s:
            s["step"] = torch.tensor(0.0)
            for name in ("exp_avg_fast", "exp_avg_slow", "exp_avg_sq"):
                s[name] = torch.zeros_like(p)
        s["step"] += 1
        (b1, b2, _), lr, t = group["betas"], group["lr"], int(s["step"])
        b3 = self.slow_beta(t, group)
        alpha = group["alpha"] * min(1.0, t / (group["t_alpha"] or t))
        for name, beta, value in (
            ("exp_avg_fast", b1, g),
            ("exp_avg_slow", b3, g),
            ("exp_avg_sq", b2, g * g),
        ):
            s[name].copy_(beta * s[name] + (1 - beta) * value)
        fast = s["exp_avg_fast"] / (1 - b1**t)
        denom = (s["exp_avg_sq"] / (1 - b2**t)).sqrt() + group["eps"]
        step = (fast + alpha * s["exp_avg_slow"]) / denom
        p.sub_(lr * (step + group["weight_decay"] * p))


class FairseqAdam(Oracle):
    """fairseq, optim/adam.py: eps beside the root that is not corrected."""

    options: ClassVar[State] = {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0,
        "amsgrad": False,
    }

    def update(self, p: torch.Tensor, g: torch.Tensor, s: State, group: State) -> None:
        if not s:
            s["step"] = 0
            for name in ("exp_avg", "exp_avg_sq"):
                s[name] = torch.zeros_like(p)
            if group["amsgrad"]:
                s["max_exp_avg_sq"] = torch.zeros_like(p)
        (b1, b2), lr = group["betas"], group["lr"]
        s["step"] += 1
        s["exp_avg"].copy_(b1 * s["exp_avg"] + (1 - b1) * g)
        s["exp_avg_sq"].copy_(b2 * s["exp_avg_sq"] + (1 - b2) * g * g)
        v = s["exp_avg_sq"]
        if group["amsgrad"]:
            v = s["max_exp_avg_sq"].copy_(torch.maximum(s["max_exp_avg_sq"], v))
        rate = lr * (1 - b2 ** s["step"]) ** 0.5 / (1 - b1 ** s["step"])
        p.sub_(group["weight_decay"] * lr * p)
        p.sub_(rate * s["exp_avg"] / (v.sqrt() + group["eps"]))


class FairseqAdamax(Oracle):
    """fairseq, optim/adamax.py: eps beside the norm."""

    options: ClassVar[State] = {
        "lr": 2e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0,
        "bias_correction": True,
    }

    def update(self, p: torch.Tensor, g: torch.Tensor, s: State, group: State) -> None:
        if not s:
            s["step"] = 0
            s["exp_avg"], s["exp_inf"] = torch.zeros_like(p), torch.zeros_like(p)
        (b1, b2), lr = group["betas"], group["lr"]
        s["step"] += 1
        s["exp_avg"].copy_(b1 * s["exp_avg"] + (1 - b1) * g)
        s["exp_inf"].copy_(torch.maximum(b2 * s["exp_inf"], g.abs()))
        rate = lr / (1 - b1 ** s["step"]) if group["bias_correction"] else lr
        p.sub_(group["weight_decay"] * lr * p)
        p.sub_(rate * s["exp_avg"] / (s["exp_inf"] + group["eps"]))


class FairseqNAG(Oracle):
    """fairseq, optim/nag.py."""

    options: ClassVar[State] = {
        "lr": 0.0,
        "lr_old": None,
        "momentum": 0,
        "weight_decay": 0,
    }

    def prepare(self, group: State) -> None:
        old = group["lr"] if group["lr_old"] is None else group["lr_old"]
        self.correct = group["lr"] / old if old > 0 else group["lr"]

    def update(self, p: torch.Tensor, g: torch.Tensor, s: State, group: State) -> None:
        b = s.setdefault("momentum_buffer", torch.zeros_like(p))
        lr, momentum = group["lr"], group["momentum"]
        p.mul_(1 - lr * group["weight_decay"])
        p.add_(momentum**2 * self.correct * b - (1 + momentum) * lr * g)
        b.copy_(momentum * self.correct * b - lr * g)

    def finish(self, group: State) -> None:
        group["lr_old"] = group["lr"]


class AdamWScheduleFree(Oracle):
    """Defazio et al., 2024, with x, y and z kept apart; the parameter holds y, or x
    after eval()."""

    options: ClassVar[State] = {
        "lr": 0.0025,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0,
        "warmup_steps": 0,
        "r": 0.0,
        "weight_lr_power": 2.0,
        "k": 0,
        "weight_sum": 0.0,
        "lr_max": 0.0,
    }

    def momentum(self, group: State) -> float:
        return float(group["betas"][0])

    def prepare(self, group: State) -> None:
        group["k"] += 1
        self.rate = group["lr"] * self.factor(group)
        group["lr_max"] = max(group["lr_max"], self.rate)
        weight = group["k"] ** group["r"] * group["lr_max"] ** group["weight_lr_power"]
        group["weight_sum"] += weight
        self.share = weight / group["weight_sum"] if group["weight_sum"] else 0.0

    def factor(self, group: State) -> float:
        return float(min(1.0, group["k"] / max(1, group["warmup_steps"])))

    def normalised(self, g: torch.Tensor, s: State, group: State) -> torch.Tensor:
        v = s.setdefault("exp_avg_sq", torch.zeros_like(g))
        b2 = group["betas"][1]
        v.copy_(b2 * v + (1 - b2) * g * g)
        corrected = v / (1 - b2 ** group["k"])
        return g / (corrected.sqrt() + group["eps"])

    def update(self, p: torch.Tensor, g: torch.Tensor, s: State, group: State) -> None:
        z = s.setdefault("z", p.clone())
        x = s.setdefault("x", p.clone())
        g = self.normalised(g, s, group) + group["weight_decay"] * p
        z.sub_(self.rate * g)
        x.copy_((1 - self.share) * x + self.share * z)
        beta = self.momentum(group)
        p.copy_((1 - beta) * z + beta * x)

    @torch.no_grad()
    def train(self) -> None:
        for group in self.param_groups:
            beta = self.momentum(group)
            for p in (p for p in group["params"] if p in self.state):
                s = self.state[p]
                p.copy_((1 - beta) * s["z"] + beta * s["x"])

    @torch.no_grad()
    def eval(self) -> None:
        for p, s in self.state.items():
            p.copy_(s["x"])


class RAdamScheduleFree(AdamWScheduleFree):
    """The same with RAdam's rectified rate (Liu et al., 2020, algorithm 2)."""

    options: ClassVar[State] = {**AdamWScheduleFree.options, "silent_sgd_phase": True}

    def rectification(self, group: State) -> float:
        k, b2 = group["k"], group["betas"][1]
        most = 2 / (1 - b2) - 1
        length = most - 2 * k * b2**k / (1 - b2**k)
        if length <= 4:
            return 0.0
        square = (length - 4) * (length - 2) * most
        return float((square / ((most - 4) * (most - 2) * length)) ** 0.5)

    def factor(self, group: State) -> float:
        return self.rectification(group) or float(not group["silent_sgd_phase"])

    def normalised(self, g: torch.Tensor, s: State, group: State) -> torch.Tensor:
        scaled = super().normalised(g, s, group)
        return scaled if self.rectification(group) else g


class SGDScheduleFree(AdamWScheduleFree):
    """The same without a second moment."""

    options: ClassVar[State] = {**AdamWScheduleFree.options, "lr": 1.0, "momentum": 0.9}

    def momentum(self, group: State) -> float:
        return float(group["momentum"])

    def normalised(self, g: torch.Tensor, s: State, group: State) -> torch.Tensor:
        return g
