"""The border between C and Python: private names of our own that C looks up."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
THEIRS, OWN = (
    (ROOT / "csrc/binding/runtime/hooks.def").read_text().split("/* ---- private names")
)
OWNERS = re.findall(r"CTPY_NAME\((\w+)\) /\* ([\w.]+) \*/", OWN)

# Private names of other packages: overrides of users replace these, or torch, fairseq
# and transformers have them on objects of theirs.
OF_OTHERS = {
    "transformers": """
        _clip_grad_norm _get_grad_norm _get_learning_rate _loss_shifts_labels
        _maybe_log_save_evaluate _run_epoch _track_num_input_tokens""",
    "accelerate": "_set_sync_gradients",
    "fairseq": """
        _build_optimizer _check_grad_norms _ema _log_oom _lr_scheduler _optimizer
        _prepare_sample _reduce_and_log_stats _wrapped_criterion _wrapped_model""",
    "torch": """
        _current_autograd_node _current_graph_task_id _get_sequence_nr _opt_called
        _optimizer_step_post_hooks _optimizer_step_pre_hooks _sequence_nr
        _version _wrapped_by_lr_sched""",
}


def test_c_looks_up_at_most_30_private_names_of_our_own() -> None:
    assert OWN.count("CTPY_NAME(") == len(OWNERS) <= 30


@pytest.mark.parametrize(("name", "owner"), OWNERS)
def test_the_owner_has_the_name(name: str, owner: str) -> None:
    pytest.importorskip("torch")
    module, _, last = owner.rpartition(".")
    if last[0].isupper():
        cls = getattr(importlib.import_module(module), last)
        if hasattr(cls, name):
            return
        owner = module  # an attribute of instances
    text = inspect.getsource(importlib.import_module(owner))
    assert re.search(rf"\.{name} = ", text), f"{owner} sets no {name}"


def test_other_private_names_are_those_of_other_packages() -> None:
    found = set(re.findall(r"CTPY_NAME\((_[a-z]\w*)\)", THEIRS))
    assert found == set(" ".join(OF_OTHERS.values()).split())


def test_no_private_name_of_our_own_is_a_literal_in_a_call() -> None:
    calls = re.compile(
        r"Py\w*(?:CallMethod|[GS]etAttrString|HasAttrString)\([^;]*?\"(_[a-z]\w*)\""
    )
    found = {
        name
        for path in (ROOT / "csrc/binding").rglob("*.c")
        for name in calls.findall(path.read_text())
    }
    assert found <= {"_make"}, "of a named tuple; ours go into hooks.def"
