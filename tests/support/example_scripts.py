"""Scripts such as users write: each trains, evaluates and predicts with a Trainer.

A script takes a `Lab` of both_trainers.py, and returns its trainer.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import datasets
import numpy as np
import tokenizers
import torch
import transformers
from both_trainers import Lab
from torch import nn
from torch.nn.functional import cross_entropy

WORDS = "the quick brown fox jumps over a lazy dog while seven grey cats sleep".split()
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
SIZES = {
    "vocab_size": 24, "hidden_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "intermediate_size": 32, "max_position_embeddings": 32,
    "pad_token_id": 0, "initializer_range": 0.3,
}  # fmt: skip
# For transformers/seq2seq
T5 = {
    "vocab_size": 24, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1,
    "num_heads": 2, "pad_token_id": 0, "eos_token_id": 3, "decoder_start_token_id": 0,
}  # fmt: skip


def tokenizer() -> Any:
    words = {word: i for i, word in enumerate(SPECIAL + WORDS)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]",
        sep_token="[SEP]", mask_token="[MASK]", model_max_length=32,
    )  # fmt: skip


def texts(n: int, seed: int = 0) -> list[str]:
    draw = np.random.default_rng(seed)
    return [" ".join(draw.choice(WORDS, draw.integers(3, 12))) for _ in range(n)]


def tokenized(n: int, seed: int = 0) -> dict[str, list[Any]]:
    ids = tokenizer()(texts(n, seed))
    return {"input_ids": ids["input_ids"], "attention_mask": ids["attention_mask"]}


def classified(n: int, classes: int = 3, seed: int = 0) -> Any:
    data = tokenized(n, seed)
    labels = [sum(ids) % classes for ids in data["input_ids"]]
    notes = {"sentence": texts(n, seed), "idx": list(range(n))}
    return datasets.Dataset.from_dict({**notes, **data, "label": labels})


def arguments(lab: Lab, cls: str = "TrainingArguments", **options: Any) -> Any:
    """Of the library; quiet, and on the CPU."""
    shared = {
        "use_cpu": True, "report_to": "none", "disable_tqdm": True, "logging_steps": 1,
        "per_device_train_batch_size": 4, "learning_rate": 1e-3,
        "adam_epsilon": 1e-5,  # gradients that are rounding alone change little
    }  # fmt: skip
    args = getattr(lab.hf, cls)("out", **{**shared, **options})
    if lab.ours:  # random numbers in rows and collators
        args.dataloader_seed_by_place = False
    return args


def accuracy(prediction: Any) -> dict[str, float]:
    predicted = prediction.predictions.argmax(-1)
    return {"accuracy": float((predicted == prediction.label_ids).mean())}


def bert(kind: str, **options: Any) -> Any:
    config = transformers.BertConfig(**{**SIZES, **options})
    return getattr(transformers, f"BertFor{kind}")(config)


# ---- Text


def glue(lab: Lab) -> Any:
    """run_glue.py: classes of sentences; the best epoch is loaded at the end."""
    words = tokenizer()
    trainer = lab.hf.Trainer(
        model=lab.see(bert("SequenceClassification", num_labels=3)),
        args=arguments(
            lab, eval_strategy="epoch", save_strategy="epoch", num_train_epochs=3,
            load_best_model_at_end=True, metric_for_best_model="accuracy",
            weight_decay=0.01, warmup_steps=3, save_total_limit=2, logging_steps=4,
        ),
        train_dataset=classified(30), eval_dataset=classified(13, seed=1),
        data_collator=transformers.DataCollatorWithPadding(words, pad_to_multiple_of=8),
        processing_class=words, compute_metrics=accuracy, callbacks=[lab.watch],
    )  # fmt: skip
    result = trainer.train()
    trainer.save_model()
    metrics = {**result.metrics, "train_samples": 30}
    trainer.log_metrics("train", metrics)
    trainer.save_metrics("train", metrics)
    trainer.save_state()
    metrics = trainer.evaluate(eval_dataset=classified(13, seed=2))
    trainer.save_metrics("eval", metrics)
    test = classified(9, seed=3).remove_columns("label")
    lab.show(trainer.predict(test, metric_key_prefix="predict").predictions)
    trainer.create_model_card(tasks="text-classification")
    return trainer


def regression(lab: Lab) -> Any:
    """STS-B: one number for a text."""
    data = classified(24)
    values = [float(v) - 0.5 for v in data["label"]]
    data = data.remove_columns("label").add_column("label", values)

    def errors(prediction: Any) -> dict[str, float]:
        predicted = np.squeeze(prediction.predictions)
        return {"mse": float(((predicted - prediction.label_ids) ** 2).mean())}

    trainer = lab.hf.Trainer(
        model=lab.see(bert("SequenceClassification", num_labels=1)),
        args=arguments(
            lab, eval_strategy="steps", eval_steps=4, save_strategy="best",
            metric_for_best_model="mse", greater_is_better=False, max_steps=12,
            lr_scheduler_type="cosine",
        ),
        train_dataset=data, eval_dataset=data, processing_class=tokenizer(),
        compute_metrics=errors, callbacks=[lab.watch],
    )  # fmt: skip
    trainer.train()
    return trainer


def multi_label(lab: Lab) -> Any:
    data = classified(20)
    labels = [[float(i % 2), float(i % 3 == 0), 1.0] for i in range(20)]
    data = data.remove_columns("label").add_column("labels", labels)
    model = bert(
        "SequenceClassification", num_labels=3,
        problem_type="multi_label_classification",
    )  # fmt: skip

    def matches(prediction: Any) -> dict[str, Any]:
        logits = prediction.predictions
        return {"matches": ((logits > 0) == prediction.label_ids).mean()}

    trainer = lab.hf.Trainer(
        lab.see(model), arguments(
            lab, gradient_accumulation_steps=2, num_train_epochs=2, bf16=True,
            eval_strategy="epoch", include_for_metrics=["inputs", "loss"],
        ), None, data, data, tokenizer(), compute_metrics=matches,
        callbacks=[lab.watch],
    )  # fmt: skip
    trainer.train()
    return trainer


def multiple_choice(lab: Lab) -> Any:
    """run_swag.py: four endings for a text."""
    ids = tokenizer()(texts(64), padding="max_length", max_length=12)["input_ids"]
    rows = [
        {"input_ids": ids[4 * i : 4 * i + 4], "label": sum(ids[i]) % 4}
        for i in range(16)
    ]
    trainer = lab.hf.Trainer(
        lab.see(bert("MultipleChoice")), arguments(lab, num_train_epochs=2),
        train_dataset=rows, eval_dataset=rows[:6], compute_metrics=accuracy,
        callbacks=[lab.watch],
    )  # fmt: skip
    trainer.train()
    lab.show(trainer.evaluate(metric_key_prefix="swag"))
    return trainer


def token_classification(lab: Lab) -> Any:
    """run_ner.py: a class of each word, -100 for what is padding."""
    data = classified(22).map(
        lambda row: {"labels": [i % 5 for i in row["input_ids"]]},
        remove_columns="label",
    )  # fmt: skip

    def f1(prediction: Any) -> dict[str, Any]:
        told = prediction.label_ids != -100
        predicted = prediction.predictions.argmax(2)
        right = (predicted == prediction.label_ids)[told]
        return {"accuracy": right.mean(), "by class": {"0": 1.0, "n": int(told.sum())}}

    words = tokenizer()
    trainer = lab.hf.Trainer(
        lab.see(bert("TokenClassification", num_labels=5)),
        arguments(
            lab, gradient_accumulation_steps=3, num_train_epochs=2,
            eval_strategy="steps", eval_steps=2, eval_accumulation_steps=1,
        ),
        transformers.DataCollatorForTokenClassification(words), data, data, words,
        compute_metrics=f1, callbacks=[lab.watch],
    )  # fmt: skip
    trainer.train()
    predicted = trainer.predict(data.select(range(7)))
    lab.show([*predicted[:2]])
    return trainer


def blocks(n: int, length: int = 16) -> Any:
    """run_clm.py's group_texts(): rows of one length."""
    joined = [*itertools.chain(*tokenized(n * 4)["input_ids"])]
    rows = [joined[i : i + length] for i in range(0, len(joined) - length, length)][:n]
    assert len(rows) == n
    return datasets.Dataset.from_dict({"input_ids": rows, "labels": rows})


