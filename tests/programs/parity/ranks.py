"""HF's Trainer on 2 ranks, ours and transformers', one after the other."""

import numpy as np
import optuna
import torch
import transformers
from programs.run import folder, tell
from rank_checkpoints import Net, files, rows
from rank_trainings import CASES, compare, run

import ctrainer

transformers.logging.set_verbosity_error()
torch.set_num_threads(1)
ours = {name: run(ctrainer, folder, name) for name in CASES}
found = {"initialized": torch.distributed.is_initialized()}
for name, mine in ours.items():
    compare(name, mine, run(transformers, folder, name))
found["cases"] = len(ours)


class Plain(Net):
    def __init__(self):
        super().__init__()
        self.layers[1].p = 0.0


def metrics(given):
    error = np.abs(given.predictions - given.label_ids)
    return {"n": len(error), "error": float(error.sum(dtype=np.float64))}


def make(kind, name, **options):
    module = {"theirs": transformers, "ours": ctrainer}[kind]
    args = module.TrainingArguments(
        f"{folder}/{name}",
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        max_steps=4,
        save_steps=2,
        logging_steps=2,
        learning_rate=1e-2,
        optim="adamw_torch",
        ddp_backend="gloo",
        include_num_input_tokens_seen="all",
        **options,
    )
    return module.Trainer(
        Plain(),
        args,
        train_dataset=rows(40),
        eval_dataset=rows(16),
        compute_metrics=metrics,
    )


def plain(values):
    return {k: v for k, v in values.items() if "runtime" not in k and "second" not in k}


def weights(trainer):
    model = trainer.model
    parameters = getattr(model, "module", model).parameters()
    return torch.cat([p.detach().flatten() for p in parameters]).tolist()


for kind in ("theirs", "ours"):
    trainer = make(kind, kind)
    trainer.train()
    predicted = trainer.predict(rows(10))
    state = trainer.state
    found[kind] = {
        "evaluate": plain(trainer.evaluate()),
        "predictions": predicted.predictions.tolist(),
        "labels": predicted.label_ids.tolist(),
        "test": plain(predicted.metrics),
        "weights": weights(trainer),
        "losses": [e["loss"] for e in state.log_history if "loss" in e],
        "tokens": state.num_input_tokens_seen,
    }
    torch.distributed.barrier()
    found[kind + " files"] = files(f"{folder}/{kind}")

for kind, other in (("theirs", "ours"), ("ours", "theirs")):
    trainer = make(kind, kind + " resumed")
    if kind == "theirs":  # torch cannot restore to its "cpu:0", which it asks for
        vars(trainer.args)["_setup_devices"] = torch.device("cpu")
    trainer.train(resume_from_checkpoint=f"{folder}/{other}/checkpoint-2")
    found[kind + " resumed"] = [weights(trainer), trainer.state.num_input_tokens_seen]


class Second(optuna.pruners.BasePruner):
    def prune(self, study, trial):
        return trial.number == 1


steps = []


class Counting(ctrainer.TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        steps.append(0)

    def on_step_end(self, args, state, control, **kwargs):
        steps[-1] = state.global_step


def space(trial):
    if trial.number == 4:
        raise ZeroDivisionError("in hp_space")
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-2),
        "weight_decay": trial.suggest_categorical("weight_decay", [0.0, 0.1]),
    }


trainer = make("ours", "search", eval_strategy="steps", eval_steps=2)
trainer.add_callback(Counting())
trainer.model_init = Plain
best = trainer.hyperparameter_search(
    hp_space=space,
    n_trials=3,
    direction="minimize",
    backend="optuna",
    pruner=Second(),
    compute_objective=lambda m: m["eval_loss"],
)
found["search"] = None if best is None else sorted(best.hyperparameters)
found["learning_rate"] = trainer.args.learning_rate
found["steps"] = list(steps)
try:
    trainer.hyperparameter_search(
        hp_space=space,
        n_trials=5,
        direction="minimize",
        backend="optuna",
        compute_objective=lambda m: m["eval_loss"],
    )
except Exception as problem:
    found["failure"] = f"{type(problem).__name__}: {problem}"
tell(found)
