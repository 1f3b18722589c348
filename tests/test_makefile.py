"""What the Makefile would run, asked of make itself."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def commands(*given: str) -> str:
    """The commands of a new environment; none is run."""
    command = ["make", "-n", "VENV=none/there", *given]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


def test_torch_is_asked_for_with_the_options_of_pip_that_TORCH_has() -> None:
    asked = commands("install", "TORCH=torch>=2.13 --index-url https://example.org/cpu")
    assert "'torch>=2.13' '--index-url' 'https://example.org/cpu'" in asked


def test_the_demo_compiles_once_without_cuda_or_the_packages_of_the_tests() -> None:
    stages = [x for x in commands("demo").splitlines() if x.startswith('echo "==>')]
    assert sum("build_ext" in stage for stage in stages) == 1
    assert any("CTRAINER_CUDA=${CTRAINER_CUDA:-0}" in stage for stage in stages)
    assert any("'.[demo]'" in stage for stage in stages)
    assert not any("test]" in stage for stage in stages)


def test_the_tests_packages_are_added_after_the_extension_is_built() -> None:
    lines = commands("test-python").splitlines()
    built = max(i for i, line in enumerate(lines) if "build_ext" in line)
    added = next(i for i, line in enumerate(lines) if "test]'" in line)
    begun = next(i for i, line in enumerate(lines) if "-m pytest" in line)
    assert built < added < begun
