"""Every schedule of the step, without torch and transformers."""

import sys

sys.modules.update(dict.fromkeys(("torch", "transformers"), None))  # imports now fail

import numpy as np  # noqa: E402

import ctrainer  # noqa: E402
from ctrainer.adapters.numpy import SGD, Parameter  # noqa: E402
from ctrainer.schedules import get_scheduler  # noqa: E402

needed = {
    "cosine_with_min_lr": {"min_lr": 1e-3},
    "cosine_warmup_with_min_lr": {"min_lr_rate": 0.1},
    "warmup_stable_decay": {"num_decay_steps": 5},
}
for name in set(ctrainer.SchedulerType) - {"reduce_lr_on_plateau", "greedy"}:
    optimizer = SGD([Parameter(np.zeros(2, np.float32))], lr=0.1)
    scheduler = get_scheduler(name, optimizer, 2, 20, needed.get(str(name)))
    for _ in range(5):
        scheduler.step()
    print(name, scheduler.get_last_lr() == [optimizer.param_groups[0]["lr"]])
