"""The command accelerate launch, its options and configuration files: ours does what
transformers' Trainer does, or says why not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from places import PYTHONPATH
from ranks import LIMIT_SECONDS, free_port

SCRIPT = Path(__file__).parents[1] / "programs" / "parity" / "launched.py"
MACHINE = "compute_environment: LOCAL_MACHINE\nnum_machines: 1\n"
FSDP = (
    MACHINE + "distributed_type: FSDP\nnum_processes: 2\nmixed_precision: 'no'\n"
    "fsdp_config:\n  fsdp_auto_wrap_policy: SIZE_BASED_WRAP\n"
    "  fsdp_min_num_params: 20\n  fsdp_offload_params: false\n"
)


def launch(
    folder: Path, engine: str, flags: list[str], config: str = "", args: Any = None
) -> tuple[int, str, list[Any]]:
    """The exit code, the output, and what each rank found."""
    folder.mkdir()
    if config:
        file = folder.parent / f"{engine}.yaml"
        file.write_text(config)
        flags = ["--config_file", str(file), *flags]
    options = {"folder": str(folder), "engine": engine, "args": args or {}}
    command = ["-m", "accelerate.commands.launch", "--main_process_port",
               str(free_port()), *flags]  # fmt: skip
    return start(folder, command, options)


def start(
    folder: Path, command: list[str], options: dict[str, Any]
) -> tuple[int, str, list[Any]]:
    done = subprocess.run(
        [sys.executable, *command, str(SCRIPT), json.dumps(options)],
        env={**os.environ, "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1",
             "HF_HOME": str(folder.parent)},
        text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=folder,
        timeout=LIMIT_SECONDS,
    )  # fmt: skip
    told = [json.loads(path.read_text()) for path in sorted(folder.glob("told*.json"))]
    return done.returncode, done.stdout, told


TWO = ["--multi_gpu", "--num_processes", "2"]
CASES = {
    "two ranks in bf16": (
        TWO, MACHINE + "distributed_type: MULTI_GPU\nmixed_precision: bf16\n", {}),
    "alone": (["--cpu", "--num_processes", "1"], "", {"use_cpu": False}),
    "config of one process": (
        [], MACHINE + "distributed_type: 'NO'\nuse_cpu: true\nnum_processes: 1\n", {}),
    "config of CPUs": (
        [], MACHINE + "distributed_type: MULTI_CPU\nuse_cpu: true\nnum_processes: 2\n"
        "mixed_precision: bf16\n", {"use_cpu": False}),
    "two ranks": (TWO, "", {}),
    "accumulation": (
        [*TWO, "--gradient_accumulation_steps", "4"], "",
        {"gradient_accumulation_steps": 2}),
    "compiled": (["--cpu", "--dynamo_backend", "eager", "--num_processes", "1"], "",
                 {}),
    "affinity": ([*TWO, "--debug", "--enable_cpu_affinity"], "", {}),
}  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
def test_a_launched_script_trains_as_with_transformers(
    name: str, tmp_path: Path
) -> None:
    flags, config, args = CASES[name]
    both = [
        launch(tmp_path / engine, engine, flags, config, args)
        for engine in ("ours", "theirs")
    ]
    for code, output, _ in both:
        assert code == 0, output
    compare(both[0][2], both[1][2])


@pytest.mark.exhaustive
@pytest.mark.parametrize("launcher", ["notebook_launcher", "debug_launcher"])
def test_a_script_starts_its_ranks_by_a_launcher_of_accelerate(
    launcher: str, tmp_path: Path
) -> None:
    found = []
    for engine in ("ours", "theirs"):
        folder = tmp_path / engine
        folder.mkdir()
        port = {"use_port": str(free_port())} if launcher == "notebook_launcher" else {}
        options = {
            "folder": str(folder), "engine": engine, "args": {}, "launcher": launcher,
            "launcher_options": port,
        }  # fmt: skip
        code, output, told = start(folder, [], options)
        assert code == 0, output
        found.append(told)
    assert len(found[0]) == 2
    compare(*found)


def compare(ours: list[Any], theirs: list[Any]) -> None:
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        for key in ("losses", "norms", "parameters"):
            # a few ulp of float32 an update: sums and means are taken in another order
            assert mine.pop(key) == pytest.approx(other.pop(key), rel=1e-5, abs=2e-6)
        missing = set(other.pop("files", ())) - set(mine.pop("files", ()))
        # of shards: docs/reference/fsdp.md
        assert {Path(name).name for name in missing} <= {"optimizer.pt"}
        assert mine == other


@pytest.mark.parametrize(
    "config",
    [
        pytest.param("  fsdp_version: 1\n  fsdp_sync_module_states: true\n", id="1"),
        pytest.param(
            "  fsdp_version: 2\n  fsdp_reshard_after_forward: false\n", id="2",
            marks=pytest.mark.exhaustive,
        ),
    ],
)  # fmt: skip
def test_a_configuration_of_fsdp_shards_on_cpus_too(
    config: str, tmp_path: Path
) -> None:
    """There transformers' Trainer has whole models, for which sync_module_states, the
    default, is an error."""
    code, output, ours = launch(tmp_path / "ours", "ours", [], FSDP + config)
    assert code == 0, output
    assert any("shard-00001-of-00002" in name for name in ours[0]["files"])
    code, output, theirs = launch(tmp_path / "theirs", "theirs", TWO)
    assert code == 0, output
    compare(ours, theirs)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("flags", "config", "text"),
    [
        ([], FSDP + "  fsdp_ignored_modules: head\n", "ignored_modules is not support"),
        ([], FSDP + "  fsdp_version: 2\n  fsdp_activation_checkpointing: true\n"
         "  fsdp_activation_checkpointing_offload: true\n", "checkpointing_offload is"),
        (["--cpu", "--num_processes", "1", "--dynamo_backend", "eager",
          "--dynamo_use_fullgraph"], "", "ACCELERATE_DYNAMO_USE_FULLGRAPH is set"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_an_error_that_names_it(
    flags: list[str], config: str, text: str, tmp_path: Path
) -> None:
    code, output, _ = launch(tmp_path / "ours", "ours", flags, config)
    assert code != 0
    assert text in output
