"""Each method of transformers' Trainer that a subclass overrides is called here as it
is called there; the calls themselves are the oracle."""

import collections
import inspect
import logging
import sys

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import ctrainer  # noqa: E402

hf_trainer = transformers.trainer.Trainer

# Parallel contexts and meshes, which are rejected; the size of the batch after running
# out of memory, which stays.
NOT_OURS = {
    "_has_mixed_mesh_grads",
    "_mixed_mesh_grad_norm",
    "_prepare_context_parallel_inputs",
    "_update_auto_batch_size",
}
SIZES = {"get_cp_size", "get_sp_size", "get_tp_size"}


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3, 1)

    def forward(self, x, labels=None):
        y = self.layer(x).squeeze(-1)
        return {"loss": ((y - labels) ** 2).mean(), "logits": y}


def rows(n=10):
    torch.manual_seed(1)
    return [{"x": torch.randn(3), "labels": torch.tensor(float(i))} for i in range(n)]


def arguments(folder, **options):
    options = {"num_train_epochs": 2, "save_steps": 3, **options}
    return transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=2, gradient_accumulation_steps=2,
        logging_steps=2, use_cpu=True, disable_tqdm=True, report_to=[], **options,
    )  # fmt: skip


def names():
    found = vars(hf_trainer).items()
    return [n for n, f in found if inspect.isfunction(f) and not n.startswith("__")]


def counting(base, calls):
    """A subclass whose every method notes that it was called."""

    def noting(name, method):
        def call(self, *args, **kwargs):
            calls[name] += 1
            return method(self, *args, **kwargs)

        call.__signature__ = inspect.signature(method)
        return call

    body = {
        name: noting(name, getattr(base, name))
        for name in names()
        if not isinstance(inspect.getattr_static(base, name, None), staticmethod)
        and hasattr(base, name)
    }
    return type("Counting", (base,), body)


def counted(base, folder, **options):
    calls = collections.Counter()
    trainer = counting(base, calls)(
        Net(), arguments(folder, eval_strategy="epoch", **options),
        train_dataset=rows(),
        eval_dataset=rows(4), compute_metrics=lambda p: {"a": 0.0},
    )  # fmt: skip
    trainer.train()
    trainer.evaluate()
    trainer.predict(rows(4))
    trainer.save_model(str(folder / "saved"))
    return calls


@pytest.mark.parametrize(
    "options",
    [{}, {"max_grad_norm": 0.0}, {"include_num_input_tokens_seen": "all"}],
    ids=str,
)
def test_every_override_is_called_as_often(tmp_path, options) -> None:
    assert {n for n in names() if not hasattr(ctrainer.Trainer, n)} <= NOT_OURS
    theirs = counted(hf_trainer, tmp_path / "theirs", **options)
    ours = counted(ctrainer.Trainer, tmp_path / "ours", **options)
    assert {n for n in theirs if not ours[n]} <= NOT_OURS | SIZES
    differing = {
        name: (theirs[name], ours[name])
        for name in theirs.keys() & ours.keys()
        if theirs[name] != ours[name]
    }
    # The reader of the data takes its generators; a folder is asked for once less; each
    # train() looks where the model is.
    assert differing.keys() <= {
        "_get_output_dir", "_load_rng_state", "_move_model_to_device"
    }  # fmt: skip


def test_run_epoch_gets_what_it_gets_there(tmp_path) -> None:
    def seen_by(base, folder, resume=None):
        seen = []

        class Own(base):
            def _run_epoch(self, **kwargs):
                began = kwargs.pop("start_time")
                assert began > 0
                model, loader = kwargs.pop("model"), kwargs.pop("train_dataloader")
                assert isinstance(model, torch.nn.Module)
                assert len(loader) == 5
                path = kwargs.pop("resume_from_checkpoint")
                seen.append((kwargs, path is not None))
                super()._run_epoch(
                    model=model, train_dataloader=loader, start_time=began,
                    resume_from_checkpoint=path, **kwargs,
                )  # fmt: skip

        args = arguments(folder, save_steps=2)
        Own(Net(), args, train_dataset=rows()).train(resume_from_checkpoint=resume)
        return seen

    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    assert seen_by(hf_trainer, theirs) == seen_by(ctrainer.Trainer, ours)
    again = seen_by(hf_trainer, theirs, str(theirs / "checkpoint-2"))
    assert again == seen_by(ctrainer.Trainer, ours, str(ours / "checkpoint-2"))


