"""Where a training_args.bin of before ctrainer.arguments looks for a class."""

from ctrainer.arguments.accelerator import AcceleratorConfig as AcceleratorConfig
