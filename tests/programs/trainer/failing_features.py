"""Ranks of failing_features.py: what each finds of the cases of some seeds."""

import failing_features
from programs.run import folder, options, rank, tell, world

tell(
    [
        failing_features.both(
            f"{folder}/{seed}", failing_features.drawn(seed, world), rank
        )
        for seed in options["seeds"]
    ]
)
