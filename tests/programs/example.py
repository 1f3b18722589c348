"""An example, as ranks that a launcher starts: its path, and its arguments."""

import os
import runpy
import sys

from programs.run import options

script = options["script"]
sys.path.insert(0, os.path.dirname(script))
sys.argv = [os.path.basename(script), *options["arguments"]]
runpy.run_path(script, run_name="__main__")
