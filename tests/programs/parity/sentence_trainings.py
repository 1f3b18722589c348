"""Trainings of sentence-transformers, PEFT, adapters and setfit on our engine and on
transformers': how far apart are what they log and the trained weights?

    python -m programs.parity.sentence_trainings [--ranks N] [--ours ARGUMENTS] [NAME]

With N ranks each engine is started as torchrun would start it, and what the first rank
finds is compared. ARGUMENTS, a dict in JSON, are ours alone: {"fsdp": "full_shard"}
compares with whole models. Each is run whole, from its checkpoint in the middle, and in
a trainer that fails, resumes and trains from the start again. A NAME is one of RUNS, or
the beginning of some; several may be given, and without one, all are run. Prints a line
for each, and ends with 1 where one of ours fails, differs or enters the loop of
transformers.
"""

import argparse
import contextlib
import functools
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import traceback
import warnings

from ranks import free_port, torchrun

RANK, RANKS = (int(os.environ.get(n, m)) for n, m in (("RANK", 0), ("WORLD_SIZE", 1)))
BOUND = 1e-4
BOUNDS = {"sentence_bf16": 1e-2}  # a last bit of a weight is many of a bfloat16
WAYS = ("plain", "resumed", "again")
STEPS = 6  # saved and evaluated after every second one
WORDS = "red green blue fast slow cat dog bird fish tree house river cloud".split()
# Ends of the names of what is measured of time.
MEASURED = ("runtime", "per_second", "_time", "total_flos")

RUNS = {}


def run(function):
    """Register a function of a folder that makes a trainer."""
    RUNS[function.__name__] = function
    return function


# ---- data and models


def sentence(i):
    draw = random.Random(i)
    return " ".join(draw.choices(WORDS, k=draw.randint(3, 12)))


def column(first, n=36):
    return [sentence(first + i) for i in range(n)]


def rows(kind, n=36):
    from datasets import Dataset

    draw = random.Random(1)
    columns = {"anchor": column(0, n), "positive": column(100, n)}
    numbers = {
        "scored": lambda: draw.random(),
        "binary": lambda: draw.randint(0, 1),
        "classes": lambda: draw.randint(0, 2),
        "margins": lambda: draw.random() - 0.5,
        "vectors": lambda: [draw.random() for _ in range(16)],
        "single": lambda: draw.randint(0, 3),
    }
    if kind in ("triplets", "margins"):
        columns["negative"] = column(200, n)
    if kind == "lists":
        columns = {
            "query": column(0, n), "docs": [column(50 * i, 3) for i in range(n)],
            "labels": [[1.0, 0.0, 0.0]] * n,
        }  # fmt: skip
    if kind in ("single", "vectors", "alone"):
        columns = {"text": column(0, n)}
    if kind in numbers:
        columns["label"] = [numbers[kind]() for _ in range(n)]
    return Dataset.from_dict(columns)


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {word: i for i, word in enumerate([*special, *WORDS, ":", "query"])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]",
        cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]",
        model_max_length=32,
    )  # fmt: skip


def bert(folder, cls="BertModel", **options):
    """A folder with a small model of this class, of the same values each time."""
    import torch
    import transformers
    from safetensors.torch import save_model

    words = tokenizer()
    config = transformers.BertConfig(
        vocab_size=len(words), hidden_size=16, num_hidden_layers=2,
        num_attention_heads=2, intermediate_size=32, max_position_embeddings=40,
        pad_token_id=0, initializer_range=0.2, **options,
    )  # fmt: skip
    torch.manual_seed(0)
    place = f"{folder}-model{RANK}"
    os.makedirs(place, exist_ok=True)
    config.architectures = [cls]
    config.save_pretrained(place)  # a model's writes on the first rank alone
    made = getattr(transformers, cls)(config)
    save_model(made, f"{place}/model.safetensors", {"format": "pt"})
    words.save_pretrained(place)
    torch.manual_seed(1)
    return place


def options(folder, **own):
    shared = dict(
        output_dir=folder, max_steps=STEPS, logging_steps=1, save_steps=2, seed=3,
        per_device_train_batch_size=4 // RANKS, use_cpu=True, disable_tqdm=True,
        per_device_eval_batch_size=4 // RANKS, learning_rate=1e-2, report_to=[],
        adam_epsilon=1e-4,  # a gradient that is zero but for rounding moves nothing
    )  # fmt: skip
    return shared | own | json.loads(os.environ.get("ARGUMENTS_OF_OURS", "{}"))


EVALUATED = dict(eval_strategy="steps", eval_steps=2)


# ---- sentence-transformers


