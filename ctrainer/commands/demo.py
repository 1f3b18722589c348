"""`ctrainer demo`: the README's demo, of the wheel's or the checkout's examples."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path


def main(arguments: list[str]) -> int:
    """Run the demo and return the exit status: 1 where a package is missing.

    Args:
        arguments (list[str]): The options of examples/code_search.py.
    """
    package = Path(__file__).parents[1]
    homes = (package / "examples", package.parent / "examples")
    sys.path[:0] = [str(home) for home in homes if home.is_dir()]
    try:
        import_module("code_search").main(arguments, "ctrainer demo")
    except ModuleNotFoundError as error:
        print(
            f"ctrainer demo: the package {error.name} is not installed; "
            "install those of the demo with: pip install 'ctrainer[demo]'",
            file=sys.stderr,
        )
        return 1
    return 0