@pytest.mark.parametrize("named", [True, False])
def test_overrides_with_other_names_get_what_they_get_there(tmp_path, named) -> None:
    def seen_by(base, folder):
        seen = []

        class Named(base):
            def training_step(self, model, inputs, items=None):
                seen.append(("training_step", items is None))
                return super().training_step(model, inputs, items)

            def log(self, logs, begun=None):
                seen.append(("log", "loss" in logs, begun is None))
                super().log(logs, begun)

        class Unnamed(base):
            def training_step(self, *args):
                seen.append(("training_step", args[2] is None))
                return super().training_step(*args)

            def log(self, *args):
                seen.append(("log", "loss" in args[0], len(args)))
                super().log(*args)

        class Own(Named if named else Unnamed):
            def _inner_training_loop(self, batch_size=None, args=None, **kwargs):
                seen.append((batch_size, args is self.args, sorted(kwargs)))
                return super()._inner_training_loop(batch_size, args, **kwargs)

            def _determine_best_metric(self, **kwargs):
                seen.append(sorted(kwargs))
                return super()._determine_best_metric(**kwargs)

        class Takes(Net):
            def forward(self, x, labels, num_items_in_batch=None, **kwargs):
                found = super().forward(x, labels)
                n = len(x) / (num_items_in_batch or len(x))
                return {**found, "loss": found["loss"] * n}

        args = arguments(folder, eval_strategy="epoch", metric_for_best_model="loss")
        Own(Takes(), args, train_dataset=rows(), eval_dataset=rows(4)).train()
        return seen

    theirs = seen_by(hf_trainer, tmp_path / "theirs")
    assert ("training_step", False) in theirs
    assert theirs == seen_by(ctrainer.Trainer, tmp_path / "ours")


def test_run_epoch_may_take_another_loader_and_model(tmp_path) -> None:
    used = []

    class Wrapped(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, **batch):
            used.append(len(batch["x"]))
            return self.inner(**batch)

    class Own(ctrainer.Trainer):
        def _run_epoch(self, model, train_dataloader, **kwargs):
            batches = list(train_dataloader)
            super()._run_epoch(
                model=Wrapped(model), train_dataloader=batches[::-1], **kwargs
            )

    trainer = Own(Net(), arguments(tmp_path), train_dataset=rows(9))
    assert trainer.train().global_step == 6
    assert used == [1, 2, 2, 2, 2] * 2  # the short batch first


def test_run_epoch_may_be_a_loop_of_ones_own(tmp_path) -> None:
    class Own(ctrainer.Trainer):
        def _run_epoch(self, model, train_dataloader, epoch, **kwargs):
            for batch in train_dataloader:
                self.training_step(model, batch)
                self.optimizer.step()
                model.zero_grad()
                self.state.global_step += 1
            self.state.epoch = epoch + 1

    trainer = Own(Net(), arguments(tmp_path), train_dataset=rows())
    assert trainer.train().global_step == 10
    with pytest.raises(RuntimeError, match="part of train"):
        ctrainer.Trainer._run_epoch(trainer, *[None] * 11)


@pytest.mark.parametrize("clip", [0.5, 0.0])
def test_the_last_word_on_the_norm_is_the_override_s(tmp_path, clip) -> None:
    def logged(base, folder):
        class Own(base):
            def _get_grad_norm(self, model, grad_norm=None):
                grads = [p.grad for p in model.parameters()]
                clipped = float(torch.nn.utils.get_total_norm(grads))
                before = super()._get_grad_norm(model, grad_norm)
                return float(before) + 1000.0 * round(clipped, 4)

        args = arguments(folder, max_grad_norm=clip)
        args.logging_steps = 1
        trainer = Own(Net(), args, train_dataset=rows())
        trainer.train()
        return [e["grad_norm"] for e in trainer.state.log_history if "grad_norm" in e]

    theirs = logged(hf_trainer, tmp_path / "theirs")
    assert logged(ctrainer.Trainer, tmp_path / "ours") == pytest.approx(
        theirs, rel=1e-4
    )


@pytest.mark.parametrize("resume", [False, True])
def test_an_override_may_log_and_save_itself(tmp_path, resume) -> None:
    def logged(base, folder):
        class Own(base):
            _maybe_log_save_evaluate = hf_trainer._maybe_log_save_evaluate

        args = arguments(folder, save_steps=2 if base is hf_trainer else 3)
        for last in [None, str(folder / f"checkpoint-{args.save_steps}")][: 1 + resume]:
            trainer = Own(Net(), args, train_dataset=rows())
            loss = trainer.train(resume_from_checkpoint=last).training_loss
        entries = [e for e in trainer.state.log_history if "loss" in e]
        return [(e["step"], e["loss"]) for e in entries], loss

    losses, mean = logged(ctrainer.Trainer, tmp_path / "ours")
    # Theirs keeps no window in a checkpoint, and resumes where a log has ended one.
    theirs, their_mean = logged(hf_trainer, tmp_path / "theirs")
    assert losses == [(step, pytest.approx(loss, rel=1e-5)) for step, loss in theirs]
    if not resume:
        assert mean == pytest.approx(their_mean, rel=1e-5)


