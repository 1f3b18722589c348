"""Consolidation on a disk with room for half of the file, then killed as it
overfills it."""

import resource
import signal
import sys

from ctrainer import __main__

prefix, result, half = sys.argv[1:]
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_FSIZE, (int(half), int(half)))
command = ["consolidate", "--ckpt_prefix", prefix, "--save_path", result]
try:
    __main__.main(command)
except SystemExit as left:
    print(left.code, flush=True)
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
__main__.main(command)
