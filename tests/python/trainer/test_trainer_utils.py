"""Seeds, results, speeds and metrics, against transformers'."""

import json
import random

import numpy as np
import pytest
from ranks import run_alone

from ctrainer import trainer_utils as utils


@pytest.fixture
def hf():
    return pytest.importorskip("transformers.trainer_utils")


def test_result_types_have_transformers_fields(hf) -> None:
    for name in ("EvalLoopOutput", "PredictionOutput", "TrainOutput"):
        assert getattr(utils, name)._fields == getattr(hf, name)._fields


@pytest.mark.parametrize(
    "more", [{}, {"inputs": 3}, {"losses": 4}, {"inputs": 3, "losses": 4}]
)
def test_eval_prediction_unpacks_what_is_there(hf, more) -> None:
    ours, theirs = utils.EvalPrediction(1, 2, **more), hf.EvalPrediction(1, 2, **more)
    assert tuple(ours) == tuple(theirs)
    assert (ours[0], ours[1]) == (1, 2)
    assert vars(ours) == vars(theirs)
    for index in (-1, 4):
        with pytest.raises(IndexError):
            ours[index]


def test_set_seed_gives_transformers_numbers(hf) -> None:
    torch = pytest.importorskip("torch")

    def draw(seed) -> tuple:
        seed(7)
        return random.random(), np.random.rand(), torch.rand(1).item()

    assert draw(utils.set_seed) == draw(hf.set_seed) == draw(utils.seed_loaded)


def test_set_seed_seeds_a_torch_that_is_not_loaded_yet() -> None:
    torch = pytest.importorskip("torch")
    done = run_alone("trainer.set_seed")
    done.check_returncode()
    expected = torch.rand(1, generator=torch.Generator().manual_seed(7)).item()
    assert float(done.stdout) == expected


def test_seeding_what_is_loaded_does_not_load_torch() -> None:
    done = run_alone("trainer.seed_loaded")
    done.check_returncode()
    assert done.stdout.strip() == "False"


def test_full_determinism_switches_torch(monkeypatch) -> None:
    torch = pytest.importorskip("torch")
    for name in ("CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("FLASH_ATTENTION_DETERMINISTIC", "")
    try:
        utils.enable_full_determinism(3)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.deterministic = False


def test_worker_seeds_differ_by_rank() -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(5)
    utils.seed_worker(0, num_workers=2, rank=3)
    first = random.random()
    utils.set_seed(5 + 6)
    assert random.random() == first


@pytest.mark.parametrize("sized", [[1], (), {"a": 1}])
def test_has_length(sized) -> None:
    assert utils.has_length(sized)


def test_has_no_length() -> None:
    class Raising:
        def __len__(self):
            raise TypeError("a stream")

    assert not any(map(utils.has_length, [Raising(), iter([]), None]))


def test_last_checkpoint_is_that_of_the_highest_step(tmp_path) -> None:
    assert utils.get_last_checkpoint(tmp_path) is None
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-x", "checkpoint-11.tmp"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-99").write_text("a file")
    assert utils.get_last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")


def test_speeds(monkeypatch) -> None:
    monkeypatch.setattr(utils.time, "time", lambda: 12.0)
    assert utils.speed_metrics(
        "eval", 10.0, num_samples=5, num_steps=3, num_tokens=8
    ) == {
        "eval_runtime": 2.0,
        "eval_samples_per_second": 2.5,
        "eval_steps_per_second": 1.5,
        "eval_tokens_per_second": 4.0,
    }
    assert utils.speed_metrics("train", 12.0, num_samples=5) == {"train_runtime": 0.0}


def test_numbers_become_pythons() -> None:
    torch = pytest.importorskip("torch")
    given = {"a": np.float32(0.5), "b": [torch.tensor(2)], "c": (torch.ones(2), "x")}
    result = utils.denumpify_detensorize(given)
    assert (type(result["a"]), type(result["b"][0])) == (float, int)
    assert result["c"][0] is given["c"][0]


METRICS = {
    "train_runtime": 3723.4567,
    "train_loss": 1.234567,
    "epoch": 3,
    "total_flos": 5 << 30,
    "train_mem_cpu_alloc_delta": 7 << 20,
}


class HasArgs:
    """What transformers' helpers ask of a trainer."""

    def __init__(self, folder) -> None:
        self.args = type("Args", (), {"output_dir": str(folder)})

    def is_world_process_zero(self) -> bool:
        return True


def test_metrics_are_printed_as_transformers_prints_them(capsys) -> None:
    pt_utils = pytest.importorskip("transformers.trainer_pt_utils")
    assert utils.metrics_format(METRICS) == pt_utils.metrics_format(METRICS)
    utils.print_metrics("train", METRICS)
    ours = capsys.readouterr().out
    pt_utils.log_metrics(HasArgs("x"), "train", METRICS)
    assert ours == capsys.readouterr().out
    utils.print_metrics("eval", {})
    assert capsys.readouterr().out == "***** eval metrics *****\n"


def test_metrics_are_written_as_transformers_writes_them(tmp_path) -> None:
    pt_utils = pytest.importorskip("transformers.trainer_pt_utils")
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    for split, metrics in (("train", METRICS), ("eval", {"eval_loss": 0.5})):
        utils.write_metrics(tmp_path / "a", split, metrics)
        pt_utils.save_metrics(HasArgs(tmp_path / "b"), split, metrics)
    names = sorted(p.name for p in (tmp_path / "a").iterdir())
    assert names == ["all_results.json", "eval_results.json", "train_results.json"]
    for name in names:
        assert (tmp_path / "a" / name).read_text() == (
            tmp_path / "b" / name
        ).read_text()
    assert json.loads((tmp_path / "a" / "all_results.json").read_text())["epoch"] == 3
