"""auto_find_batch_size: runs in which passes fail for want of memory, at drawn places,
equal those in which none does."""

import json
import random

import pytest
from ranks import run, run_alone, told

torch = pytest.importorskip("torch")

import ctrainer  # noqa: E402
from ctrainer.runtime import parts  # noqa: E402

N = 50


class Net(torch.nn.Module):
    """Fails where `fails(place, rows)` says so, in forward or in the middle of the
    backward pass."""

    def __init__(self, kind="mean"):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)
        self.norm = torch.nn.BatchNorm1d(8) if kind == "normalized" else None
        self.drop = torch.nn.Dropout(0.5 if kind == "dropout" else 0.0)
        self.kind, self.fails = kind, lambda place, rows: False

    def check(self, place, rows):
        if self.training and self.fails(place, rows):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")

    def forward(self, x, labels=None, more=None):
        rows = len(x)
        hidden = self.drop(torch.tanh(self.a(x)))
        if self.norm is not None:
            hidden = self.norm(hidden)
        self.check("forward", rows)
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: self.check("backward", rows))
        y = self.b(hidden).squeeze(-1)
        if self.kind == "sum":
            return {"loss": ((y - labels) ** 2).sum()}
        if self.kind == "coupled":
            scores = hidden @ hidden.T
            return {
                "loss": torch.nn.functional.cross_entropy(scores, torch.arange(rows))
            }
        return {"loss": ((y - labels) ** 2).mean(), "logits": y}


def rows_of_data():
    torch.manual_seed(1)
    return [
        {"x": torch.randn(4), "labels": torch.randn(()), "more": torch.zeros(2)}
        for _ in range(N)
    ]


def trained(folder, fails=None, kind="mean", model=None, **options):
    options = {"num_train_epochs": 6, "gradient_accumulation_steps": 2, **options}
    options = {"per_device_train_batch_size": 7, **options}
    args = ctrainer.TrainingArguments(
        str(folder), logging_steps=1, report_to=[],
        save_strategy="no", use_cpu=True, disable_tqdm=True, learning_rate=0.02,
        auto_find_batch_size=True, **options,
    )  # fmt: skip
    model = model or Net(kind)
    model.fails = fails or model.fails
    trainer = ctrainer.Trainer(model, args, train_dataset=rows_of_data())
    trainer.remove_callback(ctrainer.PrinterCallback)
    trainer.train()
    return trainer


def losses(trainer):
    return [e["loss"] for e in trainer.state.log_history if "loss" in e]


class Drawn:
    """Fails at most once in each of the drawn updates."""

    def __init__(self, seed, rate=0.5):
        self.draw, self.rate = random.Random(seed), rate
        self.trainer, self.failed = None, []

    def __call__(self, place, rows):
        step = self.step()
        if step in self.failed or self.draw.random() > self.rate:
            return False
        self.failed.append(step)
        return True


