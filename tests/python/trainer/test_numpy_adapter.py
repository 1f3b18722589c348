"""ctrainer.adapters.numpy: models, optimizers, batches and random state of arrays."""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ctrainer import adapters
from ctrainer.adapters import numpy as adapter
from ctrainer.adapters import torch as torch_adapter
from ctrainer.adapters.numpy import SGD, AdamW, ItemCount, Loss, Parameter


class Line:
    """y = w x, with the squared error as its loss."""

    def __init__(self) -> None:
        self.w = Parameter(np.zeros((1, 1)))
        self.b = Parameter(np.zeros(1))

    def parameters(self) -> list[Parameter]:
        return [self.w, self.b]

    def __call__(self, x: Any, labels: Any) -> dict[str, Any]:
        error = x @ self.w.data + self.b.data - labels

        def pull(scale: float) -> None:
            self.w.accumulate(scale * 2 * x.T @ error / len(x))
            self.b.accumulate(scale * 2 * error.mean(axis=0))

        return {"loss": Loss((error**2).mean(), pull)}


def args(**changes: Any) -> SimpleNamespace:
    values = {
        "seed": 7,
        "data_seed": None,
        "dataloader_drop_last": False,
        "world_size": 1,
    }
    return SimpleNamespace(**{**values, **changes})


def test_adapter_is_chosen_by_the_model() -> None:
    assert adapters.for_model(Line()) is adapter


def test_has_every_function_of_torchs_adapter() -> None:
    theirs = {
        name
        for name, value in vars(torch_adapter).items()
        if not name.startswith("_")
        and callable(value)
        and getattr(value, "__module__", "").startswith("ctrainer.adapters")
    }
    assert theirs - set(vars(adapter)) == set()


@pytest.mark.parametrize("cls", [SGD, AdamW])
def test_a_line_is_learnt(cls: type) -> None:
    model = Line()
    opt = cls(model.parameters(), lr=0.05)
    x = np.random.default_rng(0).standard_normal((64, 1))
    for _ in range(600):
        loss = model(x=x, labels=3 * x + 1)["loss"]
        loss.backward()
        opt.step(max_norm=10.0)
        opt.zero_grad()
    assert model.w.data == pytest.approx(np.array([[3.0]]), abs=0.02)
    assert model.b.data == pytest.approx(np.array([1.0]), abs=0.02)


def test_updates_equal_torchs() -> None:
    torch = pytest.importorskip("torch")
    for name in ("AdamW", "SGD"):
        options = {"lr": 0.01, **({"momentum": 0.9} if name == "SGD" else {})}
        ours = Parameter(np.ones((3, 4), np.float32))
        theirs = torch.nn.Parameter(torch.ones(3, 4))
        opt = getattr(adapter, name)([ours], **options)
        ref = getattr(torch.optim, name)([theirs], **options)
        draw = np.random.default_rng(0).standard_normal
        for _ in range(20):
            ours.grad = draw((3, 4)).astype(np.float32)
            theirs.grad = torch.from_numpy(ours.grad.copy())
            opt.step()
            ref.step()
        np.testing.assert_allclose(ours.data, theirs.detach().numpy(), rtol=1e-5)


def test_scaled_loss_scales_its_gradients() -> None:
    pulled: list[float] = []
    loss = Loss(6.0, pulled.append)
    for scaled, value in ((loss * 0.5, 3.0), (loss / 4, 1.5), (2 * loss / 3, 4.0)):
        assert scaled == pytest.approx(value)
        scaled.backward()
    assert pulled == pytest.approx([0.5, 0.25, 2 / 3])
    assert type(loss.detach()) is np.float64


def test_accumulated_gradient_does_not_alias_its_input() -> None:
    parameter, grad = Parameter(np.zeros(2)), np.ones(2)
    parameter.accumulate(grad)
    parameter.accumulate(grad)
    assert parameter.grad.tolist() == [2, 2]
    assert grad.tolist() == [1, 1]


def test_integer_parameter_is_rejected() -> None:
    with pytest.raises(TypeError, match="int64 cannot be trained"):
        Parameter(np.ones(2, np.int64))


def test_count_notes_that_it_was_read() -> None:
    for use in (
        lambda n: np.ones(3).sum() / n,
        lambda n: np.ones(3) / n,
        lambda n: 1.0 / n,
        lambda n: np.float32(2.0) * (1 / n),
        float,
        int,
        lambda n: [0, 1, 2, 3, 4][n],
    ):
        count = ItemCount(4)
        assert not count.was_read
        use(count)
        assert count.was_read
    np.testing.assert_allclose(np.ones(2) / ItemCount(4), [0.25, 0.25])


def test_state_dict_restores_the_optimizer() -> None:
    def run(opt: AdamW, parameter: Parameter, steps: range) -> None:
        for step in steps:
            parameter.grad = np.full(3, np.float32(step + 1))
            opt.step()

    one, two = (Parameter(np.ones(3, np.float32)) for _ in range(2))
    first = AdamW([{"params": [one], "lr": 0.1}])
    run(first, one, range(4))
    two.data[:] = one.data
    second = AdamW([two])
    second.load_state_dict(first.state_dict())
    run(first, one, range(4, 8))
    run(second, two, range(4, 8))
    assert (one.data == two.data).all()
    assert second.param_groups[0]["lr"] == 0.1


