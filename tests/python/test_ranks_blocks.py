"""HF's Trainer on two ranks that train apart and meet at the ends of blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from ranks import run_ranks, told

import ctrainer

KILLED = """
import os, signal
import ctrainer
from rank_checkpoints import OF_BLOCKS, make

class Dying(ctrainer.TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 5 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

trainer = make(f"{folder}/killed", **OF_BLOCKS)
trainer.add_callback(Dying())
try:
    trainer.train()
except RuntimeError as problem:
    tell(str(problem))
"""

WORK = """
import os
from rank_checkpoints import OF_BLOCKS, files, history, make
from rank_checkpoints import weights as digest
import ctrainer, torch
from torch import nn

class Line(nn.Module):
    '''Each rank has a target of its own, and all rows are alike.'''
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]) + rank)
    def forward(self, x, labels=None):
        return {"loss": ((x @ self.weight - rank) ** 2).mean()}

rows = [{"x": torch.tensor([0.5, 1.0, -0.25]), "labels": 0.0} for _ in range(64)]

def train(steps, where, resume=None, **blocks):
    args = ctrainer.TrainingArguments(
        f"{folder}/{where}", use_cpu=True, report_to="none", disable_tqdm=True,
        optim="sgd", learning_rate=0.05, lr_scheduler_type="constant", max_grad_norm=0,
        max_steps=steps, per_device_train_batch_size=2, ddp_timeout=60,
        save_strategy="steps" if where.startswith("saved") else "no", save_steps=4,
        **blocks,
    )
    made = ctrainer.Trainer(Line(), args, train_dataset=rows)
    made.train(resume_from_checkpoint=resume)
    return made

def weights(made):
    return made.model.weight.tolist()

BMUF = {"use_bmuf": True, "global_sync_iter": 2, "warmup_iterations": 1,
        "block_momentum": 0.5, "block_lr": 0.7}
DILOCO = {"use_diloco": True, "global_sync_iter": 3}
found = {"bmuf": weights(train(6, "plain", **BMUF)),
         "diloco": weights(train(6, "plain", **DILOCO)),
         "within": weights(train(5, "plain", **DILOCO))}
half = train(4, "saved", **BMUF)
half._communicator.barrier()
path = f"{folder}/saved/checkpoint-4"
found["files"] = "blocks.pt" in os.listdir(path)
found["resumed"] = weights(train(6, "plain", resume=path, **BMUF))
CODED = {**BMUF, "delta_bits": 4}
train(4, "saved coded", **CODED)._communicator.barrier()
path = f"{folder}/saved coded/checkpoint-4"
found["coded"] = [weights(train(6, "plain", **CODED)),
                  weights(train(6, "plain", resume=path, **CODED))]

# The block that ends at update 4 is on its way in the checkpoint, and at the end.
AWAY = {**BMUF, "global_sync_iter": 4, "overlap_steps": 2}
train(4, "saved away", **AWAY)._communicator.barrier()
path = f"{folder}/saved away/checkpoint-4"
found["away"] = [weights(train(6, "plain", **AWAY)),
                 weights(train(6, "plain", resume=path, **AWAY))]
found["ended away"] = weights(train(5, "plain", **AWAY))

whole = make(f"{folder}/whole", **OF_BLOCKS)
whole.train()
again = make(f"{folder}/again", **OF_BLOCKS)
again.train(resume_from_checkpoint=f"{killed}/checkpoint-4")
for name, made in (("whole", whole), ("again", again)):
    # Norms are each rank's own, and those in a checkpoint the first one's.
    logs = [e for e in history(made) if e["step"] > 4 or e.pop("grad_norm")]
    found[name] = [digest(made), logs, str(made.optimizer.state_dict())]