def test_prepare_input_sees_every_part(tmp_path) -> None:
    def parts_of(base, folder):
        parts = []

        class Own(base):
            def _prepare_input(self, data):
                parts.append(type(data).__name__)
                return super()._prepare_input(data)

            def compute_loss(self, model, inputs, *args, **kwargs):
                inputs.pop("more")
                return super().compute_loss(model, inputs, *args, **kwargs)

        def collate(batch):
            stacked = {k: torch.stack([row[k] for row in batch]) for k in batch[0]}
            return {**stacked, "more": [(stacked["x"], "text"), {"y": stacked["x"]}]}

        args = arguments(folder, max_steps=2, remove_unused_columns=False)
        Own(Net(), args, data_collator=collate, train_dataset=rows()).train()
        return collections.Counter(parts)

    theirs = parts_of(hf_trainer, tmp_path / "theirs")
    assert parts_of(ctrainer.Trainer, tmp_path / "ours") == theirs


def test_an_override_makes_the_accelerator(tmp_path) -> None:
    class Own(ctrainer.Trainer):
        def create_accelerator_and_postprocess(self):
            super().create_accelerator_and_postprocess()
            self.made = self.accelerator

        def _build_accelerator_args(self, **kwargs):
            found = super()._build_accelerator_args(**kwargs)
            return {**found, "step_scheduler_with_optimizer": False}

    trainer = Own(Net(), arguments(tmp_path), train_dataset=rows())
    assert trainer.made is trainer.accelerator
    assert trainer.accelerator.step_scheduler_with_optimizer is False


