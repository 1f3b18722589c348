"""What every test runs under: offline, on the CPU, quietly, in a folder of its own."""

import gc
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draws import EXHAUSTIVE
from hypothesis import HealthCheck, settings

os.environ.update(
    CTRAINER_FSDP_POISON="nan",  # so that no test gets by with released parameters
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
)
if "CTRAINER_TEST_GPU" not in os.environ:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

# A shell that starts a command in the background has it ignore Ctrl-C, and so all that
# the command starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says how loaded the machine is. Examples are the same in
# every run, so there is no folder of former failures, which two processes would share.
settings.register_profile(
    "ctrainer",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("ctrainer")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "exhaustive: has no small draw; deselected except in `make test-all`"
    )


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Leave exhaustive tests to `make test-all`; CTRAINER_ORDER, a number, is the seed
    of another order of the files and of the tests in each."""
    if "CTRAINER_ORDER" in os.environ:
        chance = random.Random(os.environ["CTRAINER_ORDER"])
        places = {item.path: chance.random() for item in items}
        items.sort(key=lambda item: (places[item.path], chance.random()))
    if EXHAUSTIVE:
        return
    left = [item for item in items if item.get_closest_marker("exhaustive")]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB; skips where this process may not mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting needs root")
    yield disk
    gc.collect()
    subprocess.run(["umount", str(disk)], check=True)


@pytest.fixture(autouse=True)
def _tests_do_not_reach_each_other() -> Iterator[None]:
    """The process's generators begin alike in every test, and what a test leaves in the
    environment, as the current folder or as torch's dtype goes with it."""
    environment, folder = dict(os.environ), os.getcwd()
    torch: Any = sys.modules.get("torch")
    random.seed(0)
    np.random.seed(0)
    if torch is not None:
        torch.manual_seed(0)
    yield
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_default_dtype(torch.float32)
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)
    os.chdir(folder)


@pytest.fixture(scope="session", autouse=True)
def _temporary_files_are_pytests(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[None]:
    """pytest removes its folders of older runs; nobody removes those of tempfile."""
    before = tempfile.tempdir
    tempfile.tempdir = str(tmp_path_factory.mktemp("tempfile"))
    yield
    tempfile.tempdir = before