def sentences(
    folder, loss, kind="pairs", model=None, data=None, evaluator=None,
    evaluated=True, callbacks=None, model_init=False, **own,
):  # fmt: skip
    """A SentenceTransformerTrainer; loss(losses, model)."""
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.sentence_transformer import losses

    def make():
        return (model or SentenceTransformer)(bert(folder))

    made = make()
    train = rows(kind) if data is None else data
    if evaluated or evaluator:
        own = EVALUATED | own
    return SentenceTransformerTrainer(
        model=None if model_init else made, model_init=make if model_init else None,
        args=SentenceTransformerTrainingArguments(**options(folder, **own)),
        train_dataset=train, eval_dataset=first_rows(train) if evaluated else None,
        loss=(lambda model: loss(losses, model)) if model_init else loss(losses, made),
        evaluator=evaluator and evaluator(), callbacks=callbacks,
    )  # fmt: skip


def first_rows(data, n=10):
    if isinstance(data, dict):
        return {name: first_rows(one, n) for name, one in data.items()}
    return data.take(n) if not hasattr(data, "select") else data.select(range(n))


def ranking(losses, model):
    return losses.MultipleNegativesRankingLoss(model)


def similarity():
    from sentence_transformers.sentence_transformer import evaluation

    data = rows("scored", 12)
    return evaluation.EmbeddingSimilarityEvaluator(
        data["anchor"], data["positive"], data["label"], name="sts"
    )


def triplet_accuracy():
    from sentence_transformers.sentence_transformer import evaluation

    data = rows("triplets", 12)
    return evaluation.TripletEvaluator(
        data["anchor"], data["positive"], data["negative"], name="triplets"
    )


SENTENCE_LOSSES = {
    "ranking": (ranking, "pairs"),
    "ranking_triplets": (ranking, "triplets"),
    "cached_ranking": (
        lambda of, m: of.CachedMultipleNegativesRankingLoss(m, mini_batch_size=2),
        "pairs",
    ),
    "symmetric": (lambda of, m: of.MultipleNegativesSymmetricRankingLoss(m), "pairs"),
    "guided": (lambda of, m: of.GISTEmbedLoss(m, guide=m), "pairs"),
    "cosent": (lambda of, m: of.CoSENTLoss(m), "scored"),
    "angle": (lambda of, m: of.AnglELoss(m), "scored"),
    "cosine": (lambda of, m: of.CosineSimilarityLoss(m), "scored"),
    "triplet": (lambda of, m: of.TripletLoss(m, triplet_margin=1), "triplets"),
    "contrastive": (lambda of, m: of.ContrastiveLoss(m), "binary"),
    "online_contrastive": (lambda of, m: of.OnlineContrastiveLoss(m), "binary"),
    "softmax": (lambda of, m: of.SoftmaxLoss(m, 16, num_labels=3), "classes"),
    "margin": (lambda of, m: of.MarginMSELoss(m), "margins"),
    "vectors": (lambda of, m: of.MSELoss(m), "vectors"),
    "matryoshka": (
        lambda of, m: of.MatryoshkaLoss(m, ranking(of, m), [16, 8]),
        "pairs",
    ),
    "layers": (lambda of, m: of.AdaptiveLayerLoss(m, ranking(of, m)), "pairs"),
    "components": (lambda of, m: of.GlobalOrthogonalRegularizationLoss(m), "pairs"),
}
for _name, (_loss, _kind) in SENTENCE_LOSSES.items():
    RUNS[f"sentence_{_name}"] = lambda folder, loss=_loss, kind=_kind: sentences(
        folder, loss, kind
    )


@run
def sentence_denoising(folder):
    return sentences(
        folder,
        lambda of, m: of.DenoisingAutoEncoderLoss(
            m, decoder_name_or_path=f"{folder}-model", tie_encoder_decoder=False
        ),
        "pairs",
    )


@run
def sentence_batch_triplets(folder):
    return sentences(
        folder, lambda of, m: of.BatchAllTripletLoss(m), "single",
        batch_sampler="group_by_label",
    )  # fmt: skip


def two(kinds=("pairs", "scored")):
    return {kind: rows(kind, 20) for kind in kinds}


def loss_of_each(losses, model):
    return {"pairs": ranking(losses, model), "scored": losses.CoSENTLoss(model)}


@run
def sentence_datasets(folder):
    return sentences(folder, loss_of_each, data=two())


@run
def sentence_datasets_round_robin(folder):
    return sentences(
        folder, loss_of_each, data=two(), multi_dataset_batch_sampler="round_robin",
        gradient_accumulation_steps=2, evaluator=similarity,
    )  # fmt: skip


@run
def sentence_datasets_best(folder):
    return sentences(
        folder, loss_of_each, data=two(), evaluator=similarity,
        load_best_model_at_end=True, greater_is_better=True,
        metric_for_best_model="eval_sts_spearman_cosine",
    )  # fmt: skip


@run
def sentence_one_loss_of_datasets(folder):
    return sentences(folder, ranking, data=two(("pairs", "triplets")))


