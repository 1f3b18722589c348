"""Trainer: what other packages ask of it beside training."""

from __future__ import annotations

import logging
import os
from typing import Any

import numpy as np

from ctrainer import integrations, trainer_utils
from ctrainer.trainer.base import TrainerBase
from ctrainer.trainer_utils import speed_metrics

logger = logging.getLogger("ctrainer.trainer")


class ExtraMixin(TrainerBase):
    """Accelerate's object, counts of tokens and parameters, model cards and the Hub."""

    @property
    def accelerator(self) -> Any:
        """A real accelerate.Accelerator, made when it is first asked for.

        Nothing of ours needs it; subclasses of transformers' Trainer do. Raises
        ImportError without accelerate.
        """
        made = self.__dict__.get("_accelerator")
        if made is None:
            self.create_accelerator_and_postprocess()
            made = self.__dict__["_accelerator"]
        return made

    @accelerator.setter
    def accelerator(self, value: Any) -> None:
        self.__dict__["_accelerator"] = value

    def create_accelerator_and_postprocess(self) -> None:
        """Make self.accelerator: on the trainer's device, by accelerator_config and the
        ddp_ arguments, without mixed precision or accumulation of its own, which are
        ours."""
        options = self._adapter.ddp_options(self.model, self.args)
        self.accelerator = integrations.new_accelerator(
            self.args, self._inputs_stay, options
        )
        syncs = self.__dict__.get("_syncs_gradients", True)  # of this micro-batch
        self.accelerator.gradient_state._set_sync_gradients(syncs)

    @property
    def tokenizer(self) -> Any:
        """processing_class, by its name before transformers 4.46."""
        return self.processing_class

    @tokenizer.setter
    def tokenizer(self, value: Any) -> None:
        self.processing_class = value

    # Counting

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Count a micro-batch's tokens, with or without padding, where it maps names to
        tensors. Of several ranks they come into the state together, before a log or a
        checkpoint."""
        name = self._main_input_name
        if not hasattr(inputs, "keys") or name not in inputs:
            return
        tokens = inputs[name]
        count = int(tokens.numel() if hasattr(tokens, "numel") else np.size(tokens))
        if self.args.include_num_input_tokens_seen == "non_padding":
            pad = getattr(self.processing_class, "pad_token_id", None)
            if "attention_mask" in inputs:
                count = int(inputs["attention_mask"].sum())
            elif pad is not None:
                count = int((tokens != pad).sum())
        if self.args.world_size == 1:
            self.state.num_input_tokens_seen += count
        else:
            self._counted_tokens += count

    def _log_tokens(self, logs: dict[str, Any], start: float | None) -> None:
        logs["num_input_tokens_seen"] = self.state.num_input_tokens_seen
        if start is not None:
            seen = (
                self.state.num_input_tokens_seen - self._initial_num_input_tokens_seen
            )
            logs.update(speed_metrics("train", start, num_tokens=seen))

    def get_num_trainable_parameters(self) -> int:
        """Number of elements of the parameters that train."""
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    def get_learning_rates(self) -> list[float]:
        """The learning rate of each parameter group.

        Raises ValueError before the optimizer exists.
        """
        return [group["lr"] for group in self._optimizer_or_raise().param_groups]

    def get_optimizer_group(self, param: Any = None) -> Any:
        """The group that `param` is in; all groups without it.

        Raises ValueError before the optimizer exists.
        """
        groups = self._optimizer_or_raise().param_groups
        if param is None:
            return [group["params"] for group in groups]
        for group in groups:
            if any(param is p for p in group["params"]):
                return group
        return None

    def _optimizer_or_raise(self) -> Any:
        if self.optimizer is None:
            raise ValueError(
                "the optimizer does not exist yet; call create_optimizer()"
            )
        return self.optimizer

    def get_sp_size(self) -> int:
        return 1

    def get_cp_size(self) -> int:
        return 1

    def get_tp_size(self) -> int:
        return 1

    @staticmethod
    def num_tokens(train_dl: Any, max_steps: int | None = None) -> int:
        """Tokens in the batches of a loader, or in as many as max_steps reads."""
        counts = (int(batch["input_ids"].numel()) for batch in train_dl)
        return next(counts, 0) * max_steps if max_steps is not None else sum(counts)

    # Metrics, as scripts print and keep them

    def metrics_format(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """`metrics` with rounded numbers and readable times and sizes."""
        return trainer_utils.metrics_format(metrics)

    def log_metrics(self, split: str, metrics: dict[str, Any]) -> None:
        """Print `metrics` of the split "train", "eval", ... as a table."""
        if self.is_world_process_zero():
            trainer_utils.print_metrics(split, metrics)

    def save_metrics(
        self, split: str, metrics: dict[str, Any], combined: bool = True
    ) -> None:
        """Write `metrics` to {split}_results.json in output_dir, and with `combined`
        into all_results.json."""
        if self.is_world_process_zero():
            trainer_utils.write_metrics(self.args.output_dir, split, metrics, combined)

    # The Hub

    def create_model_card(
        self,
        language: str | None = None,
        license: str | None = None,
        tags: str | list[str] | None = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        tasks: str | list[str] | None = None,
        dataset_tags: str | list[str] | None = None,
        dataset: str | list[str] | None = None,
        dataset_args: str | list[str] | None = None,
    ) -> None:
        """Write README.md with the run's facts into output_dir, through transformers'
        TrainingSummary. Raises ImportError without transformers."""
        if not self.is_world_process_zero():
            return
        card = integrations.model_card(
            self, language=language, license=license, tags=tags, model_name=model_name,
            finetuned_from=finetuned_from, tasks=tasks, dataset_tags=dataset_tags,
            dataset=dataset, dataset_args=dataset_args,
        )  # fmt: skip
        path = os.path.join(self.args.output_dir, "README.md")
        with open(path, "w", encoding="utf-8") as file:
            file.write(card)

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Save the model and upload output_dir, without its checkpoints, to the Hub.

        Returns what huggingface_hub.upload_folder returns, None on ranks other than 0.
        Raises ImportError without huggingface_hub.
        """
        import huggingface_hub

        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        self.init_hf_repo(token)
        assert self.hub_model_id is not None
        self.create_model_card(**kwargs)
        token = token or getattr(self.args, "hub_token", None)
        options: dict[str, Any] = {"run_as_future": not blocking}
        return huggingface_hub.upload_folder(
            repo_id=self.hub_model_id, folder_path=self.args.output_dir, token=token,
            commit_message=commit_message, revision=revision,
            ignore_patterns=["_*", "checkpoint-*", ".*"], **options,
        )  # fmt: skip

    def init_hf_repo(self, token: str | None = None) -> None:
        """Make the repository on the Hub that hub_model_id, or else the name of
        output_dir, tells; set hub_model_id to its full name."""
        import huggingface_hub

        repo = self.hub_model_id or getattr(self.args, "hub_model_id", None)
        if not repo:
            repo = os.path.basename(os.path.abspath(self.args.output_dir))
        token = token or getattr(self.args, "hub_token", None)
        url = huggingface_hub.create_repo(repo, token=token, exist_ok=True)
        self.hub_model_id = url.repo_id
