"""A run over a stream whose rows take their time, in a folder."""

import sys
from pathlib import Path

from test_data_resume import make, slow

slow()
make(Path(sys.argv[1]), "stream with a state", 2, False).train()