def test_bad_parameters_are_named() -> None:
    parameter = Parameter(np.ones(1))
    with pytest.raises(ValueError, match="empty"):
        SGD([])
    with pytest.raises(TypeError, match=r"params\[1\] is a ndarray"):
        SGD([parameter, np.ones(1)])
    with pytest.raises(ValueError, match="twice"):
        SGD([parameter, parameter])
    with pytest.raises(ValueError, match=r"groups of \[1\]"):
        SGD([parameter, Parameter(np.ones(1))]).load_state_dict(
            SGD([parameter]).state_dict()
        )


def test_decay_goes_to_matrices_alone() -> None:
    model = Line()
    names = adapter.decay_parameter_names(model)
    groups = adapter.optimizer_groups(model, names, 0.1)
    assert [g["params"] for g in groups] == [[model.w], [model.b]]
    assert [g["weight_decay"] for g in groups] == [0.1, 0.0]


def epoch_of(loader: Any, epoch: int, skip: int) -> Any:
    adapter.set_epoch(loader, epoch)
    return adapter.reader(loader, 0).start(epoch, skip, None)


DATA: list[dict[str, Any]] = [{"x": [float(i)], "label": i} for i in range(10)]


class TestBatches:
    def loader(self, **changes: Any) -> Any:
        options = args(**changes)
        return adapter.data_loader(
            DATA,
            options,
            training=True,
            sampler=adapter.random_sampler(DATA, options),
            batch_size=4,
            collate_fn=adapter.default_collator,
        )

    @staticmethod
    def order(iterator: Any) -> list[int]:
        return [int(i) for batch in iterator for i in batch["labels"]]

    def test_batches_cover_the_data_in_a_seeded_order(self) -> None:
        orders = [self.order(epoch_of(self.loader(), epoch, 0)) for epoch in (0, 1, 0)]
        assert sorted(orders[0]) == list(range(10))
        assert orders[0] == orders[2] != orders[1]
        other = self.order(epoch_of(self.loader(data_seed=8), 0, 0))
        assert other != orders[0]

    def test_skipped_batches_are_not_read(self) -> None:
        whole = self.order(epoch_of(self.loader(), 3, 0))
        assert self.order(epoch_of(self.loader(), 3, 2)) == whole[8:]

    def test_last_batch_may_be_dropped(self) -> None:
        whole, cut = self.loader(), self.loader(dataloader_drop_last=True)
        assert (len(whole), len(list(whole))) == (3, 3)
        assert (len(cut), len(list(cut))) == (2, 2)

    def test_iterables_are_taken_as_they_come(self) -> None:
        stream = SimpleNamespace(__iter__=None)
        assert adapter.is_iterable(iter([]))
        assert adapter.is_iterable(stream)
        loader = adapter.data_loader(
            iter(DATA), args(), training=True, sampler=None, batch_size=4,
            collate_fn=adapter.default_collator,
        )  # fmt: skip
        assert self.order(epoch_of(loader, 0, 1)) == list(range(4, 10))

    def test_collator_stacks_and_names_labels(self) -> None:
        batch = adapter.default_collator(
            [{"x": np.float32([1, 2]), "label": 3, "text": "a", "gone": None}] * 2
        )
        assert sorted(batch) == ["labels", "x"]
        assert (batch["labels"].dtype, batch["x"].shape) == (np.int64, (2, 2))
        floats = adapter.default_collator([{"label_ids": [0.5]}])
        assert floats["labels"].dtype == np.float32

    def test_grouping_by_length_keeps_every_index(self) -> None:
        lengths = list(range(300))
        random.Random(0).shuffle(lengths)
        order = list(adapter.length_grouped_sampler(2, lengths, seed=1))
        assert sorted(order) == list(range(300))
        assert lengths[order[0]] == 299
        first = [lengths[i] for i in order[1:74]]
        assert first == sorted(first, reverse=True)


def test_random_state_is_restored() -> None:
    state = adapter.rng_state()
    first = (random.random(), np.random.rand())
    adapter.set_rng_state(state)
    assert (random.random(), np.random.rand()) == first


@pytest.mark.parametrize(
    ("name", "value"),
    [("bf16", True), ("label_smoothing_factor", 0.1), ("dataloader_num_workers", 2)],
)
def test_options_of_torch_are_rejected(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        adapter.prepare_args(args(**{name: value}))


def test_targets_are_counted() -> None:
    labels = np.array([[1, -100, 2], [-100, -100, 3]])
    assert adapter.count_targets(labels, shifted=False) == 3
    assert adapter.count_targets(labels, shifted=True) == 2
    assert adapter.count_targets([1, 2], shifted=False) is None


def test_all_ranks_take_over_the_first_ones_generator() -> None:
    class First:
        def broadcast_bytes(self, data: bytes, root: int) -> bytes:
            self.sent = getattr(self, "sent", data)
            return self.sent

    group: Any = First()
    np.random.seed(5)
    np.random.normal()  # leaves the second of a pair behind
    adapter.share_order([], group)
    expected = np.random.normal(size=3).tolist()
    np.random.seed(6)
    adapter.share_order([], group)
    assert np.random.normal(size=3).tolist() == expected
