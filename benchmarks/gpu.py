"""make gpu: what a GPU has to show, in ten minutes, stage by stage.

    python benchmarks/gpu.py [--out FOLDER] [--only STAGE ...] [--again STAGE ...]
    python benchmarks/gpu.py --table out/gpu/gpu.json docs/benchmarks.md

Takes the Python, torch and nvcc that it finds, no package index and no network. Each
stage has its own limit of time; a stage that fails does not keep the next ones, and one
that has passed is not run again. FOLDER gets gpu.json, the results so far, and gpu.log,
all that was printed. --emulated rehearses the stages on the emulated device.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import report

ROOT = Path(__file__).resolve().parents[1]
PY = sys.executable
DEVICE = ["tests/device", "tests/cuda/test_fsdp_gpu.py"]
SANITIZED = ("test_norm", "test_elementwise", "test_measure", "test_quantized")
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
BEGIN, END = "<!-- gpu:begin -->", "<!-- gpu:end -->"


@dataclass(frozen=True)
class Stage:
    """Commands that run one after the other within some minutes, whatever becomes of
    each; JSON lines that they print are results."""

    minutes: float
    commands: list[list[str]]
    environment: dict[str, str] = field(default_factory=dict)
    without: str = ""  # why it cannot run here


def make(target: str, *options: str) -> list[str]:
    return ["make", "-s", f"-j{os.cpu_count()}", *options, f"PY={PY}", target]


def python(script: str, *options: str) -> list[str]:
    return [PY, f"benchmarks/{script}", *options]


def libraries() -> dict[str, str]:
    """Where programs without Python find torch's cuBLAS and NCCL."""
    folders = [
        str(folder)
        for path in sys.path
        for folder in Path(path).glob("nvidia/*/lib")
        if folder.parent.name in ("cu13", "nccl")
    ]
    before = os.environ.get("LD_LIBRARY_PATH", "")
    return {"LD_LIBRARY_PATH": ":".join(filter(None, [*folders, before]))}


def on_a_gpu(capability: str, nvcc: str) -> dict[str, Stage]:
    built = {"CTRAINER_CUDA": "1", "CTRAINER_CUDA_ARCHS": capability, "NVCC": nvcc}
    # Warnings are for the compilers of development: another gcc may have more.
    checked = [f"NVCC={nvcc}", f"CUDA_CHECK_ARCH=sm_{capability}", "STRICT=-std=c11"]
    beside = str(Path(nvcc).parent)
    sanitizer = (
        shutil.which("compute-sanitizer")
        or shutil.which("compute-sanitizer", path=beside)
        or ""
    )
    sanitized = [
        [
            *(sanitizer, "--tool", tool, "--error-exitcode", "1"),
            *("--report-api-errors", "no"),  # the tests provoke some
            f"build/cuda/{program}",
        ]
        for tool in TOOLS
        for program in SANITIZED
    ]
    return {
        "build": Stage(1.5, [[PY, "setup.py", "-q", "build_ext", "--inplace"]], built),
        "versions": Stage(0.3, [["nvidia-smi"], [PY, "-m", "ctrainer", "env"]]),
        "kernels": Stage(2.0, [make("cuda-check", *checked)], libraries()),
        "updates": Stage(
            1.2,
            [
                python("gpu_updates.py"),
                python("bench_checkpoint.py", "--gpu", "--rounds", "3"),
            ],
        ),
        "bandwidth": Stage(
            0.7, [make("build/cuda/gpu_kernels", *checked), ["build/cuda/gpu_kernels"]]
        ),
        "steps": Stage(1.5, [python("gpu_steps.py")]),
        "tests": Stage(
            2.0, [[PY, "-m", "pytest", *DEVICE]], {"CTRAINER_TEST_GPU": "1"}
        ),
        "sanitizers": Stage(
            0.8, sanitized, {"CTRAINER_SMALL": "1", **libraries()},
            "" if sanitizer else "there is no compute-sanitizer",
        ),
    }  # fmt: skip


def emulated() -> dict[str, Stage]:
    few = ["-k", "run_on_the_device and (plain or sgd)"]
    rehearsed = {"CTRAINER_EMULATED": "1"}
    return {
        "build": Stage(10, [make("cuda-emul-torch")]),
        "versions": Stage(1, [[PY, "-m", "ctrainer", "env"]]),
        "kernels": Stage(10, [make("build/emul/test_norm"), ["build/emul/test_norm"]]),
        "updates": Stage(
            5,
            [
                python(name, *more, "--small", "--rounds", "1")
                for name, *more in (
                    ["gpu_updates.py"],
                    ["bench_checkpoint.py", "--gpu"],
                )
            ],
            rehearsed,
        ),
        "bandwidth": Stage(
            5,
            [make("build/emul/gpu_kernels"), ["build/emul/gpu_kernels", "1000", "1"]],
        ),
        "steps": Stage(
            5,
            [python("gpu_steps.py", *"--small --rounds 1 --updates 2".split())],
            rehearsed,
        ),
        "tests": Stage(5, [[PY, "-m", "pytest", DEVICE[0], *few]]),
        "sanitizers": Stage(1, [], without="the emulation has its own: make cuda-emul"),
    }


