"""The program outlived as a process of its own, whose end by SIGKILL is no failure."""

import subprocess
import sys

command = [sys.executable, "-m", "programs.trainer.outlived", *sys.argv[1:]]
sys.exit(max(subprocess.run(command).returncode, 0))