@run
def sentence_evaluator_alone(folder):
    return sentences(folder, ranking, evaluator=similarity, evaluated=False)


@run
def sentence_evaluator_alone_best(folder):
    return sentences(
        folder, ranking, evaluator=lambda: [similarity(), triplet_accuracy()],
        evaluated=False, load_best_model_at_end=True, greater_is_better=True,
        metric_for_best_model="eval_sts_pearson_cosine", eval_on_start=True,
    )  # fmt: skip


@run
def sentence_evaluator(folder):
    return sentences(
        folder, ranking, evaluator=similarity, load_best_model_at_end=True,
        metric_for_best_model="sts_spearman_cosine", save_total_limit=3,
    )  # fmt: skip


@run
def sentence_evaluator_plateau(folder):
    return sentences(
        folder, ranking, evaluator=similarity, evaluated=False,
        lr_scheduler_type="reduce_lr_on_plateau", greater_is_better=True,
        metric_for_best_model="eval_sts_spearman_cosine",
        lr_scheduler_kwargs={"mode": "max", "patience": 0},
    )  # fmt: skip


@run
def sentence_best_loss_early_stop(folder):
    from transformers import EarlyStoppingCallback

    return sentences(
        folder, ranking, load_best_model_at_end=True,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=1)],
    )  # fmt: skip


@run
def sentence_accumulation(folder):
    return sentences(folder, ranking, gradient_accumulation_steps=2)


@run
def sentence_epochs(folder):
    return sentences(
        folder, ranking, max_steps=-1, num_train_epochs=2,
        per_device_train_batch_size=8, batch_sampler="no_duplicates",
        warmup_steps=0.2, lr_scheduler_type="cosine",
    )  # fmt: skip


@run
def sentence_drop_last(folder):
    return sentences(
        folder, ranking, dataloader_drop_last=True, per_device_train_batch_size=7,
        max_steps=8, per_device_eval_batch_size=5,
    )  # fmt: skip


@run
def sentence_workers(folder):
    return sentences(folder, ranking, dataloader_num_workers=1)


@run
def sentence_prompts(folder):
    return sentences(folder, ranking, prompts={"anchor": "query: ", "positive": "red "})


@run
def sentence_prompts_of_datasets(folder):
    prompts = {"pairs": {"anchor": "query: "}, "scored": {"positive": "red "}}
    return sentences(folder, loss_of_each, data=two(), prompts=prompts)


@run
def sentence_learning_rates(folder):
    return sentences(
        folder, ranking, learning_rate_mapping={"word_embeddings": 1e-3, "bias": 0.02},
        weight_decay=0.1,
    )  # fmt: skip


@run
def sentence_router(folder):
    def routed(place):
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer.modules import (
            Pooling,
            Router,
            Transformer,
        )

        def part():
            module = Transformer(place)
            return [module, Pooling(module.get_embedding_dimension())]

        return SentenceTransformer(modules=[Router.for_query_document(part(), part())])

    return sentences(
        folder, ranking, model=routed, learning_rate_mapping={"document": 1e-3},
        router_mapping={"anchor": "query", "positive": "document"},
    )  # fmt: skip


@run
def sentence_model_init(folder):
    return sentences(folder, ranking, model_init=True)


@run
def sentence_stream(folder):
    return sentences(folder, ranking, data=rows("pairs").to_iterable_dataset())


@run
def sentence_bf16(folder):
    return sentences(folder, ranking, bf16=True)


@run
def sentence_gradient_checkpointing(folder):
    return sentences(folder, ranking, gradient_checkpointing=True)


@run
def sentence_lora(folder):
    def adapted(place):
        from peft import LoraConfig, TaskType
        from sentence_transformers import SentenceTransformer

        model = SentenceTransformer(place)
        model.add_adapter(
            LoraConfig(task_type=TaskType.FEATURE_EXTRACTION, r=2, lora_dropout=0.1)
        )
        return model

    return sentences(
        folder, ranking, model=adapted, evaluator=similarity,
        load_best_model_at_end=True,
    )  # fmt: skip


# ---- cross encoders


def crossed(folder, loss, kind, labels=1, evaluator=None, **own):
    """A CrossEncoderTrainer; loss(losses, model)."""
    from sentence_transformers.cross_encoder import (
        CrossEncoder,
        CrossEncoderTrainer,
        CrossEncoderTrainingArguments,
        losses,
    )

    place = bert(folder, "BertForSequenceClassification", num_labels=labels)
    model = CrossEncoder(place, num_labels=labels)
    train = rows(kind)
    has_rows = own.pop("evaluated", True)
    return CrossEncoderTrainer(
        model=model, train_dataset=train, loss=loss(losses, model),
        eval_dataset=first_rows(train) if has_rows else None, evaluator=evaluator,
        args=CrossEncoderTrainingArguments(**options(folder, **EVALUATED | own)),
    )  # fmt: skip


