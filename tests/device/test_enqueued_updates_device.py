"""Updates that the host enqueues without waiting for their norm: the runs are those in
which the host measures first, also where a gradient is not finite."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import any_gpu
import pytest
import ranks
import torch
import transformers
from draws import draws
from enqueued import UPDATES, Measured, assert_same_runs, muon, run
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import Net

import ctrainer
from ctrainer import deepspeed_schedules, optim


@pytest.fixture(scope="module", autouse=True)
def gpu() -> torch.device:
    return any_gpu.device()


RUNS = st.fixed_dictionaries(
    {
        "nonfinite_policy": st.sampled_from(["skip", "skip", "keep"]),
        "max_grad_norm": st.sampled_from([0.0, 0.05, 1.0]),
        "grad_norm_type": st.sampled_from([2.0, 1.0, float("inf")]),
        "gradient_accumulation_steps": st.sampled_from([1, 2]),
        "logging_steps": st.sampled_from([1, 3, 100]),
        "lr_scheduler_type": st.sampled_from(["linear", "constant", "cosine"]),
        "warmup_steps": st.sampled_from([0, 3]),
        "optim": st.sampled_from(
            [
                "adamw_torch", "sgd", "rmsprop", "adagrad", "adamw_compact",
                "adafactor", "schedule_free_radam",
            ]
        ),
        "average": st.sampled_from(
            [
                {}, {"ema_decay": 0.9}, {"ema_decay": 0.5, "ema_start_update": 3},
                {"ema_decay": 0.9, "ema_update_freq": 2}, {"swa_start_update": 2},
            ]
        ),
        "half": st.sampled_from(
            [
                {}, {}, {"fp16": True},
                {"fp16": True, "loss_scaler": {
                    "preset": "torch", "init_scale": 2.0**20, "growth_interval": 2}},
                {"fp16": True, "loss_scaler": {
                    "preset": "fairseq", "init_scale": 2.0**18, "scale_window": 3}},
            ]
        ),
    }
)  # fmt: skip


@settings(max_examples=draws(12, 150), deadline=None)
@given(options=RUNS, bad=st.sets(st.integers(0, 5 * UPDATES - 1), max_size=4))
def test_a_run_is_the_one_in_which_the_host_measures_first(
    tmp_path_factory: Any, options: dict[str, Any], bad: set[int]
) -> None:
    folder = tmp_path_factory.mktemp("runs")
    options |= options.pop("average") | options.pop("half")
    enqueued, notes = run(folder / "a", ctrainer.Trainer, bad, **options)
    measured, others = run(folder / "b", Measured, bad, **options)
    assert any(notes.enqueued[1:])
    assert not any(others.enqueued)
    assert_same_runs(enqueued, measured)


class Rounded(Net):
    """Its weights are bfloat16's."""

    def __init__(self) -> None:
        super().__init__()
        self.bfloat16()

    def forward(self, x: torch.Tensor, labels: Any = None) -> Any:
        return super().forward(x.bfloat16(), labels)


LARGE: dict[str, Any] = {"lr": 0.02}
OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (optim.NAdam, LARGE),
    (optim.FairseqNAG, {**LARGE, "momentum": 0.9}),
    (optim.AdamWScheduleFree, {**LARGE, "warmup_steps": 3}),
    (optim.SGDScheduleFree, {**LARGE, "momentum": 0.9}),
    (optim.Adafactor, {**LARGE, "relative_step": False, "scale_parameter": False}),
    (optim.Adafactor, {**LARGE, "beta1": 0.9, "relative_step": False}),
    (optim.LAMB, {**LARGE, "max_grad_norm": 0.0}),
    (optim.LARS, {**LARGE, "momentum": 0.9}),
    (muon, LARGE),
    (optim.AdamW, {**LARGE, "stochastic_rounding": True, "rounding_seed": 3}),
]


@pytest.mark.parametrize("number", range(len(OPTIMIZERS)))
def test_an_optimizer_that_keeps_more_than_a_count_is_enqueued(
    tmp_path: Path, number: int
) -> None:
    """Its numbers are what they would be, also behind a skipped update, and in a run
    that begins from there."""
    kind, arguments = OPTIMIZERS[number]
    options: dict[str, Any] = {
        "optimizer": (kind, arguments), "max_grad_norm": 0.05, "logging_steps": 5,
        "model": Rounded if "stochastic_rounding" in arguments else Net,
    }  # fmt: skip
    # Saving takes schedule-free weights to their average and back, with roundings.
    options |= {"save_strategy": "steps", "save_steps": 6}
    bad = {3, 21, 26, 57}  # the last update, too
    enqueued, notes = run(tmp_path / "a", ctrainer.Trainer, bad, **options)
    measured, others = run(tmp_path / "b", Measured, bad, **options)
    assert notes.enqueued.count(True) >= UPDATES - 4  # the first, logged and saved
    assert not any(others.enqueued)
    assert_same_runs(enqueued, measured)
    saved = str(tmp_path / "a" / "checkpoint-6")
    again, _ = run(tmp_path / "c", ctrainer.Trainer, bad, resume=saved, **options)
    assert_same_runs(enqueued, again)


