"""The lines and events of fairseq's progress bars.

Source of the formats: fairseq/logging/progress_bar.py.
"""

import json
import logging
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ctrainer.fairseq import as_config, progress_bar
from ctrainer.fairseq import progress_bar as bars
from ctrainer.fairseq.meters import AverageMeter, StopwatchMeter, SumMeter, TimeMeter

STATS = {"loss": 12.3456789, "ppl": "4.1 ", "num_updates": 3}


class Batches(list):
    """Batches that are taken up at the n-th."""

    n = 0


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger=bars.__name__)
    return caplog


def said(log: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(record.name, record.getMessage()) for record in log.records]


def run(bar: bars.BaseProgressBar, **log: object) -> None:
    for _ in bar:
        bar.log(STATS, **log)


class TestFormatStat:
    def test_numbers_have_six_digits(self) -> None:
        assert bars.format_stat(1234567.0) == "1.23457e+06"
        assert bars.format_stat(0.1 + 0.2) == "0.3"
        assert bars.format_stat(3) == "3"

    def test_meters(self) -> None:
        mean = AverageMeter()
        mean.update(2.0)
        rate, watch = TimeMeter(init=2.0, n=0), StopwatchMeter()
        rate.start = watch.sum = 0.0
        watch.sum = 3.6
        assert bars.format_stat(mean) == "2.000"
        assert bars.format_stat(rate) == "0"
        assert bars.format_stat(watch) == "4"

    def test_the_rest_is_left(self) -> None:
        assert bars.format_stat(torch.tensor([1.0, 2.0])) == [1.0, 2.0]
        assert bars.format_stat("text") == "text"
        assert bars.format_stat(None) is None


class TestSimple:
    def test_a_line_every_interval(self, lines: pytest.LogCaptureFixture) -> None:
        bar = bars.progress_bar(
            range(5), log_format="simple", log_interval=2, epoch=1, prefix="train"
        )
        run(bar, tag="train_inner")
        begin = "epoch 001 | train:  "
        end = " loss=12.3457, ppl=4.1, num_updates=3"
        assert said(lines) == [
            ("train_inner", f"{begin}    3 / 5{end}"),
            ("train_inner", f"{begin}    5 / 5{end}"),
        ]

    def test_the_step_decides_when_it_is_given(
        self, lines: pytest.LogCaptureFixture
    ) -> None:
        bar = bars.progress_bar(range(3), log_format="simple", log_interval=100)
        for step, _ in enumerate(bar, start=99):
            bar.log({}, step=step)
        assert said(lines) == [(bars.__name__, ":      2 / 3 ")]

    def test_it_counts_on_from_where_the_iterator_is(
        self, lines: pytest.LogCaptureFixture
    ) -> None:
        batches = Batches(range(2))
        batches.n = 8
        bar = bars.progress_bar(batches, log_format="simple", log_interval=1)
        run(bar)
        assert [message.split("/")[0].split()[-1] for _, message in said(lines)] == [
            "9",
            "10",
        ]

    def test_no_interval_means_no_lines(self, lines: pytest.LogCaptureFixture) -> None:
        run(bars.progress_bar(range(3), log_format="simple", log_interval=None))
        assert said(lines) == []

    def test_the_end_of_an_epoch(self, lines: pytest.LogCaptureFixture) -> None:
        bar = bars.progress_bar([], log_format="simple", epoch=12)
        bar.print(STATS, tag="train")
        assert said(lines) == [
            ("train", "epoch 012 | loss 12.3457 | ppl 4.1 | num_updates 3")
        ]

    def test_logging_before_the_first_batch(
        self, lines: pytest.LogCaptureFixture
    ) -> None:
        """fairseq raises TypeError."""
        bar = bars.progress_bar(range(4), log_format="simple", log_interval=1)
        bar.log({}, step=1)
        assert said(lines) == [(bars.__name__, ":      0 / 4 ")]


class TestJson:
    def test_on_the_way(self, lines: pytest.LogCaptureFixture) -> None:
        bar = bars.progress_bar(range(3), log_format="json", log_interval=2, epoch=2)
        run(bar, tag="train_inner")
        assert said(lines) == [
            (
                "train_inner",
                '{"epoch": 2, "update": 2.0, "loss": "12.3457", "ppl": "4.1 ", '
                '"num_updates": "3"}',
            )
        ]

    def test_the_update_is_the_epoch_with_its_fraction(
        self, lines: pytest.LogCaptureFixture
    ) -> None:
        bar = bars.progress_bar(range(3), log_format="json", log_interval=1, epoch=2)
        run(bar)
        found = [json.loads(message)["update"] for _, message in said(lines)]
        assert found == [1.667, 2.0]

    def test_the_end_carries_the_tag_in_its_names(
        self, lines: pytest.LogCaptureFixture
    ) -> None:
        bar = bars.progress_bar(range(3), log_format="json")
        bar.print({"loss": 2, "none": None}, tag="valid")
        bar.print({"loss": 2})
        assert said(lines) == [
            ("valid", '{"valid_loss": "2", "valid_none": null}'),
            (bars.__name__, '{"loss": "2"}'),
        ]


