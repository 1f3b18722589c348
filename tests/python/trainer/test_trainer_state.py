"""TrainerState and TrainerControl: what is stored and exchanged with transformers."""

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ctrainer.trainer_state import ExportableState, TrainerControl, TrainerState


def full_state() -> TrainerState:
    return TrainerState(
        epoch=1.5,
        global_step=3,
        max_steps=8,
        eval_steps=2,
        train_batch_size=4,
        log_history=[{"loss": 0.5, "step": 1}, {"eval_f1": 0.25, "step": 2}],
        best_metric=0.25,
        best_global_step=2,
        best_model_checkpoint="out/checkpoint-2",
        stateful_callbacks={"TrainerControl": TrainerControl().state()},
    )


def test_fields_and_defaults_are_those_of_transformers() -> None:
    hf = pytest.importorskip("transformers")
    ours = {
        f.name: getattr(TrainerState(), f.name)
        for f in dataclasses.fields(TrainerState)
    }
    theirs = hf.TrainerState()
    assert ours == {f.name: getattr(theirs, f.name) for f in dataclasses.fields(theirs)}
    assert dataclasses.asdict(TrainerControl()) == dataclasses.asdict(
        hf.TrainerControl()
    )
    assert TrainerControl().state() == hf.TrainerControl().state()


def test_file_is_the_same_as_transformers_and_each_reads_the_other(tmp_path) -> None:
    hf = pytest.importorskip("transformers")
    state = full_state()
    state.save_to_json(tmp_path / "ours.json")
    theirs = hf.TrainerState.load_from_json(str(tmp_path / "ours.json"))
    theirs.save_to_json(str(tmp_path / "theirs.json"))
    assert (tmp_path / "ours.json").read_text() == (
        tmp_path / "theirs.json"
    ).read_text()
    assert TrainerState.load_from_json(tmp_path / "theirs.json") == state


def test_unknown_keys_are_left_out_and_told(tmp_path, caplog) -> None:
    path = tmp_path / "state.json"
    path.write_text(json.dumps({"global_step": 7, "of_the_future": 1}))
    assert TrainerState.load_from_json(path).global_step == 7
    assert "unknown of_the_future left out" in caplog.text


def test_file_that_is_no_state_is_rejected(tmp_path) -> None:
    path = tmp_path / "state.json"
    path.write_text("[1]")
    with pytest.raises(ValueError, match="must hold a JSON object, not list"):
        TrainerState.load_from_json(path)


def test_field_of_another_type_is_rejected_by_its_name(tmp_path) -> None:
    path = tmp_path / "state.json"
    path.write_text(json.dumps({"global_step": "seven"}))
    with pytest.raises(ValueError, match=r"state.json.*global_step"):
        TrainerState.load_from_json(path)


def test_numbers_of_numpy_and_torch_are_stored_plainly(tmp_path) -> None:
    torch = pytest.importorskip("torch")
    state = TrainerState(
        log_history=[{"a": np.float32(0.5), "b": torch.tensor(2), "c": np.array(3)}]
    )
    state.save_to_json(tmp_path / "state.json")
    loaded = TrainerState.load_from_json(tmp_path / "state.json")
    assert loaded.log_history == [{"a": 0.5, "b": 2, "c": 3}]


def test_what_json_cannot_hold_is_named_and_leaves_the_old_file(tmp_path) -> None:
    path = tmp_path / "state.json"
    TrainerState(global_step=1).save_to_json(path)
    with pytest.raises(TypeError, match="cannot hold a set"):
        TrainerState(log_history=[{"a": {1}}]).save_to_json(path)
    assert TrainerState.load_from_json(path).global_step == 1
    assert [p.name for p in tmp_path.iterdir()] == ["state.json"]


@pytest.mark.parametrize("steps", [10, 0.1, 0.001, None, 1.0])
def test_shares_of_the_run_become_steps_as_in_transformers(steps) -> None:
    hf = pytest.importorskip("transformers")
    args = type(
        "Args", (), dict.fromkeys(["logging_steps", "eval_steps", "save_steps"], steps)
    )
    ours, theirs = TrainerState(), hf.TrainerState()
    ours.compute_steps(args, 75)
    theirs.compute_steps(args, 75)
    assert dataclasses.asdict(ours) == dataclasses.asdict(theirs)


def test_states_of_callbacks_are_grouped_by_class() -> None:
    class Counter(ExportableState):
        def __init__(self, n: int = 0) -> None:
            self.n = n

        def state(self):
            return {"args": {}, "attributes": {"n": self.n}}

    state = TrainerState(stateful_callbacks=[Counter(1), TrainerControl(), Counter(2)])
    stored = state.stateful_callbacks
    assert [Counter.from_state(s).n for s in stored["Counter"]] == [1, 2]
    assert TrainerControl.from_state(stored["TrainerControl"]) == TrainerControl()


def test_callback_without_a_state_is_rejected() -> None:
    with pytest.raises(TypeError, match="object is to be saved, so it must define"):
        TrainerState(stateful_callbacks=[object()])
    with pytest.raises(NotImplementedError, match="must define state"):
        ExportableState().state()


def test_references_of_a_run_are_taken_over() -> None:
    class Trainer:
        hp_name = None

        def is_local_process_zero(self):
            return True

        def is_world_process_zero(self):
            return False

    state = TrainerState()
    state.init_training_references(Trainer(), 12, 3, {"lr": 0.1})
    assert (state.max_steps, state.num_train_epochs) == (12, 3)
    assert (state.is_world_process_zero, state.trial_params) == (False, {"lr": 0.1})


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("trial", [None, {"lr": 0.1}])
def test_a_trial_is_named_by_the_trainer(named: bool, trial: Any) -> None:
    trainer = SimpleNamespace(
        hp_name=(lambda of: f"rate {of['lr']}") if named else None,
        _trial=trial,
        is_local_process_zero=lambda: True,
        is_world_process_zero=lambda: True,
    )
    state = TrainerState()
    state.init_training_references(trainer, 12, 3, trial)
    assert state.trial_name == ("rate 0.1" if named and trial else None)
    assert state.trial_params == trial
