"""What becomes of each option: the table from which docs/fairseq_config.md is made.

An option that is neither honoured nor refused is read: checked, kept for whoever asks
for it, and acted on by nothing in this package.
"""

from __future__ import annotations

_BAR = "by training_progress_bar"
_TRACKER = "training_progress_bar raises ValueError; use tensorboard_logdir"

HONOURED = {
    "common.log_file": _BAR,
    "common.log_format": _BAR,
    "common.log_interval": _BAR,
    "common.memory_efficient_bf16": "sets bf16",
    "common.memory_efficient_fp16": "sets fp16",
    "common.no_progress_bar": _BAR,
    "common.tensorboard_logdir": _BAR,
    "common.wandb_project": _BAR,
}
# Of all options of a kind of component.
HONOURED_COMPONENTS = {"lr_scheduler": "by build_lr_scheduler"}
REFUSED = {
    "common.aim_repo": _TRACKER,
    "common.azureml_logging": _TRACKER,
}


def status_of(option: str) -> str:
    """The status of "group.option" or "component.name.option", with where or why."""
    if option in HONOURED:
        return f"honoured: {HONOURED[option]}"
    component = option.partition(".")[0]
    if component in HONOURED_COMPONENTS:
        return f"honoured: {HONOURED_COMPONENTS[component]}"
    if option in REFUSED:
        return f"refused when set: {REFUSED[option]}"
    return "read"