found["killed files"] = files(killed)
tell(found)
"""


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    first = tmp_path_factory.mktemp("killed")
    ranks = run_ranks(first, KILLED)
    assert ranks[1].code == -9
    assert "rank 1" in ranks[0].told
    work = f"killed = {str(first / 'killed')!r}" + WORK
    return told(run_ranks(tmp_path_factory.mktemp("blocks"), work))


def by_hand(updates: int, every: int, warmup: int, step: Any) -> Any:
    """Both ranks' weights, in double, as rows."""
    x = np.array([0.5, 1.0, -0.25])
    rows = np.array([[1.0, -2.0, 3.0]] * 2)  # all begin with the first one's
    model, momentum = rows[0].copy(), np.zeros(3)
    for update in range(1, updates + 1):
        for rank in range(2):
            rows[rank] -= 0.05 * 2 * (x @ rows[rank] - rank) * x
        if update == warmup:
            rows[1] = model = rows[0].copy()
        elif update > warmup and update % every == 0:
            model, momentum = step(model, momentum, model - rows.mean(axis=0))
            rows[:] = model
    return rows


def test_bmuf_by_its_arguments(both: list[Any]) -> None:
    def step(model: Any, momentum: Any, delta: Any) -> Any:
        momentum = 0.5 * momentum + 0.7 * delta
        return model - momentum, momentum

    expected = by_hand(6, 2, 1, step)
    for rank, found in enumerate(both):
        np.testing.assert_allclose(found["bmuf"], expected[rank], atol=2e-6)


def test_diloco_by_its_preset(both: list[Any]) -> None:
    def step(model: Any, momentum: Any, delta: Any) -> Any:
        momentum = 0.9 * momentum + 0.7 * delta
        return model - (0.7 * delta + 0.9 * momentum), momentum

    for updates, name in ((6, "diloco"), (5, "within")):
        expected = by_hand(updates, 3, 0, step)
        for rank, found in enumerate(both):
            np.testing.assert_allclose(found[name], expected[rank], atol=2e-6)
    assert both[0]["within"] != both[1]["within"]


def test_a_run_that_is_resumed_at_the_end_of_a_block_goes_on(both: list[Any]) -> None:
    for found in both:
        assert found["files"]
        assert found["resumed"] == found["bmuf"]


def test_distances_of_4_bits_are_resumed_with_what_they_missed(both: list[Any]) -> None:
    for found in both:
        whole, resumed = found["coded"]
        assert whole == resumed
        # A scale is 1/7 of the largest distance, which was below 2, and 3 blocks end
        assert 0 < np.max(np.abs(np.subtract(whole, found["bmuf"]))) < 3 * 2 / 7


def test_a_block_that_is_on_its_way_arrives_after_a_resume_and_at_the_end(
    both: list[Any],
) -> None:
    def train_by_hand(updates: int) -> Any:
        """Warm-up 1; the block of update 4 moves the model 2 updates later."""
        x = np.array([0.5, 1.0, -0.25])
        rows = np.array([[1.0, -2.0, 3.0]] * 2)
        for update in range(1, updates + 1):
            for rank in range(2):
                rows[rank] -= 0.05 * 2 * (x @ rows[rank] - rank) * x
            if update == 1:
                rows[1] = model = rows[0].copy()
            if update == 4:
                left = rows.copy()
        return model - 0.7 * (model - left.mean(axis=0)) + rows - left

    for rank, found in enumerate(both):
        whole, resumed = found["away"]
        assert whole == resumed
        np.testing.assert_allclose(whole, train_by_hand(6)[rank], atol=2e-6)
        np.testing.assert_allclose(found["ended away"], train_by_hand(5)[rank],
                                   atol=2e-6)  # fmt: skip
    assert both[0]["away"] != both[1]["away"]


def test_a_run_killed_within_a_block_goes_on_exactly_on_every_rank(
    both: list[Any],
) -> None:
    for found in both:
        assert found["again"] == found["whole"]
        (saved,) = found["killed files"].values()
        assert {"blocks.pt", "blocks_1.pt"} < set(saved)
    assert both[0]["whole"][0] != both[1]["whole"][0]  # 8 updates end within a block


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_bmuf": True, "use_diloco": True}, "are both set; set one"),
        ({"block_momentum": 0.5}, "block_momentum is of blocks of updates, which need"),
        ({"average_sync": True}, "average_sync is of blocks"),
        ({"delta_bits": 8}, "delta_bits is of blocks"),
        ({"overlap_steps": 1}, "overlap_steps is of blocks"),
        ({"use_diloco": True, "use_nbm": True}, "use_diloco has its own"),
    ],
)
def test_contradictions_are_named(
    tmp_path: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ctrainer.TrainingArguments(tmp_path, **options)
