"""Where the checkout is, and what a child needs to import it and the tests' modules."""

import os
from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
ROOT = SUPPORT.parents[1]
PYTHONPATH = os.pathsep.join(
    [
        *map(str, (ROOT, SUPPORT.parent, SUPPORT)),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
)
