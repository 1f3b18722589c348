"""Evaluations whose outcome must not depend on how many ranks make them."""

from __future__ import annotations

import hashlib
from collections import namedtuple
from typing import Any

import torch
from torch import nn

import ctrainer

Pair = namedtuple("Pair", "first second")


class Wide(nn.Module):
    """Outputs of many kinds: as wide as the batch, bool, int32, bfloat16, nested."""

    main_input_name = "ids"

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, ids: torch.Tensor, labels: Any = None) -> dict[str, Any]:
        x = ids * self.weight
        return {
            "loss": (x / 7).square().mean(),
            "wide": x,
            "nested": [Pair(ids > 3, ids.int()), {"half": x[:, 0].bfloat16()}],
        }


def collate(rows: list[int]) -> dict[str, torch.Tensor]:
    """Row i has i % 5 + 1 tokens; a batch is as wide as its longest row."""
    width = max(row % 5 for row in rows) + 1
    ids = [[row if j <= row % 5 else -1 for j in range(width)] for row in rows]
    return {"ids": torch.tensor(ids), "labels": torch.tensor(rows)}


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Any:
        return iter(range(self.n))


def flat(value: Any) -> list[Any]:
    """Every array of a nest, with dtype, shape and a sum over its bytes."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [type(value).__name__, *(flat(v) for v in value)]
    if value is None:
        return []
    tensor = torch.as_tensor(value)
    kind = f"{type(value).__name__} of {tensor.dtype}"
    array = tensor.float().numpy() if "bfloat16" in kind else tensor.numpy()
    digest = hashlib.sha256(array.tobytes()).hexdigest()
    return [kind, list(array.shape), digest]


class Seen:
    """A compute_metrics that tells everything it is given."""

    def __init__(self) -> None:
        self.batches: list[Any] = []

    def __call__(self, given: Any, compute_result: bool = True) -> dict[str, Any]:
        kinds = (given.predictions, given.label_ids, given.inputs, given.losses)
        self.batches.append([compute_result, *(flat(k) for k in kinds)])
        return {"batches": self.batches} if compute_result else {}


def own(metrics: dict[str, Any]) -> dict[str, Any]:
    timed = ("runtime", "per_second", "model_preparation_time")
    return {k: v for k, v in metrics.items() if not k.endswith(timed)}


class Dealt(list):
    """The batches of one rank, every world_size-th."""

    def __init__(self, rows: Any, trainer: Any) -> None:
        self.dataset = rows
        rows, args = list(rows), trainer.args
        batches = [rows[i : i + 4] for i in range(0, len(rows), 4)]
        if args.dataloader_drop_last and len(batches[-1]) < 4:
            batches.pop()
        mine = batches[args.process_index :: args.world_size]
        super().__init__(trainer.data_collator(batch) for batch in mine)


class DealingTrainer(ctrainer.Trainer):
    """One whose overrides deal out the batches."""

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        if isinstance(eval_dataset, str):
            eval_dataset = self.eval_dataset[eval_dataset]
        return Dealt(eval_dataset, self)

    get_test_dataloader = get_eval_dataloader


class Even(list):
    """As accelerate makes the ranks even: the first rows once more at the end of the
    last batch, and the true number of rows beside them."""

    def __init__(self, rows: Any, trainer: Any) -> None:
        self.dataset, self.total_dataset_length = rows, len(rows)
        args = trainer.args
        whole = 4 * args.world_size
        filled = [*rows, *(list(rows) * whole)[: -len(rows) % whole]]
        batches = [filled[i : i + 4] for i in range(0, len(filled), 4)]
        mine = batches[args.process_index :: args.world_size]
        super().__init__(trainer.data_collator(batch) for batch in mine)


def repeated(folder: str) -> list[Any]:
    """The rows that metrics and predictions have of loaders that repeat some, when this
    many are there."""
    found = []
    for n in (9, 16, 22, 3):
        seen: list[int] = []

        def count(given: Any, seen: list[int] = seen) -> dict[str, float]:
            seen.extend(given.label_ids.tolist())
            return {}

        made = trainer(
            folder, Wide(), {"remove_unused_columns": False}, data_collator=collate,
            compute_metrics=count,
        )  # fmt: skip
        output = made.evaluation_loop(Even(range(n), made), "Even")
        found.append([seen, output.num_samples, len(output.predictions[0])])
    return found


def trainer(folder: str, model: nn.Module, options: dict[str, Any], **more: Any) -> Any:
    args = ctrainer.TrainingArguments(
        folder, use_cpu=True, report_to="none", disable_tqdm=True, ddp_timeout=60,
        per_device_eval_batch_size=4, **options,
    )  # fmt: skip
    cls = more.pop("cls", ctrainer.Trainer)
    return cls(model, args, **more)


EVERYTHING = {"include_for_metrics": ["inputs", "loss"]}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "even": (range(16), EVERYTHING),
    "uneven": (range(22), EVERYTHING),
    "one batch": (range(3), EVERYTHING),
    "a row too many": (range(9), {}),
    "lists": (range(10), {"eval_do_concat_batches": False}),
    "by batch": (range(22), {"batch_eval_metrics": True, **EVERYTHING}),
    "by token": (range(22), {"eval_loss_by_token": True}),
    "accumulated": (range(22), {"eval_accumulation_steps": 2}),
    "stream": (Stream(21), {"remove_unused_columns": False}),
    "short stream": (Stream(3), EVERYTHING),
    "stream read by all": (
        Stream(21),
        {"accelerator_config": {"dispatch_batches": False}, **EVERYTHING},
    ),
    "dispatched": (
        range(22),
        {"accelerator_config": {"dispatch_batches": True}, **EVERYTHING},
    ),
    "dropped": (range(22), {"dataloader_drop_last": True}),
}


def outcomes(folder: str) -> dict[str, Any]:
    """What evaluate and predict give in each case."""
    found: dict[str, Any] = {}
    for name, (rows, options) in CASES.items():
        made = trainer(
            folder, Wide(), {"remove_unused_columns": False, **options},
            data_collator=collate, compute_metrics=Seen(),
        )  # fmt: skip
        found[name] = own(made.evaluate(rows))
        made.compute_metrics = None
        output = made.predict(rows)
        found[name + ", predicted"] = [
            flat(output.predictions), flat(output.label_ids), own(output.metrics)
        ]  # fmt: skip
    for rows in (range(22), range(3)):
        made = trainer(
            folder, Wide(), {"remove_unused_columns": False}, cls=DealingTrainer,
            data_collator=collate, compute_metrics=Seen(),
        )  # fmt: skip
        found[f"dealt {len(rows)}"] = own(made.evaluate(rows))
    made = trainer(
        folder, Wide(), {"remove_unused_columns": False}, data_collator=collate,
        eval_dataset={"a": range(7), "b": range(5)},
    )  # fmt: skip
    found["named"] = own(made.evaluate())
    return found
