"""A user's optimizer and schedule for fairseq."""

import torch
from fairseq.optim import FairseqOptimizer, register_optimizer
from fairseq.optim.lr_scheduler import FairseqLRScheduler, register_lr_scheduler


@register_optimizer("mine")
class Mine(FairseqOptimizer):
    def __init__(self, args, params):
        super().__init__(args)
        self._optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.5)

    @property
    def optimizer_config(self):
        return {"lr": 0.1}


@register_lr_scheduler("falling")
class Falling(FairseqLRScheduler):
    def step_update(self, updates):
        self.optimizer.set_lr(0.1 / (updates + 1))
        return self.optimizer.get_lr()