CROSS_LOSSES = {
    "binary": (lambda of, m: of.BinaryCrossEntropyLoss(m), "binary"),
    "entropy": (lambda of, m: of.CrossEntropyLoss(m), "classes"),
    "ranking": (lambda of, m: of.MultipleNegativesRankingLoss(m), "pairs"),
    "cached_ranking": (
        lambda of, m: of.CachedMultipleNegativesRankingLoss(m, mini_batch_size=2),
        "triplets",
    ),
    "squares": (lambda of, m: of.MSELoss(m), "scored"),
    "margin": (lambda of, m: of.MarginMSELoss(m), "margins"),
    "lambda": (lambda of, m: of.LambdaLoss(m), "lists"),
    "list_net": (lambda of, m: of.ListNetLoss(m), "lists"),
    "rank_net": (lambda of, m: of.RankNetLoss(m), "lists"),
    "list_mle": (lambda of, m: of.PListMLELoss(m), "lists"),
}
for _name, (_loss, _kind) in CROSS_LOSSES.items():
    RUNS[f"cross_{_name}"] = lambda folder, loss=_loss, kind=_kind: crossed(
        folder, loss, kind, labels=3 if kind == "classes" else 1
    )


def cross_correlation():
    from sentence_transformers.cross_encoder import evaluation

    data = rows("scored", 12)
    pairs = list(zip(data["anchor"], data["positive"], strict=True))
    return evaluation.CrossEncoderCorrelationEvaluator(pairs, data["label"], name="sts")


@run
def cross_evaluator_alone(folder):
    return crossed(
        folder, CROSS_LOSSES["binary"][0], "binary", evaluator=cross_correlation(),
        evaluated=False, load_best_model_at_end=True, gradient_accumulation_steps=2,
        metric_for_best_model="eval_sts_pearson", greater_is_better=True,
    )  # fmt: skip


@run
def cross_evaluator(folder):
    return crossed(
        folder, CROSS_LOSSES["squares"][0], "scored", evaluator=cross_correlation(),
        load_best_model_at_end=True, prompts="query: ",
        learning_rate_mapping={"classifier": 1e-3},
    )  # fmt: skip


# ---- sparse encoders


def sparse(folder, loss, kind, evaluator=None, csr=False, **own):
    """A SparseEncoderTrainer; loss(losses, model)."""
    from sentence_transformers.sparse_encoder import (
        SparseEncoder,
        SparseEncoderTrainer,
        SparseEncoderTrainingArguments,
        losses,
    )

    place = bert(folder, "BertModel" if csr else "BertForMaskedLM")
    model = compressed(place) if csr else SparseEncoder(place)
    train = rows(kind)
    has_rows = own.pop("evaluated", True)
    return SparseEncoderTrainer(
        model=model, train_dataset=train, loss=loss(losses, model),
        eval_dataset=first_rows(train) if has_rows else None, evaluator=evaluator,
        args=SparseEncoderTrainingArguments(**options(folder, **EVALUATED | own)),
    )  # fmt: skip


def compressed(place):
    from sentence_transformers.sentence_transformer.modules import Pooling
    from sentence_transformers.sparse_encoder import SparseEncoder
    from sentence_transformers.sparse_encoder.modules import (
        SparseAutoEncoder,
        Transformer,
    )

    parts = [Transformer(place), Pooling(16)]
    return SparseEncoder(modules=[*parts, SparseAutoEncoder(16, 64, k=8, k_aux=16)])


def splade(of, model, loss, cls="SpladeLoss", **own):
    weights = {"document_regularizer_weight": 0.01, "query_regularizer_weight": 0.02}
    return getattr(of, cls)(model, loss, **weights | own)


SPARSE_LOSSES = {
    "splade": (
        lambda of, m: splade(of, m, of.SparseMultipleNegativesRankingLoss(m)),
        "pairs",
    ),
    "splade_triplets": (
        lambda of, m: splade(of, m, of.SparseTripletLoss(m, triplet_margin=1)),
        "triplets",
    ),
    "splade_margin": (
        lambda of, m: splade(of, m, of.SparseMarginMSELoss(m)), "margins",
    ),
    "cached_splade": (
        lambda of, m: splade(
            of, m, of.SparseMultipleNegativesRankingLoss(m), "CachedSpladeLoss",
            mini_batch_size=2,
        ),
        "pairs",
    ),
    "splade_cosent": (lambda of, m: splade(of, m, of.SparseCoSENTLoss(m)), "scored"),
    "csr": (lambda of, m: of.CSRLoss(m), "pairs"),
}  # fmt: skip
for _name, (_loss, _kind) in SPARSE_LOSSES.items():
    RUNS[f"sparse_{_name}"] = lambda folder, loss=_loss, kind=_kind, name=_name: sparse(
        folder, loss, kind, csr=name == "csr"
    )


