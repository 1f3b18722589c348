"""What `optim` and `optim_args` make, and what they reject."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

import ctrainer
from ctrainer import Trainer, TrainingArguments, hf, optim
from ctrainer.adapters import numpy as arrays
from ctrainer.arguments import optimizers
from ctrainer.enums import OptimizerNames


def arguments(folder: Path, name: str, **options: Any) -> TrainingArguments:
    return TrainingArguments(
        str(folder), optim=name, report_to="none", disable_tqdm=True, **options
    )


def made(folder: Path, name: str, **options: Any) -> Any:
    args = arguments(folder, name, **options)
    cls, kwargs = Trainer.get_optimizer_cls_and_kwargs(args, nn.Linear(2, 1))
    return cls(nn.Linear(2, 1).parameters(), **kwargs)


def test_every_name_is_supported_or_has_its_package() -> None:
    known = optimizers.RECIPES.keys() | optimizers.PACKAGES.keys()
    assert known == {n.value for n in OptimizerNames}
    assert not optimizers.RECIPES.keys() & optimizers.PACKAGES.keys()


def test_the_class_is_found_without_a_model(tmp_path: Path) -> None:
    """As transformers finds it."""
    for name in ("adamw_torch", "sgd", "adafactor", "rmsprop"):
        args = arguments(tmp_path, name)
        cls, kwargs = Trainer.get_optimizer_cls_and_kwargs(args)
        assert (cls, kwargs) == Trainer.get_optimizer_cls_and_kwargs(
            args, nn.Linear(2, 1)
        )
        theirs, expected = transformers.Trainer.get_optimizer_cls_and_kwargs(args)
        assert cls.__name__ == theirs.__name__
        assert kwargs["lr"] == expected["lr"]


@pytest.mark.parametrize("name", sorted(optimizers.RECIPES))
def test_every_name_that_is_supported_makes_its_class(
    name: str, tmp_path: Path
) -> None:
    optimizer = made(tmp_path, name, learning_rate=0.25)
    assert type(optimizer) is getattr(optim, optimizers.RECIPES[name].cls)
    assert optimizer.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize("name", sorted(optimizers.PACKAGES))
def test_a_name_of_another_package_says_which(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = optimizers.PACKAGES[name]
    monkeypatch.setattr(optimizers.Package, "installed", False)
    told = package.reason or f"pip install {package.name}"
    with pytest.raises(
        ValueError, match=f"optim='{name}'.* package {package.name}.*{told}"
    ):
        arguments(tmp_path, name)


class Ravine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner, self.outer = nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.outer(self.inner(x).tanh()).squeeze(-1)
        return {"loss": (found - labels).square().mean(), "logits": found}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("grokadamw", {"optim_args": "gamma=0.2"}),
        ("stable_adamw", {}),
        ("adamw_torch_8bit", {}),
        ("adamw_torch_4bit", {}),
        ("galore_adamw", {"optim_target_modules": ["inner"], "optim_args": "rank=4"}),
        ("apollo_adamw", {"optim_target_modules": ["inner"], "optim_args": "rank=4"}),
    ],
)
def test_a_package_s_optimizer_trains_as_in_transformers(
    name: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = optimizers.PACKAGES[name].module
    package = pytest.importorskip(module, exc_type=ImportError)
    if name == "stable_adamw":
        # Wherever Triton is installed, as by a torch with CUDA, it takes Triton's
        # kernels, also on a machine without the GPU that these need.
        monkeypatch.setattr(package.utils, "HAS_TRITON", False)
    generator = torch.Generator().manual_seed(2)
    rows = [
        {"x": torch.randn(16, generator=generator), "labels": torch.tensor(i % 2 + 0.0)}
        for i in range(24)
    ]
    start = nn.utils.parameters_to_vector(Ravine().parameters())
    weights = []
    for trainers in (ctrainer, transformers):
        args = trainers.TrainingArguments(
            output_dir=str(tmp_path), optim=name, max_steps=4, learning_rate=1e-2,
            use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no",
            **options,
        )  # fmt: skip
        model = Ravine()
        torch.manual_seed(3)
        trainers.Trainer(model=model, args=args, train_dataset=rows).train()
        weights.append(nn.utils.parameters_to_vector(model.parameters()))
    assert not torch.equal(weights[0], start)
    torch.testing.assert_close(*weights, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_package_s_optimizer_is_found_for_arguments_of_transformers(
    replaced: bool, tmp_path: Path
) -> None:
    expected = pytest.importorskip("grokadamw").GrokAdamW
    args = transformers.TrainingArguments(
        str(tmp_path), optim="grokadamw", optim_args="gamma=0.2", learning_rate=0.3,
        use_cpu=True, report_to="none",
    )  # fmt: skip
    if replaced:
        hf.patch_transformers()
    try:
        trainer = transformers.Trainer if replaced else Trainer
        optimizer = trainer(Ravine(), args).create_optimizer()
    finally:
        hf.unpatch_transformers()
    assert issubclass(trainer, Trainer)
    assert type(optimizer) is expected
    assert {(g["gamma"], g["lr"]) for g in optimizer.param_groups} == {(0.2, 0.3)}


@pytest.mark.parametrize("loaded", [None, ModuleType("torchdistx")])
def test_a_package_is_installed_if_its_module_is_loaded(
    loaded: ModuleType | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module that a program made has no __spec__; None forbids the import."""
    monkeypatch.setitem(sys.modules, "torchdistx", loaded)
    assert optimizers.supported("adamw_anyprecision") is (loaded is not None)


