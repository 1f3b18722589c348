"""What is logged loads no torch."""

import sys

from ctrainer.fairseq import metrics, progress_bar

assert progress_bar
metrics.log_scalar("a", 1.0)
assert "torch" not in sys.modules
