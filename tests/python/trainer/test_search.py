"""Search of hyper-parameters, run by optuna through transformers' backend."""

from pathlib import Path

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
        return {"learning_rate": rate, "per_device_train_batch_size": 2}

    best = trainer.hyperparameter_search(space, n_trials=3, backend="optuna")
    assert len(tried) == 3
    assert len(seen) == 1 + 3
    assert best.hyperparameters["learning_rate"] in tried
    assert trainer.args.learning_rate == tried[-1]
    assert trainer._train_batch_size == 2
    assert trainer.hp_search_backend is None
    assert best.objective >= 0.0


def test_a_search_needs_fresh_models(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="model_init"):
        make(tmp_path, model=Line()).hyperparameter_search(backend="optuna")
