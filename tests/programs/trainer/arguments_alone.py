"""Arguments are made, shown and written without a framework."""

import sys

from ctrainer.training_args import TrainingArguments

made = TrainingArguments("x")
assert repr(made)
assert made.to_dict()
print("torch" in sys.modules, "transformers" in sys.modules)
