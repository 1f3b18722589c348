"""A Trainer that trains again: it resumes after a failure or a stop, with options drawn
together, as a run that nothing has disturbed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from draws import draws

import ctrainer
from ctrainer.callbacks import TrainerCallback

PLACES = ("step", "stop", "pre", "substep", "log", "evaluate", "save")
UPDATES, SAVED = 7, 3


class Fails(TrainerCallback):
    """Raises in an event of update 5, or of the first save; or ends the run there."""

    def __init__(self, place: str) -> None:
        self.place = place

    def _at(self, place: str, state: Any, step: int) -> None:
        if self.place == place and state.global_step == step:
            raise ArithmeticError(place)

    def on_pre_optimizer_step(
        self, args: Any, state: Any, *rest: Any, **kw: Any
    ) -> None:
        self._at("pre", state, 4)

    def on_substep_end(self, args: Any, state: Any, *rest: Any, **kw: Any) -> None:
        self._at("substep", state, 4)

    def on_step_end(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        self._at("step", state, 4)
        if self.place == "stop" and state.global_step == 4:
            control.should_training_stop = True

    def on_log(self, args: Any, state: Any, *rest: Any, **kw: Any) -> None:
        self._at("log", state, 4)

    def on_evaluate(self, args: Any, state: Any, *rest: Any, **kw: Any) -> None:
        self._at("evaluate", state, 4)

    def on_save(self, args: Any, state: Any, *rest: Any, **kw: Any) -> None:
        self._at("save", state, SAVED)


def drawn(number: int) -> tuple[str, bool, dict[str, Any], dict[str, Any]]:
    """Where the run fails, whether it is evaluated before, and options of the run and
    of the model."""
    draw = random.Random(number)

    def perhaps(**options: Any) -> dict[str, Any]:
        return options if draw.random() < 0.3 else {}

    kind = draw.choice(["whole", "whole", "sharded", "bmuf", "diloco"])
    kinds: dict[str, dict[str, Any]] = {
        "sharded": {"fsdp": "full_shard auto_wrap"}, "bmuf": {"use_bmuf": True},
        "diloco": {"use_diloco": True}, "whole": perhaps(chunked_cross_entropy=True),
    }  # fmt: skip
    precision = draw.choice(["", "", "bf16", "fp16"])
    options = {
        **kinds[kind],
        **({precision: True} if precision else {}),
        "optim": draw.choice(
            ["adamw_torch", "adamw_torch", "adamw_bnb_8bit", "lion_32bit", "sgd",
             "schedule_free_adamw", "adamw_compact", "rmsprop", "adafactor"]
        ),
        "gradient_accumulation_steps": draw.choice([1, 2, 3]),
        "weight_decay": draw.choice([0.0, 0.1]),
        "max_grad_norm": draw.choice([0.0, 0.5, 1.0]),
        "lr_scheduler_type": draw.choice(["linear", "cosine", "constant_with_warmup"]),
        "train_sampling_strategy": draw.choice(
            ["random", "sequential", "group_by_length"]
        ),
        **perhaps(ema_decay=0.5),
        **perhaps(neftune_noise_alpha=5.0),
        **perhaps(gradient_checkpointing=True),
        **perhaps(label_smoothing_factor=0.1),
        **perhaps(eval_strategy="steps", eval_steps=2),
        **perhaps(auto_find_batch_size=True),
        **perhaps(log_layer_grad_norms=True),
        **perhaps(include_num_input_tokens_seen=True),
        **perhaps(pack_sequences=True),
    }  # fmt: skip
    if options.get("eval_strategy") and draw.random() < 0.5:
        options |= {"load_best_model_at_end": True, "eval_steps": SAVED}
    if options.get("eval_strategy") and draw.random() < 0.5:
        options["lr_scheduler_type"] = "reduce_lr_on_plateau"
        options["metric_for_best_model"] = "eval_loss"
    places = [
        place
        for place in PLACES
        if (place != "substep" or options["gradient_accumulation_steps"] > 1)
        and (place != "evaluate" or options.get("eval_steps") == 2)
    ]
    names = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
    model = dict.fromkeys(names, draw.choice([0.0, 0.0, 0.1]))
    return draw.choice(places), draw.random() < 0.5, options, model


def made(folder: Path, options: dict[str, Any], model: dict[str, Any]) -> Any:
    rows = tiny.tokens(60, padded=True)
    return tiny.make(
        ctrainer.Trainer, tiny.gpt2(**model), rows, parts={"eval_dataset": rows[:5]},
        output_dir=str(folder), max_steps=UPDATES, save_strategy="steps",
        save_steps=SAVED, learning_rate=1e-2, per_device_train_batch_size=2,
        **options,
    )  # fmt: skip


def told(trainer: Any) -> tuple[Any, ...]:
    """The logs after the checkpoint, and the weights at the end."""
    logs = [
        {name: log.get(name) for name in ("step", "loss", "grad_norm", "eval_loss")}
        for log in trainer.state.log_history
        if log["step"] > SAVED and "train_runtime" not in log
    ]
    full = getattr(trainer.model, "full_state_dict", trainer.model.state_dict)
    return logs, {name: value.tolist() for name, value in full().items()}


@pytest.mark.parametrize("number", range(draws(14, 150)))
def test_a_trainer_resumes_what_has_failed_in_it(number: int, tmp_path: Path) -> None:
    place, evaluates, options, model = drawn(number)
    kept, results = None, []
    # Gradients are clipped before what listens to that, and else with the update, where
    # Adafactor's sums are of other roundings: both runs have the callback.
    for fails in (Fails("nowhere"), Fails(place)):
        trainer = made(tmp_path / fails.place, options, model)
        trainer.add_callback(fails)
        if evaluates:  # which draws a seed for its loader
            trainer.evaluate()
        try:
            trainer.train()
        except ArithmeticError as error:
            kept = error  # and its frames
        if fails.place != "nowhere":
            fails.place = "nowhere"
            if evaluates:
                trainer.evaluate()
            checkpoint = tmp_path / place / f"checkpoint-{SAVED}"
            trainer.train(resume_from_checkpoint=str(checkpoint))
        results.append(told(trainer))
    assert (kept is None) == (place == "stop")
    assert results[1] == results[0]


@pytest.mark.parametrize("optim", ["adamw_torch", "sgd"])
def test_gradients_before_a_training_are_dropped(optim: str, tmp_path: Path) -> None:
    """transformers drops them."""
    losses = []
    for cls in (transformers.Trainer, ctrainer.Trainer):
        trainer = tiny.make(
            cls, tiny.Net(), tiny.rows(), output_dir=str(tmp_path), max_steps=3,
            optim=optim, learning_rate=1e-2,
        )  # fmt: skip
        for parameter in trainer.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        trainer.train()
        logs = trainer.state.log_history
        losses.append([log["loss"] for log in logs if "loss" in log])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
