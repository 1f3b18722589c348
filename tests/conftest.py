"""What every test runs under: offline, on the CPU, quietly, in a folder of its own."""

import os
import tempfile
from collections.abc import Iterator

import pytest

os.environ.update(
    CUDA_VISIBLE_DEVICES="",
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
)


@pytest.fixture(scope="session", autouse=True)
def _temporary_files_are_pytests(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[None]:
    """pytest removes its folders of older runs; nobody removes those of tempfile."""
    before = tempfile.tempdir
    tempfile.tempdir = str(tmp_path_factory.mktemp("tempfile"))
    yield
    tempfile.tempdir = before
