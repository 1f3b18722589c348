"""install() is idempotent, and undone by uninstall()."""

import dataclasses

import numpy

from ctrainer.fairseq import install, uninstall

plain = dataclasses.dataclass
lines = install()
assert install() == lines, lines

import fairseq.trainer  # noqa: E402
import fairseq_cli.train as program  # noqa: E402
from fairseq import metrics  # noqa: E402

import ctrainer.fairseq  # noqa: E402

assert issubclass(program.Trainer, ctrainer.fairseq.Trainer)
assert metrics is ctrainer.fairseq.metrics
uninstall()
assert fairseq.trainer.Trainer.__module__ == "fairseq.trainer"
assert dataclasses.dataclass is plain
assert "float" not in vars(numpy)
install()
assert issubclass(fairseq.trainer.Trainer, ctrainer.fairseq.Trainer)
