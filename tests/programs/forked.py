"""Ranks as forks of this process, which has imported what they import.

A line of its input is a run: its seconds, the module that ranks run, and for each rank
its arguments, variables, folder and file of output. The answer is a line of exit codes;
a SIGALRM has it come at once.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib.util
import itertools
import json
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np

import ctrainer

os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # of pyarrow


def import_what_it_imports(program: str) -> None:
    """Run the imports that a program begins with, but for what is a rank's own."""
    spec = importlib.util.find_spec(program)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text())
    begin = 1 if ast.get_docstring(tree) else 0
    imports = itertools.takewhile(
        lambda line: isinstance(line, ast.Import | ast.ImportFrom), tree.body[begin:]
    )
    tree.body = [x for x in imports if getattr(x, "module", None) != "programs.run"]
    with contextlib.suppress(Exception):  # which the ranks raise, too
        assert ctrainer.Trainer
        exec(compile(tree, spec.origin, "exec"), {})


def become(rank: dict[str, Any]) -> None:
    """What a process of its own would begin with."""
    output = os.open(rank["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(rank["folder"])
    os.environ.clear()
    os.environ.update(rank["environ"])
    sys.path[0] = rank["folder"]
    sys.argv[1:] = rank["arguments"]
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    np.random.seed()


def run(program: str) -> None:
    """As `python -m` does; what the program has lives until the interpreter goes."""
    of_main = runpy.run_module(program, run_name="__main__", alter_sys=True)
    globals()["of_main"] = of_main


def main() -> None:
    processes: list[int] = []

    def kill(*_: object) -> None:
        for process in processes:
            os.kill(process, signal.SIGKILL)

    signal.signal(signal.SIGALRM, kill)
    for line in sys.stdin:
        request = json.loads(line)
        import_what_it_imports(request["program"])
        assert len(os.listdir("/proc/self/task")) == 1, "forks have no other threads"
        gc.collect()
        gc.freeze()
        for rank in request["ranks"]:
            process = os.fork()
            if process == 0:
                become(rank)
                return run(request["program"])
            processes.append(process)
        signal.alarm(request["seconds"])
        for process in processes:  # each keeps its id until all have ended
            os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
        signal.alarm(0)
        codes = [os.waitstatus_to_exitcode(os.waitpid(p, 0)[1]) for p in processes]
        processes.clear()
        print(json.dumps(codes), flush=True)


if __name__ == "__main__":
    main()