def gpt2(**options: Any) -> Any:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=24, n_positions=32, n_embd=16, n_layer=2, n_head=2,
            bos_token_id=2, eos_token_id=3, pad_token_id=0, **options,
        )
    )  # fmt: skip


def llama(**options: Any) -> Any:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**{**SIZES, "num_key_value_heads": 1, **options})
    )


def causal(lab: Lab, model: Any, **options: Any) -> Any:
    """run_clm.py: labels that the model shifts, metrics of the argmax."""

    def first(logits: Any, labels: Any) -> Any:
        return logits.argmax(dim=-1)

    def right(prediction: Any) -> dict[str, float]:
        predicted, labels = prediction.predictions[:, :-1], prediction.label_ids[:, 1:]
        return {"accuracy": float((predicted == labels).mean())}

    trainer = lab.hf.Trainer(
        model=lab.see(model),
        args=arguments(
            lab, eval_strategy="epoch", num_train_epochs=2, save_steps=3, **options
        ),
        train_dataset=blocks(16), eval_dataset=blocks(5), processing_class=tokenizer(),
        data_collator=transformers.default_data_collator, compute_metrics=right,
        preprocess_logits_for_metrics=first, callbacks=[lab.watch],
    )  # fmt: skip
    trainer.train()
    lab.show(float(np.exp(trainer.evaluate()["eval_loss"])))
    return trainer


