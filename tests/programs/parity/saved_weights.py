"""Weights that transformers renames, saved and loaded by 2 sharded ranks."""

import sharded_weights as runs
from programs.run import folder, options, tell

tell({f"{n} {k}": runs.round_trip(folder, n, k) for n, k in options["named"]})
