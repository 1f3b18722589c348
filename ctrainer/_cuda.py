"""The CUDA plugin of ctrainer-cuda13, where none is built beside this file."""

import sys

from ctrainer import __version__

try:
    import ctrainer_cuda13
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "ctrainer's CUDA plugin is not installed: pip install 'ctrainer[cuda13]', or "
        "build it (docs/reference/cuda.md)",
        name=error.name,
    ) from error
if ctrainer_cuda13.__version__ != __version__:
    raise ImportError(
        f"ctrainer-cuda13 is of version {ctrainer_cuda13.__version__} and ctrainer of "
        f"{__version__}: pip install 'ctrainer-cuda13=={__version__}'",
        name=__name__,
    )
from ctrainer_cuda13 import _cuda

sys.modules[__name__] = _cuda