def clm_gpt2(lab: Lab) -> Any:
    """Made from a bare configuration, so without loss_type."""
    return causal(lab, gpt2(), gradient_accumulation_steps=2)


def clm_gpt2_alone(lab: Lab) -> Any:
    """The same without accumulation."""
    return causal(lab, gpt2(), max_grad_norm=0.0)


def clm_llama(lab: Lab) -> Any:
    return causal(
        lab, llama(), gradient_accumulation_steps=2, gradient_checkpointing=True,
        include_num_input_tokens_seen="non_padding", lr_scheduler_type="constant",
    )  # fmt: skip


def clm_tied(lab: Lab) -> Any:
    """A head that is the embedding; noise on embeddings."""
    model = llama(tie_word_embeddings=True)
    trainer = causal(lab, model, neftune_noise_alpha=5.0, optim="adafactor")
    lab.show(model.lm_head.weight is model.model.embed_tokens.weight)
    return trainer


def mlm(lab: Lab, seed: int | None = None, **options: Any) -> Any:
    """run_mlm.py: the collator draws the masks."""
    data = datasets.Dataset.from_dict(tokenized(30))
    evaluation = {"eval_strategy": "steps", "eval_steps": 5}
    trainer = lab.hf.Trainer(
        model=lab.see(bert("MaskedLM")),
        args=arguments(
            lab, num_train_epochs=2, gradient_accumulation_steps=2,
            **(options or evaluation)
        ),
        train_dataset=data, eval_dataset=data.select(range(10)),
        data_collator=transformers.DataCollatorForLanguageModeling(
            tokenizer(), mlm_probability=0.3, seed=seed
        ), callbacks=[lab.watch],
    )  # fmt: skip
    trainer.train()
    lab.show(trainer.evaluate())
    return trainer


def mlm_of_a_seed(lab: Lab) -> Any:
    """A collator that draws from a generator of its own."""
    return mlm(lab, seed=8, save_strategy="no")


