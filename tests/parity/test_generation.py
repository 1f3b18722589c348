"""Seq2SeqTrainer against transformers' on a tiny T5."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import ctrainer  # noqa: E402

OURS = (ctrainer.Seq2SeqTrainer, ctrainer.Seq2SeqTrainingArguments)
THEIRS = (transformers.Seq2SeqTrainer, transformers.Seq2SeqTrainingArguments)


def model() -> Any:
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=40,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
    )
    return transformers.T5ForConditionalGeneration(config)


def data(labels: bool = True) -> list[dict[str, Any]]:
    random = np.random.default_rng(0)
    made = []
    for n in random.integers(3, 9, 6):  # full batches: see the loss of a short one
        tokens = random.integers(2, 40, n).tolist()
        row = {"input_ids": tokens}
        made.append({**row, "labels": tokens[::-1]} if labels else row)
    return made


def pad(features: list[dict[str, Any]]) -> dict[str, Any]:
    batch = {}
    for name in features[0]:
        width = max(len(f[name]) for f in features)
        fill = -100 if name == "labels" else 0
        batch[name] = torch.tensor(
            [f[name] + [fill] * (width - len(f[name])) for f in features]
        )
    return batch


def make(which: Any, folder: Path, **options: Any) -> Any:
    trainer, arguments = which
    options.setdefault("predict_with_generate", True)
    args = arguments(
        str(folder),
        per_device_eval_batch_size=3,
        use_cpu=True,
        disable_tqdm=True,
        report_to="none",
        **options,
    )
    return trainer(model(), args, data_collator=pad, eval_dataset=data())


CALLS: list[tuple[bool, dict[str, Any], dict[str, Any]]] = [
    (True, {"predict_with_generate": False}, {}),
    (True, {"generation_max_length": 6}, {}),
    (False, {"generation_max_length": 6}, {}),
    (True, {"generation_num_beams": 2}, {"max_length": 9}),
    (False, {"generation_num_beams": 2}, {"max_length": 9}),
    (True, {}, {"max_new_tokens": 4, "num_beams": None}),
    (False, {}, {"max_new_tokens": 4}),
    (True, {"label_smoothing_factor": 0.1}, {"max_length": 5}),
    (True, {"prediction_loss_only": True}, {"max_length": 5}),
]


@pytest.mark.parametrize(("labels", "options", "call"), CALLS, ids=str)
def test_predictions_are_equal(
    labels: bool, options: dict[str, Any], call: dict[str, Any], tmp_path: Path
) -> None:
    a = make(OURS, tmp_path, **options).predict(data(labels), **call)
    b = make(THEIRS, tmp_path, **options).predict(data(labels), **call)
    for x, y in ((a.predictions, b.predictions), (a.label_ids, b.label_ids)):
        x, y = ((v[0] if isinstance(v, tuple) else v) for v in (x, y))
        assert (x is None) == (y is None)
        if y is not None:
            assert x.dtype == y.dtype
            np.testing.assert_array_equal(x, y)
    assert ("test_loss" in a.metrics) == ("test_loss" in b.metrics)
    if "test_loss" in b.metrics:
        assert a.metrics["test_loss"] == pytest.approx(b.metrics["test_loss"], rel=3e-7)


def test_every_batch_generates_as_many_tokens(tmp_path: Path) -> None:
    # transformers changes the model's generation_config in the first batch, after which
    # the default length is one token shorter.
    predictions = make(OURS, tmp_path).predict(data()).predictions
    before = transformers.GenerationConfig().to_dict()
    assert predictions.shape == (6, 21)
    assert (predictions != -100).all()
    assert transformers.GenerationConfig().to_dict() == before


def test_loss_counts_the_rows_of_a_short_batch_once(tmp_path: Path) -> None:
    # transformers counts the last batch as a full one here, as it does for streams.
    rows = data()[:4]
    one_by_one = make(OURS, tmp_path)
    losses = [one_by_one.predict([r], max_length=5).metrics["test_loss"] for r in rows]
    trainer = make(OURS, tmp_path)
    whole = trainer.predict(rows, max_length=5).metrics["test_loss"]
    first = trainer.predict(rows[:3], max_length=5).metrics["test_loss"]
    assert whole == pytest.approx((3 * first + losses[3]) / 4, rel=1e-6)


def test_evaluate_takes_options_too(tmp_path: Path) -> None:
    seen = []
    for which in (OURS, THEIRS):
        trainer = make(which, tmp_path)
        trainer.compute_metrics = lambda p: {"shape": list(p.predictions.shape)}
        seen.append(trainer.evaluate(max_new_tokens=30)["eval_shape"])
    assert seen[0] == seen[1]


def test_generation_config_of_args_replaces_the_models(tmp_path: Path) -> None:
    config = transformers.GenerationConfig(
        max_new_tokens=3, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1
    )
    a = make(OURS, tmp_path, generation_config=config).predict(data())
    b = make(THEIRS, tmp_path, generation_config=config).predict(data())
    np.testing.assert_array_equal(a.predictions, b.predictions)
    config.save_pretrained(tmp_path / "config")
    again = make(OURS, tmp_path, generation_config=str(tmp_path / "config"))
    np.testing.assert_array_equal(again.predict(data()).predictions, a.predictions)