def find_gpu() -> tuple[str, str, str]:
    """The GPU's name, its compute capability without the point, and nvcc."""
    try:
        import torch
    except ImportError:
        raise SystemExit(f"{PY} has no torch: give PYTHON=... that has it") from None
    if not torch.cuda.is_available():
        raise SystemExit(
            f"torch {torch.__version__} of {PY} sees no GPU; --emulated rehearses"
        )
    usual = "/usr/local/cuda/bin"
    nvcc = (
        os.environ.get("NVCC")
        or shutil.which("nvcc")
        or shutil.which("nvcc", path=usual)
    )
    if nvcc is None:
        raise SystemExit("nvcc of CUDA 13 is needed: in PATH, or NVCC=...")
    major, minor = torch.cuda.get_device_capability()
    return torch.cuda.get_device_name(), f"{major}{minor}", nvcc


def run(command: list[str], more: dict[str, str], until: float, log: Any) -> str:
    """What became of a command: "passed" if all went well."""
    log.write(f"$ {' '.join(command)}\n".encode())
    log.flush()
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    ours = {"PYTHONPATH": ":".join(paths), "PYTHONUNBUFFERED": "1"}
    try:
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log,
            stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, **ours, **more},
        )  # fmt: skip
    except OSError as error:
        return f"failed: {error}"
    try:
        code = process.wait(max(0.0, until - time.monotonic()))
        became = "passed" if code == 0 else f"failed with {code}"
    except subprocess.TimeoutExpired:
        became = "was stopped at its limit"
        os.killpg(process.pid, signal.SIGINT)  # pytest says what failed so far
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            pass
    finally:
        try:  # with all that it started
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
    return became


def results(printed: str) -> list[dict[str, Any]]:
    """The lines of benchmarks; others, such as a log's, are no JSON."""
    found = []
    for line in printed.splitlines():
        if re.match(r'\{".*\}$', line):
            with contextlib.suppress(json.JSONDecodeError):
                found.append(json.loads(line))
    return found


def run_stage(stage: Stage, log: Any) -> dict[str, Any]:
    start, begin = time.monotonic(), log.tell()
    until = start + 60 * stage.minutes
    each = [run(command, stage.environment, until, log) for command in stage.commands]
    seconds = round(time.monotonic() - start, 1)
    printed = Path(log.name).read_bytes()[begin:].decode(errors="replace")
    return {
        "became": next((it for it in each if it != "passed"), "passed"),
        "seconds": seconds, "rows": results(printed), "end": printed[-2000:],
    }  # fmt: skip


def table(found: dict[str, Any]) -> str:
    """The page's table of a run's comparisons, and the name of the device."""
    stages = found["stages"].values()
    rows = [row for stage in stages for row in stage["rows"] if "ratio" in row]
    kept = [name for name, s in found["stages"].items() if s["became"] != "passed"]
    head = f"Measured on one {found['device']}, {found['torch']}"
    head += f"; not complete: {', '.join(kept)}.\n\n" if kept else ".\n\n"
    return head + report.HEAD + "\n".join(map(report.cells, rows)) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "out/gpu")
    parser.add_argument("--only", nargs="+", default=[], help="stages")
    parser.add_argument("--again", nargs="+", default=[], help="stages that passed")
    parser.add_argument("--emulated", action="store_true")
    parser.add_argument(
        "--table", nargs=2, type=Path, metavar=("JSON", "PAGE"),
        help="write the results into a page, and run nothing",
    )  # fmt: skip
    options = parser.parse_args()
    if options.table:
        file, page = options.table
        report.rewrite(page, table(json.loads(file.read_text())), BEGIN, END)
        return 0
    if options.emulated:
        device, stages = "emulated GPU", emulated()
    else:
        device, capability, nvcc = find_gpu()
        stages = on_a_gpu(capability, nvcc)
    unknown = {*options.only, *options.again} - stages.keys()
    if unknown:
        parser.error(f"{', '.join(unknown)}: the stages are {', '.join(stages)}")
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "gpu.json"
    found = json.loads(file.read_text()) if file.exists() else {"stages": {}}
    import torch

    found |= {"device": device, "torch": f"torch {torch.__version__}"}
    minutes = sum(stage.minutes for stage in stages.values())
    print(f"{device}, {found['torch']}, Python {sys.version.split()[0]}")
    print(f"{len(stages)} stages, at most {minutes:g} minutes, into {options.out}")
    with open(options.out / "gpu.log", "ab") as log:
        for name, stage in stages.items():
            before = found["stages"].get(name, {}).get("became")
            if (options.only and name not in options.only) or (
                before == "passed" and name not in options.again
            ):
                continue
            print(f"==> {name}, at most {stage.minutes:g} min", flush=True)
            if stage.without:
                told = {"became": stage.without, "seconds": 0, "rows": [], "end": ""}
            else:
                told = run_stage(stage, log)
            found["stages"][name] = told
            file.write_text(json.dumps(found, indent=1) + "\n")
            print(f"    {told['seconds']} s: {told['became']}", flush=True)
    bad = [n for n, s in found["stages"].items() if s["became"] != "passed"]
    for name in bad:
        print(f"{name}: {found['stages'][name]['became']}")
        print(*found["stages"][name]["end"].splitlines()[-15:], sep="\n")
    return int(any(not stages[name].without for name in bad))


if __name__ == "__main__":
    sys.exit(main())