def question_answering(lab: Lab) -> Any:
    """run_qa.py: a subclass whose evaluate() and predict() have more arguments."""
    rows = []
    for i, ids in enumerate(tokenizer()(texts(20), padding="max_length", max_length=14)[
        "input_ids"
    ]):  # fmt: skip
        rows.append(
            {"input_ids": ids, "start_positions": i % 3, "end_positions": 3 + i % 4}
        )
    model = bert("QuestionAnswering")

    class Answers(lab.hf.Trainer):  # type: ignore[misc]
        def __init__(self, *args: Any, spans: Any = None, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.spans = spans

        def evaluate(
            self, eval_dataset: Any = None, ignore_keys: Any = None,
            metric_key_prefix: str = "eval",
        ) -> Any:  # fmt: skip
            loader = self.get_eval_dataloader(eval_dataset)
            compute, self.compute_metrics = self.compute_metrics, None
            try:
                output = self.evaluation_loop(
                    loader, description="Evaluation",
                    prediction_loss_only=True if compute is None else None,
                    ignore_keys=ignore_keys, metric_key_prefix=metric_key_prefix,
                )  # fmt: skip
            finally:
                self.compute_metrics = compute
            found = self.spans(output.predictions)
            metrics = {f"{metric_key_prefix}_spans": found, **output.metrics}
            self.log(metrics)
            self.control = self.callback_handler.on_evaluate(
                self.args, self.state, self.control, metrics
            )
            return metrics

    def spans(predictions: Any) -> float:
        start, end = predictions
        return float((end.argmax(-1) - start.argmax(-1)).mean())

    trainer = Answers(
        model=lab.see(model), args=arguments(
            lab, eval_strategy="epoch", num_train_epochs=2, logging_strategy="epoch",
        ), train_dataset=rows, eval_dataset=rows[:9], spans=spans,
        compute_metrics=lambda p: {}, callbacks=[lab.watch],
    )  # fmt: skip
    trainer.train()
    lab.show(trainer.predict(rows[:5])[:2])
    return trainer


def summarization(lab: Lab) -> Any:
    """run_summarization.py: the metrics are of generated texts."""
    words = tokenizer()
    inputs, targets = tokenized(18)["input_ids"], tokenized(18, seed=1)["input_ids"]
    rows = [
        {"input_ids": a, "labels": b[:6]} for a, b in zip(inputs, targets, strict=True)
    ]
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**T5))

    def lengths(prediction: Any) -> dict[str, float]:
        predicted = np.where(prediction.predictions == -100, 0, prediction.predictions)
        told = np.where(prediction.label_ids == -100, 0, prediction.label_ids)
        return {
            "gen_len": float((predicted != 0).sum(1).mean()),
            "overlap": float(np.isin(predicted, told).mean()),
        }

    trainer = lab.hf.Seq2SeqTrainer(
        model=lab.see(model),
        args=arguments(
            lab, "Seq2SeqTrainingArguments", predict_with_generate=True,
            generation_max_length=7, generation_num_beams=2, eval_strategy="steps",
            eval_steps=3, max_steps=6, label_smoothing_factor=0.1,
            per_device_eval_batch_size=5,
        ),
        train_dataset=rows, eval_dataset=rows[:10], compute_metrics=lengths,
        data_collator=transformers.DataCollatorForSeq2Seq(words, model=model),
        processing_class=words, callbacks=[lab.watch],
    )  # fmt: skip
    trainer.train()
    predicted = trainer.predict(rows[:6], max_length=9, num_beams=1)
    lab.show(predicted.predictions)
    return trainer


def translation(lab: Lab) -> Any:
    """run_translation.py with BART: embeddings that are tied, sampling by length."""
    config = transformers.BartConfig(
        vocab_size=24, d_model=16, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=32,
        decoder_ffn_dim=32, max_position_embeddings=32, pad_token_id=0,
        bos_token_id=2, eos_token_id=3, decoder_start_token_id=3,
        forced_eos_token_id=3,
    )  # fmt: skip
    words = tokenizer()
    inputs = tokenized(18)["input_ids"]
    rows = [{"input_ids": ids, "labels": (ids * 3)[5::-1]} for ids in inputs]
    model = transformers.BartForConditionalGeneration(config)
    trainer = lab.hf.Seq2SeqTrainer(
        lab.see(model),
        arguments(
            lab, "Seq2SeqTrainingArguments", num_train_epochs=2,
            train_sampling_strategy="group_by_length", gradient_accumulation_steps=2,
            save_strategy="epoch", save_only_model=True,
        ),
        transformers.DataCollatorForSeq2Seq(words, model=model), rows, rows[:8],
        callbacks=[lab.watch],
    )  # fmt: skip
    lab.equal_shares(trainer).train()
    trainer.evaluate(max_length=8, num_beams=2)
    return trainer


# ---- Images, sound


def images(lab: Lab) -> Any:
    """run_image_classification.py: rows are transformed as they are read."""
    generator = torch.Generator().manual_seed(4)
    pixels = torch.rand(24, 3, 8, 8, generator=generator)
    data = datasets.Dataset.from_dict(
        {"image": pixels.tolist(), "label": [0, 1, 2] * 8}
    )
    data.set_transform(
        lambda rows: {
            "pixel_values": [torch.tensor(image) * 2 - 1 for image in rows["image"]],
            "label": rows["label"],
        }
    )

    def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return {
            "pixel_values": torch.stack([row["pixel_values"] for row in rows]),
            "labels": torch.tensor([row["label"] for row in rows]),
        }

    small = {k: v for k, v in SIZES.items() if k in transformers.ViTConfig().to_dict()}
    config = transformers.ViTConfig(
        **small, image_size=8, patch_size=4, num_labels=3, hidden_dropout_prob=0.1
    )
    trainer = lab.hf.Trainer(
        model=lab.see(transformers.ViTForImageClassification(config)),
        args=arguments(
            lab, remove_unused_columns=False, num_train_epochs=2,
            eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True,
            seed=1337, dataloader_num_workers=1,
        ),
        train_dataset=data, eval_dataset=data.select(range(10)),
        compute_metrics=accuracy, data_collator=collate, callbacks=[lab.watch],
    )  # fmt: skip
    trainer.train()
    return trainer


