"""The display: its text in gold, then on a terminal, in a pipe and in a notebook."""

import io
import json
import os
import pickle
import pty
import random
import re
import struct
import subprocess
import sys
import termios
import time
from fcntl import ioctl
from pathlib import Path
from types import SimpleNamespace

import pytest
from places import ROOT
from screen import screen

from ctrainer.display import html, progress, text
from ctrainer.display.progress import ProgressCallback, choose_mode
from ctrainer.display.text import Progress, render
from ctrainer.trainer_state import TrainerControl, TrainerState

HERE = Path(__file__).resolve().parent
RUN = HERE / "display_run.py"


def a_run(**changed: object) -> Progress:
    values = {
        "step": 140,
        "total": 200,
        "epoch": 1.4,
        "epochs": 2,
        "losses": [(i, 4.0 - i / 50) for i in range(1, 141)],
        "learning_rate": 6e-5,
        "grad_norm": 0.83,
        "samples_per_second": 87.04,
        "tokens_per_second": 12400,
        "memory_bytes": int(1.9 * 2**30),
        "eta_seconds": 22,
        "elapsed_seconds": 52,
    }
    return Progress(**{**values, **changed})


HISTORY = [
    {"loss": 2.5, "step": 10, "epoch": 0.5, "grad_norm": 1.0},
    {"eval_loss": 2.25, "eval_f1": 0.5, "eval_runtime": 1.0, "step": 10, "epoch": 0.5},
    {"loss": 1.5, "step": 20, "epoch": 1.0, "nonfinite_steps": 3},
    {"eval_loss": 1.75, "eval_f1": 0.625, "eval_runtime": 1.0, "step": 20, "epoch": 1},
    {
        "train_runtime": 75.2,
        "train_samples_per_second": 1234.5,
        "train_steps_per_second": 0.266,
        "train_loss": 2.0,
        "step": 20,
        "epoch": 1.0,
    },
]


class TestLiveLine:
    @pytest.mark.parametrize(
        ("width", "line"),
        [
            (
                200,
                "ctrainer 140/200  70% ━━━━━━━━━━━━━━━━╸─────── ep 1.40/2 "
                "loss 1.200 █▇▆▅▄▃▂▁ lr 6.0e-05 gn 0.830 87.0 samples/s 12.4k tok/s "
                "1.9G eta 00:22",
            ),
            (
                100,
                "140/200  70% ━━━╸─ loss 1.200 █▇▆▅▄▃▂▁ lr 6.0e-05 gn 0.830 "
                "87.0 samples/s 12.4k tok/s 1.9G eta 00:22",
            ),
            (
                79,
                "140/200  70% ━━━╸─ loss 1.200 lr 6.0e-05 gn 0.830 87.0 samples/s "
                "1.9G eta 00:22",
            ),
            (40, "140/200  70% ━━━━── loss 1.200 eta 00:22"),
            (12, "140/200  70%"),
            (5, "140/2"),
            (0, ""),
        ],
    )
    def test_what_matters_least_goes_first(self, width: int, line: str) -> None:
        assert render(a_run(), width) == line

    @pytest.mark.parametrize("width", range(0, 160))
    def test_never_wider_than_the_terminal(self, width: int) -> None:
        assert len(render(a_run(), width)) <= width
        assert len(render(a_run(evaluating=(3, 8)), width)) <= width

    def test_mfu(self) -> None:
        assert " 12.4k tok/s mfu 41.2% 1.9G " in render(a_run(mfu=0.4123), 200)

    def test_what_is_not_known_is_not_shown(self) -> None:
        assert render(Progress(step=3), 80) == "ctrainer 3"
        assert render(Progress(step=0, total=8), 24) == "ctrainer 0/8   0% ──────"

    def test_a_bar_has_four_columns_or_is_left_out(self) -> None:
        assert render(Progress(step=0, total=8), 22) == "ctrainer 0/8   0% ────"
        assert render(Progress(step=0, total=8), 21) == "ctrainer 0/8   0%"

    def test_evaluation_takes_the_place_of_the_numbers(self) -> None:
        line = "ctrainer 140/200 eval 12/40 ━━━╸────────"
        assert render(a_run(evaluating=(12, 40)), 40) == line
        line = "ctrainer 140/200 eval 12"
        assert render(a_run(evaluating=(12, None)), 40) == line
        assert render(Progress(evaluating=(1, 4)), 26) == "ctrainer eval 1/4 ━━──────"

    def test_ascii_and_color(self) -> None:
        line = render(a_run(), 110, ascii_only=True)
        assert line.isascii()
        assert "140/200  70% ===>- ep" in line
        colored = render(a_run(), 110, color=True)
        assert re.sub(r"\x1b\[\d+m", "", colored) == render(a_run(), 110)
        assert colored != render(a_run(), 110)

    @pytest.mark.parametrize(
        ("values", "sparks"),
        [
            ([], ""),
            ([1.0], ""),
            ([2.0, 1.0], "█▁"),
            ([1.0, 1.0, 1.0], "▁▁▁"),
            ([float("nan"), 1.0, 2.0, float("inf")], "▁█"),
            (list(range(80)), "▁▂▃▄▅▆▇█"),
        ],
    )
    def test_sparkline(self, values: list[float], sparks: str) -> None:
        assert text.sparkline(values) == sparks

    @pytest.mark.parametrize(
        ("share", "drawn"),
        [(0, "────"), (0.125, "╸───"), (0.5, "━━──"), (1, "━━━━"), (7, "━━━━")],
    )
    def test_bar(self, share: float, drawn: str) -> None:
        assert text.bar(share, 4) == drawn

    def test_numbers(self) -> None:
        assert [text.number(v) for v in (0, 1.4123, -12.5, 1e-5, 123456)] == [
            "0.000",
            "1.412",
            "-12.500",
            "1e-05",
            "1.23e+05",
        ]
        assert [text.rate(v, "rows") for v in (8.12, 312.4, 12400, 3e6, 0.25, 0)] == [
            "8.12 rows/s",
            "312 rows/s",
            "12.4k rows/s",
            "3.0M rows/s",
            "4.00 s/row",
            "0.00 rows/s",
        ]
        assert [text.clock(s) for s in (0, 61.4, 3600, -5)] == [
            "00:00",
            "01:01",
            "1:00:00",
            "00:00",
        ]
        assert text.memory(312 << 20) == "312M"