def with_failures(folder, seed, **options):
    draws = Drawn(seed)
    steps = [0]
    draws.step = lambda: steps[0]

    class Steps(ctrainer.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            steps[0] = state.global_step

    original = ctrainer.Trainer.__init__

    def init(self, *args, **kwargs):
        original(self, *args, callbacks=[Steps()], **kwargs)

    ctrainer.Trainer.__init__ = init
    try:
        return trained(folder, draws, **options), draws
    finally:
        ctrainer.Trainer.__init__ = original


@pytest.mark.parametrize("kind", ["mean", "sum"])
@pytest.mark.parametrize("seed", range(4))
def test_a_run_with_failures_is_the_run_without(tmp_path, seed, kind) -> None:
    accumulated = (1, 2, 3, 6)[seed]
    options = {"kind": kind, "gradient_accumulation_steps": accumulated}
    options["num_train_epochs"] = 12 * accumulated
    plain = trained(tmp_path / "plain", **options)
    failing, draws = with_failures(tmp_path / "failing", seed, **options)
    assert len(draws.failed) > 50
    assert losses(failing) == pytest.approx(losses(plain), rel=1e-6, abs=1e-6)
    for a, b in zip(failing.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)
    assert failing.state.global_step == plain.state.global_step
    assert failing.state.epoch == plain.state.epoch


class Reused(Net):
    """Recomputes in the backward pass, which then adds to a gradient three times, and
    fails between two of them."""

    def forward(self, x, labels=None, more=None):
        rows, x = len(x), x.clone().requires_grad_()
        for i in range(2):
            step = torch.utils.checkpoint.checkpoint(self.a, x, use_reentrant=True)
            x = x + torch.tanh(step)[:, :4]
            if i == 0 and x.requires_grad:
                x.register_hook(lambda grad: self.check("between", rows))
        return super().forward(x, labels)


@pytest.mark.parametrize(
    ("kind", "repeated"), [("mean", 1), ("dropout", 5), ("reused", 5)]
)
def test_how_much_a_failure_in_the_backward_pass_repeats(
    tmp_path, kind, repeated
) -> None:
    """Of the fifth of six micro-batches: that one, where the pass is known to add to
    each gradient once and to compute the same again; else all five."""
    seen = []

    def fails(place, rows):
        seen.append((place, rows))
        where = "between" if kind == "reused" else "backward"
        return place == where and len(seen) == (15 if kind == "reused" else 10)

    def run_with(fails):
        return trained(
            tmp_path, fails, kind, Reused() if kind == "reused" else None, max_steps=2,
            gradient_accumulation_steps=6, per_device_train_batch_size=8,
        )  # fmt: skip

    plain, failing = run_with(None), run_with(fails)
    rows = sum(n for place, n in seen if place == "forward")
    seen_of_plain = 8 * 6 + 2
    assert rows == seen_of_plain + 8 * repeated
    if kind != "dropout":
        assert losses(failing) == pytest.approx(losses(plain), rel=1e-6)
        pairs = zip(failing.model.parameters(), plain.model.parameters(), strict=True)
        for a, b in pairs:
            assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


def test_what_is_logged_of_a_pass_that_is_repeated_counts_once(tmp_path) -> None:
    class Own(ctrainer.Trainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            rows = len(inputs["x"])
            self.log_mean("first", inputs["x"][:, 0].mean(), weight=rows)
            self.log_mean("ones", 1.0, weight=rows)
            return super().compute_loss(model, inputs, *args, **kwargs)

    def logged(fails):
        args = ctrainer.TrainingArguments(
            str(tmp_path), per_device_train_batch_size=8, max_steps=3, logging_steps=1,
            gradient_accumulation_steps=2, report_to=[], save_strategy="no",
            use_cpu=True, disable_tqdm=True, auto_find_batch_size=True,
        )  # fmt: skip
        model = Net()
        model.fails = fails
        trainer = Own(model, args, train_dataset=rows_of_data())
        trainer.remove_callback(ctrainer.PrinterCallback)
        weights = []
        take = trainer._take_means
        trainer._take_means = lambda: (
            weights.append(trainer._means["ones"][1]), take()
        )[1]  # fmt: skip
        trainer.train()
        firsts = [e["first"] for e in trainer.state.log_history if "first" in e]
        return firsts, weights

    firsts, weights = logged(lambda place, rows: False)
    assert weights == [16.0, 16.0, 16.0]
    for where in ("forward", "backward"):
        found = logged(lambda place, rows, at=where: place == at and rows > 3)
        assert found[0] == pytest.approx(firsts, rel=1e-6)
        assert found[1] == weights


def test_parts_fit_from_then_on_and_grow_again(tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(parts, "GROWTH_INTERVAL", 10)
    seen = []

    def fails(place, rows):
        seen.append(rows)
        return rows > 3 and len(seen) < 60

    plain = trained(tmp_path / "plain")
    trainer = trained(tmp_path / "failing", fails)
    assert losses(trainer) == pytest.approx(losses(plain), rel=1e-6)
    assert max(seen[2:20]) <= 4
    assert seen[-1] >= 7 or seen[-3] >= 7
    assert "from here on at most 4 rows are in memory at once" in caplog.text


@pytest.mark.parametrize("kind", ["coupled", "normalized"])
def test_rows_that_depend_on_each_other_are_not_split_quietly(tmp_path, kind) -> None:
    def fails(place, rows):
        return place == "forward" and rows > 4

    whole = {"dataloader_drop_last": True}
    with pytest.raises(ValueError, match="split_coupled_rows=True"):
        trained(tmp_path, fails, kind, **whole)
    trainer = trained(tmp_path, fails, kind, split_coupled_rows=True, **whole)
    assert trainer._parts.rows == 4


def test_what_draws_is_reported_and_keeps_the_generators(tmp_path, caplog) -> None:
    failed = []

    def fails(place, rows):
        failed.append(place)
        return place == "forward" and len(failed) == 9

    trainer = trained(tmp_path, fails, "dropout", max_steps=8)
    assert trainer._parts.rows == 4
    assert "the model draws random numbers" in caplog.text


def test_a_row_that_is_tried_again_draws_what_it_has_drawn(tmp_path) -> None:
    one = {"kind": "dropout", "per_device_train_batch_size": 1, "num_train_epochs": 1}
    plain = trained(tmp_path / "plain", **one)
    failing, draws = with_failures(tmp_path / "failing", 3, **one)
    assert len(draws.failed) > 8
    assert losses(failing) == losses(plain)


def test_other_errors_and_a_single_row_stop_the_run(tmp_path) -> None:
    def fails(place, rows):
        return True

    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        trained(tmp_path, fails)

    def broken(place, rows):
        raise RuntimeError("size mismatch")

    with pytest.raises(RuntimeError, match="size mismatch"):
        trained(tmp_path, broken)


def test_a_tensor_without_rows_is_named(tmp_path) -> None:
    def collate(rows):
        batch = {k: torch.stack([r[k] for r in rows]) for k in ("x", "labels")}
        return {**batch, "more": torch.zeros(3, len(rows))}

    args = ctrainer.TrainingArguments(
        str(tmp_path), per_device_train_batch_size=7, use_cpu=True, max_steps=1,
        auto_find_batch_size=True, report_to=[], disable_tqdm=True,
        remove_unused_columns=False,
    )  # fmt: skip
    model = Net()
    model.fails = lambda place, rows: True
    trainer = ctrainer.Trainer(model, args, collate, train_dataset=rows_of_data())
    with pytest.raises(ValueError, match=r"tensor of shape \(3, 7\)"):
        trainer.train()


class Tokens(torch.nn.Module):
    """The mean over targets, which knows nothing of their number in the update."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = torch.nn.Embedding(16, 8), torch.nn.Linear(8, 16)

    def forward(self, input_ids, labels=None):
        logits = self.head(self.table(input_ids))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss}


def gpt2():
    hf = pytest.importorskip("transformers")
    torch.manual_seed(0)
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0,
            eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    )  # fmt: skip


@pytest.mark.parametrize("made", [Tokens, gpt2])
def test_parts_weigh_what_they_have_of_the_targets(tmp_path, made) -> None:
    rows = []
    for i in range(40):
        ids = [(i * 5 + j) % 16 for j in range(6)]
        hidden = 6 if 8 <= i < 16 else i % 6  # some micro-batches have no target
        rows.append({"input_ids": ids, "labels": [-100] * hidden + ids[hidden:]})

    def run_with(fails):
        model = made()
        if fails:
            part = model.transformer if made is gpt2 else model.table
            part.register_forward_pre_hook(_fails_above(3))
        args = ctrainer.TrainingArguments(
            str(tmp_path), per_device_train_batch_size=8, logging_steps=1, max_steps=5,
            gradient_accumulation_steps=2, save_strategy="no", use_cpu=True,
            report_to=[], disable_tqdm=True, auto_find_batch_size=True,
            train_sampling_strategy="sequential", learning_rate=0.5, optim="sgd",
        )  # fmt: skip
        trainer = ctrainer.Trainer(model, args, train_dataset=rows)
        trainer.remove_callback(ctrainer.PrinterCallback)
        trainer.train()
        return trainer

    plain, split = run_with(False), run_with(True)
    assert split._parts.rows == 2
    assert losses(split) == pytest.approx(losses(plain), rel=1e-5)
    for a, b in zip(plain.model.parameters(), split.model.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)


def _fails_above(rows):
    def hook(module, args):
        if module.training and len(args[0]) > rows:
            raise MemoryError

    return hook


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("[enforce fail] not enough memory: you tried"), True),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling"), True),
        (RuntimeError("shapes do not match"), False),
        (ValueError("out of memory"), False),
    ],
)  # fmt: skip
def test_reports_of_too_little_memory(error, found) -> None:
    assert parts.is_out_of_memory(error) == found


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5])
def test_ranks_fail_each_at_its_own_times(tmp_path, rate) -> None:
    ranks = told(run(tmp_path, "trainer.out_of_memory", rate=rate))
    assert (sum(rank["failed"] for rank in ranks) > 1) == (rate > 0)
    for rank in ranks:
        for plain, failing in zip(rank["plain"], rank["failing"], strict=True):
            assert failing == pytest.approx(plain, rel=1e-5, abs=1e-6)
    assert ranks[0]["failing"] == ranks[1]["failing"]


def test_a_process_with_little_memory_trains_as_one_with_much(tmp_path) -> None:
    def trained_with(megabytes):
        done = run_alone("trainer.little_memory", str(megabytes), str(tmp_path))
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout.splitlines()[-1])

    much, little = trained_with(0), trained_with(200)
    assert much["rows"] == 0
    assert 0 < little["rows"] < 64
    assert little["losses"] == pytest.approx(much["losses"], rel=1e-6)