def sparse_similarity():
    from sentence_transformers.sparse_encoder import evaluation

    data = rows("scored", 12)
    return evaluation.SparseEmbeddingSimilarityEvaluator(
        data["anchor"], data["positive"], data["label"], name="sts"
    )


@run
def sparse_evaluator_alone(folder):
    return sparse(
        folder, SPARSE_LOSSES["splade"][0], "pairs", evaluator=sparse_similarity(),
        evaluated=False, gradient_accumulation_steps=2, load_best_model_at_end=True,
        metric_for_best_model="eval_sts_spearman_dot", greater_is_better=True,
    )  # fmt: skip


@run
def sparse_evaluator(folder):
    return sparse(
        folder, SPARSE_LOSSES["splade"][0], "pairs", evaluator=sparse_similarity(),
        load_best_model_at_end=True, learning_rate_mapping={"cls": 1e-3},
    )  # fmt: skip


# ---- encoders of many vectors


@run
def vectors_ranking(folder):
    from sentence_transformers.multi_vector_encoder import (
        MultiVectorEncoder,
        MultiVectorEncoderTrainer,
        MultiVectorEncoderTrainingArguments,
        losses,
    )

    model, train = MultiVectorEncoder(bert(folder)), rows("pairs")
    return MultiVectorEncoderTrainer(
        model=model, train_dataset=train, eval_dataset=first_rows(train),
        loss=losses.MultiVectorMultipleNegativesRankingLoss(model),
        args=MultiVectorEncoderTrainingArguments(
            # Slow, since a token that is nearly the nearest jumps to be that.
            **options(folder, learning_rate=1e-3, **EVALUATED)
        ),
    )  # fmt: skip


# ---- PEFT and setfit


def lora(folder, **own):
    """A plain Trainer of a causal model with LoRA."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import (
        DataCollatorForLanguageModeling,
        LlamaConfig,
        LlamaForCausalLM,
        Trainer,
        TrainingArguments,
    )

    words = tokenizer()
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(words), hidden_size=16, intermediate_size=32,
            num_hidden_layers=2, num_attention_heads=2, pad_token_id=0,
        )
    )  # fmt: skip
    peft = own.pop("peft", {})
    model = get_peft_model(
        model, LoraConfig(task_type="CAUSAL_LM", r=2, lora_dropout=0.1, **peft)
    )
    train = rows("alone").map(lambda row: words(row["text"]), remove_columns="text")
    own = EVALUATED | own
    return Trainer(
        model=model, args=TrainingArguments(**options(folder, **own)),
        train_dataset=train, eval_dataset=first_rows(train), processing_class=words,
        data_collator=DataCollatorForLanguageModeling(words, mlm=False),
    )  # fmt: skip


@run
def lora_causal(folder):
    return lora(folder)


@run
def lora_causal_best(folder):
    return lora(
        folder, load_best_model_at_end=True, gradient_accumulation_steps=2,
        gradient_checkpointing=True, peft={"modules_to_save": ["lm_head"]},
    )  # fmt: skip


def classified(folder, peft, **own):
    """A plain Trainer of a classifier with an adapter of PEFT, and metrics."""
    import peft as package
    from transformers import (
        BertForSequenceClassification,
        Trainer,
        TrainingArguments,
    )

    words = tokenizer()
    place = bert(folder, "BertForSequenceClassification", num_labels=4)
    model = BertForSequenceClassification.from_pretrained(place)
    kind, settings = peft
    config = getattr(package, kind)(task_type="SEQ_CLS", **settings)
    model = package.get_peft_model(model, config)
    train = rows("single").map(lambda row: words(row["text"]), remove_columns="text")
    return Trainer(
        model=model, args=TrainingArguments(**options(folder, **EVALUATED | own)),
        train_dataset=train, eval_dataset=first_rows(train), processing_class=words,
        compute_metrics=accuracy,
    )  # fmt: skip


def accuracy(found):
    predicted = found.predictions.argmax(-1)
    return {
        "accuracy": float((predicted == found.label_ids).mean()),
        "largest": float(found.predictions.max()),
    }


ADAPTERS = {
    "lora": ("LoraConfig", {"r": 2, "lora_dropout": 0.1}),
    "dora": ("LoraConfig", {"r": 2, "use_dora": True}),
    "ia3": ("IA3Config", {}),
    "prompt": ("PromptTuningConfig", {"num_virtual_tokens": 3}),
    "prompt_encoder": (
        "PromptEncoderConfig",
        {"num_virtual_tokens": 3, "encoder_hidden_size": 8},
    ),
    "prefix": ("PrefixTuningConfig", {"num_virtual_tokens": 3}),
}
for _name, _peft in ADAPTERS.items():
    RUNS[f"peft_{_name}"] = lambda folder, peft=_peft: classified(
        folder, peft, load_best_model_at_end=True, metric_for_best_model="accuracy"
    )


def bottlenecked(folder, kind, settings, made, seq2seq=False, **own):
    """An AdapterTrainer of adapters', with an adapter of this kind of configuration;
    made: a model's class, and what saves one for a folder and the class."""
    import adapters
    import transformers
    from adapters import AdapterTrainer, Seq2SeqAdapterTrainer

    name, saved_model = made
    model = getattr(transformers, name).from_pretrained(saved_model(folder, name))
    adapters.init(model)
    if seq2seq:  # adapters' forward() of T5 declares any keyword; T5's does not
        model.accepts_loss_kwargs = False
    model.add_adapter("task", config=getattr(adapters, kind)(**settings))
    model.train_adapter("task")
    classifies, words, cut = name == "BertForSequenceClassification", tokenizer(), {}
    if not classifies:
        # As many targets in every row, and evaluations of whole batches: transformers
        # weighs others wrongly. 4.57 also counts a target in the first place, which
        # GPT-2 does not predict.
        cut = dict(truncation=True, max_length=5)
    train = rows("single").map(lambda row: words(row["text"], **cut))
    train = train.remove_columns("text")
    collate = transformers.DataCollatorWithPadding(words)
    if not classifies:
        train = train.map(lambda row: {"labels": [-100, *row["input_ids"][1:]]})
        train = train.remove_columns("label")
        collate = transformers.DataCollatorForSeq2Seq(words, model)
    cls, arguments = AdapterTrainer, transformers.TrainingArguments
    if seq2seq:
        cls, arguments = Seq2SeqAdapterTrainer, transformers.Seq2SeqTrainingArguments
    return cls(
        model=model, args=arguments(**options(folder, **EVALUATED | own)),
        train_dataset=train, eval_dataset=first_rows(train, 8), processing_class=words,
        data_collator=collate,
    )  # fmt: skip


