"""Where the programs' lines go."""

from __future__ import annotations

import logging
import os
import sys


def log_to_stdout() -> None:
    """Write lines "date | level | logger | text" to standard output, as fairseq's
    programs do, from the level that the variable LOGLEVEL names, by default INFO."""
    logging.basicConfig(
        format="%(asctime)s | %(levelname)s | %(name)s | %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
        level=os.environ.get("LOGLEVEL", "INFO").upper(),
        stream=sys.stdout,
    )