def test_a_subclass_finds_accelerate_s_state(tmp_path) -> None:
    from accelerate.state import AcceleratorState

    class Own(ctrainer.Trainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.found = AcceleratorState().process_index

    args = arguments(tmp_path)
    AcceleratorState._reset_state()
    assert Own(Net(), args, train_dataset=rows()).found == 0


def test_a_loop_of_ones_own_needs_no_init_of_ours(tmp_path) -> None:
    class Own(ctrainer.Trainer):
        def __init__(self, model, args):
            self.model, self.args = model, args
            self.optimizer = self.lr_scheduler = None
            self.optimizer_cls_and_kwargs = None
            self.create_optimizer_and_scheduler(num_training_steps=4)

    trainer = Own(Net(), arguments(tmp_path))
    assert isinstance(trainer.optimizer, torch.optim.Optimizer)
    assert trainer.lr_scheduler.get_last_lr() == [5e-5, 5e-5]
    assert not trainer.is_in_train


@pytest.mark.parametrize("bf16", [False, True])
def test_arguments_of_transformers_4_57_make_the_accelerator(bf16, tmp_path) -> None:
    """They have no mixed_precision."""
    args = transformers.TrainingArguments(
        str(tmp_path), use_cpu=True, bf16=bf16, report_to="none"
    )
    vars(args).pop("mixed_precision", None)
    assert not hasattr(args, "mixed_precision")
    trainer = ctrainer.Trainer(Net(), args, train_dataset=rows())
    assert trainer.accelerator.mixed_precision == ("bf16" if bf16 else "no")


def test_the_accelerator_runs_other_models_in_the_trainer_s_precision(tmp_path):
    other = torch.nn.Linear(3, 1)
    for bf16 in True, False:
        args = arguments(tmp_path, bf16=bf16)
        accelerator = ctrainer.Trainer(Net(), args, train_dataset=rows()).accelerator
        kind = torch.bfloat16 if bf16 else torch.float32
        assert accelerator.mixed_precision == ("bf16" if bf16 else "no")
        with accelerator.autocast():
            assert other(torch.ones(3)).dtype == kind


def test_names_of_transformers_4_are_called(tmp_path) -> None:
    calls = []

    class Own(ctrainer.Trainer):
        def _activate_neftune(self, model):
            calls.append("activate")
            made = super()._activate_neftune(model)
            assert made is model
            assert self.neftune_hook_handle is not None
            return made

        def _deactivate_neftune(self, model):
            calls.append("deactivate")
            super()._deactivate_neftune(model)

        def _align_special_tokens(self):
            calls.append("align")

        def compare_trainer_and_checkpoint_args(self, args, state):
            calls.append(state.global_step)

    config = transformers.GPT2Config(
        vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2
    )
    data = [{"input_ids": [i % 16] * 4, "labels": [i % 16] * 4} for i in range(24)]
    for resume in (None, str(tmp_path / "checkpoint-2")):
        args = arguments(tmp_path, save_steps=2, max_steps=4, neftune_noise_alpha=5.0)
        trainer = Own(transformers.GPT2LMHeadModel(config), args, train_dataset=data)
        trainer.train(resume)
        assert trainer.neftune_hook_handle is None
    around = ["align", "activate", "deactivate"]
    assert calls == [*around, "align", "activate", 2, "deactivate"]


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            yield from rows()


@pytest.mark.parametrize(("data", "max_steps"), [(rows, -1), (rows, 4), (Endless, 4)])
def test_the_run_s_length_may_come_from_an_override_of_transformers_4(
    tmp_path, data, max_steps
) -> None:
    """Whose signature and values are those of 4.57's trainer.py."""
    seen = []

    class Own(ctrainer.Trainer):
        def set_initial_training_values(self, args, dataloader, total_train_batch_size):
            seen.append(total_train_batch_size)
            if data is Endless:
                return sys.maxsize, 4, 16, 16, False, None, 4
            epochs = 2 if max_steps == 4 else 3  # another length than the arguments'
            return epochs, 3, 10, 30, max_steps < 0, len(dataloader), 3 * epochs

    logs = []
    for cls in (Own, ctrainer.Trainer):
        steps = {"max_steps": max_steps} if data is Endless or cls is Own else {}
        epochs = 3 if max_steps < 0 else 2
        args = arguments(tmp_path, num_train_epochs=epochs, **steps)
        trainer = cls(Net(), args, train_dataset=data())
        trainer.train()
        logs.append([(e["step"], e.get("loss")) for e in trainer.state.log_history])
    assert logs[0] == logs[1]
    assert seen == [4]
    values = trainer.set_initial_training_values(
        args=args, dataloader=trainer.get_train_dataloader(), total_train_batch_size=4
    )
    assert values[1] == (4 if data is Endless else 3)


@pytest.mark.parametrize("sharded", [{}, {"fsdp": "full_shard"}], ids=str)
def test_a_model_whose_tensors_are_cut_over_ranks_is_rejected(
    tmp_path, sharded
) -> None:
    config = transformers.GPT2Config(
        vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2
    )

    def cut():
        model = transformers.GPT2LMHeadModel(config)
        model._tp_size = 2  # as from_pretrained(tp_plan="auto") sets it on 2 ranks
        return model

    args = ctrainer.TrainingArguments(str(tmp_path), use_cpu=True, **sharded)
    for given in ({"model": cut()}, {"model_init": cut}):
        with pytest.raises(ValueError, match=r"cut over 2 ranks .*without tp_plan"):
            ctrainer.Trainer(args=args, train_dataset=rows(), **given)
    model = cut()
    model._tp_size = None
    ctrainer.Trainer(model, args, train_dataset=rows())


def test_keys_that_a_load_lacks_are_named(tmp_path, caplog, monkeypatch) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    caplog.set_level(logging.WARNING, "transformers")
    trainer = ctrainer.Trainer(Net(), arguments(tmp_path), train_dataset=rows())
    result = trainer.model.load_state_dict({"more": torch.ones(1)}, strict=False)
    trainer._issue_warnings_after_load(result)
    assert "missing keys in the checkpoint model loaded: ['layer.weight'" in caplog.text
    assert "unexpected keys in the checkpoint model loaded: ['more']" in caplog.text


# ---- the log, in transformers' words


def lines_of(base, folder, caplog):
    """What a run, its evaluation and a resume with other arguments say."""
    log = logging.getLogger("transformers")
    caplog.clear()
    log.addHandler(caplog.handler)
    level = log.level
    log.setLevel(logging.INFO)
    try:
        options = {"eval_strategy": "steps", "eval_steps": 2, "save_total_limit": 1}
        best = {"load_best_model_at_end": True, "save_steps": 2, "max_steps": 4}
        data = {"train_dataset": rows(), "eval_dataset": rows(4)}
        early = transformers.EarlyStoppingCallback(9)
        args = arguments(folder, **options, **best)
        base(Net(), args, callbacks=[early, early], **data).train()
        args = arguments(folder, max_steps=6, save_steps=3, eval_strategy="no")
        args.restore_callback_states_from_checkpoint = True
        args.per_device_train_batch_size = 4
        args.ignore_data_skip = True
        trainer = base(Net(), args, **data)
        trainer.train(resume_from_checkpoint=True)
        trainer.evaluate()
    finally:
        log.setLevel(level)
        log.removeHandler(caplog.handler)
    texts = "\n".join(record.getMessage() for record in caplog.records)
    texts = texts.replace(str(folder), "FOLDER").replace("ctrainer.", "transformers.")
    texts = texts.replace("currentlist", "current list")
    return {line for line in texts.splitlines() if line.strip()}


def test_the_log_has_transformers_lines(tmp_path, caplog) -> None:
    theirs = lines_of(hf_trainer, tmp_path / "theirs", caplog)
    ours = lines_of(ctrainer.Trainer, tmp_path / "ours", caplog)
    assert len(theirs) > 25
    elsewhere = (
        "Saving model checkpoint to",  # the writer's thread does
        "Configuration saved in",
        "Model weights saved in",
        "Loading model from",
        "  Fast-forwarding the dataloader past",  # no row is read
        "Trainer.model is not a `PreTrainedModel`",
        "Continuing training from checkpoint, restoring",
        "transformers.trainer_callback",  # in the list of the callbacks
        "mtime may not be reliable",  # it decides on nothing here
    )
    missing = {line for line in theirs - ours if not line.startswith(elsewhere)}
    assert missing <= {"ProgressCallback", "PrinterCallback"}


# ---- special tokens, against transformers' own function


TOKENS = [None, 0, 1, 2]


@pytest.mark.parametrize("seed", range(40))
def test_special_tokens_are_aligned_as_there(seed) -> None:
    import random

    from ctrainer.integrations import align_special_tokens as align

    theirs = pytest.importorskip("transformers.trainer_utils")
    if not hasattr(theirs, "align_special_tokens"):
        pytest.skip("this transformers aligns them in a method of its Trainer")

    draw = random.Random(seed)
    names = ("eos_token_id", "bos_token_id", "pad_token_id")
    tokens = {name: draw.choice(TOKENS) for name in names}
    config = {name: draw.choice(TOKENS) for name in names}
    generation = {name: draw.choice(TOKENS) for name in names}
    if draw.random() < 0.4:
        generation["eos_token_id"] = draw.choice([[1], [0, 2], [2, 1]])
    has_generation = draw.random() < 0.8

    def aligned(function):
        tokenizer = transformers.PreTrainedTokenizerFast.__new__(_Tokens)
        tokenizer.ids = tokens
        model = Net()
        model.config = transformers.GPT2Config(**config)
        if has_generation:
            given = {
                k: v[:] if isinstance(v, list) else v for k, v in generation.items()
            }
            model.generation_config = transformers.GenerationConfig(**given)
        function(model, tokenizer)
        made = getattr(model, "generation_config", None)
        return [[getattr(c, n) for n in names] for c in (model.config, made) if c]

    assert aligned(align) == aligned(theirs.align_special_tokens)


class _Tokens(transformers.PreTrainedTokenizerFast):
    eos_token_id = property(lambda self: self.ids["eos_token_id"])
    bos_token_id = property(lambda self: self.ids["bos_token_id"])
    pad_token_id = property(lambda self: self.ids["pad_token_id"])


def test_a_trainer_aligns_them_before_the_first_batch(tmp_path) -> None:
    model = Net()
    model.config = transformers.GPT2Config(eos_token_id=5, pad_token_id=None)
    tokenizer = transformers.PreTrainedTokenizerFast.__new__(_Tokens)
    tokenizer.ids = {"eos_token_id": 7, "bos_token_id": 3, "pad_token_id": 7}
    tokenizer.save_pretrained = lambda folder: None
    args = arguments(tmp_path, max_steps=1)
    collate = transformers.default_data_collator
    ctrainer.Trainer(
        model, args, collate, train_dataset=rows(), processing_class=tokenizer
    ).train()
    assert (model.config.eos_token_id, model.config.pad_token_id) == (7, 7)


def test_overflow_is_found_where_it_begins(tmp_path, capsys) -> None:
    class Bad(Net):
        def forward(self, x, labels=None):
            return super().forward(self.layer.weight[0] * x * 1e38 * 1e38, labels)

    args = arguments(tmp_path, max_steps=1, debug="underflow_overflow")
    trainer = ctrainer.Trainer(Bad(), args, train_dataset=rows())
    with pytest.raises(ValueError, match="inf/nan detected"):
        trainer.train()
    assert "Detected inf/nan" in capsys.readouterr().out
