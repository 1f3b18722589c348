"""The set_* methods of TrainingArguments: several related fields at a time."""

from __future__ import annotations

from typing import Self

from ctrainer.arguments.older_fields import OwnFields
from ctrainer.enums import (
    HubStrategy,
    IntervalStrategy,
    OptimizerNames,
    SaveStrategy,
    SchedulerType,
)


def _check_steps(strategy: str, steps: float) -> None:
    if strategy == IntervalStrategy.STEPS and not steps > 0:
        raise ValueError(f"strategy 'steps' needs steps above 0, not {steps!r}")


class Setters(OwnFields):
    """Each sets all of its fields, those not given to its own defaults, and returns the
    arguments. Values are checked when a Trainer takes them."""

    def set_training(
        self,
        learning_rate: float = 5e-5,
        batch_size: int = 8,
        weight_decay: float = 0,
        num_epochs: float = 3,
        max_steps: int = -1,
        gradient_accumulation_steps: int = 1,
        seed: int = 42,
        gradient_checkpointing: bool = False,
    ) -> Self:
        """Set what training depends on, do_train too; return these arguments.

        Args:
            learning_rate (float, default 5e-05): Peak learning rate.
            batch_size (int, default 8): Rows in a micro-batch.
            weight_decay (float, default 0): Decoupled decay of weights, not of biases
                or norms.
            num_epochs (float, default 3): Passes over the data; may have a fraction.
            max_steps (int, default -1): Updates; above 0 it overrides num_epochs.
            gradient_accumulation_steps (int, default 1): Micro-batches in an update.
            seed (int, default 42): Of the run.
            gradient_checkpointing (bool, default False): Recompute activations in the
                backward pass.
        """
        self.do_train = True
        self.learning_rate = learning_rate
        self.per_device_train_batch_size = batch_size
        self.weight_decay = weight_decay
        self.num_train_epochs = num_epochs
        self.max_steps = max_steps
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self.seed = seed
        self.gradient_checkpointing = gradient_checkpointing
        return self

    def set_evaluate(
        self,
        strategy: str | IntervalStrategy = "no",
        steps: int = 500,
        batch_size: int = 8,
        accumulation_steps: int | None = None,
        delay: float | None = None,
        loss_only: bool = False,
    ) -> Self:
        """Set when and how to evaluate; return these arguments.

        Args:
            strategy (str | IntervalStrategy, default 'no'): "no", "steps" or "epoch".
            steps (int, default 500): Updates between evaluations.
            batch_size (int, default 8): Rows in a batch.
            accumulation_steps (int | None, default None): Batches whose results may
                still be on their way to host memory; None: 1.
            delay (float | None, default None): Epochs or updates before the first
                evaluation; None: 0.
            loss_only (bool, default False): Compute the loss alone.

        Raises:
            ValueError: another strategy, or "steps" with 0 steps.
        """
        self.eval_strategy = IntervalStrategy(strategy)
        _check_steps(self.eval_strategy, steps)
        self.do_eval = self.eval_strategy != IntervalStrategy.NO
        self.eval_steps = steps
        self.per_device_eval_batch_size = batch_size
        self.eval_accumulation_steps = accumulation_steps
        self.eval_delay = delay or 0
        self.prediction_loss_only = loss_only
        return self

    def set_testing(self, batch_size: int = 8, loss_only: bool = False) -> Self:
        """Set how to predict, do_predict too; return these arguments.

        Args:
            batch_size (int, default 8): Rows in a batch.
            loss_only (bool, default False): Compute the loss alone.
        """
        self.do_predict = True
        self.per_device_eval_batch_size = batch_size
        self.prediction_loss_only = loss_only
        return self

    def set_save(
        self,
        strategy: str | IntervalStrategy = "steps",
        steps: int = 500,
        total_limit: int | None = None,
        on_each_node: bool = False,
    ) -> Self:
        """Set when to take a checkpoint and how many to keep; return these arguments.

        Args:
            strategy (str | IntervalStrategy, default 'steps'): "no", "steps", "epoch"
                or "best".
            steps (int, default 500): Updates between checkpoints.
            total_limit (int | None, default None): Checkpoints to keep; None: all.
            on_each_node (bool, default False): Every machine writes its own.

        Raises:
            ValueError: another strategy, or "steps" with 0 steps.
        """
        self.save_strategy = SaveStrategy(strategy)
        _check_steps(self.save_strategy, steps)
        self.save_steps = steps
        self.save_total_limit = total_limit
        self.save_on_each_node = on_each_node
        return self

    def set_logging(
        self,
        strategy: str | IntervalStrategy = "steps",
        steps: int = 500,
        report_to: str | list[str] = "none",
        level: str = "passive",
        first_step: bool = False,
        nan_inf_filter: bool = False,
        on_each_node: bool = False,
        replica_level: str = "passive",
    ) -> Self:
        """Set when and where to log; return these arguments. As in transformers, the
        filter's default here is not the field's.

        Args:
            strategy (str | IntervalStrategy, default 'steps'): "no", "steps" or
                "epoch".
            steps (int, default 500): Updates between logs.
            report_to (str | list[str], default 'none'): Trackers by name.
            level (str, default 'passive'): Level of ranks that log.
            first_step (bool, default False): Log the first update, too.
            nan_inf_filter (bool, default False): Leave losses that are NaN or Inf out
                of the logged mean.
            on_each_node (bool, default False): The first rank of each machine logs;
                else the first of all.
            replica_level (str, default 'passive'): Level of the other ranks.

        Raises:
            ValueError: another strategy, or "steps" with 0 steps.
        """
        self.logging_strategy = IntervalStrategy(strategy)
        _check_steps(self.logging_strategy, steps)
        self.logging_steps = steps
        self.report_to = report_to
        self.log_level = level
        self.logging_first_step = first_step
        self.logging_nan_inf_filter = nan_inf_filter
        self.log_on_each_node = on_each_node
        self.log_level_replica = replica_level
        return self

    def set_push_to_hub(
        self,
        model_id: str,
        strategy: str | HubStrategy = "every_save",
        token: str | None = None,
        private_repo: bool | None = None,
        always_push: bool = False,
        revision: str | None = None,
    ) -> Self:
        """Set what goes to the Hub; return these arguments, which are rejected when
        they are checked again.

        Args:
            model_id (str): Name of the repository.
            strategy (str | HubStrategy, default 'every_save'): When to push.
            token (str | None, default None): For logging in.
            private_repo (bool | None, default None): Make a private repository.
            always_push (bool, default False): Also push while the last push runs.
            revision (str | None, default None): Branch.
        """
        self.push_to_hub = True
        self.hub_model_id = model_id
        self.hub_strategy = HubStrategy(strategy)
        self.hub_token = token
        self.hub_private_repo = private_repo
        self.hub_always_push = always_push
        self.hub_revision = revision
        return self

    def set_optimizer(
        self,
        name: str | OptimizerNames = "adamw_torch",
        learning_rate: float = 5e-5,
        weight_decay: float = 0,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        args: str | None = None,
    ) -> Self:
        """Set the optimizer; return these arguments.

        Args:
            name (str | OptimizerNames, default 'adamw_torch'): One of OptimizerNames.
            learning_rate (float, default 5e-05): Peak learning rate.
            weight_decay (float, default 0): Decoupled decay of weights, not of biases
                or norms.
            beta1 (float, default 0.9): Decay of the mean of gradients.
            beta2 (float, default 0.999): Decay of the mean of squared gradients.
            epsilon (float, default 1e-08): Added to the root of the mean square.
            args (str | None, default None): More settings, as 'name=value,...'.
        """
        self.optim = OptimizerNames(name)
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.adam_beta1 = beta1
        self.adam_beta2 = beta2
        self.adam_epsilon = epsilon
        self.optim_args = args
        return self

    def set_lr_scheduler(
        self,
        name: str | SchedulerType = "linear",
        num_epochs: float = 3.0,
        max_steps: int = -1,
        warmup_steps: float = 0,
    ) -> Self:
        """Set the schedule of the learning rate; return these arguments.

        Args:
            name (str | SchedulerType, default 'linear'): One of SchedulerType.
            num_epochs (float, default 3.0): Passes over the data.
            max_steps (int, default -1): Updates; above 0 it overrides num_epochs.
            warmup_steps (float, default 0): Updates of the warm-up; below 1, a part of
                the run.
        """
        self.lr_scheduler_type = SchedulerType(name)
        self.num_train_epochs = num_epochs
        self.max_steps = max_steps
        self.warmup_steps = warmup_steps
        return self

    def set_dataloader(
        self,
        train_batch_size: int = 8,
        eval_batch_size: int = 8,
        drop_last: bool = False,
        num_workers: int = 0,
        pin_memory: bool = True,
        persistent_workers: bool = False,
        prefetch_factor: int | None = None,
        multiprocessing_context: str | None = None,
        in_order: bool = True,
        auto_find_batch_size: bool = False,
        ignore_data_skip: bool = False,
        sampler_seed: int | None = None,
    ) -> Self:
        """Set how data is loaded; return these arguments.

        Args:
            train_batch_size (int, default 8): Rows in a micro-batch.
            eval_batch_size (int, default 8): Rows in an evaluation batch.
            drop_last (bool, default False): Leave out a last batch that is not full.
            num_workers (int, default 0): Processes that load data; 0: this one.
            pin_memory (bool, default True): Put batches into pinned memory.
            persistent_workers (bool, default False): Keep the processes between epochs.
            prefetch_factor (int | None, default None): Batches that each process has
                prefetched.
            multiprocessing_context (str | None, default None): How the processes start.
            in_order (bool, default True): Return batches in the order of their indices.
            auto_find_batch_size (bool, default False): Split a micro-batch that runs
                out of memory.
            ignore_data_skip (bool, default False): Begin a resumed epoch's data anew.
            sampler_seed (int | None, default None): Of the order of rows; None: the
                seed of the run.
        """
        self.per_device_train_batch_size = train_batch_size
        self.per_device_eval_batch_size = eval_batch_size
        self.dataloader_drop_last = drop_last
        self.dataloader_num_workers = num_workers
        self.dataloader_pin_memory = pin_memory
        self.dataloader_persistent_workers = persistent_workers
        self.dataloader_prefetch_factor = prefetch_factor
        self.dataloader_multiprocessing_context = multiprocessing_context
        self.dataloader_in_order = in_order
        self.auto_find_batch_size = auto_find_batch_size
        self.ignore_data_skip = ignore_data_skip
        self.data_seed = sampler_seed
        return self
