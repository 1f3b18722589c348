"""The CUDA plugin of ctrainer: `ctrainer._cuda` loads the extension in this folder."""

__version__ = "0.1.0"