def saved(folder, cls, kind, **settings):
    """A folder with a small model of this class and kind of configuration."""
    import torch
    import transformers

    ends = dict(pad_token_id=0, eos_token_id=3, bos_token_id=2)
    config = getattr(transformers, kind)(vocab_size=len(tokenizer()), **ends | settings)
    torch.manual_seed(0)
    getattr(transformers, cls)(config).save_pretrained(f"{folder}-model")
    torch.manual_seed(1)
    return f"{folder}-model"


def gpt2(folder, cls):
    sizes = dict(n_embd=16, n_layer=2, n_head=2, n_positions=40)
    return saved(folder, cls, "GPT2Config", initializer_range=0.2, **sizes)


def t5(folder, cls):
    sizes = dict(d_model=16, d_ff=32, d_kv=8, num_layers=2, num_heads=2)
    return saved(folder, cls, "T5Config", decoder_start_token_id=0, **sizes)


MODELS = {
    "bert": ("BertForSequenceClassification", functools.partial(bert, num_labels=4)),
    "gpt2": ("GPT2LMHeadModel", gpt2),
    "t5": ("T5ForConditionalGeneration", t5),
}
BOTTLENECKS = {
    "bottleneck": ("SeqBnConfig", {"reduction_factor": 4}),
    "lora": ("LoRAConfig", {"r": 2, "dropout": 0.1}),
}
for _model in MODELS:
    for _name in BOTTLENECKS:
        for _ending, _own in {
            "": {"load_best_model_at_end": True},
            "_accumulation": {"gradient_accumulation_steps": 2},
        }.items():
            RUNS[f"adapters_{_model}_{_name}{_ending}"] = functools.partial(
                bottlenecked, kind=BOTTLENECKS[_name][0],
                settings=BOTTLENECKS[_name][1], made=MODELS[_model],
                seq2seq=_model == "t5", **_own,
            )  # fmt: skip


def setfit(folder, differentiable, **own):
    """setfit's Trainer; its train() takes a checkpoint here."""
    from sentence_transformers import SentenceTransformer
    from setfit import SetFitHead, SetFitModel, Trainer, TrainingArguments
    from sklearn.linear_model import LogisticRegression

    body = SentenceTransformer(bert(folder))
    head = SetFitHead(16, 4) if differentiable else LogisticRegression()
    model, data = SetFitModel(body, head), rows("single", 16)
    trainer = Trainer(
        model=model, train_dataset=data, eval_dataset=first_rows(data), metric=hits,
        args=TrainingArguments(
            output_dir=folder, batch_size=4, max_steps=STEPS, logging_steps=1,
            save_steps=2, eval_strategy="steps", eval_steps=2, report_to="none",
            num_epochs=1, save_total_limit=None, seed=3, **own,
        ),
    )  # fmt: skip
    inner = trainer.st_trainer

    def train(resume_from_checkpoint=None):
        whole = type(inner).train
        inner.train = functools.partial(whole, inner, resume_from_checkpoint)
        trainer.train()
        inner.state.log_history.append(trainer.evaluate(data))

    return inner, train


