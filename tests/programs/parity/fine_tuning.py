"""Fine-tunings on the shards of 2 ranks."""

import sys
import traceback

import torch
from programs.run import folder, options, tell

# transformers imports these where they are, and no run here needs them
sys.modules.update(dict.fromkeys(("pandas", "scipy", "sklearn", "torchao")))

import fine_tunings  # noqa: E402

failed = {}
for case in fine_tunings.table()[options["first"] : options["end"]]:
    try:
        found = fine_tunings.train(case, f"{folder}/{case.number}", sharded=True)
        expected = torch.load(f"{folder}/{case.number}.pt", weights_only=True)
        fine_tunings.compare(case, found, *expected)
    except Exception:
        failed[str(case)] = traceback.format_exc()
tell(failed)
