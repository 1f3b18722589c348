"""seed_loaded() loads no torch."""

import sys

from ctrainer.trainer_utils import seed_loaded

seed_loaded(1)
print("torch" in sys.modules)
