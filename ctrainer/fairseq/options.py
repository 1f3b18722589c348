"""Command lines, by the names of fairseq's options.py."""

from __future__ import annotations

import argparse

from ctrainer.fairseq.config import training_parser
from ctrainer.fairseq.utils import eval_bool, eval_str_list

__all__ = [
    "eval_bool",
    "eval_str_list",
    "get_training_parser",
]


def get_training_parser(default_task: str = "translation") -> argparse.ArgumentParser:
    """Return the parser of fairseq-train, without the options of the components that
    are chosen: ctrainer.fairseq.train.parse_args() reads a whole command line.

    Args:
        default_task (str, default 'translation'): The task without --task.
    """
    return training_parser(task=default_task)
