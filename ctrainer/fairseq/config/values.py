"""Values of fairseq's options: read as all settings are, and as OmegaConf and the
command line do, to which "1,2" is a list of two and a number a text."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from ctrainer.arguments.settings import Mismatch, Reader, plain
from ctrainer.fairseq.config.base import MISSING


def is_reference(value: Any) -> bool:
    """Whether it is a text such as "${common.seed}"."""
    return isinstance(value, str) and "${" in value


def as_lists(value: Any) -> Any:
    """Tuples as lists, in containers too: YAML and OmegaConf have nothing else."""
    if isinstance(value, dict):
        return {key: as_lists(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_lists(item) for item in value]
    return value


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise Mismatch from None


class _FairseqReader(Reader):
    def read(self, value: Any, hint: Any, where: str) -> Any:
        value = plain(value)
        if is_reference(value) or (isinstance(value, str) and value == MISSING):
            return value
        return super().read(value, hint, where)

    def anything(self, value: Any) -> Any:
        return as_lists(value)

    def _says_nothing(self, value: Any, kind: Any) -> bool:
        return False  # OmegaConf's None is null alone, which YAML has read

    def number(self, value: Any, kind: Any, where: str) -> float:
        return float(super().number(value, kind, where))

    def text(self, value: Any, kind: Any, where: str) -> str:
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        return str(value) if is_number else super().text(value, kind, where)

    def choice(self, value: Any, kind: Any, where: str) -> str:
        return str(getattr(found := super().choice(value, kind, where), "value", found))

    def items(self, value: Any) -> Sequence[Any]:
        """Those of a list, of its text such as "1,2" or "[1, 2]", or one value."""
        if isinstance(value, str):
            try:
                value = _literal(value) if value else []
            except Mismatch:
                value = [part.strip() for part in value.split(",")]
        if value is None or isinstance(value, Mapping):
            raise Mismatch
        return value if isinstance(value, (list, tuple)) else [value]

    def mapping(self, value: Any, kind: Any, where: str) -> dict[Any, Any]:
        return super().mapping(
            _literal(value) if isinstance(value, str) else value, kind, where
        )


convert = _FairseqReader().read
