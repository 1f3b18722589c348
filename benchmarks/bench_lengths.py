"""Fine-tuning on lines of uneven length: tokens per CPU-second beside transformers.

The rows are lines of the standard library as tokens of a BPE trained on them; the model
is a small Llama. Each way trains one epoch of the same rows, with batches of about the
same number of rows, in its own order; all ways take turns, each turn with another seed,
in one process and one thread. Reports non-padding tokens per second of CPU time, as the
median of the turns, its ratio to transformers' default and to the best of transformers'
ways, and the loss on held-out lines, mean and spread over the seeds. Also orders of
10 million rows by length. Prints JSON lines.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import numpy as np
import torch
import transformers
from code_pairs import source_files, standard_library
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers.trainer_pt_utils import LengthGroupedSampler

import ctrainer
from ctrainer.adapters import torch as adapter

LONGEST, HELD_OUT = 96, 400
DEFAULT, GOAL_DEFAULT, GOAL_BEST = "transformers", 2.0, 1.3


def lines() -> list[str]:
    texts = (
        path.read_text(errors="replace") for path in source_files(standard_library())
    )
    return [
        line for text in texts for line in text.split("\n") if len(line.strip()) > 3
    ]


def rows_of(count: int, vocabulary: int) -> list[dict[str, Any]]:
    """Lines, in tokens, in an order drawn once."""
    every = lines()
    order = np.random.default_rng(0).permutation(len(every))[: count + HELD_OUT]
    chosen = [every[i] for i in order]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.train_from_iterator(
        every[::20], trainers.BpeTrainer(vocab_size=vocabulary, show_progress=False)
    )
    found = [encoded.ids[:LONGEST] for encoded in bpe.encode_batch(chosen)]
    return [{"input_ids": ids, "labels": ids} for ids in found if len(ids) > 1]


def pad(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """What transformers' padding collators make of such rows."""
    width = max(len(row["input_ids"]) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for i, row in enumerate(rows):
        tokens = torch.tensor(row["input_ids"])
        ids[i, : len(tokens)], labels[i, : len(tokens)] = tokens, tokens
        mask[i, : len(tokens)] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def model_of(options: argparse.Namespace, seed: int) -> Any:
    torch.manual_seed(seed)
    width = options.width
    config = transformers.LlamaConfig(
        vocab_size=options.vocabulary, hidden_size=width, intermediate_size=3 * width,
        num_hidden_layers=options.layers, num_attention_heads=4,
        max_position_embeddings=LONGEST * 64, tie_word_embeddings=True,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def ways(
    tokens_per_row: float, batch: int
) -> dict[str, tuple[bool, dict[str, Any], Any]]:
    """Of each way: is it ours, its arguments, its collator."""
    grouped = {"train_sampling_strategy": "group_by_length"}
    budget = {"max_tokens_per_batch": max(int(batch * tokens_per_row), LONGEST)}
    chunked, packed = {"chunked_cross_entropy": True}, {"pack_sequences": True}
    flat = transformers.DataCollatorWithFlattening()
    return {
        DEFAULT: (False, {}, pad),
        "transformers, group_by_length": (False, grouped, pad),
        "transformers, padding-free": (False, {}, flat),
        "ctrainer": (True, {}, pad),
        "ctrainer, group_by_length": (True, grouped, pad),
        "ctrainer, max_tokens_per_batch": (True, budget, pad),
        "ctrainer, max_tokens_per_batch, chunked": (True, budget | chunked, pad),
        "ctrainer, pack_sequences": (True, budget | packed, None),
        "ctrainer, pack_sequences, chunked": (True, budget | packed | chunked, None),
    }


def turn(
    way: tuple[bool, dict[str, Any], Any], options: argparse.Namespace, seed: int,
    rows: list[dict[str, Any]],
) -> tuple[float, float]:  # fmt: skip
    """Non-padding tokens per CPU-second, and the loss by token on held-out rows."""
    ours, given, collator = way
    module = ctrainer if ours else transformers
    train, held_out = rows[:-HELD_OUT], rows[-HELD_OUT:]
    with tempfile.TemporaryDirectory() as folder:
        args = module.TrainingArguments(
            folder, num_train_epochs=1, seed=seed,
            per_device_train_batch_size=options.batch, learning_rate=1e-3,
            lr_scheduler_type="constant", report_to="none",
            disable_tqdm=True, use_cpu=True, save_strategy="no", logging_steps=50,
            **given,
        )  # fmt: skip
        model = model_of(options, seed)
        trainer = module.Trainer(
            model, args, train_dataset=train, data_collator=collator
        )
        begin = time.process_time()
        trainer.train()
        seconds = time.process_time() - begin
    total = targets = 0.0
    model.eval()
    with torch.no_grad():
        for at in range(0, len(held_out), 50):
            batch = pad(held_out[at : at + 50])
            n = int((batch["labels"][:, 1:] != -100).sum())
            total, targets = total + float(model(**batch).loss) * n, targets + n
    return sum(len(row["input_ids"]) for row in train) / seconds, total / targets


def orders(rows: int) -> None:
    lengths = np.random.default_rng(0).integers(1, 512, rows).astype(np.int32)

    def cpu(sampler: Any) -> float:
        begin = time.process_time()
        assert sum(1 for _ in sampler()) == rows
        return time.process_time() - begin

    ours = cpu(lambda: adapter.length_grouped_sampler(8, lengths))
    theirs = cpu(lambda: LengthGroupedSampler(8, lengths=lengths.tolist()))
    print(json.dumps({"rows": rows, "order_s": ours, "transformers_s": theirs}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=8, help="rows")
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--order-rows", type=int, default=10_000_000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    orders(options.order_rows)
    rows = rows_of(options.rows, options.vocabulary)
    per_row = statistics.mean(len(row["input_ids"]) for row in rows)
    found: dict[str, list[tuple[float, float]]] = {}
    for seed in range(options.turns):
        for name, way in ways(per_row, options.batch).items():
            found.setdefault(name, []).append(turn(way, options, seed, rows))
    rates = {name: statistics.median(r for r, _ in of) for name, of in found.items()}
    best = max(rate for name, rate in rates.items() if name.startswith(DEFAULT))
    for name, rate in rates.items():
        losses = [loss for _, loss in found[name]]
        print(json.dumps({
            "way": name, "tokens_per_cpu_second": round(rate),
            "to_default": round(rate / rates[DEFAULT], 2),
            "to_best": round(rate / best, 2),
            "loss": round(statistics.mean(losses), 4),
            "losses_from_to": [round(min(losses), 4), round(max(losses), 4)],
        }))  # fmt: skip
    print(json.dumps({
        "goal_to_default": GOAL_DEFAULT, "goal_to_best": GOAL_BEST,
        "tokens_per_row": round(per_row, 1), "rows_per_batch": options.batch,
        "torch": torch.__version__,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
