"""evaluate and predict against transformers.Trainer on the same model and data."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import ctrainer  # noqa: E402

SPEED = ("runtime", "per_second", "preparation_time", "epoch")


def small(**changes: Any) -> dict[str, Any]:
    return {
        "vocab_size": 50,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": 64,
        **changes,
    }


def rows(n: int, seed: int = 0) -> list[dict[str, Any]]:
    """n examples of 3 to 17 tokens."""
    random = np.random.default_rng(seed)
    lengths = random.integers(3, 18, n)
    return [{"input_ids": random.integers(1, 50, size).tolist()} for size in lengths]


def with_class(examples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**e, "labels": sum(e["input_ids"]) % 3} for e in examples]


def with_tags(examples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**e, "labels": [t % 5 for t in e["input_ids"]]} for e in examples]


def with_copy(examples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**e, "labels": list(e["input_ids"])} for e in examples]


def pad(features: list[dict[str, Any]]) -> dict[str, Any]:
    """Every list to the longest of its batch: labels with -100, tokens with 0."""
    width = max(len(f["input_ids"]) for f in features)
    batch: dict[str, Any] = {}
    for name in features[0]:
        values = [f[name] for f in features]
        if isinstance(values[0], list):
            fill = -100 if name == "labels" else 0
            values = [v + [fill] * (width - len(v)) for v in values]
        batch[name] = torch.tensor(values)
    batch["attention_mask"] = (batch["input_ids"] != 0).long()
    return batch


def classifier() -> Any:
    torch.manual_seed(1)
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(**small(num_labels=3))
    )


def tagger() -> Any:
    torch.manual_seed(2)
    return transformers.BertForTokenClassification(
        transformers.BertConfig(**small(num_labels=5))
    )


def language_model() -> Any:
    torch.manual_seed(3)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**small(num_key_value_heads=2))
    )


class Plain(torch.nn.Module):
    """A module of no library; returns a tuple or a dict."""

    def __init__(self, as_dict: bool) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embed = torch.nn.Embedding(50, 8)
        self.out = torch.nn.Linear(8, 3)
        self.as_dict = as_dict

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any = None) -> Any:
        hidden = self.embed(input_ids) * attention_mask.unsqueeze(-1)
        logits = self.out(hidden.mean(1))
        outputs = {"logits": logits, "hidden": hidden}
        if labels is not None:
            loss = torch.nn.functional.cross_entropy(logits, labels)
            outputs = {"loss": loss, **outputs}
        return outputs if self.as_dict else tuple(outputs.values())


CASES: dict[str, tuple[Callable[[], Any], Callable[..., Any]]] = {
    "classification": (classifier, with_class),
    "tagging": (tagger, with_tags),
    "language model": (language_model, with_copy),
    "tuple": (lambda: Plain(False), with_class),
    "dict": (lambda: Plain(True), with_class),
}


def summary(prediction: Any) -> dict[str, Any]:
    """Metrics that depend on every value and shape that they are given."""
    leaves: list[np.ndarray] = []

    def walk(value: Any) -> None:
        if isinstance(value, list | tuple):
            for item in value:
                walk(item)
        elif value is not None:
            leaves.append(np.asarray(value))

    for value in prediction:
        walk(value)
    return {
        "sums": [float(np.abs(leaf.astype("f8")).sum()) for leaf in leaves],
        "first": np.float64(leaves[0].ravel()[0]),
        "n": torch.tensor(len(leaves)),
    }


def make(
    library: Any,
    model: Any,
    folder: Path,
    data: Any,
    *,
    cls: Any = None,
    **options: Any,
) -> Any:
    keys = ("compute_metrics", "preprocess_logits_for_metrics", "callbacks")
    own = {k: options.pop(k) for k in keys if k in options}
    args = library.TrainingArguments(
        str(folder),
        per_device_eval_batch_size=options.pop("batch", 4),
        disable_tqdm=True,
        report_to="none",
        use_cpu=True,
        **options,
    )
    kwargs = {"data_collator": pad, "eval_dataset": data, **own}
    return (cls or library.Trainer)(model, args, **kwargs)


def both(
    case: str, folder: Path, n: int = 22, **options: Any
) -> tuple[Any, Any, list[dict[str, Any]]]:
    """ctrainer's and transformers' trainer over equal models, and the data."""
    factory, label = CASES[case]
    data = label(rows(n))
    ours = make(ctrainer, factory(), folder, data, **options)
    theirs = make(transformers, factory(), folder, data, **options)
    return ours, theirs, data


def metrics_of(metrics: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in metrics.items() if not k.endswith(SPEED)}


def assert_same(a: Any, b: Any) -> None:
    """Equal arrays, bit for bit: both ran the same kernels on the same numbers."""
    assert type(a) is type(b)
    if isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    elif isinstance(a, np.ndarray):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        np.testing.assert_array_equal(a, b)
    else:
        assert a == b


def assert_close(
    ours: dict[str, Any], theirs: dict[str, Any], rel: float = 3e-7
) -> None:
    """Equal keys and numbers; transformers takes its mean of losses in float32, or in
    float16 where these are."""
    ours, theirs = metrics_of(ours), metrics_of(theirs)
    assert set(ours) == set(theirs)
    for key, value in theirs.items():
        assert type(ours[key]) is type(value)
        assert ours[key] == pytest.approx(value, rel=rel), key


@pytest.mark.parametrize("case", CASES)
def test_predictions_and_metrics_are_equal(case: str, tmp_path: Path) -> None:
    ours, theirs, data = both(case, tmp_path, compute_metrics=summary)
    a, b = ours.predict(data), theirs.predict(data)
    assert_same(a.predictions, b.predictions)
    assert_same(a.label_ids, b.label_ids)
    assert_close(a.metrics, b.metrics)
    assert_close(ours.evaluate(), theirs.evaluate())


@pytest.mark.parametrize("case", ["classification", "tuple", "dict"])
def test_data_without_labels_gives_predictions_alone(case: str, tmp_path: Path) -> None:
    ours, theirs, _ = both(case, tmp_path, compute_metrics=summary)
    a, b = ours.predict(rows(9)), theirs.predict(rows(9))
    assert_same(a.predictions, b.predictions)
    assert a.label_ids is None
    assert_close(a.metrics, b.metrics)


OPTIONS: list[dict[str, Any]] = [
    {"eval_do_concat_batches": False},
    {"eval_accumulation_steps": 2},
    {"include_for_metrics": ["inputs", "loss"]},
    {"include_for_metrics": ["loss"], "eval_do_concat_batches": False},
    {"prediction_loss_only": True},
    {"batch": 1},
    {"batch": 64},
    {"bf16": True},
    {"bf16_full_eval": True},
    {"fp16_full_eval": True},
    {"bf16": True, "bf16_full_eval": True},
    {"dataloader_drop_last": True},
    {"label_names": ["labels", "attention_mask"]},
    {"label_smoothing_factor": 0.1},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("case", ["classification", "tagging"])
def test_every_option_does_the_same(
    case: str, options: dict[str, Any], tmp_path: Path
) -> None:
    ours, theirs, data = both(case, tmp_path, compute_metrics=summary, **options)
    rel = 2**-11 if "fp16_full_eval" in options else 3e-7
    assert_close(ours.evaluate(), theirs.evaluate(), rel)
    a, b = ours.predict(data), theirs.predict(data)
    assert_same(a.predictions, b.predictions)
    assert_same(a.label_ids, b.label_ids)
    assert_close(a.metrics, b.metrics, rel)


def test_ignored_keys_and_preprocessing_are_the_same(tmp_path: Path) -> None:
    def half(logits: Any, labels: Any) -> Any:
        assert labels.shape[0] == logits.shape[0]
        return logits[:, :2]

    ours, theirs, data = both("dict", tmp_path, preprocess_logits_for_metrics=half)
    a = ours.predict(data, ignore_keys=["hidden"])
    b = theirs.predict(data, ignore_keys=["hidden"])
    assert a.predictions.shape == (22, 2)
    assert_same(a.predictions, b.predictions)


def test_metrics_by_batch_see_every_batch_and_the_last(tmp_path: Path) -> None:
    seen: list[tuple[int, bool]] = []

    def by_batch(prediction: Any, compute_result: bool) -> dict[str, float]:
        assert isinstance(prediction.predictions, torch.Tensor)
        seen.append((len(prediction.predictions), compute_result))
        return {"rows": float(sum(n for n, _ in seen))} if compute_result else {}

    options = {"compute_metrics": by_batch, "batch_eval_metrics": True}
    ours, theirs, _ = both("classification", tmp_path, **options)
    a = ours.evaluate()
    mine = list(seen)
    seen.clear()
    b = theirs.evaluate()
    assert mine == seen == [(4, False)] * 5 + [(2, True)]
    assert_close(a, b)


def test_several_data_sets_get_a_prefix_each(tmp_path: Path) -> None:
    data = {"short": with_class(rows(5, 1)), "long": with_class(rows(9, 2))}
    a = make(ctrainer, classifier(), tmp_path, data).evaluate()
    b = make(transformers, classifier(), tmp_path, data).evaluate()
    assert "eval_short_loss" in a
    assert_close(a, b)


def test_one_of_several_data_sets_by_name(tmp_path: Path) -> None:
    data = {"short": with_class(rows(5, 1)), "long": with_class(rows(9, 2))}
    a = make(ctrainer, classifier(), tmp_path, data).evaluate("long")
    b = make(transformers, classifier(), tmp_path, data).evaluate("long")
    assert_close(a, b)


def test_columns_that_the_model_does_not_take_are_left_out(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    examples = [{**e, "text": "unused"} for e in with_class(rows(11))]
    data = datasets.Dataset.from_list(examples)
    a = make(ctrainer, classifier(), tmp_path, data, compute_metrics=summary)
    b = make(transformers, classifier(), tmp_path, data, compute_metrics=summary)
    assert_close(a.evaluate(), b.evaluate())
    assert_same(a.predict(data).predictions, b.predict(data).predictions)


def test_model_without_labels_may_return_a_loss(tmp_path: Path) -> None:
    class Contrast(Plain):
        def forward(  # type: ignore[override]
            self, input_ids: Any, attention_mask: Any, return_loss: bool = True
        ) -> Any:
            outputs = super().forward(input_ids, attention_mask)
            return {"loss": outputs["logits"].square().mean(), **outputs}

    a = make(ctrainer, Contrast(True), tmp_path, rows(10), compute_metrics=summary)
    b = make(transformers, Contrast(True), tmp_path, rows(10), compute_metrics=summary)
    assert a.can_return_loss
    assert_close(a.evaluate(), b.evaluate())


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, data: list[Any]) -> None:
        self.data = data

    def __iter__(self) -> Any:
        return iter(self.data)


def test_stream_of_unknown_length(tmp_path: Path) -> None:
    # 20 rows in batches of 4: transformers weighs a short last batch as a full one.
    stream = Stream(with_class(rows(20)))
    a = make(ctrainer, classifier(), tmp_path, stream, compute_metrics=summary)
    b = make(transformers, classifier(), tmp_path, stream, compute_metrics=summary)
    assert_close(a.evaluate(), b.evaluate())
    assert_same(a.predict(stream).predictions, b.predict(stream).predictions)


def test_evaluation_within_training_is_the_same(tmp_path: Path) -> None:
    logs = []
    for library, folder in ((ctrainer, "a"), (transformers, "b")):
        trainer = make(
            library,
            classifier(),
            tmp_path / folder,
            with_class(rows(22)),
            compute_metrics=summary,
            max_steps=4,
            eval_strategy="steps",
            eval_steps=2,
            save_strategy="no",
            optim="sgd",
            max_grad_norm=0.0,
        )
        trainer.train_dataset = with_class(rows(32, 7))
        trainer.train()
        logs.append([e for e in trainer.state.log_history if "eval_loss" in e])
    assert [e["step"] for e in logs[0]] == [2, 4]
    for a, b in zip(*logs, strict=True):
        assert a["eval_loss"] == pytest.approx(b["eval_loss"], rel=1e-5)
        assert a["eval_sums"] == pytest.approx(b["eval_sums"], rel=1e-5)


def test_best_metric_of_several_data_sets(tmp_path: Path) -> None:
    best = []
    for library, folder in ((ctrainer, "a"), (transformers, "b")):
        trainer = make(
            library,
            classifier(),
            tmp_path / folder,
            {"one": with_class(rows(8, 1)), "two": with_class(rows(8, 2))},
            max_steps=4,
            eval_strategy="steps",
            save_strategy="steps",
            eval_steps=1,
            save_steps=1,
            learning_rate=0.05,
            optim="sgd",
            load_best_model_at_end=True,
            metric_for_best_model="eval_two_loss",
        )
        trainer.train_dataset = with_class(rows(32, 7))
        trainer.train()
        best.append((trainer.state.best_metric, trainer.state.best_global_step))
    assert best[0][0] == pytest.approx(best[1][0], rel=1e-5)
    assert best[0][1] == best[1][1]