class TestLines:
    def test_evaluation(self) -> None:
        metrics = {
            "eval_loss": 1.683,
            "eval_accuracy": 0.661,
            "eval_runtime": 3.14,
            "eval_samples_per_second": 9.0,
            "epoch": 1.0,
        }
        line = "eval 120  loss 1.683  accuracy 0.661  (3.1 s)"
        assert text.evaluation_line(120, metrics) == line

    def test_evaluation_without_a_common_prefix(self) -> None:
        line = "eval 7  a_loss 1.000  b_loss 2.000"
        assert text.evaluation_line(7, {"a_loss": 1, "b_loss": 2.0}) == line

    def test_log(self) -> None:
        logs = {"loss": 1.23456789, "name": "a b", "n": 3, "step": 9}
        line = '2026-01-02T03:04:05Z step=7 loss=1.23457 name="a b" n=3'
        assert text.log_line(logs, 7, "2026-01-02T03:04:05Z") == line

    def test_json_has_the_logs_and_fairseqs_names(self) -> None:
        line = text.log_json({"loss": 1.5, "learning_rate": 0.1}, 7, "t", 2.0)
        assert json.loads(line) == {
            "time": "t",
            "step": 7,
            "num_updates": 7,
            "loss": 1.5,
            "learning_rate": 0.1,
            "lr": 0.1,
            "wall": 2.0,
        }

    def test_summary(self) -> None:
        assert text.summary(HISTORY, 20) == [
            "ctrainer: 20 updates in 01:15, 1.2k samples/s, 3.76 s/update, "
            "train loss 2.000, 3 of them with gradients NaN or Inf",
            "step  epoch  train loss  eval loss     f1",
            "  10   0.50       2.500      2.250  0.500",
            "  20   1.00       1.500      1.750  0.625",
        ]

    def test_columns_of_a_resumed_run_are_in_the_same_order(self) -> None:
        """Of names that trainer_state.json has sorted."""
        read = [dict(sorted(entry.items())) for entry in HISTORY]
        assert text.summary(read, 20) == text.summary(HISTORY, 20)

    def test_summary_of_a_resumed_run_is_of_its_own_updates(self) -> None:
        line = text.summary([{"train_runtime": 2.0, "train_loss": 1.0}], 20, 15)[0]
        assert (
            line == "ctrainer: 5 updates in 00:02 from step 15 to 20, train loss 1.000"
        )

    def test_summary_of_a_run_without_logs(self) -> None:
        assert text.summary([], 0) == ["ctrainer: 0 updates"]


