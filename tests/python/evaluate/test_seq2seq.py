"""Seq2SeqTrainer against transformers', on a tiny T5."""

import inspect

import numpy as np
import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

import ctrainer  # noqa: E402
from ctrainer.seq2seq import _for_generating  # noqa: E402

LENGTH = 12


def tiny_t5() -> torch.nn.Module:
    torch.manual_seed(0)
    config = hf.T5Config(
        vocab_size=32,
        d_model=16,
        d_kv=4,
        d_ff=32,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
    )
    return hf.T5ForConditionalGeneration(config).eval()


def rows() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "input_ids": torch.randint(2, 32, (6,), generator=generator),
            "labels": torch.randint(2, 32, (5,), generator=generator),
        }
        for _ in range(8)
    ]


def trainer_of(package, folder, **given):
    args = package.Seq2SeqTrainingArguments(
        str(folder),
        use_cpu=True,
        disable_tqdm=True,
        per_device_eval_batch_size=4,
        **given,
    )
    return package.Seq2SeqTrainer(tiny_t5(), args, eval_dataset=rows())


GIVEN = {"predict_with_generate": True, "generation_max_length": LENGTH}


@pytest.mark.parametrize(
    ("given", "kwargs"),
    [
        (GIVEN, {}),
        (GIVEN, {"num_beams": 2}),
        (GIVEN, {"max_new_tokens": 3}),
        ({**GIVEN, "generation_num_beams": 2}, {}),
        ({**GIVEN, "label_smoothing_factor": 0.1}, {}),
        ({"predict_with_generate": False}, {}),
    ],
)
def test_predictions_are_transformers(given, kwargs, tmp_path) -> None:
    ours = trainer_of(ctrainer, tmp_path, **given).predict(rows(), **kwargs)
    theirs = trainer_of(hf, tmp_path, **given).predict(rows(), **kwargs)
    leaves = [_leaves(output.predictions) for output in (ours, theirs)]
    for mine, other in zip(*leaves, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5)
    np.testing.assert_array_equal(ours.label_ids, theirs.label_ids)
    # Full batches: transformers' Seq2SeqTrainer counts a last one that is not full as
    # if it were. Both take a mean of batch means, in different precision.
    assert ours.metrics["test_loss"] == pytest.approx(
        theirs.metrics["test_loss"], rel=1e-5
    )


def _leaves(tree) -> list[np.ndarray]:
    if isinstance(tree, np.ndarray):
        return [tree]
    return [leaf for branch in tree for leaf in _leaves(branch)]


def test_compute_metrics_gets_the_generated_tokens(tmp_path) -> None:
    seen = {}

    def metrics(prediction):
        seen["shape"] = prediction.predictions.shape
        return {"ones": 1.0}

    trainer = trainer_of(ctrainer, tmp_path, **GIVEN)
    trainer.model.generation_config.max_length = LENGTH
    trainer.compute_metrics = metrics
    assert trainer.evaluate()["eval_ones"] == 1.0
    assert seen["shape"] == (8, LENGTH)


def test_keywords_of_one_call_do_not_stay_for_the_next(tmp_path) -> None:
    trainer = trainer_of(ctrainer, tmp_path, **GIVEN)
    trainer.evaluate(num_beams=2, max_length=None)
    assert trainer._gen_kwargs == {"num_beams": 2, "max_length": LENGTH}
    trainer.evaluate(max_new_tokens=4)
    assert trainer._gen_kwargs == {"max_new_tokens": 4}


def test_generation_config_of_the_arguments_replaces_the_models(tmp_path) -> None:
    config = hf.GenerationConfig(max_length=7, num_beams=3)
    config.save_pretrained(tmp_path)
    for given in (config, tmp_path, tmp_path / "generation_config.json"):
        trainer = trainer_of(ctrainer, tmp_path, generation_config=given)
        assert trainer.model.generation_config is not config
        assert trainer.model.generation_config.num_beams == 3


def test_generation_config_that_cannot_be_saved_is_rejected(tmp_path) -> None:
    config = hf.GenerationConfig(do_sample=False, temperature=0.5)
    with pytest.raises(ValueError, match="generation_config cannot be saved"):
        trainer_of(ctrainer, tmp_path, generation_config=config)


def test_decoder_inputs_made_from_labels_are_not_given_to_generate() -> None:
    labels = torch.ones(2, 3)
    inputs = {"labels": labels, "decoder_input_ids": labels, "input_ids": labels}
    assert set(_for_generating(inputs)) == {"labels", "input_ids"}
    inputs["decoder_input_ids"] = torch.ones(2, 1)
    assert set(_for_generating(inputs)) == set(inputs)


def test_padding_without_a_token_is_an_error(tmp_path) -> None:
    trainer = trainer_of(ctrainer, tmp_path, **GIVEN)
    trainer.model.config.pad_token_id = None
    with pytest.raises(ValueError, match="need a pad_token_id"):
        trainer._pad_tensors_to_max_len(torch.ones(1, 2), 4)


def test_signatures_are_transformers() -> None:
    for name in ("evaluate", "predict", "prediction_step", "_pad_tensors_to_max_len"):
        ours = inspect.signature(getattr(ctrainer.Seq2SeqTrainer, name)).parameters
        theirs = inspect.signature(getattr(hf.Seq2SeqTrainer, name)).parameters
        assert [(p.name, p.default, p.kind) for p in ours.values()] == [
            (p.name, p.default, p.kind) for p in theirs.values()
        ]
