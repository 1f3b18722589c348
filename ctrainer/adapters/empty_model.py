"""A model of transformers without values."""

from __future__ import annotations

from typing import Any


def empty_model(name: str) -> Any:
    """What from_pretrained(name) would load, on the meta device; only the
    configuration is read. Raises OSError where there is none."""
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(name)
    auto: Any = transformers.AutoModel
    named = getattr(transformers, (config.architectures or [""])[0], None)
    with torch.device("meta"):
        return auto.from_config(config) if named is None else named._from_config(config)