def hits(predicted, labels):
    return {"hits": sum(map(int.__eq__, map(int, predicted), map(int, labels)))}


@run
def setfit_regression(folder):
    return setfit(folder, False)


@run
def setfit_head(folder):
    return setfit(folder, True, load_best_model_at_end=True)


# ---- one run, and all of them


class Events:
    """The names of the events that a callback sees, each with its step."""

    def __init__(self):
        self.seen = []

    def __getattr__(self, name):
        if not name.startswith("on_"):
            raise AttributeError(name)
        return lambda args, state, control, **rest: self.seen.append(
            f"{name[3:]} {state.global_step}"
        )


def observed(engine, make, folder, checkpoint=None, again=False):
    """What a training logs, and what it leaves behind; with again of one that fails,
    resumes in the same trainer, and trains from the start once more."""
    import torch

    made = make(folder)
    trainer, train = made if isinstance(made, tuple) else (made, made.train)
    events = Events()
    trainer.add_callback(events)
    if RANKS > 1 and engine == "theirs":  # torch cannot restore to its "cpu:0"
        vars(trainer.args)["_setup_devices"] = torch.device("cpu")
    history = []
    if again:
        from fails_once import FailsOnce

        fails = os.environ["FAILS"] == "1"
        trainer.add_callback(FailsOnce(3 if fails else -1))
        for at in (None, f"{folder}/checkpoint-2"):
            with contextlib.suppress(ArithmeticError):
                train(resume_from_checkpoint=at)
                assert at or not fails, "the callback's error was lost"
            history += trainer.state.log_history
    train(resume_from_checkpoint=checkpoint)
    logs = [
        {name: value for name, value in log.items() if not name.endswith(MEASURED)}
        for log in history + trainer.state.log_history
    ]
    model = trainer.model
    weights = getattr(model, "full_state_dict", model.state_dict)()
    if RANKS > 1:
        torch.distributed.barrier()
    saved = {
        name: sorted(os.listdir(f"{folder}/{name}"))
        for name in sorted(os.listdir(folder))
        if name.startswith("checkpoint-")
    }
    best = os.path.basename(trainer.state.best_model_checkpoint or "")
    return {
        "logs": logs, "events": events.seen, "files": saved, "best": best,
        "weights": {n: w.double().abs().sum().item() for n, w in weights.items()},
    }  # fmt: skip


def serve(engine, folder, names):
    """Run these on one engine; write results.json."""
    warnings.filterwarnings("ignore")
    from transformers.trainer import Trainer as Original

    entered, theirs = [], Original._inner_training_loop

    def counted(*args, **kwargs):
        entered.append(1)
        return theirs(*args, **kwargs)

    Original._inner_training_loop = counted
    if engine == "ours":
        import ctrainer

        ctrainer.patch_transformers()
    import datasets
    import torch

    datasets.disable_progress_bars()
    torch.set_num_threads(1)
    results = {}
    for name in names:
        place, result = f"{folder}/{name}", {}
        for way in WAYS:
            entered.clear()
            middle = f"{place}/checkpoint-4" if way == "resumed" else None
            try:
                if middle and RANK == 0:
                    keep_only(place, middle)
                again = way == "again"
                result[way] = observed(engine, RUNS[name], place, middle, again)
            except Exception:
                result[way] = {"error": traceback.format_exc()}
            result[way]["entered"] = len(entered)
        results[name] = result
        if RANK == 0:
            shutil.rmtree(place, ignore_errors=True)
    with open(f"{folder}/results{RANK or ''}.json", "w") as file:
        json.dump(results, file)


def keep_only(place, middle):
    """Leave the run as it was when it had saved the checkpoint in the middle."""
    for name in os.listdir(place):
        if name.startswith("checkpoint-") and int(name[11:]) > int(middle[-1]):
            shutil.rmtree(f"{place}/{name}")


def distance(a, b, place=""):
    """The largest difference of numbers in two trees, relative where they are above 1,
    infinite where the trees differ in anything else; and where it is."""
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        parts = [distance(a[key], b[key], f"{place}.{key}") for key in a]
        return max(parts, default=(0.0, place))
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        pairs = enumerate(zip(a, b, strict=True))
        parts = [distance(*pair, f"{place}[{i}]") for i, pair in pairs]
        return max(parts, default=(0.0, place))
    if isinstance(a, int | float) and isinstance(b, int | float):
        if a == b or (math.isnan(a) and math.isnan(b)):
            return 0.0, place
        # Evaluators round to four decimals, of which one is 1e-4, not a little more.
        apart = round(abs(a - b), 12)
        return apart / max(1.0, abs(a), abs(b)), f"{place} {a} not {b}"
    return (0.0, place) if a == b else (math.inf, f"{place} {a} not {b}")