class Buffered(Net):
    """Its average has more than parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.insert(1, torch.nn.BatchNorm1d(16))


@pytest.mark.parametrize("freq", [1, 3])
def test_averages_of_buffers_know_whether_the_update_was_made(
    tmp_path: Path, freq: int
) -> None:
    options = {"model": Buffered, "ema_decay": 0.5, "ema_update_freq": freq}
    enqueued, notes = run(tmp_path, ctrainer.Trainer, {3, 17, 33, 46}, **options)
    measured, _ = run(tmp_path, Measured, {3, 17, 33, 46}, **options)
    assert_same_runs(enqueued, measured)
    assert any(notes.enqueued) == (freq == 3)


def test_a_checkpoint_behind_a_skipped_update_resumes_to_the_bit(
    tmp_path: Path,
) -> None:
    bad = {3, 17, 33, 46}
    save: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1}
    save["ema_decay"] = 0.75
    whole, _ = run(tmp_path, ctrainer.Trainer, bad, logging_steps=4, **save)
    folder = tmp_path / "again"
    for step in (3, 7, 8):
        again, _ = run(
            folder, ctrainer.Trainer, bad, logging_steps=4, ema_decay=0.75,
            resume=str(tmp_path / f"checkpoint-{step}"),
        )  # fmt: skip
        assert_same_runs(whole, again)


class Reads(ctrainer.TrainerCallback):
    """What an optimizer says of its last update, while the trainer has not asked."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **k: Any) -> None:
        optimizer = k["optimizer"]
        name = ("state", "grad_norm", "clip_coef", "finite", "updated")[
            state.global_step % 5
        ]
        if name == "state":
            states = optimizer.state_dict()["state"].values()
            self.found.append([float(of_one["step"]) for of_one in states])
        else:
            self.found.append(str(getattr(optimizer._engine, name)))


