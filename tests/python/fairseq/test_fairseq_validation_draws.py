"""A validation in the middle of an epoch changes nothing of fairseq's training, also
where rows, collators and models draw random numbers, and is the same after a resume."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import data_kinds
import numpy as np
import pytest
import torch
from data_kinds import BATCH, WIDTH, N
from draws import EXHAUSTIVE
from torch import nn

from ctrainer.adapters._torch_reading import seed_all
from ctrainer.adapters.generators import place_word
from ctrainer.fairseq import criterions, metrics, models, tasks
from ctrainer.fairseq.config import components
from ctrainer.fairseq.data import FairseqDataset
from ctrainer.fairseq.dataclass import FairseqDataclass
from ctrainer.fairseq.train import parse_args, train

# Powers of two, also as sizes of batches: multiplying by them rounds nothing.
SEED, EPOCHS, LR = 5, 2, 1 / 16
IN_EPOCH = -(-N // BATCH)  # updates
VALID_ROWS = 10
Heard = list[tuple[bool, float]]  # is it of the training, loss


class Rows(FairseqDataset):
    """Rows that draw, and whose targets depend on the epoch they are told."""

    def __init__(self, first: int, length: int, reusable: bool) -> None:
        self.first, self.length, self.epoch = first, length, 1
        self.reusable = reusable

    @property
    def can_reuse_epoch_itr_across_epochs(self) -> bool:
        return self.reusable

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> Any:
        row = data_kinds.row(self.first + int(i))
        return {**row, "labels": row["labels"] + 0.1 * self.epoch}

    def collater(self, rows: list[Any]) -> Any:
        if not rows:
            return {}
        return {**data_kinds.collate(rows), "nsentences": len(rows)}

    def num_tokens(self, i: int) -> int:
        return 1

    def num_tokens_vec(self, indices: Any) -> Any:
        return np.ones(len(indices), np.int64)

    def size(self, i: int) -> int:
        return 1


@dataclass
class Options(FairseqDataclass):
    reusable: bool = field(default=False)


class DrawnRows(tasks.FairseqTask):
    def load_dataset(self, split: str, **kwargs: Any) -> None:
        first, length = (0, N) if split == "train" else (100, VALID_ROWS)
        self.datasets[split] = Rows(first, length, self.cfg.reusable)


class DrawnNet(models.BaseFairseqModel):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 1)
        )
        generator = torch.Generator().manual_seed(1)
        for p in self.parameters():
            p.data = torch.randn(p.shape, generator=generator) / 3

    @classmethod
    def build_model(cls, cfg: Any, task: Any) -> DrawnNet:
        return cls()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


HEARD: Heard = []


@dataclass
class Factor(FairseqDataclass):
    drawn_factor: bool = field(default=False)


class DrawnSquares(criterions.FairseqCriterion):
    def __init__(self, task: Any, drawn_factor: bool) -> None:
        super().__init__(task)
        self.drawn_factor = drawn_factor

    def forward(self, model: Any, sample: Any, reduce: bool = True) -> Any:
        loss = squares(model, sample, self.drawn_factor)
        HEARD.append((model.training, loss.item()))
        n = sample["nsentences"]
        return loss, n, {"loss": loss.data, "nsentences": n, "ntokens": n}

    @classmethod
    def reduce_metrics(cls, outputs: Any) -> None:
        size = sum(o["nsentences"] for o in outputs)
        metrics.log_scalar("loss", sum(o["loss"] for o in outputs) / size, size)

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        return True


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    """For these tests alone: others list what there is."""
    models_by_name = (models.ARCH_MODEL_REGISTRY, models.ARCH_MODEL_NAME_REGISTRY)
    names: list[dict[str, Any]] = [
        *components._classes.values(), *models_by_name, models.ARCH_CONFIG_REGISTRY,
        tasks.TASK_REGISTRY, models.MODEL_REGISTRY, criterions.CRITERION_REGISTRY,
    ]  # fmt: skip
    before = [dict(registry) for registry in names]
    tasks.register_task("drawn_rows", dataclass=Options)(DrawnRows)
    models.register_model("drawn_net", dataclass=FairseqDataclass)(DrawnNet)
    criterions.register_criterion("drawn_squares", dataclass=Factor)(DrawnSquares)
    yield
    for registry, kept in zip(names, before, strict=True):
        registry.clear()
        registry.update(kept)


def squares(model: nn.Module, sample: Any, drawn_factor: bool) -> torch.Tensor:
    """drawn_factor: of the generators that fairseq does not seed for each update."""
    loss: torch.Tensor = (model(sample["x"])[:, 0] - sample["labels"]).square().sum()
    factor = np.random.rand() + random.random()
    return loss * factor if drawn_factor and model.training else loss


def run(folder: Path, *options: str, valid: str = "valid") -> tuple[bytes, Heard]:
    """Its weights at the end, and the losses that it had."""
    HEARD.clear()
    random.seed(SEED)
    text = f"""--task drawn_rows --arch drawn_net --criterion drawn_squares
        --save-dir {folder} --batch-size {BATCH} --required-batch-size-multiple 1
        --optimizer sgd --lr {LR} --lr-scheduler fixed --max-epoch {EPOCHS} --cpu
        --seed {SEED} --log-format none --valid-subset {valid}"""
    trainer = train(parse_args([*text.split(), *options]))
    return weights(trainer.get_model()), list(HEARD)


def weights(model: nn.Module) -> bytes:
    return b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())


class Expected:
    """A loop of plain torch: its losses, by update, and the weights at the end.

    interval: updates between validations, 0 for those at the ends of epochs alone.
    """

    def __init__(self, valid: str, interval: int, drawn_factor: bool = False) -> None:
        self.model, self.heard = DrawnNet(), list[Heard]()
        self.drawn_factor = drawn_factor
        np.random.seed(SEED)
        random.seed(SEED)
        optimizer = torch.optim.SGD(self.model.parameters(), LR)
        for epoch in range(1, EPOCHS + 1):
            rows = Rows(0, N, True)
            rows.epoch = epoch
            batches = cut(rows)
            rows.collater([rows[i] for i in batches[0]])  # which dummies are made of
            np.random.RandomState(SEED + epoch).shuffle(batches)
            for place, indices in enumerate(batches):
                self.update(optimizer, drawn(rows, indices, epoch, place))
                ends = place + 1 == len(batches)
                if ends or (interval and len(self.heard) % interval == 0):
                    for name in valid.split(","):
                        self.validate(name, epoch)

    def update(self, optimizer: Any, sample: Any) -> None:
        torch.manual_seed(SEED + len(self.heard))
        self.model.train()
        optimizer.zero_grad()
        loss = squares(self.model, sample, self.drawn_factor)
        loss.backward()  # type: ignore[no-untyped-call]
        for p in self.model.parameters():
            assert p.grad is not None
            p.grad *= 1 / len(sample["x"])
        optimizer.step()
        self.heard.append([(True, loss.item())])

    def validate(self, name: str, epoch: int) -> None:
        rows = Rows(0, N, True) if name == "train" else Rows(100, VALID_ROWS, True)
        rows.epoch = epoch if name == "train" else 1
        self.model.eval()
        with torch.no_grad(), generators_kept():
            for place, indices in enumerate(cut(rows)):
                sample = drawn(rows, indices, 1, place)
                loss = squares(self.model, sample, self.drawn_factor)
                self.heard[-1].append((False, loss.item()))

    def after(self, update: int) -> tuple[bytes, Heard]:
        return weights(self.model), [found for u in self.heard[update:] for found in u]


def drawn(rows: Rows, indices: Any, epoch: int, place: int) -> Any:
    """A batch as its place in the epoch draws it."""
    with generators_kept():
        seed_all(place_word(SEED, epoch, place))
        return rows.collater([rows[i] for i in indices])


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    states = np.random.get_state(), random.getstate()
    yield
    np.random.set_state(states[0])
    random.setstate(states[1])


def cut(rows: Rows) -> list[list[int]]:
    return [list(range(len(rows)))[i : i + BATCH] for i in range(0, len(rows), BATCH)]


CASES = [
    (workers, interval, valid, reusable)
    for workers in (0, 2)
    for interval in (1, 3)
    for valid in ("valid", "train", "valid,train")
    for reusable in (True, False)
]
SOME = [(0, 1, "valid,train", True), (0, 3, "train", False), (2, 3, "valid", True)]


def options_of(workers: int, interval: int, reusable: bool) -> list[str]:
    options = f"--num-workers {workers} --validate-interval-updates {interval}"
    return [*options.split(), *["--reusable"] * reusable]


@pytest.mark.parametrize(
    ("workers", "interval", "valid", "reusable"), CASES if EXHAUSTIVE else SOME
)
def test_losses_and_weights_are_those_of_plain_torch(
    tmp_path: Path, workers: int, interval: int, valid: str, reusable: bool
) -> None:
    options = options_of(workers, interval, reusable)
    expected = Expected(valid, interval, drawn_factor=True)
    found = run(tmp_path, "--no-save", "--drawn-factor", *options, valid=valid)
    assert found == expected.after(0)
    without = run(tmp_path, "--no-save", "--drawn-factor", "--disable-validation")
    assert without == (found[0], [heard for heard in found[1] if heard[0]])


@pytest.mark.parametrize(
    ("workers", "interval", "valid", "reusable"), CASES if EXHAUSTIVE else SOME
)
def test_a_run_resumed_between_validations_has_the_losses_that_follow(
    tmp_path: Path, workers: int, interval: int, valid: str, reusable: bool
) -> None:
    run(tmp_path, "--save-interval-updates", "1", "--disable-validation")
    expected = Expected(valid, interval)
    options = options_of(workers, interval, reusable)
    for update in range(1, EPOCHS * IN_EPOCH)[:: 1 if EXHAUSTIVE else 4]:
        epoch, ends = -(-update // IN_EPOCH), update % IN_EPOCH == 0
        name = f"checkpoint{epoch}.pt" if ends else f"checkpoint_{epoch}_{update}.pt"
        saved = tmp_path / name
        assert saved.exists()
        found = run(
            tmp_path / "resumed", "--restore-file", str(saved), "--no-save", *options,
            valid=valid,
        )  # fmt: skip
        assert found == expected.after(update), update