def correct_mean(logs):
    """Put the mean of all losses in train_loss: in a resumed run transformers divides
    those since then by all steps."""
    steps = [log for log in logs if "learning_rate" in log]
    losses = [log.get("loss", log.get("embedding_loss")) for log in steps]
    for log in logs:
        if "train_loss" in log:
            log["train_loss"] = sum(losses) / len(losses)


def leave_out_means(*found):
    """Leave out the mean of all losses, of which one run has resumed."""
    for one in found:
        for log in one.get("logs", ()):
            log.pop("train_loss", None)


def without_intended(ours, theirs, way):
    """Leave out what differs on several ranks: docs/start/from_transformers.md."""
    for found in (ours, theirs):
        found["logs"] = [
            {k: v for k, v in log.items() if not k.startswith("eval_")}
            for log in found.get("logs", [])
        ]
        if way == "resumed":  # a checkpoint at the end of an epoch
            found["events"] = []


def verdict(ours, theirs, bound):
    """A text, and whether it is good news."""
    if "error" in theirs:
        last = theirs["error"].splitlines()[-1]
        return f"transformers fails too: {last[:90]}", "error" in ours
    if "error" in ours:
        return "FAILS\n" + ours["error"], False
    said = []
    if ours["entered"] or not theirs["entered"]:
        said.append(f"loop of transformers entered {ours['entered']} times")
    said += [
        f"{part} {ours[part]} not {theirs[part]}"
        for part in ("events", "best")
        if ours[part] != theirs[part]
    ]
    for folder, files in theirs["files"].items():
        sharded = any("shard-" in name for name in ours["files"].get(folder, ()))
        missing = set(files) - set(ours["files"].get(folder, ()))
        missing -= {"optimizer.pt"} if sharded else set()
        if missing:
            said.append(f"{folder} lacks {sorted(missing)}")
    numbers = []
    for part in ("logs", "weights"):
        apart, where = distance(ours[part], theirs[part], part)
        numbers.append(f"{part} {apart:.1e}")
        if not apart <= bound:
            said.append(where)
    return "; ".join([" ".join(numbers), *said]), not said


def main(chosen, ranks, arguments):
    names = [n for n in RUNS if not chosen or n.startswith(tuple(chosen))]
    with tempfile.TemporaryDirectory() as root:
        engines = ("ours", "theirs")
        started = {}
        for engine in engines:
            os.mkdir(f"{root}/{engine}")
            command = [sys.executable, "-m", __spec__.name, engine, f"{root}/{engine}"]
            given = {"ARGUMENTS_OF_OURS": arguments} if engine == "ours" else {}
            # Shards of a run that has failed are of a group that is left.
            given["FAILS"] = "0" if "fsdp" in arguments else "1"
            port = free_port()
            for rank in range(ranks):
                of_rank = torchrun(rank, ranks, engine, port) if ranks > 1 else {}
                name = f"{root}/{engine}/log{rank}"
                started[name] = subprocess.Popen(
                    [*command, *names], env=ENVIRONMENT | of_rank | given,
                    stdout=open(name, "w"), stderr=subprocess.STDOUT,
                )  # fmt: skip
        for name, process in started.items():
            if process.wait():
                with open(name) as log:
                    sys.exit(log.read())
        ours, theirs = ({}, {})
        for engine, into in zip(engines, (ours, theirs), strict=True):
            with open(f"{root}/{engine}/results.json") as file:
                into.update(json.load(file))
    good = True
    for name in names:
        for way in WAYS:
            mine, other = ours[name][way], theirs[name][way]
            if ranks > 1:
                without_intended(mine, other, way)
            if way == "resumed" and "logs" in other:
                correct_mean(other["logs"])
            if way == "again":
                leave_out_means(mine, other)
            text, fine = verdict(mine, other, BOUNDS.get(name, BOUND))
            print(f"{'ok ' if fine else 'NOT'} {name} {way}: {text}")
            good &= fine
    return 0 if good else 1


ENVIRONMENT = os.environ | {
    "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "", "TRANSFORMERS_VERBOSITY": "error",
}  # fmt: skip

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--ours", default="{}", metavar="ARGUMENTS")
    parser.add_argument("names", nargs="*")
    given = parser.parse_args()
    if given.names[:1] in (["ours"], ["theirs"]):
        serve(given.names[0], given.names[1], given.names[2:])
    else:
        sys.exit(main(given.names, given.ranks, given.ours))