LRS = torch.optim.lr_scheduler
SCHEDULES: dict[str, Any] = {
    "transformers'": lambda o: transformers.get_scheduler("cosine", o, 2, UPDATES),
    "halved": lambda o: LRS.StepLR(o, 2, 0.5),
    "cosine": lambda o: LRS.CosineAnnealingLR(o, UPDATES),
    "restarts": lambda o: LRS.CosineAnnealingWarmRestarts(o, 3),
    "betas, too": lambda o: LRS.OneCycleLR(o, 0.02, UPDATES),
    "sequence": lambda o: LRS.SequentialLR(
        o, [LRS.LinearLR(o, 0.1, total_iters=3), LRS.ExponentialLR(o, 0.8)], [4]
    ),
    "product": lambda o: LRS.ChainedScheduler(
        [LRS.ConstantLR(o, 0.3, 4), LRS.MultiplicativeLR(o, lambda step: 0.9)]
    ),
    "DeepSpeed's": lambda o: deepspeed_schedules.WarmupCosineLR(o, UPDATES, 0.1, 3),
    "DeepSpeed's, betas, too": lambda o: deepspeed_schedules.OneCycle(o, 0.001, 0.02),
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_skipped_update_takes_the_step_of_known_schedules_back(
    tmp_path: Path, name: str
) -> None:
    class Own(ctrainer.Trainer):
        def create_scheduler(self, num_training_steps: int, o: Any = None) -> Any:
            self.lr_scheduler = SCHEDULES[name](o or self.optimizer)
            return self.lr_scheduler

    class Derived(Own):  # a class that might keep anything
        def create_scheduler(self, num_training_steps: int, o: Any = None) -> Any:
            made = super().create_scheduler(num_training_steps, o)
            made.__class__ = type("Derived", (type(made),), {})
            return made

    bad, logged = {3, 17, 33, 5 * UPDATES - 1}, 1 if name == "halved" else 5
    runs = [
        run(tmp_path, cls, bad, max_grad_norm=0.05, logging_steps=logged)
        for cls in (Own, Derived)
    ]
    assert [any(notes.enqueued) for _, notes in runs] == [True, False]
    assert_same_runs(runs[0][0], runs[1][0])


def test_whoever_asks_for_the_result_waits_for_it(tmp_path: Path) -> None:
    found = []
    for cls in (ctrainer.Trainer, Measured):
        reads = Reads()
        run(tmp_path, cls, set(range(0, 60, 9)), callbacks=[reads], max_steps=20)
        found.append(reads.found)
    assert found[0] == found[1]
    assert {"True", "False", "nan"} <= {x for x in found[0] if isinstance(x, str)}


class Remembers(ctrainer.TrainerCallback):
    step = -1

    def on_step_begin(self, args: Any, state: Any, control: Any, **k: Any) -> None:
        self.step = state.global_step


def test_a_scale_without_room_to_fall_ends_the_run_where_it_would(
    tmp_path: Path,
) -> None:
    scaler = {"preset": "fairseq", "init_scale": 64.0, "min_loss_scale": 8.0}
    for cls in (ctrainer.Trainer, Measured):
        remembers = Remembers()
        with pytest.raises(FloatingPointError, match=r"Minimum loss scale reached"):
            run(
                tmp_path, cls, set(range(60)), fp16=True, loss_scaler=scaler,
                max_steps=10, callbacks=[remembers],
            )  # fmt: skip
        assert remembers.step == 2


class Forbids(ctrainer.TrainerCallback):
    """Lets torch raise where one of its operators waits for a GPU."""

    def on_step_end(self, args: Any, state: Any, control: Any, **k: Any) -> None:
        mode = {2: "error", 102: "default"}.get(state.global_step)
        if mode is not None:
            torch.cuda.set_sync_debug_mode(mode)


class Counted(Net):
    """Its loss is passed the number of targets."""

    accepts_loss_kwargs = True

    def forward(
        self, x: torch.Tensor, labels: Any = None, num_items_in_batch: Any = None
    ) -> dict[str, torch.Tensor]:
        y = self.layers(x).squeeze(-1)
        return {"loss": (y - labels).square().sum() / num_items_in_batch}


@pytest.mark.parametrize(
    "options",
    [
        {}, {"fp16": True}, {"model": Counted}, {"optim": "adafactor"},
        {"optim": "schedule_free_adamw"}, {"optimizer": (muon, LARGE)},
    ],
    ids=["plain", "fp16", "counts", "adafactor", "schedule-free", "muon"],
)  # fmt: skip
def test_a_hundred_updates_wait_for_nothing(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """The pass of the next update is on the device before the host asks for the last
    one's result. Neither do torch's operators wait."""
    if any_gpu.REAL:  # whose driver does not count waits
        try:
            run(
                tmp_path, ctrainer.Trainer, set(), max_steps=103,
                logging_strategy="no", callbacks=[Forbids()], **options,
            )  # fmt: skip
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return
    gc.collect()  # releasing an engine waits for its last result
    waits = []
    for cls in (ctrainer.Trainer, Measured):
        _, notes = run(
            tmp_path, cls, set(), max_steps=103, logging_strategy="no", **options
        )
        waits.append(notes.waits[-1] - notes.waits[2])
    assert waits[0] == 0
    assert waits[1] > 50  # those of measuring are counted


@pytest.mark.skipif(any_gpu.REAL, reason="NCCL needs a GPU for each rank")
def test_ranks_enqueue_the_updates_that_they_would_measure(tmp_path: Path) -> None:
    for found in ranks.told(ranks.run(tmp_path, "trainer.enqueued_ranks")):
        assert found["gpu"] == found["rank"]
        assert found["enqueued"] == {
            "plain": True, "clipped": True, "kept": True, "accumulated": True,
            "averaged": True, "fp16": True, "sharded": True, "sharded, fp16": True,
            "unused": True, "heard": False, "alone": True, "adafactor": True,
            "adafactor, sharded": True, "schedule-free, fp16": True,
            "muon, sharded": True, "lamb, sharded": False,
            "blocks": True, "blocks, adam's moments": True,
            "blocks after a warm-up": True, "diloco": True,
        }  # fmt: skip
        assert found["waits"].keys() == {
            "plain", "sharded", "blocks", "adafactor, sharded", "muon, sharded",
        }  # fmt: skip
        for name, (enqueued, measured) in found["waits"].items():
            assert enqueued <= (7 if name == "blocks" else 0)  # the ends of blocks
            assert measured >= 20  # a second one may have ended before it is asked for


@pytest.mark.skipif(any_gpu.REAL, reason="NCCL needs a GPU for each rank")
@pytest.mark.parametrize("fsdp", ["", "full_shard"])
def test_a_rank_that_dies_behind_its_update_is_named(tmp_path: Path, fsdp: str) -> None:
    limit = 20
    options: dict[str, Any] = {"ddp_timeout": limit, "logging_strategy": "no"}
    first, last = ranks.run(tmp_path, "trainer.dies_on_gpu", fsdp=fsdp, **options)
    assert (first.code, last.code) == (0, 9), first.output
    error, seconds = first.told
    assert "rank 1 (process" in error
    assert seconds < limit + 10


@pytest.mark.skipif(any_gpu.REAL, reason="NCCL needs a GPU for each rank")
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("", {}), ("full_shard", {}), ("hybrid_shard", {}),
        ("", {"measured": True}), ("full_shard", {"measured": True}),
        ("hybrid_shard", {"measured": True}),
        ("full_shard", {"from_last": 2}), ("hybrid_shard", {"from_last": 3}),
        ("hybrid_shard auto_wrap", {"from_last": 2, "slow": True}),
        ("full_shard", {"evaluates": True}),
    ],
)  # fmt: skip
def test_no_update_behind_a_failed_collective_is_saved(
    tmp_path: Path, kind: str, options: dict[str, Any]
) -> None:
    """Its weights are wrong, and the streams have continued."""
    for rank in ranks.run(
        tmp_path, "trainer.broken_behind", fsdp=kind, **options,
        fsdp_config={"min_num_params": 1, "state_dict_type": "SHARDED_STATE_DICT"},
    ):  # fmt: skip
        assert rank.code == 0, rank.output
        error, saved = rank.told
        assert "not done, within 2 seconds" in error
        assert saved == []
