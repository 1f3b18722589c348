"""Trainer for models that are evaluated on what they generate."""

from __future__ import annotations

from typing import Any

from ctrainer.trainer import Trainer

# max_length of transformers' generate() where neither caller nor model says.
DEFAULT_MAX_LENGTH = 20


class Seq2SeqTrainer(Trainer):
    """Trainer whose evaluation generates where args.predict_with_generate is set.

    The loss weighs each row alike, where transformers counts a last batch that is not
    full as if it were.

    Args:
        *args, **kwargs: As Trainer's; its args are Seq2SeqTrainingArguments, whose
            generation_config replaces the model's.

    Source: transformers 5.17, trainer_seq2seq.py.

    Example:
        >>> import torch
        >>> from ctrainer import Seq2SeqTrainer, Seq2SeqTrainingArguments
        >>> args = Seq2SeqTrainingArguments("out", use_cpu=True)
        >>> Seq2SeqTrainer(torch.nn.Linear(3, 2), args).args.predict_with_generate
        False
    """

    _gen_kwargs: dict[str, Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._gen_kwargs = {}
        given = getattr(self.args, "generation_config", None)
        if given is not None:
            self.model.generation_config = self.load_generation_config(given)

    @staticmethod
    def load_generation_config(gen_config_arg: Any) -> Any:
        """Return a checked GenerationConfig.

        Args:
            gen_config_arg: A GenerationConfig, a file, a folder, or a model's name.
        """
        from ctrainer.integrations.generation import load_generation_config

        return load_generation_config(gen_config_arg)

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
        **gen_kwargs: Any,
    ) -> dict[str, float]:
        """Return the metrics of an evaluation, as Trainer.evaluate.

        Args:
            eval_dataset (default None): The rows; None: the trainer's.
            ignore_keys (list[str] | None, default None): Outputs of the model that are
                dropped.
            metric_key_prefix (str, default 'eval'): In front of the metrics' names.
            **gen_kwargs: Keywords of generate().
        """
        self._gen_kwargs = self._with_lengths(gen_kwargs)
        return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def predict(
        self,
        test_dataset: Any,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "test",
        **gen_kwargs: Any,
    ) -> Any:
        """Return the predictions for a data set, as Trainer.predict.

        Args:
            test_dataset: The rows.
            ignore_keys (list[str] | None, default None): Outputs of the model that are
                dropped.
            metric_key_prefix (str, default 'test'): In front of the metrics' names.
            **gen_kwargs: Keywords of generate().
        """
        self._gen_kwargs = self._with_lengths(gen_kwargs)
        return super().predict(test_dataset, ignore_keys, metric_key_prefix)

    def _with_lengths(self, given: dict[str, Any]) -> dict[str, Any]:
        """Fill in generation_max_length and generation_num_beams of args."""
        kwargs = {k: v for k, v in given.items() if v is not None}
        length = getattr(self.args, "generation_max_length", None)
        beams = getattr(self.args, "generation_num_beams", None)
        if not {"max_length", "max_new_tokens"} & set(kwargs) and length is not None:
            kwargs["max_length"] = length
        if beams is not None:
            kwargs.setdefault("num_beams", beams)
        return kwargs

    def prediction_step(
        self,
        model: Any,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **gen_kwargs: Any,
    ) -> tuple[Any, Any, Any]:
        """Return (loss, generated tokens, labels) of a batch, each None where there is
        none.

        Tokens and labels are padded to the generation's max_length.

        Args:
            model: The model.
            inputs (dict[str, Any]): The batch.
            prediction_loss_only (bool): Compute the loss alone.
            ignore_keys (list[str] | None, default None): Outputs of the model that are
                dropped.
            **gen_kwargs: Keywords of generate(), instead of evaluate()'s and
                predict()'s.
        """
        if prediction_loss_only or not getattr(
            self.args, "predict_with_generate", False
        ):
            return super().prediction_step(
                model, inputs, prediction_loss_only, ignore_keys
            )
        inputs = self._prepare_inputs(inputs)
        tokens = self.model.generate(
            **_for_generating(inputs), **(gen_kwargs or self._gen_kwargs)
        )
        loss = self._loss_of(model, inputs) if "labels" in inputs else None
        if self.args.prediction_loss_only:
            return loss, None, None
        labels = inputs.get("labels")
        padded = None if labels is None else self._pad_generated(labels)
        return loss, self._pad_generated(tokens), padded

    def _loss_of(self, model: Any, inputs: dict[str, Any]) -> Any:
        with self._adapter.no_grad(), self.compute_loss_context_manager():
            outputs = model(**inputs)
        if self.label_smoother is not None:
            loss = self.label_smoother(outputs, inputs["labels"])
        else:
            loss = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
        return loss.detach().mean()

    def _pad_generated(self, tensor: Any) -> Any:
        config = self.model.generation_config
        length = config.max_length or DEFAULT_MAX_LENGTH
        if tensor.shape[-1] >= length and config.max_new_tokens is not None:
            length = config.max_new_tokens + 1
        if tensor.shape[-1] >= length:
            return tensor
        return self._pad_tensors_to_max_len(tensor, length)

    def _pad_tensors_to_max_len(self, tensor: Any, max_length: int) -> Any:
        """`tensor` (rows, length) with the pad token up to `max_length`."""
        padded = tensor.new_full((tensor.shape[0], max_length), self._pad_token())
        padded[:, : tensor.shape[-1]] = tensor
        return padded

    def _pad_token(self) -> int:
        """The processing class's pad or end token, else the model's pad token."""
        config = getattr(self.model, "config", None)
        if hasattr(self.processing_class, "pad_token_id"):
            found = self.processing_class.pad_token_id
            found = self.processing_class.eos_token_id if found is None else found
        else:
            found = getattr(config, "pad_token_id", None)
        if found is None:
            raise ValueError(
                "generated tokens of different lengths need a pad_token_id: set that "
                "of the processing class or of model.config"
            )
        return int(found)


def _for_generating(inputs: dict[str, Any]) -> dict[str, Any]:
    """Without the decoder's inputs where they were made from the labels: the model is
    to generate freely, not to continue after them."""
    labels, made = inputs.get("labels"), inputs.get("decoder_input_ids")
    if labels is None or made is None or labels.shape != made.shape:
        return dict(inputs)
    dropped = ("decoder_input_ids", "decoder_attention_mask")
    return {name: value for name, value in inputs.items() if name not in dropped}