def test_options_that_a_package_s_optimizer_lacks_are_rejected(tmp_path: Path) -> None:
    pytest.importorskip("grokadamw")
    args = arguments(tmp_path, "grokadamw", optim_args="gama=0.2")
    with pytest.raises(ValueError, match="did you mean 'gamma'"):
        Trainer.get_optimizer_cls_and_kwargs(args, Ravine())


def test_target_modules_are_for_those_that_project(tmp_path: Path) -> None:
    args = arguments(tmp_path, "adamw_torch", optim_target_modules=["inner"])
    with pytest.raises(ValueError, match=r"\['inner'\].*GaLore"):
        Trainer.get_optimizer_cls_and_kwargs(args, Ravine())


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        (
            "adamw_torch",
            {"adam_beta1": 0.8, "adam_epsilon": 1e-6, "optim_args": "amsgrad=true"},
            {"betas": (0.8, 0.999), "eps": 1e-6, "amsgrad": True},
        ),
        (
            "sgd",
            {"optim_args": "momentum=0.9, nesterov=yes"},
            {"momentum": 0.9, "nesterov": True, "dampening": 0},
        ),
        ("adagrad", {"optim_args": "lr_decay=0.1,eps=1e-8"}, {"lr_decay": 0.1}),
        (
            "rmsprop",
            {"optim_args": "alpha=0.9,momentum=0.5,centered=1"},
            {"alpha": 0.9, "momentum": 0.5, "centered": True, "eps": 1e-8},
        ),
        ("lion_32bit", {"adam_beta2": 0.99}, {"betas": (0.9, 0.99)}),
        (
            "ademamix",
            {"adam_beta1": 0.8, "optim_args": "beta3=0.99,alpha=2,t_alpha=9"},
            {"betas": (0.8, 0.999, 0.99), "alpha": 2, "t_alpha": 9, "t_beta3": None},
        ),
        (
            "schedule_free_adamw",
            {"warmup_steps": 7, "optim_args": "r=0.5,weight_lr_power=1"},
            {"warmup_steps": 7, "r": 0.5, "weight_lr_power": 1, "eps": 1e-8},
        ),
        (
            "schedule_free_sgd",
            {"optim_args": "momentum=0.8,fp32_state=true"},
            {"momentum": 0.8, "warmup_steps": 0, "fp32_state": True},
        ),
    ],
)
def test_arguments_reach_the_optimizer(
    name: str, options: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    group = made(tmp_path, name, **options).param_groups[0]
    assert {k: group[k] for k in expected} == expected


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("sgd", "momentun=0.9", "'momentun', which optim='sgd' .* mean 'momentum'"),
        ("lion_32bit", "eps=1", "which optim='lion_32bit' does not have; there is"),
        ("sgd", "weight_decay=0.1", "is the argument weight_decay"),
        ("adagrad", "lr=0.1", "is the argument learning_rate"),
        ("adamw_torch", "betas=1", "adam_beta1 and adam_beta2"),
        ("ademamix", "beta1=0.8", "is the argument adam_beta1"),
        ("adamw_torch", "beta3=0.8", "'beta3', which optim='adamw_torch' does not"),
        ("sgd", "fused=true", "does not have"),
        ("sgd", "momentum=much", "momentum must be a number, not 'much'"),
        ("sgd", "nesterov=maybe", "nesterov must be true or false, not 'maybe'"),
        ("sgd", "momentum", "name=value"),
    ],
)
def test_options_that_the_optimizer_lacks_are_named(
    name: str, text: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        made(tmp_path, name, optim_args=text)


def test_warm_up_as_a_fraction_is_rejected_where_updates_are_counted(
    tmp_path: Path,
) -> None:
    with pytest.raises(ValueError, match=r"warmup_steps=0\.1 is a fraction"):
        made(tmp_path, "schedule_free_adamw", warmup_steps=0.1)


def test_what_torch_lacks_is_rejected_for_a_model_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizers.Package, "installed", False)
    args = arguments(tmp_path, "lion_32bit")
    model = nn.Linear(2, 1, device="meta")
    with pytest.raises(
        ValueError, match=r"on meta, for which torch\.optim has no Lion"
    ):
        Trainer.get_optimizer_cls_and_kwargs(args, model)
    args = arguments(tmp_path, "rmsprop")
    cls, _ = Trainer.get_optimizer_cls_and_kwargs(args, model)
    assert cls is torch.optim.RMSprop


