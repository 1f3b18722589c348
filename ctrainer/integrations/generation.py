"""transformers' generation settings."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any


def load_generation_config(given: Any) -> Any:
    """A GenerationConfig from one (copied), a file, a folder, or a model's name.

    Raises ValueError for settings that contradict each other: they could not be saved
    at the end of training.
    """
    from transformers import GenerationConfig

    if isinstance(given, GenerationConfig):
        config = copy.deepcopy(given)
    elif Path(given).is_file():
        path = Path(given)
        config = GenerationConfig.from_pretrained(path.parent, path.name)
    else:
        config = GenerationConfig.from_pretrained(os.fspath(given))
    try:
        config.validate(strict=True)
    except ValueError as error:
        raise ValueError(
            f"generation_config cannot be saved with the model: {error}\n\nFix these "
            "issues to train your model."
        ) from error
    return config
