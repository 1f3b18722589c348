"""eval_loss_by_token of a language model is NumPy's mean over all predicted targets,
whatever the batches; transformers' eval_loss is another number for each batch size."""

import numpy as np
import pytest
import transformers
from tiny import arguments, llama, tokens

import ctrainer

torch = pytest.importorskip("torch")
SIZES = (1, 3, 8)


def model_of():
    """With losses that differ from row to row."""
    model = llama()
    model.lm_head.weight.data *= 20.0
    return model.eval()


def by_numpy(model, rows):
    """-log softmax of each target but a row's first, in double."""
    total, count = 0.0, 0
    for row in rows:
        with torch.no_grad():
            logits = model(row["input_ids"][None]).logits[0].double().numpy()
        labels = row["labels"].numpy()[1:]
        shifted = logits[:-1] - logits[:-1].max(1, keepdims=True)
        logs = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
        targets = np.flatnonzero(labels != -100)
        total -= logs[targets, labels[targets]].sum()
        count += len(targets)
    return total / count


def evaluated(package, rows, size, **options):
    args = arguments(
        package.TrainingArguments, per_device_eval_batch_size=size, **options
    )
    trainer = package.Trainer(model_of(), args, eval_dataset=rows)
    if package is ctrainer:
        trainer.remove_callback(ctrainer.PrinterCallback)
    return trainer.evaluate()


def test_it_is_the_mean_over_targets_for_every_batch_size() -> None:
    rows = tokens(21, padded=True)
    wanted = by_numpy(model_of(), rows)
    theirs = [evaluated(transformers, rows, size)["eval_loss"] for size in SIZES]
    assert len({round(loss, 3) for loss in [*theirs, wanted]}) == len(SIZES) + 1
    for size, their_loss in zip(SIZES, theirs, strict=True):
        ours = evaluated(ctrainer, rows, size, eval_loss_by_token=True)
        # Sums in float32 of a batch's targets, at most 88 of them.
        assert ours["eval_loss_by_token"] == pytest.approx(wanted, rel=88 * 2.0**-24)
        assert ours["eval_loss"] == pytest.approx(their_loss, rel=1e-6)
