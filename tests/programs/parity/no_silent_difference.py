"""Scripts on both trainers, each on the ranks of this run."""

import logging
from pathlib import Path

import torch
from intended_differences import compare
from programs.run import folder, options, tell

torch.set_num_threads(1)
logging.disable(logging.WARNING)
rows, silent = set(), {}
for name in options["names"]:
    here = Path(folder, str(name))
    here.mkdir(exist_ok=True)
    # A model whose loss ignores the count has it multiplied by the ranks.
    ignores = name in ("glue", "callbacks_that_decide", "hooks", 20)
    more = {"ranks", "ignores the count"} if ignores else {"ranks"}
    found, silent[name] = compare(name, here, more)
    rows |= found
tell({"rows": sorted(rows), "silent": silent})
