"""auto_wrap_bn: batch normalisations as units of their own."""

from __future__ import annotations

from typing import Any

from torch import nn

from ctrainer import _C
from ctrainer.compat.fairscale._fsdp import FullyShardedDataParallel
from ctrainer.compat.fairscale._wrap import (
    auto_wrap,
    config_auto_wrap_policy,
    enable_wrap,
)


def auto_wrap_bn(
    module: nn.Module,
    single_rank_pg: bool = False,
    process_group: Any = None,
    fsdp_config: dict[str, Any] | None = None,
    wrap_it: bool = True,
    assert_on_collision: bool = True,
) -> nn.Module:
    """Wrap each batch normalisation by itself, in float32 and not resharded, and return
    the module.

    Args:
        module (nn.Module): The module.
        single_rank_pg (bool, default False): Units of one rank.
        process_group (default None): Of the units; None: all ranks.
        fsdp_config (dict[str, Any] | None, default None): Other options of these units.
        wrap_it (bool, default True): False only leaves `wrapper_config` on them, for
            auto_wrap().
        assert_on_collision (bool, default True): Raise AssertionError where one has a
            `wrapper_config`.
    """
    config = fsdp_config
    if config is None:
        config = {
            "process_group": _C.Communicator() if single_rank_pg else process_group,
            "mixed_precision": False,
            "flatten_parameters": False,
            "reshard_after_forward": False,
            "force_input_to_fp32": False,
        }
    for child in module.modules():
        if isinstance(child, nn.modules.batchnorm._BatchNorm):
            assert not (assert_on_collision and hasattr(child, "wrapper_config")), (
                "a batch normalisation has a wrapper_config already"
            )
            child.wrapper_config = config  # type: ignore[assignment]
    if not wrap_it:
        return module
    with enable_wrap(config_auto_wrap_policy, wrapper_cls=FullyShardedDataParallel):
        return auto_wrap(module)
