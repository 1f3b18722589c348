"""Fine-tunings on the shards of 2 ranks."""

import traceback

import fine_tunings
import torch
from programs.run import folder, options, tell

failed = {}
for case in fine_tunings.table()[options["first"] : options["end"]]:
    try:
        found = fine_tunings.train(case, f"{folder}/{case.number}", sharded=True)
        expected = torch.load(f"{folder}/{case.number}.pt", weights_only=True)
        fine_tunings.compare(case, found, *expected)
    except Exception:
        failed[str(case)] = traceback.format_exc()
tell(failed)
