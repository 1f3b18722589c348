"""Ctrl-C in a wait for the other rank."""

import os
import signal
import sys
import threading
import time

import numpy as np

from ctrainer.comm import from_environment

group = from_environment(60.0)
values = np.ones(200000)
if group.rank == 0:

    def interrupt():
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGINT)

    work = group.all_reduce(values, async_op=True)
    try:
        threading.Thread(target=interrupt).start()
        work.wait()
    except KeyboardInterrupt:
        print("interrupted", values[0], flush=True)
    sys.stdin.read()
else:
    sys.stdin.readline()
    try:
        group.all_reduce(values)
    except RuntimeError as error:
        print(error)
