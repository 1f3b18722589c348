"""Search of hyper-parameters, run by optuna through transformers' backend."""

import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
optuna = pytest.importorskip("optuna")

import ctrainer  # noqa: E402


class Line(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, x, labels=None):
        y = self.layer(x).squeeze(-1)
        return {"loss": torch.nn.functional.mse_loss(y, labels), "logits": y}


def make(folder: Path, **kwargs) -> ctrainer.Trainer:
    rows = [{"x": torch.ones(2) * i, "labels": torch.tensor(i / 4)} for i in range(8)]
    args = ctrainer.TrainingArguments(
        str(folder), max_steps=4, eval_strategy="steps", eval_steps=2, use_cpu=True,
        save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    return ctrainer.Trainer(args=args, train_dataset=rows, eval_dataset=rows, **kwargs)


def test_each_trial_sets_its_values_and_the_best_is_returned(tmp_path: Path) -> None:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    seen = []

    def fresh() -> Line:
        seen.append(1)
        return Line()

    trainer = make(tmp_path, model_init=fresh)
    tried = []

    def space(trial):
        rate = trial.suggest_float("learning_rate", 1e-5, 1e-1, log=True)
        tried.append(rate)
        chosen = {"learning_rate": rate, "per_device_train_batch_size": 2}
        return {**chosen, "weight_decay": trial.suggest_int("weight_decay", 1, 1)}

    best = trainer.hyperparameter_search(space, n_trials=3, backend="optuna")
    assert len(tried) == 3
    assert len(seen) == 1 + 3
    assert best.hyperparameters["learning_rate"] in tried
    assert trainer.args.learning_rate == tried[-1]
    assert trainer._train_batch_size == 2
    assert isinstance(trainer.args.weight_decay, float)
    assert trainer.hp_search_backend is None
    assert best.objective >= 0.0


def test_a_search_needs_fresh_models(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="model_init"):
        make(tmp_path, model=Line()).hyperparameter_search(backend="optuna")


class RaysReports(ModuleType):
    """What transformers' search with Ray asks of ray.tune in a trial."""

    class Checkpoint:
        def __init__(self, folder: str) -> None:
            self.folder = folder

        @classmethod
        def from_directory(cls, folder: str) -> "RaysReports.Checkpoint":
            return cls(folder)

    def __init__(self, kept: Path) -> None:
        super().__init__("ray.tune")
        self.kept, self.reported = kept, []

    def get_context(self) -> SimpleNamespace:
        return SimpleNamespace(get_trial_id=lambda: "7f_0001")

    def report(self, metrics, checkpoint) -> None:
        """Takes the checkpoint away, as Ray does."""
        if checkpoint is not None:
            shutil.copytree(checkpoint.folder, self.kept, dirs_exist_ok=True)
        self.reported.append((metrics["objective"], checkpoint is not None))


def test_ray_gets_checkpoints_to_continue_a_trial_from(tmp_path, monkeypatch) -> None:
    tune = RaysReports(tmp_path / "kept")
    package = ModuleType("ray")
    package.tune = tune
    monkeypatch.setitem(sys.modules, "ray", package)
    monkeypatch.setitem(sys.modules, "ray.tune", tune)
    runs = []
    for resume in (None, str(tmp_path / "kept" / "checkpoint-2")):
        trainer = make(tmp_path / "own", model_init=Line)
        trainer.args.save_strategy, trainer.args.save_steps = "steps", 2
        trainer.args.save_only_model = False
        trainer.hp_search_backend = "ray"
        trainer.compute_objective = lambda metrics: metrics["eval_loss"]
        trainer.train(resume_from_checkpoint=resume, trial={"learning_rate": 0.1})
        runs.append(list(trainer.model.state_dict().values()))
    (first, saved), (last, also), again = tune.reported
    assert saved
    assert also
    assert again == (last, True) != (first, True)
    assert all(map(torch.equal, *runs))
    assert sorted(p.name for p in (tmp_path / "own").iterdir()) == ["run-7f_0001"]
    assert trainer.args.output_dir == str(tmp_path / "own")


def test_a_trial_without_a_save_reports_its_metrics_alone(
    tmp_path, monkeypatch
) -> None:
    tune = RaysReports(tmp_path / "kept")
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    sys.modules["ray"].tune = tune
    monkeypatch.setitem(sys.modules, "ray.tune", tune)
    trainer = make(tmp_path / "own", model_init=Line)
    trainer.hp_search_backend = "ray"
    trainer.compute_objective = lambda metrics: metrics["eval_loss"]
    trainer.train(trial={"learning_rate": 0.1})
    assert [saved for _, saved in tune.reported] == [False, False]
    # As transformers' backend calls it where no evaluation has been reported.
    trainer._tune_save_checkpoint(checkpoint_dir=str(tmp_path / "folder"))
    names = {p.name for p in (tmp_path / "folder" / "checkpoint-4").iterdir()}
    assert names >= {"model.safetensors", "optimizer.pt", "trainer_state.json"}
