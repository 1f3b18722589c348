"""Trains with torch_compile on one of the two Trainers: the process's peak memory."""

from pathlib import Path

from compiled_trainings import trained
from programs.run import folder, options, tell

trained(folder, "gpt2", torch_compile_backend="aot_eager", **options)
status = Path("/proc/self/status").read_text()
tell(int(status.split("VmHWM:")[1].split()[0]))
