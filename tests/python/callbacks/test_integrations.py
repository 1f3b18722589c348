"""Trackers, driven by transformers' callbacks."""

import os

import pytest

from ctrainer import integrations
from ctrainer.training_args import TrainingArguments


def test_no_tracker_needs_no_transformers(monkeypatch) -> None:
    monkeypatch.setattr(integrations, "find_spec", lambda name: None)
    assert integrations.reporting_callbacks([]) == []
    assert integrations.installed_reporters() == []
    with pytest.raises(ImportError, match="report_to needs transformers"):
        integrations.reporting_callbacks(["tensorboard"])


def test_callbacks_are_transformers_and_know_the_logging_dir(monkeypatch) -> None:
    hf = pytest.importorskip("transformers.integrations")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", "mine")
    assert integrations.reporting_callbacks(["tensorboard"], "logs") == [
        hf.TensorBoardCallback
    ]
    assert os.environ["TENSORBOARD_LOGGING_DIR"] == "mine"
    monkeypatch.delenv("TENSORBOARD_LOGGING_DIR")
    integrations.reporting_callbacks(["tensorboard"], "logs")
    assert os.environ["TENSORBOARD_LOGGING_DIR"] == "logs"


def test_unknown_tracker_is_an_error() -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ValueError, match="no_such"):
        integrations.reporting_callbacks(["no_such"])


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (None, []),
        ("none", []),
        (["none"], []),
        ("wandb", ["wandb"]),
        (["wandb", "mlflow"], ["wandb", "mlflow"]),
    ],
)
def test_names_become_a_list(given, names, tmp_path) -> None:
    assert TrainingArguments(tmp_path, report_to=given).report_to == names


def test_all_means_those_that_are_installed(tmp_path) -> None:
    hf = pytest.importorskip("transformers.integrations")
    args = TrainingArguments(tmp_path, report_to="all")
    assert args.report_to == hf.get_available_reporting_integrations()