def speech(lab: Lab) -> Any:
    """run_speech_recognition_ctc.py: sounds and texts of unequal length; numpy draws
    the masks."""
    config = transformers.Wav2Vec2Config(
        vocab_size=12, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, conv_dim=(8, 8), conv_stride=(4, 2), conv_kernel=(4, 2),
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
        num_feat_extract_layers=2, mask_time_prob=0.2, mask_time_length=2,
        layerdrop=0.0, ctc_loss_reduction="mean", pad_token_id=0,
        feat_extract_norm="layer",
    )  # fmt: skip
    draw = np.random.default_rng(2)
    sounds = [draw.normal(size=160 + 8 * i).tolist() for i in range(12)]
    rows = [{"input_values": s, "labels": [1, 5, i % 9]} for i, s in enumerate(sounds)]

    def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        longest = max(len(row["input_values"]) for row in rows)
        sounds = [
            r["input_values"] + [0.0] * (longest - len(r["input_values"])) for r in rows
        ]
        masks = [[1] * len(r["input_values"]) for r in rows]
        masks = [mask + [0] * (longest - len(mask)) for mask in masks]
        return {
            "input_values": torch.tensor(sounds), "attention_mask": torch.tensor(masks),
            "labels": torch.tensor([row["labels"] for row in rows]),
        }  # fmt: skip

    model = transformers.Wav2Vec2ForCTC(config)
    model.freeze_feature_encoder()
    trainer = lab.hf.Trainer(
        lab.see(model),
        arguments(
            lab, num_train_epochs=2, gradient_accumulation_steps=2, eval_steps=2,
            eval_strategy="steps", length_column_name="input_length",
        ), collate, rows, rows[:5], callbacks=[lab.watch],
    )  # fmt: skip
    lab.equal_shares(trainer).train()
    return trainer


# ---- Parts of the Trainer that users replace


def lora(lab: Lab) -> Any:
    """PEFT: the adapter alone is trained and saved; a second trainer resumes."""
    import peft

    def adapted() -> Any:
        torch.manual_seed(3)
        config = peft.LoraConfig(
            r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.1,
            task_type="CAUSAL_LM",
        )  # fmt: skip
        return peft.get_peft_model(llama(), config)

    for resume in (False, True):
        trainer = lab.hf.Trainer(
            lab.see(adapted()), arguments(lab, max_steps=6 + 3 * resume, save_steps=3),
            train_dataset=blocks(16), callbacks=[lab.watch],
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=resume)
    trainer.save_model("adapter")
    return trainer


def weighted_loss(lab: Lab) -> Any:
    """compute_loss with weights of the classes, as in transformers' documentation."""

    class Weighted(lab.hf.Trainer):  # type: ignore[misc]
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False,
            num_items_in_batch: Any = None,
        ) -> Any:  # fmt: skip
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            weight = torch.tensor([1.0, 2.0, 3.0])
            loss = cross_entropy(outputs.logits, labels, weight=weight)
            return (loss, outputs) if return_outputs else loss

    return fit(lab, Weighted, eval_strategy="epoch")


def fit(
    lab: Lab, cls: Any, parts: Any = None, equal_shares: bool = False, **options: Any
) -> Any:
    """Two epochs of sentences in three classes."""
    trainer = cls(
        model=lab.see(bert("SequenceClassification", num_labels=3)),
        args=arguments(lab, **{"num_train_epochs": 2, **options}),
        **{
            "train_dataset": classified(20), "eval_dataset": classified(9, seed=1),
            "processing_class": tokenizer(), "callbacks": [lab.watch], **(parts or {}),
        },
    )  # fmt: skip
    if equal_shares:
        lab.equal_shares(trainer)
    trainer.train()
    return trainer


def loss_of_old_signature(lab: Lab) -> Any:
    """compute_loss of an example of 2024, which takes the count among the rest, and
    an accumulation over micro-batches of equal size."""

    class Old(lab.hf.Trainer):  # type: ignore[misc]
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any
        ) -> Any:
            outputs = model(**inputs)
            loss = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
            return (loss * 2, outputs) if return_outputs else loss * 2

    return fit(lab, Old, eval_strategy="epoch", gradient_accumulation_steps=5)


