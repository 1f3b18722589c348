"""The setup that `ctrainer replay --setup` calls: a trainer of the crash's options."""

import fairseq_tiny as tiny


def setup(cfg):
    assert cfg["common"]["seed"] == 7
    return tiny.trainer()
