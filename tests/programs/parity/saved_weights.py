"""Weights that transformers renames, saved and loaded by 2 sharded ranks."""

import sys

from programs.run import folder, options, tell

# transformers imports these where they are, and no run here needs them
sys.modules.update(dict.fromkeys(("pandas", "scipy", "sklearn", "torchao")))

import sharded_weights as runs  # noqa: E402

tell({f"{n} {k}": runs.round_trip(folder, n, k) for n, k in options["named"]})
