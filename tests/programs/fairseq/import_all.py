"""Imports the modules that are named, of either package, in that order, and
looks for files that have run twice."""

import sys
from importlib import import_module

from ctrainer.fairseq import install_fairseq_aliases

install_fairseq_aliases()
for name in sys.argv[1:]:
    import_module(name)
for name in sys.argv[1:]:
    short = name.removeprefix("ctrainer.")
    ours, theirs = (import_module(p + short) for p in ("ctrainer.", ""))
    assert ours is theirs, name
    package, _, last = short.rpartition(".")
    assert getattr(sys.modules[package], last, ours) is ours, name
    assert ours.__spec__.name.startswith("ctrainer."), name
by_file = {}
for name, module in list(sys.modules.items()):
    file = getattr(module, "__file__", None) or name
    if name.split(".")[0] in ("fairseq", "ctrainer") and file[-3:] == ".py":
        assert by_file.setdefault(file, module) is module, file
print(len(by_file))