class TestTqdm:
    def test_a_pipe_gets_lines_instead(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
        assert isinstance(bars.progress_bar([1]), bars.SimpleProgressBar)

    def test_a_terminal_gets_the_bar(
        self, monkeypatch: pytest.MonkeyPatch, lines: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
        bar = bars.progress_bar(range(2), epoch=3)
        assert isinstance(bar, bars.TqdmProgressBar)
        run(bar)
        assert bar.tqdm.desc == "epoch 003"
        assert bar.tqdm.postfix == "loss=12.3457, ppl=4.1, num_updates=3"
        bar.print({"loss": 2}, tag="train")
        assert said(lines) == [("train", "epoch 003 | loss 2")]

    def test_it_is_quiet_where_info_is_not_logged(self) -> None:
        bars.logger.setLevel(logging.WARNING)
        try:
            assert bars.TqdmProgressBar([1]).tqdm.disable is True
        finally:
            bars.logger.setLevel(logging.NOTSET)

    def test_without_tqdm_it_says_what_to_install(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "tqdm", None)
        with pytest.raises(ImportError, match="pip install tqdm"):
            bars.TqdmProgressBar([1])


class TestChoice:
    def test_none_is_silent(self, lines: pytest.LogCaptureFixture) -> None:
        bar = bars.progress_bar(range(3), log_format="none", log_interval=1)
        run(bar)
        bar.print(STATS)
        assert said(lines) == []
        assert len(bar) == 3

    def test_an_unknown_format_is_rejected(self) -> None:
        with pytest.raises(ValueError, match="Unknown log format: xml; choose json"):
            bars.progress_bar([], log_format="xml")

    @pytest.mark.parametrize("option", [{"aim_repo": "x"}, {"azureml_logging": True}])
    def test_other_trackers_are_rejected(self, option: dict) -> None:
        with pytest.raises(ValueError, match="aim_repo and azureml_logging"):
            bars.progress_bar([], log_format="none", **option)

    def test_it_is_a_context(self) -> None:
        with bars.progress_bar([1], log_format="none") as bar:
            assert list(bar) == [1]

    def test_lines_are_copied_to_a_file_once(
        self, tmp_path: Path, lines: pytest.LogCaptureFixture
    ) -> None:
        """fairseq adds a handler a bar: the n-th epoch's lines come n times."""
        path = tmp_path / "log.txt"
        for epoch in (1, 2):
            bars.progress_bar(
                [], log_format="simple", log_file=str(path), epoch=epoch
            ).print({"loss": 1}, tag="train")
        for handler in list(bars.logger.handlers):
            bars.logger.removeHandler(handler)
            handler.close()
        assert path.read_text() == "epoch 001 | loss 1\nepoch 002 | loss 1\n"
        assert len(said(lines)) == 2

    def test_the_loggers_name_comes_back_after_an_error(self) -> None:
        with pytest.raises(KeyError):
            with bars.rename_logger(bars.logger, "train"):
                raise KeyError
        assert bars.logger.name == bars.__name__


class TestForAConfig:
    def test_the_common_options_decide(self, lines: pytest.LogCaptureFixture) -> None:
        config = as_config({"common": {"log_format": "json", "log_interval": 2}})
        bar = bars.training_progress_bar(config, range(4), epoch=3)
        assert isinstance(bar, bars.JsonProgressBar)
        assert (bar.log_interval, bar.epoch) == (2, 3)

    def test_no_progress_bar_means_plain_lines(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
        config = as_config({"common": {"no_progress_bar": True}})
        bar = bars.training_progress_bar(config, [], epoch=1)
        assert isinstance(bar, bars.SimpleProgressBar)

    def test_only_the_master_tracks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        wandb = FakeWandb()
        monkeypatch.setitem(sys.modules, "wandb", wandb)
        monkeypatch.delenv("WANDB_NAME", raising=False)
        config = as_config(
            {
                "common": {"log_format": "none", "wandb_project": "lm"},
                "checkpoint": {"save_dir": "runs/first"},
            }
        )
        worker = bars.training_progress_bar(config, [], epoch=1, is_master=False)
        assert isinstance(worker, bars.NoopProgressBar)
        bars.training_progress_bar(config, [], epoch=1)
        assert wandb.calls == [
            ("init", {"project": "lm", "reinit": False, "name": "first"})
        ]

    def test_what_has_no_tracker_is_rejected(self) -> None:
        config = as_config({"common": {"azureml_logging": True}})
        with pytest.raises(ValueError, match="azureml_logging"):
            bars.training_progress_bar(config, [], epoch=1)


def events(folder: Path) -> list[tuple[str, float, int]]:
    """(name, value, step) of the scalars in a folder's event files: records of a
    length, its checksum, the event, its checksum."""
    from tensorboardX.proto.event_pb2 import Event

    progress_bar._close_writers()
    found = []
    for path in sorted(folder.glob("events.*")):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            found += [
                (value.tag, round(value.simple_value, 4), event.step)
                for value in event.summary.value
                if value.HasField("simple_value")
            ]
    return found


class TestTensorBoard:
    @pytest.fixture(autouse=True)
    def _close(self) -> Iterator[None]:
        pytest.importorskip("tensorboardX")
        yield
        progress_bar._close_writers()

    def test_numbers_go_into_a_folder_of_their_tag(self, tmp_path: Path) -> None:
        mean = AverageMeter()
        mean.update(1.0)
        mean.update(4.0)
        stats = {"loss": 2.5, "mean": mean, "t": torch.tensor([7.0]), "text": "no"}
        bar = bars.progress_bar(
            range(2), log_format="none", tensorboard_logdir=str(tmp_path)
        )
        bar.log(stats, tag="train_inner", step=10)
        bar.print({"loss": 1.5, "num_updates": 20}, tag="train")
        assert events(tmp_path / "train_inner") == [
            ("loss", 2.5, 10),
            ("mean", 4.0, 10),
            ("t", 7.0, 10),
        ]
        assert events(tmp_path / "train") == [("loss", 1.5, 20)]

    def test_the_bar_inside_reports_too(
        self, tmp_path: Path, lines: pytest.LogCaptureFixture
    ) -> None:
        bar = bars.progress_bar(
            range(1), log_format="simple", epoch=1, tensorboard_logdir=str(tmp_path)
        )
        assert list(bar) == [0]
        bar.print({"loss": 1, "num_updates": 2}, tag="train")
        bar.update_config({"lr": 1})
        assert said(lines) == [("train", "epoch 001 | loss 1 | num_updates 2")]

    def test_two_folders_in_one_process(self, tmp_path: Path) -> None:
        """fairseq writes both runs into the first one's folder."""
        for run_name in ("a", "b"):
            bar = bars.progress_bar(
                [], log_format="none", tensorboard_logdir=str(tmp_path / run_name)
            )
            bar.log({"loss": 1.0}, tag="train", step=1)
        assert events(tmp_path / "b" / "train") == [("loss", 1.0, 1)]

    def test_a_step_is_needed(self, tmp_path: Path) -> None:
        bar = bars.progress_bar([], log_format="none", tensorboard_logdir=str(tmp_path))
        with pytest.raises(ValueError, match=r"pass step=, or stats\['num_updates'\]"):
            bar.log({"loss": 1.0})

    def test_without_the_package_it_says_what_to_install(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """fairseq warns and trains on without."""
        for name in ("tensorboard", "torch.utils.tensorboard", "tensorboardX"):
            monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(ImportError, match="pip install tensorboard"):
            bars.progress_bar([], "none", tensorboard_logdir=str(tmp_path))


class FakeWandb:
    """As much of wandb's module as is called, recording the calls."""

    def __init__(self) -> None:
        self.calls: list = []
        self.config = self

    def init(self, **kwargs: object) -> None:
        self.calls.append(("init", kwargs))

    def update(self, config: dict) -> None:
        self.calls.append(("config", config))

    def log(self, numbers: dict, step: int) -> None:
        self.calls.append(("log", numbers, step))


class TestWandB:
    def test_numbers_carry_their_tag(self, monkeypatch: pytest.MonkeyPatch) -> None:
        wandb = FakeWandb()
        monkeypatch.setitem(sys.modules, "wandb", wandb)
        bar = bars.progress_bar([], "none", wandb_project="lm", wandb_run_name="first")
        bar.update_config({"lr": 1})
        bar.log({"loss": 2.0, "words": SumMeter()}, tag="train", step=5)
        bar.print({"loss": 3.0, "num_updates": 6})
        bar.log({"text": "alone"}, step=7)
        assert wandb.calls == [
            ("init", {"project": "lm", "reinit": False, "name": "first"}),
            ("config", {"lr": 1}),
            ("log", {"train/loss": 2.0}, 5),
            ("log", {"loss": 3.0}, 6),
        ]

    def test_without_the_package_it_says_what_to_install(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "wandb", None)
        with pytest.raises(ImportError, match="pip install wandb"):
            bars.progress_bar([], "none", wandb_project="lm")