def loss_function(lab: Lab) -> Any:
    """compute_loss_func that divides by the count of items of the update."""

    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        total = cross_entropy(outputs.logits, labels, reduction="sum")
        return total / (
            len(labels) if num_items_in_batch is None else num_items_in_batch
        )

    return fit(
        lab, lab.hf.Trainer, {"compute_loss_func": loss}, eval_strategy="epoch",
        gradient_accumulation_steps=2,
    )  # fmt: skip


def optimizer_of_ones_own(lab: Lab) -> Any:
    """Optimizer and schedule as a tuple, two groups of parameters."""
    model = bert("SequenceClassification", num_labels=3)
    head = list(model.classifier.parameters())
    rest = [p for n, p in model.named_parameters() if "classifier" not in n]
    optimizer = torch.optim.SGD(
        [{"params": head, "lr": 0.1}, {"params": rest}], lr=0.01, momentum=0.9
    )
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    trainer = lab.hf.Trainer(
        lab.see(model), arguments(lab, num_train_epochs=2, save_strategy="epoch"),
        train_dataset=classified(20), processing_class=tokenizer(),
        optimizers=(optimizer, schedule), callbacks=[lab.watch],
    )  # fmt: skip
    trainer.train()
    return trainer


def optimizer_by_class(lab: Lab) -> Any:
    chosen = (torch.optim.RMSprop, {"lr": 1e-3, "momentum": 0.5, "eps": 1e-2})
    return fit(lab, lab.hf.Trainer, {"optimizer_cls_and_kwargs": chosen})


