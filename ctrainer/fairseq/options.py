"""Command lines, by the names of fairseq's options.py."""

from __future__ import annotations

import argparse
from ast import literal_eval
from collections.abc import Callable
from typing import Any

from ctrainer.fairseq.config import training_parser
from ctrainer.fairseq.utils import eval_bool, eval_str_list

__all__ = [
    "csv_str_list",
    "eval_bool",
    "eval_str_dict",
    "eval_str_list",
    "get_training_parser",
]


def csv_str_list(x: str) -> list[str]:
    return x.split(",")


def eval_str_dict(x: Any, type: Callable[[Any], Any] = dict) -> Any:
    """A dict out of its text; None for None."""
    return literal_eval(x) if isinstance(x, str) else x


def get_training_parser(default_task: str = "translation") -> argparse.ArgumentParser:
    """The parser of fairseq-train, without the options of the components that are
    chosen: ctrainer.fairseq.train.parse_args() reads a whole command line."""
    return training_parser(task=default_task)
