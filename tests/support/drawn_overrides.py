"""Subclasses of a Trainer that override some methods, and callbacks that set flags, for
the scripts of drawn_scripts.py."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers
from both_trainers import FLAGS, Lab
from torch.utils.data import DataLoader, SequentialSampler, WeightedRandomSampler

Base: Any = object  # beside a Trainer, which a script adds


class Override(Base):  # type: ignore[misc]
    lab: Lab


class ComputeLoss(Override):
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:  # fmt: skip
        loss, outputs = super().compute_loss(
            model,
            inputs,
            return_outputs=True,
            num_items_in_batch=num_items_in_batch,
        )
        loss = loss + 0.01 * outputs["logits"].square().mean()
        return (loss, outputs) if return_outputs else loss


class ComputeLossOfKeywords(Override):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        self.lab.show([len(args), sorted(kwargs)])
        return super().compute_loss(*args, **kwargs)


class TrainingStep(Override):
    """All of it, as older examples have it."""

    def training_step(
        self, model: Any, inputs: Any, num_items_in_batch: Any = None
    ) -> Any:
        model.train()
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            loss = self.compute_loss(
                model, inputs, num_items_in_batch=num_items_in_batch
            )
        if not self.model_accepts_loss_kwargs or num_items_in_batch is None:
            if self.compute_loss_func is None:
                loss = loss / self.current_gradient_accumulation_steps
        self.accelerator.backward(loss)
        self.lab.show(loss.item())
        return loss.detach()


class TrainingStepOfPositions(Override):
    def training_step(self, *args: Any) -> Any:
        self.lab.show(len(args))
        return super().training_step(*args)


class PredictionStep(Override):
    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool,
        ignore_keys: Any = None,
    ) -> Any:  # fmt: skip
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad():
            loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
        if prediction_loss_only:
            return loss.detach(), None, None
        return loss.detach(), outputs["logits"] * 2, inputs.get("labels")


class Log(Override):
    def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        logs["mine"] = self.state.global_step
        super().log(logs, *args, **kwargs)


class LogRenamed(Override):
    def log(self, logs: dict[str, Any], begun: float | None = None) -> None:
        self.lab.show(["loss" in logs, begun is None])
        super().log(logs, begun)


class Loaders(Override):
    """torch's own, of which the Trainer knows nothing."""

    def get_train_dataloader(self) -> Any:
        data = self._remove_unused_columns(self.train_dataset, "training")
        return DataLoader(
            data,
            self.args.train_batch_size,
            collate_fn=self.data_collator,
            drop_last=True,
        )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        if isinstance(eval_dataset, str):
            eval_dataset = self.eval_dataset[eval_dataset]
        data = self.eval_dataset if eval_dataset is None else eval_dataset
        data = self._remove_unused_columns(data, "evaluation")
        return DataLoader(data, 5, collate_fn=self.data_collator)

    def _remove_unused_columns(self, dataset: Any, description: Any = None) -> Any:
        if not hasattr(dataset, "column_names"):
            return dataset
        return super()._remove_unused_columns(dataset, description)


class PreparedLoader(Override):
    def get_test_dataloader(self, test_dataset: Any) -> Any:
        return self.accelerator.prepare(
            DataLoader(
                list(test_dataset)[:5],
                2,
                collate_fn=self._get_collator_with_removed_columns(
                    self.data_collator, description="test"
                ),
            )
        )


class CreateOptimizer(Override):
    def create_optimizer(self, *args: Any) -> Any:
        if self.optimizer is None:
            self.optimizer = torch.optim.NAdam(
                self.model.parameters(), lr=1e-3, eps=1e-4
            )
        return self.optimizer


class CreateOptimizerAfter(Override):
    def create_optimizer(self, *args: Any) -> Any:
        optimizer = super().create_optimizer(*args)
        for group in optimizer.param_groups:
            group["lr"] *= 2
        return optimizer


class CreateScheduler(Override):
    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        self.lab.show([num_training_steps, optimizer is None])
        self.lr_scheduler = torch.optim.lr_scheduler.ExponentialLR(
            self.optimizer if optimizer is None else optimizer, 0.8
        )
        return self.lr_scheduler


class OptimizerCls(Override):
    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> Any:
        cls, kwargs = transformers.Trainer.get_optimizer_cls_and_kwargs(args, model)
        return cls, {**kwargs, "lr": kwargs["lr"] / 2}

    def get_decay_parameter_names(self, model: Any) -> Any:
        return [n for n, _ in model.named_parameters() if n.endswith("weight")]


class Evaluate(Override):
    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None,
        metric_key_prefix: str = "eval",
    ) -> Any:  # fmt: skip
        metrics = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        if isinstance(metrics, dict):
            more = {
                f"{metric_key_prefix}_more": 2
                * metrics.get(f"{metric_key_prefix}_loss", 1.0)
            }
            self.log(dict(more))
            metrics.update(more)
        return metrics


class EvaluationLoop(Override):
    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        output = super().evaluation_loop(*args, **kwargs)
        output.metrics["rows"] = output.num_samples
        self.lab.show([args[1:], kwargs.get("metric_key_prefix")])
        return output


class SaveCheckpoint(Override):
    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        step = self.state.global_step
        folder = Path(self._get_output_dir(trial), f"checkpoint-{step}")
        (folder / "more.txt").write_text(f"{step}")


class Save(Override):
    def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        Path(output_dir or self.args.output_dir, "more.txt").write_text("more")

    def save_model(self, output_dir: Any = None, _internal_call: bool = False) -> None:
        self.lab.show(_internal_call)
        super().save_model(output_dir, _internal_call)