class TestPicture:
    def test_page_is_svg_and_table_without_script(self) -> None:
        page = html.page(a_run(), HISTORY, ["<careful> & so on"])
        assert "<script" not in page
        assert page.count("<svg") == 1
        assert page.count("<polyline") == 2
        assert page.count("<circle") == 2
        assert "<td style='text-align:right;padding:1px 8px'>0.625</td>" in page
        assert "⚠ &lt;careful&gt; &amp; so on" in page
        assert " 140/200 · epoch 1.40/2 · 00:52&lt;00:22 · loss 1.200</div>" in page
        assert ">lr 6.0e-05 · gn 0.830 · 87.0 samples/s · 12.4k tok/s · 1.9G<" in page

    def test_columns_have_the_names_of_transformers_table(self) -> None:
        notebook = pytest.importorskip("transformers.utils.notebook")
        pytest.importorskip("IPython")
        metrics = {"eval_loss": 0.5, "eval_accuracy": 0.75, "eval_exact_match": 0.25}
        history = [{"loss": 1.0, "step": 4}, {**metrics, "step": 4, "epoch": 1.0}]
        written: list[str] = []

        class Tracker:
            def write_line(self, values: dict[str, object]) -> None:
                written.extend(values)

            def remove_child(self) -> None: ...

        callback = notebook.NotebookProgressCallback()
        callback.training_tracker, callback.prediction_bar = Tracker(), None
        callback.first_column = "Step"
        state = TrainerState(global_step=4, epoch=1.0, log_history=history)
        args = SimpleNamespace(eval_strategy="steps")
        control = TrainerControl()
        callback.on_evaluate(args, state, control, metrics=dict(metrics))
        names = re.findall(r"<th [^>]*>([^<]*)</th>", html.page(a_run(), history))
        assert {"Validation Loss", "Training Loss", "Exact Match"} <= set(written)
        assert names[0] == "Step"
        assert set(names) == {*written, "Step", "Epoch"}

    def test_no_row_is_wider_than_900_pixels(self) -> None:
        far = a_run(
            step=1234567, total=2345678, epoch=123.45, epochs=234, eta_seconds=1e6,
            elapsed_seconds=1e6, evaluating=(12345, 23456), resumed="resumed",
        )  # fmt: skip
        page = html.page(far, [])
        rows = re.findall("<div style='font:12px monospace'>(.*?)</div>", page)
        assert len(rows) == 3
        bar, pixels = 200, 7.3  # of a character of that font
        for row in rows:
            shown = re.sub("<.*?>", "", row).replace("&lt;", "<")
            assert bar * ("<progress" in row) + pixels * len(shown) < 900

    @pytest.mark.parametrize(
        ("low", "high", "whole", "found"),
        [
            (0.0, 1.0, False, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
            (1.234, 1.236, False, [1.234, 1.2345, 1.235, 1.2355, 1.236]),
            (1, 40, True, [5, 10, 15, 20, 25, 30, 35, 40]),
            (10, 12, True, [10, 11, 12]),
            (3.0, 3.0, False, [3.0]),
            (-1e-9, 2e-9, False, [-1e-9, -5e-10, 0, 5e-10, 1e-9, 1.5e-9, 2e-9]),
        ],
    )
    def test_ticks(
        self, low: float, high: float, whole: bool, found: list[float]
    ) -> None:
        assert html.ticks(low, high, whole=whole) == pytest.approx(found)

    def test_axes_have_three_numbers_or_more(self) -> None:
        chance = random.Random(7)
        for _ in range(200):
            low = chance.uniform(-5, 5) * 10 ** chance.randrange(-6, 7)
            high = low + chance.uniform(0.01, 9) * 10 ** chance.randrange(-4, 5)
            found = html.ticks(low, high)
            assert 3 <= len(found) <= 9
            assert low - 1e-9 * (high - low) <= found[0]
            assert found[-1] <= high + 1e-8 * (high - low)

    def test_numbers_of_steps_are_whole_and_apart_from_their_name(self) -> None:
        first, last = 1_000_000.0, 1_400_000.0
        page = html.svg({"train": [(first, 1.0), (last, 2.0)]})
        middles = re.findall(r"x='([\d.]+)' \S+ text-anchor='middle' .*?>(\S+?)<", page)
        half = 3.2 * 7  # pixels of seven characters of that font
        assert float(middles[0][0]) - half > 24  # which `step` ends before
        assert float(middles[-1][0]) + half < html.WIDTH

    def test_page_before_the_first_log(self) -> None:
        page = html.page(Progress(total=5), [])
        assert "<svg" not in page
        assert "max='5'" in page

    def test_points_that_are_not_finite_are_left_out(self) -> None:
        history = [{"loss": float("nan"), "step": 1}, {"loss": 1.0, "step": 2}]
        assert html.curves(history) == {"train": [(2.0, 1.0)]}
        assert "nan" not in html.page(a_run(), history)

    def test_a_frame_of_a_long_run_stays_small_and_keeps_spikes(self) -> None:
        points = [(float(i), 1.0) for i in range(100_000)]
        points[54_321] = (54_321.0, 9.0)
        kept = html.thin(points)
        assert len(kept) <= 400
        assert points[54_321] in kept
        history = [{"loss": y, "step": x} for x, y in points]
        assert len(html.page(a_run(losses=points), history)) < 8192


class TestModes:
    class Stream:
        def __init__(self, terminal: bool) -> None:
            self.terminal = terminal

        def isatty(self) -> bool:
            return self.terminal

    @pytest.mark.parametrize(
        ("terminal", "environment", "mode"),
        [
            (True, {}, "live"),
            (False, {}, "plain"),
            (True, {"TERM": "dumb"}, "plain"),
            (True, {"CTRAINER_LOG": "json"}, "json"),
            (False, {"CTRAINER_LOG": "live"}, "live"),
        ],
    )
    def test_choice(self, terminal, environment, mode, monkeypatch) -> None:
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.delenv("CTRAINER_LOG", raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        assert choose_mode(self.Stream(terminal)) == mode

    def test_unknown_word_is_rejected(self, monkeypatch) -> None:
        monkeypatch.setenv("CTRAINER_LOG", "loud")
        with pytest.raises(ValueError, match="set it to one of live, plain, json"):
            choose_mode(self.Stream(True))

    def test_callback_pickles(self) -> None:
        again = pickle.loads(pickle.dumps(ProgressCallback(max_str_len=7)))
        assert again.max_str_len == 7


def environment(**changed: str) -> dict[str, str]:
    kept = {
        k: v for k, v in os.environ.items() if k not in ("CTRAINER_LOG", "NO_COLOR")
    }
    return {
        **kept,
        "PYTHONPATH": str(ROOT),
        "PYTHONUTF8": "1",
        "TERM": "xterm",
        **changed,
    }


def on_terminal(columns: int, *args: str, **changed: str) -> str:
    """What the run writes when its output is a terminal of that many columns."""
    master, slave = pty.openpty()
    ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with subprocess.Popen(
        [sys.executable, RUN, *args],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=environment(**changed),
    ) as process:
        os.close(slave)
        chunks = []
        while True:
            try:
                chunk = os.read(master, 65536)
            except OSError:  # the other end is closed
                break
            if not chunk:
                break
            chunks.append(chunk)
    os.close(master)
    text = b"".join(chunks).decode()
    assert process.returncode == 0, text
    return text


class TestTerminal:
    def test_one_live_line_and_finished_ones_above_it(self) -> None:
        text = on_terminal(80, "0.01", "0.03")
        shown = screen(text)
        assert shown[0] == "warning: step 10: gradients NaN or Inf, updates affected: 2"
        assert shown[1] == "log 10  reward 0.750"
        assert shown[2].startswith("eval 15  loss ")
        assert shown[3].startswith("eval 30  loss ")
        assert shown[4].startswith("ctrainer 30/30 100%")
        assert shown[5].startswith("ctrainer: 30 updates in 01:15, train loss 1.500")
        assert shown[6].split() == "step epoch train loss eval loss accuracy".split()
        assert [line.split()[0] for line in shown[7:9]] == ["15", "30"]
        assert shown[9:] == [""]
        frames = [line for line in re.split(r"[\r\n]+", text) if "/30" in line]
        widths = [len(re.sub(r"\x1b\[\d*[mK]", "", frame)) for frame in frames]
        assert max(widths) <= 77  # two for the ^C that a terminal shows at the end
        assert any(re.search(r"eval \d/6", frame) for frame in frames)

    def test_redrawn_at_most_ten_times_a_second(self) -> None:
        started = time.monotonic()
        text = on_terminal(80, "0.02", "0")
        seconds = time.monotonic() - started
        # Beside the ticks: the begin, the end and the 2 evaluations are drawn when they
        # come, and finished lines (2 evaluations, 2 logs, 1 at the end) clear theirs.
        assert text.count("\x1b[K") <= 10 * seconds + 9

    def test_no_color(self) -> None:
        assert "\x1b[36m" in on_terminal(120, "0", "0")
        assert "\x1b[36m" not in on_terminal(120, "0", "0", NO_COLOR="1")

    def test_dumb_terminal_gets_whole_lines(self) -> None:
        text = on_terminal(80, "0", "0", TERM="dumb")
        assert "\x1b" not in text
        assert "\r" not in text.replace("\r\n", "\n")


def in_a_pipe(**changed: str) -> tuple[str, str]:
    done = subprocess.run(
        [sys.executable, RUN, "0", "0"],
        capture_output=True,
        text=True,
        check=True,
        env=environment(**changed),
    )
    return done.stdout, done.stderr


class TestPace:
    """Frames by the clock, whatever the number of logs."""

    @staticmethod
    def display(monkeypatch) -> tuple[ProgressCallback, io.StringIO]:
        monkeypatch.setenv("CTRAINER_LOG", "live")
        callback, stream = ProgressCallback(), io.StringIO()
        callback.line.stream = stream
        return callback, stream

    def test_many_logs_are_few_frames(self, monkeypatch) -> None:
        callback, stream = self.display(monkeypatch)
        args = SimpleNamespace(train_batch_size=1, gradient_accumulation_steps=1)
        state = TrainerState(max_steps=10**6)
        started = time.monotonic()
        callback.on_train_begin(args, state, None)
        for step in range(3000):
            state.global_step = step
            callback.on_log(args, state, None, logs={"loss": 1.0})
        seconds = time.monotonic() - started
        assert stream.getvalue().count("\r") <= 2 + 10 * seconds
        losses = callback.meter.progress.losses
        assert len(losses) <= 1024
        assert losses[-1] == (2999, 1.0)

    def test_speeds_are_of_the_seconds_that_the_updates_took(self, monkeypatch) -> None:
        clock = SimpleNamespace(monotonic=lambda: 100.0)
        monkeypatch.setattr(progress, "time", clock)
        meter = progress.Meter()
        args = SimpleNamespace(world_size=2)
        state = TrainerState(max_steps=20)
        meter.start(args, state)
        clock.monotonic = lambda: 104.0
        state.global_step, state.num_input_tokens_seen = 8, 4000
        state.samples_done, meter.seen = 64, 104.0  # of this rank
        meter.move(args, state)
        found = meter.progress
        assert found.elapsed_seconds == 4.0
        assert found.samples_per_second == 8 * 16 / 4
        assert found.tokens_per_second == 4000 / 4
        assert found.eta_seconds == (20 - 8) * 4 / 8

    def test_speeds_are_those_of_the_last_fifteen_seconds(self, monkeypatch) -> None:
        chance, clock = random.Random(5), SimpleNamespace(monotonic=lambda: 0.0)
        monkeypatch.setattr(progress, "time", clock)
        args = SimpleNamespace()
        state = TrainerState(global_step=0, max_steps=10_000)
        meter = progress.Meter()
        meter.start(args, state)
        marks = [(0.0, 0, 0, 0)]
        for _ in range(60):
            now = marks[-1][0] + chance.choice([0.25, 2.0, 5.0, 15.0, 16.0, 40.0])
            clock.monotonic = lambda now=now: now
            meter.seen = now
            state.global_step += chance.randrange(1, 5)
            state.samples_done += chance.randrange(1, 40)
            state.num_input_tokens_seen += chance.randrange(1, 1000)
            meter.move(args, state)
            counts = (
                state.global_step,
                state.samples_done,
                state.num_input_tokens_seen,
            )
            marks.append((now, *counts))
            # At least two, however long ago the first of them was.
            late = [mark for mark in marks if now - mark[0] <= 15.0]
            then, step, rows, tokens = (late if len(late) > 1 else marks[-2:])[0]
            found, steps = meter.progress, state.global_step - step
            assert found.samples_per_second == (state.samples_done - rows) / (
                now - then
            )
            tokens = state.num_input_tokens_seen - tokens
            assert found.tokens_per_second == tokens / (now - then)
            left = 10_000 - state.global_step
            assert found.eta_seconds == left * (1 / (steps / (now - then)))

    def test_an_evaluation_counts_for_the_time_that_remains_alone(
        self, monkeypatch
    ) -> None:
        callback, _ = self.display(monkeypatch)
        clock = SimpleNamespace(monotonic=lambda: 100.0)
        monkeypatch.setattr(progress, "time", clock)
        args, state = SimpleNamespace(), TrainerState(max_steps=20)
        callback.on_train_begin(args, state, None)
        for now in (102.0, 104.0):  # two updates of 2 s
            clock.monotonic = lambda now=now: now
            state.global_step += 1
            state.samples_done += 16
            callback.on_step_end(args, state, None)
        clock.monotonic = lambda: 124.0  # 20 s of evaluation
        callback.on_evaluate(args, state, None, metrics={"eval_loss": 1.0})
        clock.monotonic = lambda: 126.0
        state.global_step, state.samples_done = 3, 48
        callback.on_step_end(args, state, None)
        found = callback.meter.progress
        assert found.samples_per_second == 16 / 2
        assert found.elapsed_seconds == 26.0
        assert found.eta_seconds == pytest.approx(17 * (2 + 20 / 3))

    def test_tokens_that_arrive_with_the_logs_of_several_ranks(
        self, monkeypatch
    ) -> None:
        clock = SimpleNamespace(monotonic=lambda: 0.0)
        monkeypatch.setattr(progress, "time", clock)
        args, state, meter = SimpleNamespace(), TrainerState(), progress.Meter()
        meter.start(args, state)
        for now in range(1, 13):
            clock.monotonic = lambda now=now: float(now)
            state.global_step, meter.seen = now, float(now)
            state.num_input_tokens_seen = now // 5 * 500  # 100 a second
            meter.move(args, state)
        assert meter.progress.tokens_per_second == 100

    def test_the_end_shows_the_rates_of_the_log(self, monkeypatch) -> None:
        callback, stream = self.display(monkeypatch)
        args, state = SimpleNamespace(), TrainerState(max_steps=9)
        callback.on_train_begin(args, state, None)
        logs = {"train_runtime": 61.2, "train_samples_per_second": 42.0}
        state.global_step, state.samples_done = 4, 8
        callback.on_log(args, state, None, logs={**logs, "loss": 1.0})
        assert not callback.meter.of_run  # a log where tokens are counted
        callback.on_log(args, state, None, logs={**logs, "train_loss": 1.0})
        callback.on_train_end(args, state, None)
        assert callback.meter.progress.elapsed_seconds == 61.2
        assert "42.0 samples/s" in stream.getvalue().splitlines()[-2]

    @pytest.mark.parametrize("event", ["on_predict", "on_evaluate"])
    def test_each_prediction_is_counted_from_its_begin(
        self, event: str, monkeypatch
    ) -> None:
        callback, stream = self.display(monkeypatch)
        state = TrainerState()
        for _ in range(2):
            callback.on_prediction_step(None, state, None, eval_dataloader=range(9))
            assert callback.meter.progress.evaluating == (1, 9)
            getattr(callback, event)(None, state, None, metrics={"eval_loss": 1.0})
            assert callback.meter.progress.evaluating is None
        assert "eval 1/9" in stream.getvalue()

    def test_a_log_between_ticks_shows_how_far_the_run_is(self, monkeypatch) -> None:
        callback, stream = self.display(monkeypatch)
        args = SimpleNamespace(train_batch_size=1, gradient_accumulation_steps=1)
        state = TrainerState(max_steps=9)
        callback.on_train_begin(args, state, None)
        state.global_step, callback.next_draw = 4, 0.0
        callback.on_log(args, state, None, logs={"loss": 1.0})
        assert "4/9" in stream.getvalue()

    def test_a_frame_that_takes_long_comes_seldom(self, monkeypatch) -> None:
        callback, _ = self.display(monkeypatch)
        monkeypatch.setattr(callback.line, "draw", lambda progress: time.sleep(0.05))
        args = SimpleNamespace(train_batch_size=1, gradient_accumulation_steps=1)
        began = time.monotonic()
        callback.on_train_begin(args, TrainerState(max_steps=9), None)
        assert callback.next_draw - began > 1.0  # 20 times as long as the frame took


class TestPipe:
    def test_each_log_is_one_line_that_parses(self) -> None:
        out, err = in_a_pipe()
        assert err == ""
        assert "\r" not in out
        assert "\x1b" not in out
        lines = out.splitlines()
        logs = [line for line in lines if line.startswith("20")]
        assert len(logs) == 7 + 2 + 1
        for line in logs:
            time, *pairs = line.split(" ")
            assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", time)
            assert all(re.fullmatch(r"[\w]+=[-+.\w]+", pair) for pair in pairs)
        assert lines[len(logs)].startswith("ctrainer: 30 updates")

    def test_json(self) -> None:
        out, err = in_a_pipe(CTRAINER_LOG="json")
        assert err == ""
        objects = [json.loads(line) for line in out.splitlines()]
        assert [o["step"] for o in objects if "loss" in o] == [1, 5, 10, 15, 20, 25, 30]
        assert objects[2]["reward"] == 0.75
        assert objects[-1]["train_loss"] == 1.5


NOTEBOOK = """\
import sys
sys.path[:0] = [{root!r}, {here!r}]
from display_run import Run
run = Run(0.02, 0.01)
run.train()
"""


class TestNotebook:
    def test_one_output_is_updated_in_place(self) -> None:
        nbclient = pytest.importorskip(
            "nbclient", reason="needs nbclient and ipykernel"
        )
        nbformat = pytest.importorskip("nbformat")
        pytest.importorskip("ipykernel")
        source = NOTEBOOK.format(root=str(ROOT), here=str(HERE))
        cells = [nbformat.v4.new_code_cell(x) for x in (source, "run.evaluate(0.5)")]
        notebook = nbformat.v4.new_notebook(cells=cells)
        client = nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3")
        client.execute()
        outputs = notebook.cells[0].outputs
        assert [o.output_type for o in outputs] == ["display_data"] * 2
        page = outputs[0].data["text/html"]
        assert outputs[0].data["text/plain"].startswith("ctrainer 30/30 100% ")
        # The table, for outputs without HTML.
        assert outputs[1].data["text/html"] == ""
        assert outputs[1].data["text/plain"].startswith("ctrainer: 30 updates in 01:15")
        assert "30/30" in page
        assert page.count("<polyline") == 2
        assert "updates affected: 2" in page
        # What is evaluated later shows in its own cell, and not as still under way.
        outputs = notebook.cells[1].outputs
        assert [o.output_type for o in outputs] == ["display_data"]
        line = "eval 30  loss 0.600  accuracy 0.600  (1.2 s)"
        assert outputs[0].data["text/plain"] == line
        assert f">{line}</div>" in outputs[0].data["text/html"]
        assert "svg" not in outputs[0].data["text/html"]


class TestPlot:
    def test_draws_losses_and_metrics(self, tmp_path) -> None:
        pytest.importorskip("matplotlib")
        from ctrainer.display.plotting import metric_curves, plot

        assert metric_curves(HISTORY) == {"f1": [(10.0, 0.5), (20.0, 0.625)]}
        plot(HISTORY, tmp_path / "run.svg", title="A run")
        text = (tmp_path / "run.svg").read_text()
        assert text.count('<g id="axes_') == 2
        plot(HISTORY[:1], tmp_path / "run.png")
        assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")

    def test_nothing_to_draw_is_an_error(self, tmp_path) -> None:
        from ctrainer.display.plotting import plot

        with pytest.raises(ValueError, match="neither a loss nor a metric"):
            plot([{"step": 1}], tmp_path / "x.png")