def test_without_a_model_the_arguments_device_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrainingArguments, "device", torch.device("meta"))
    args = arguments(tmp_path, "adamw_torch")
    cls, kwargs = Trainer.get_optimizer_cls_and_kwargs(args)
    assert cls is torch.optim.AdamW
    weight = nn.Parameter(torch.ones(2, device="meta"))
    weight.grad = torch.ones(2, device="meta")
    cls([weight], **kwargs | {"fused": False}).step()  # the fused kernel needs a GPU


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.mse_loss(self.layer(x).squeeze(-1), labels)}


DATA = [
    {"x": torch.tensor([i / 9, 1.0, -i / 5]), "labels": float(i % 3)} for i in range(24)
]


def trainer(folder: Path, name: str, **options: Any) -> Trainer:
    settings = {
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "learning_rate": 0.05,
        "lr_scheduler_type": "constant",
        "save_strategy": "no",
        **options,
    }
    args = arguments(folder, name, **settings)
    return Trainer(model=Model(), args=args, train_dataset=DATA, eval_dataset=DATA)


@pytest.mark.parametrize("name", sorted(optimizers.RECIPES))
def test_every_name_trains(name: str, tmp_path: Path) -> None:
    run = trainer(tmp_path, name)
    before = run.evaluate()["eval_loss"]
    run.train()
    assert run.optimizer._engine.updated
    assert run.evaluate()["eval_loss"] < before


class TestScheduleFreeInATrainer:
    def test_ends_with_the_average_in_the_model(self, tmp_path: Path) -> None:
        run = trainer(tmp_path, "schedule_free_sgd", max_grad_norm=0.0)
        run.train()
        assert [g["train_mode"] for g in run.optimizer.param_groups] == [False, False]
        ended = [p.detach().clone() for p in run.model.parameters()]
        run.optimizer.train()
        params = list(run.model.parameters())
        assert not any(torch.equal(a, b) for a, b in zip(ended, params, strict=True))

    def test_checkpoints_hold_the_average_and_resume_to_the_bit(
        self, tmp_path: Path
    ) -> None:
        options = {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps"}
        whole = trainer(tmp_path, "schedule_free_adamw", **options, eval_steps=2)
        whole.train()
        saved = torch.load(tmp_path / "checkpoint-3" / "optimizer.pt")
        assert saved["param_groups"][0]["train_mode"] is False
        assert saved["param_groups"][0]["k"] == 3
        resumed = trainer(tmp_path, "schedule_free_adamw", **options, eval_steps=2)
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
        for a, b in zip(
            whole.model.parameters(), resumed.model.parameters(), strict=True
        ):
            assert torch.equal(a, b)

    def test_a_save_that_fails_leaves_the_training_in_train_mode(
        self, tmp_path: Path
    ) -> None:
        run = trainer(
            tmp_path, "schedule_free_sgd", save_strategy="steps", save_steps=2
        )
        modes = []

        def failing(folder: str) -> None:
            modes.append(run.optimizer.param_groups[0]["train_mode"])
            raise OSError("no space")

        run._save_rng_state = failing
        with pytest.raises(OSError, match="no space"):
            run.train()
        assert modes == [False]
        assert run.optimizer.param_groups[0]["train_mode"] is True


class Line:
    def __init__(self) -> None:
        self.w = arrays.Parameter(np.zeros((1, 1), np.float32))

    def parameters(self) -> Any:
        yield self.w


@pytest.mark.parametrize("name", ["sgd", "adagrad", "rmsprop", "lion_32bit"])
def test_models_of_numpy_have_them_too(name: str, tmp_path: Path) -> None:
    model = Line()
    args = arguments(tmp_path, name)
    cls, kwargs = Trainer.get_optimizer_cls_and_kwargs(args, model)
    assert issubclass(cls, arrays.Optimizer)
    optimizer = cls(model.parameters(), **kwargs)
    model.w.grad = np.ones((1, 1), np.float32)
    optimizer.step()
    assert model.w.data[0, 0] < 0


def test_what_numpy_lacks_is_named(tmp_path: Path) -> None:
    args = arguments(tmp_path, "schedule_free_sgd")
    with pytest.raises(ValueError, match="this one is of NumPy, for which there are"):
        Trainer.get_optimizer_cls_and_kwargs(args, Line())


def test_a_package_s_optimizer_is_for_torch(tmp_path: Path) -> None:
    pytest.importorskip("grokadamw")
    args = arguments(tmp_path, "grokadamw")
    with pytest.raises(ValueError, match="'grokadamw' is for models of torch"):
        arrays.package_optimizer_class(args, object())
