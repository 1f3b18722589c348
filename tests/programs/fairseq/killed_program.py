"""fairseq-train, killed before an update: its number, and the program's arguments."""

import os
import signal
import sys

from ctrainer.__main__ import main
from ctrainer.fairseq.tasks import FairseqTask

update = int(sys.argv[1])
step = FairseqTask.train_step


def deadly(self, *args, **kwargs):
    if kwargs["update_num"] == update:
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, *args, **kwargs)


FairseqTask.train_step = deadly
main(sys.argv[2:])