def callbacks_that_decide(lab: Lab) -> Any:
    """Flags that callbacks set at events of every kind."""

    class Decide(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(
            self, args: Any, state: Any, control: Any, **kwargs: Any
        ) -> Any:
            control.should_log = state.global_step in (1, 4)
            control.should_evaluate = state.global_step in (2, 7)
            control.should_save = state.global_step in (2, 6)
            if state.global_step == 3:
                control.should_epoch_stop = True
            control.should_training_stop = state.global_step == 8
            return control

        def on_epoch_end(
            self, args: Any, state: Any, control: Any, **kwargs: Any
        ) -> None:
            control.should_evaluate = True
            control.should_save = state.epoch > 1

        def on_log(
            self, args: Any, state: Any, control: Any, logs: Any, **kwargs: Any
        ) -> None:
            logs["seen"] = state.global_step

        def on_evaluate(
            self, args: Any, state: Any, control: Any, **kwargs: Any
        ) -> None:
            control.should_log = True

    return fit(
        lab, lab.hf.Trainer, {"callbacks": [Decide(), lab.watch]}, num_train_epochs=4,
        logging_strategy="no", save_strategy="no",
    )  # fmt: skip


def early_stopping(lab: Lab) -> Any:
    """Evaluations do not improve, and end the run."""
    stop = transformers.EarlyStoppingCallback(2, 0.5)
    parts = {"callbacks": [lab.watch, stop], "compute_metrics": accuracy}
    trainer = fit(
        lab, lab.hf.Trainer, parts, num_train_epochs=9, eval_strategy="steps",
        eval_steps=2, save_steps=2, load_best_model_at_end=True, save_total_limit=1,
        metric_for_best_model="loss", lr_scheduler_type="reduce_lr_on_plateau",
        lr_scheduler_kwargs={"patience": 0},
    )  # fmt: skip
    lab.show(trainer.evaluate())
    return trainer


def several_evaluations(lab: Lab) -> Any:
    """A dict of data sets, the best by one of them."""
    data = {"near": classified(8, seed=5), "far": classified(7, seed=6)}
    trainer = fit(
        lab, lab.hf.Trainer, {"eval_dataset": data, "compute_metrics": accuracy},
        eval_strategy="steps", eval_steps=3, save_steps=3, eval_on_start=True,
        load_best_model_at_end=True, metric_for_best_model="far_loss",
    )  # fmt: skip
    lab.show(trainer.evaluate("near"))
    return trainer


class Extra(nn.Module):
    """Of no library: more outputs than the loss, shared weights, a buffer, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(24, 8), nn.Linear(8, 24, bias=False)
        self.out.weight = self.embed.weight
        self.drop, self.norm = nn.Dropout(0.2), nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)
        self.register_buffer("calls", torch.zeros(1))
        self.config = transformers.PretrainedConfig()
        self.config.keys_to_ignore_at_inference = ["pooled"]

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any = None) -> Any:
        if self.training:
            self.calls += 1
        hidden = self.norm(self.drop(self.embed(input_ids)))
        mask = attention_mask.unsqueeze(-1)
        pooled = (hidden * mask).sum(1) / mask.sum(1)
        logits = self.head(pooled)
        outputs = {
            "logits": logits,
            "pooled": pooled,
            "pair": (pooled, {"mean": pooled.mean(1)}),
        }
        if labels is not None:
            aside = self.out(hidden).square().mean()
            outputs = {"loss": cross_entropy(logits, labels) + 0.1 * aside, **outputs}
        return outputs


def plain_module(lab: Lab) -> Any:
    """Tied weights, which transformers cannot save then, and nested outputs of a module
    of torch, frozen in part."""
    model = Extra()
    model.norm.requires_grad_(False)
    words = tokenizer()
    trainer = lab.hf.Trainer(
        lab.see(model),
        arguments(
            lab, num_train_epochs=2, save_strategy="no", eval_strategy="epoch",
            optim="adagrad", label_names=["labels"],
        ), transformers.DataCollatorWithPadding(words), classified(18), classified(7),
        callbacks=[lab.watch],
    )  # fmt: skip
    trainer.train(ignore_keys_for_eval=["pair"])
    predicted = trainer.predict(classified(6, seed=4))
    lab.show([*predicted[:2]])
    lab.show(trainer.predict(classified(6, seed=4), ignore_keys=["pair"]).predictions)
    return trainer


class Pairs(nn.Module):
    """Contrastive: it takes no labels, and returns a loss when asked."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, a: Any, b: Any, return_loss: bool = True) -> Any:
        scores = self.left(a) @ self.right(b).T
        if not return_loss:
            return {"scores": scores}
        loss = cross_entropy(scores, torch.arange(len(scores)))
        return {"loss": loss, "scores": scores.diagonal()}


def contrastive(lab: Lab) -> Any:
    x = torch.randn(20, 6, generator=torch.Generator().manual_seed(1))
    rows = [{"a": row, "b": row.roll(1)} for row in x]
    trainer = lab.hf.Trainer(
        lab.see(Pairs()), arguments(lab, num_train_epochs=2, eval_strategy="epoch"),
        train_dataset=rows, eval_dataset=rows[:8], callbacks=[lab.watch],
    )  # fmt: skip
    trainer.train()
    lab.show(trainer.predict(rows[:4]).predictions)
    return trainer


def hooks(lab: Lab) -> Any:
    """A subclass that overrides and extends a hook of every part."""

    class Mine(lab.hf.Trainer):  # type: ignore[misc]
        def training_step(
            self, model: Any, inputs: Any, num_items_in_batch: Any = None
        ) -> Any:
            loss = super().training_step(model, inputs, num_items_in_batch)
            self.last = loss.item()
            return loss

        def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
            if "loss" in logs:
                logs["last"] = self.last
            super().log(logs, start_time)

        def get_train_dataloader(self) -> Any:
            loader = super().get_train_dataloader()
            self.length = len(loader)
            return loader

        def create_optimizer(self, *args: Any) -> Any:
            if self.optimizer is None:
                self.optimizer = torch.optim.AdamW(
                    self.model.parameters(), lr=1e-3, eps=1e-4, weight_decay=0.1
                )
            return self.optimizer

        def create_scheduler(
            self, num_training_steps: int, optimizer: Any = None
        ) -> Any:
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
                self.optimizer, lambda step: 1 - step / num_training_steps / 2
            )
            return self.lr_scheduler

        def prediction_step(
            self, model: Any, inputs: Any, *args: Any, **kwargs: Any
        ) -> Any:
            loss, logits, labels = super().prediction_step(
                model, inputs, *args, **kwargs
            )
            return loss, logits.softmax(-1), labels

        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def floating_point_ops(self, inputs: Any) -> int:
            return 1000 * len(inputs["labels"])

    trainer = fit(
        lab, Mine, {"compute_metrics": accuracy}, eval_strategy="epoch", save_steps=4
    )
    lab.show([trainer.length, trainer.predict(classified(5, seed=8)).predictions])
    return trainer