class MaybeLogSaveEvaluate(Override):
    def _maybe_log_save_evaluate(
        self, tr_loss: Any, grad_norm: Any, model: Any, trial: Any, epoch: Any,
        ignore_keys_for_eval: Any, start_time: Any, learning_rate: Any = None,
    ) -> None:  # fmt: skip
        self.lab.show([float(grad_norm), epoch, learning_rate])
        super()._maybe_log_save_evaluate(
            tr_loss, grad_norm, model, trial, epoch, ignore_keys_for_eval,
            start_time, learning_rate,
        )  # fmt: skip


class FloatingPointOps(Override):
    def floating_point_ops(self, inputs: Any) -> int:
        return 3 + len(inputs)


class TrainSampler(Override):
    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return SequentialSampler(self.train_dataset)

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        return [*range(len(eval_dataset))][::-1]


class WeightedSampler(Override):
    def _get_train_sampler(self, *args: Any) -> Any:
        n = len(self.train_dataset)
        generator = torch.Generator().manual_seed(3)
        return WeightedRandomSampler(
            [1.0 + i % 3 for i in range(n)], n, generator=generator
        )


class GlobalSampler(Override):
    """Draws from torch's own generator."""

    def _get_train_sampler(self, *args: Any) -> Any:
        n = len(self.train_dataset)
        return WeightedRandomSampler([1.0 + i % 3 for i in range(n)], n)


class PrepareInputs(Override):
    def _prepare_inputs(self, inputs: Any) -> Any:
        inputs = super()._prepare_inputs(inputs)
        for name in ("x", "attention_mask"):
            if name in inputs:
                inputs[name] = inputs[name].clone()
                inputs[name][:, -1] = 0
        return inputs


class BatchSamples(Override):
    def get_batch_samples(self, iterator: Any, n: int, device: Any) -> Any:
        batches, items = super().get_batch_samples(iterator, n, device)
        self.lab.show([n, len(batches)])
        return batches, items


class BatchSamplesOfOnesOwn(Override):
    def get_batch_samples(self, iterator: Any, n: int, device: Any) -> Any:
        found = []
        for _ in range(n):
            try:
                found.append(next(iterator))
            except StopIteration:
                break
        return found, None


class Best(Override):
    def _load_best_model(self) -> None:
        self.lab.show(Path(self.state.best_model_checkpoint).name)
        super()._load_best_model()

    def _determine_best_metric(self, metrics: Any, trial: Any) -> Any:
        found = super()._determine_best_metric(metrics, trial)
        self.lab.show([found, self.state.best_metric])
        return found

    def _load_from_checkpoint(
        self, resume_from_checkpoint: Any, model: Any = None
    ) -> None:
        self.lab.show(Path(resume_from_checkpoint).name)
        super()._load_from_checkpoint(resume_from_checkpoint, model)


class InnerLoop(Override):
    def _inner_training_loop(
        self, batch_size: Any = None, args: Any = None,
        resume_from_checkpoint: Any = None, trial: Any = None,
        ignore_keys_for_eval: Any = None,
    ) -> Any:  # fmt: skip
        self.lab.show([batch_size, args is self.args, resume_from_checkpoint, trial])
        return super()._inner_training_loop(
            batch_size, args, resume_from_checkpoint, trial, ignore_keys_for_eval
        )


class StateFiles(Override):
    def _save_optimizer_and_scheduler(self, output_dir: Any) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        torch.save({"more": self.state.global_step}, Path(output_dir, "more.pt"))

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        self.lab.show(
            None if checkpoint is None else torch.load(Path(checkpoint, "more.pt"))
        )

    def _save_rng_state(self, output_dir: Any) -> None:
        super()._save_rng_state(output_dir)
        Path(output_dir, "rng.txt").write_text("here")


class Train(Override):
    def train(self, *args: Any, **kwargs: Any) -> Any:
        output = super().train(*args, **kwargs)
        self.log({"after": 1.0})
        return output


class Clip(Override):
    def _clip_grad_norm(self, model: Any) -> Any:
        norm = super()._clip_grad_norm(model)
        self.lab.show(float(norm))
        return norm

    def _get_learning_rate(self) -> float:
        return super()._get_learning_rate() * 10


class Values(Override):
    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        found = super().set_initial_training_values(args, dataloader)
        self.lab.show([*found])
        return found

    def num_examples(self, dataloader: Any) -> int:
        return 100

    def get_total_train_batch_size(self, args: Any) -> int:
        return 50

    def store_flos(self) -> None:
        self.lab.show(float(self.current_flos))
        super().store_flos()


class Columns(Override):
    """As TRL's trainers do."""

    def _set_signature_columns_if_needed(self) -> None:
        if self._signature_columns is None:
            self._signature_columns = [
                "input_ids", "attention_mask", "x", "labels", "label",
            ]  # fmt: skip


class RunEpoch(Override):
    def _run_epoch(self, **kwargs: Any) -> None:
        self.lab.show([kwargs[n] for n in ("epoch", "steps_in_epoch")])
        self.lab.show(sorted(kwargs))
        super()._run_epoch(**kwargs)


OVERRIDES: dict[str, Any] = {cls.__name__: cls for cls in Override.__subclasses__()}


class Decide(transformers.TrainerCallback):  # type: ignore[misc]
    """Sets and clears flags in events of every kind, as drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self.seed, self.times = seed, Counter()

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def event(args: Any, state: Any, control: Any, **given: Any) -> Any:
            key = name, state.global_step
            self.times[key] += 1
            draw = random.Random(f"{self.seed} {key} {self.times[key]}")
            for flag in FLAGS:
                drawn = draw.random() * (4 if flag in FLAGS[:2] else 1)
                if drawn < 0.05:
                    setattr(control, flag, drawn < 0.04)
            return control if draw.random() < 0.5 else None

        return event