class Stream(torch.utils.data.IterableDataset):
    """Rows without a length."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield from classified(self.n).remove_columns(["sentence", "idx"])


def stream(lab: Lab) -> Any:
    data = {"train_dataset": Stream(24), "eval_dataset": Stream(16)}
    return fit(
        lab, lab.hf.Trainer, data, True, max_steps=9, gradient_accumulation_steps=2,
        eval_strategy="steps", eval_steps=4,
    )  # fmt: skip


def resumed(lab: Lab) -> Any:
    """A run that goes on in the middle of an epoch, with another length, after one that
    a callback ended."""

    class Stop(transformers.TrainerCallback):  # type: ignore[misc]
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = not state.global_step % 7

    options = {
        "num_train_epochs": 3, "save_steps": 7, "logging_steps": 2, "data_seed": 5,
        "lr_scheduler_type": "polynomial", "eval_strategy": "steps", "eval_steps": 5,
        "lr_scheduler_kwargs": {"power": 2.0, "lr_end": 1e-5},
        "logging_first_step": True,
    }  # fmt: skip
    fit(lab, lab.hf.Trainer, {"callbacks": [lab.watch, Stop()]}, **options)
    args = arguments(lab, **options)
    trainer = lab.hf.Trainer(
        lab.see(bert("SequenceClassification", num_labels=3)), args,
        train_dataset=classified(20), eval_dataset=classified(9, seed=1),
        processing_class=tokenizer(), callbacks=[lab.watch],
    )  # fmt: skip
    trainer.train(resume_from_checkpoint="out/checkpoint-7")
    return trainer


def made_anew(lab: Lab) -> Any:
    """model_init; train() twice, with evaluations between."""

    def init() -> Any:
        return lab.see(bert("SequenceClassification", num_labels=3))

    trainer = lab.hf.Trainer(
        args=arguments(lab, num_train_epochs=1, full_determinism=False, seed=5),
        model_init=init, train_dataset=classified(20), eval_dataset=classified(9),
        processing_class=tokenizer(), callbacks=[lab.watch],
    )  # fmt: skip
    lab.show(trainer.evaluate())
    trainer.train()
    lab.show(trainer.evaluate())
    trainer.train()
    return trainer


def other_arguments(lab: Lab) -> Any:
    """A second train() of the same Trainer, with other arguments and data."""
    trainer = fit(lab, lab.hf.Trainer, eval_strategy="epoch", save_strategy="no")
    trainer.args.learning_rate, trainer.args.num_train_epochs = 5e-4, 1
    trainer.train_dataset = classified(12, seed=4)
    trainer.train()
    lab.show(trainer.evaluate({"near": classified(5), "far": classified(6)}))
    return trainer


def deterministic(lab: Lab) -> Any:
    try:
        return fit(lab, lab.hf.Trainer, full_determinism=True, eval_strategy="epoch")
    finally:
        torch.use_deterministic_algorithms(False)


def not_finite(lab: Lab) -> Any:
    """Losses that are NaN, of gradients that are not."""

    class Sometimes(lab.hf.Trainer):  # type: ignore[misc]
        calls = 0

        def training_step(self, *args: Any) -> Any:
            self.calls += 1
            loss = super().training_step(*args)
            return loss * float("nan") if self.calls in (3, 4, 7, 12) else loss

    return fit(lab, Sometimes, logging_steps=4, num_train_epochs=3)


def search(lab: Lab) -> Any:
    """Two values by optuna, of three models."""
    import optuna

    def space(trial: Any) -> dict[str, Any]:
        rate = trial.suggest_float("learning_rate", 1e-4, 1e-2, log=True)
        return {"learning_rate": rate, "weight_decay": trial.suggest_int("decay", 0, 1)}

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    trainer = lab.hf.Trainer(
        args=arguments(
            lab, num_train_epochs=1, eval_strategy="epoch", save_strategy="epoch"
        ),
        model_init=lambda: lab.see(bert("SequenceClassification", num_labels=3)),
        train_dataset=classified(20), eval_dataset=classified(9, seed=1),
        processing_class=tokenizer(), callbacks=[lab.watch],
    )  # fmt: skip
    best = trainer.hyperparameter_search(
        space, n_trials=3, sampler=optuna.samplers.RandomSampler(seed=4)
    )
    lab.show([best.run_id, best.objective, best.hyperparameters])
    return trainer


SCRIPTS = {
    script.__name__: script
    for script in (
        glue, clm_gpt2, summarization, resumed, callbacks_that_decide, regression,
        multi_label, multiple_choice, token_classification, clm_gpt2_alone, clm_llama,
        clm_tied, mlm, mlm_of_a_seed, question_answering, translation, images, speech,
        lora, weighted_loss, loss_of_old_signature, loss_function,
        optimizer_of_ones_own, optimizer_by_class, early_stopping, several_evaluations,
        plain_module, contrastive, hooks, stream, made_anew, other_arguments,
        deterministic, not_finite, search,
    )
}  # fmt: skip
