"""Checkpoints of every release of fairseq: loaded, and gone on from."""

from __future__ import annotations

import itertools
import random
import shutil
from pathlib import Path
from typing import Any

import fairseq_layouts as layouts
import pytest
import torch
from draws import draws
from fairseq_layouts import Layout

from ctrainer.__main__ import main
from ctrainer.adapters.fairseq_parameters import state_in_order
from ctrainer.adapters.torch_fairseq import load_file, save_file
from ctrainer.fairseq import checkpoint_utils, metrics, train

torch.set_num_threads(1)

MODELS = list(itertools.product(layouts.RELEASES, layouts.KINDS, (True, False)))
# Shared words and fp16 are drawn beside each, and all combinations in the full run.
OTHERS = list(itertools.product((False, True), (False, True)))
DRAW = random.Random(2)
CASES = [
    (*model, *other)
    for model in MODELS
    for other in DRAW.sample(OTHERS, 4)[: draws(1, 4)]
]


def _name(case: tuple[Any, ...]) -> str:
    release, kind, learned, shared, fp16 = case
    positions = "learned" if learned else "sinusoidal"
    return f"{release}-{kind}-{positions}{'-shared' * shared}{'-fp16' * fp16}"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One text, as a translation of itself and as a language's."""
    folder = tmp_path_factory.mktemp("text")
    generator = random.Random(4)
    for split, count in (("train", 60), ("valid", 8)):
        lines = (
            " ".join(f"w{generator.randrange(9)}" for _ in range(5))
            for _ in range(count)
        )
        text = "".join(f"{line}\n" for line in lines)
        for suffix in ("", ".xx", ".yy"):
            (folder / f"{split}{suffix}").write_text(text)
    prefixes = ["--trainpref", folder / "train", "--validpref", folder / "valid"]
    for target, more in (
        ("transformer_lm", ["--only-source"]),
        ("transformer", ["-s", "xx", "-t", "yy", "--joined-dictionary"]),
    ):
        given = [*prefixes, "--destdir", folder / target, *more]
        assert main(["fairseq-preprocess", *map(str, given)]) == 0
    return folder


def _words(data: Path, kind: str) -> int:
    name = "dict.txt" if kind == "transformer_lm" else "dict.xx.txt"
    return len((data / kind / name).read_text().splitlines()) + 4


def _write(data: Path, folder: Path, case: tuple[Any, ...]) -> tuple[Layout, Path]:
    release, kind, learned, shared, fp16 = case
    words = _words(data, kind)
    layout = Layout(release, kind, learned, shared, fp16, words)
    path = folder / "checkpoint_last.pt"
    layouts.write(layout, path, data / kind)
    return layout, path


def _check_weights(layout: Layout, model: Any) -> None:
    """Every trained weight is what was drawn for its name, to the bit, and no other is
    there."""
    found = dict(model.named_parameters())
    drawn = {
        entry.today: layouts.drawn(entry, "weights")
        for entry in layout.parameters()
        if not layouts.is_copy(entry.name)
    }
    assert found.keys() == drawn.keys()
    for name, value in drawn.items():
        dtype = torch.float16 if layout.fp16 else torch.float32
        assert torch.equal(found[name].to(dtype), value.to(dtype)), name
    for name, buffer in model.named_buffers():
        assert torch.isfinite(buffer).all(), name


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_the_model_of_a_release_is_loaded(
    data: Path, tmp_path: Path, case: tuple[Any, ...]
) -> None:
    layout, path = _write(data, tmp_path, case)
    models, cfg, task = checkpoint_utils.load_model_ensemble_and_task([str(path)])
    _check_weights(layout, models[0])
    assert cfg.model.decoder_embed_dim == layouts.WIDTH
    assert len(task.source_dictionary) == layout.words


def _arguments(layout: Layout, data: Path, save_dir: Path) -> list[str]:
    """The command line of options(), whose model the checkpoint holds."""
    positions = "--decoder-learned-pos" if layout.learned else ""
    shared = "--share-decoder-input-output-embed" if layout.shared else ""
    if layout.kind == "transformer_lm":
        task = f"""--task language_modeling --tokens-per-sample {layouts.POSITIONS}
            --sample-break-mode complete --max-target-positions {layouts.POSITIONS}"""
    else:
        size = layouts.WIDTH
        task = f"""--task translation --max-source-positions {layouts.POSITIONS}
            --max-target-positions {layouts.POSITIONS} --encoder-embed-dim {size}
            --encoder-ffn-embed-dim {layouts.FFN} --encoder-attention-heads 2
            --encoder-layers {layouts.LAYERS}"""
        positions += " --encoder-learned-pos" if layout.learned else ""
        shared = "--share-all-embeddings" if layout.shared else ""
    text = f"""{data / layout.kind} {task} {positions} {shared} --arch {layout.kind}
        --save-dir {save_dir} --decoder-embed-dim {layouts.WIDTH} --dropout 0
        --decoder-ffn-embed-dim {layouts.FFN} --decoder-layers {layouts.LAYERS}
        --decoder-attention-heads 2 --optimizer adam --adam-betas (0.9,0.98)
        --lr {layouts.LR} --lr-scheduler inverse_sqrt --warmup-updates {layouts.WARMUP}
        --max-tokens 64 --cpu --num-workers 0 --seed 1 --log-format none
        --disable-validation --max-update {layouts.UPDATES + 2}"""
    return [*text.split(), *(["--fp16"] if layout.fp16 else [])]


def _run(layout: Layout, data: Path, save_dir: Path, *more: str) -> train.TrainingRun:
    """What fairseq-train makes before its first update: the checkpoint is loaded."""
    metrics.reset()
    arguments = [*_arguments(layout, data, save_dir), *more]
    return train.TrainingRun(train.parse_args(arguments))


def _moments_of(trainer: Any) -> dict[str, dict[str, torch.Tensor]]:
    """The optimizer's state by the names of its parameters."""
    names = {id(p): name for name, p in trainer.get_model().named_parameters()}
    state = trainer.optimizer.optimizer.state
    return {names[id(parameter)]: values for parameter, values in state.items()}


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_a_run_goes_on_from_the_checkpoint_of_a_release(
    data: Path, tmp_path: Path, case: tuple[Any, ...]
) -> None:
    """Weights, moments of each by its name, the number of updates and the place in the
    data are those of the file; and two updates end as they do from our own file of the
    same run."""
    layout, _ = _write(data, tmp_path, case)
    run = _run(layout, data, tmp_path)
    trainer = run.trainer
    _check_weights(layout, trainer.get_model())
    moments = _moments_of(trainer)
    for entry in layout.parameters():
        if not layouts.is_copy(entry.name):
            found = moments.pop(entry.today)
            assert int(found["step"]) == layouts.UPDATES
            for kind in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(found[kind], layouts.drawn(entry, kind)), entry
    assert not moments
    assert trainer.get_num_updates() == layouts.UPDATES
    assert trainer.get_lr() == pytest.approx(
        layouts.LR * layouts.UPDATES / layouts.WARMUP
    )
    assert run.epoch_itr.epoch == layouts.EPOCH
    assert run.epoch_itr.iterations_in_epoch == layouts.BATCHES
    if layout.fp16:
        assert trainer.optimizer.scaler.loss_scale == 64
    ours = tmp_path / "ours"
    ours.mkdir()
    position = {"train_iterator": run.epoch_itr.state_dict(), "val_loss": None}
    trainer.save_checkpoint(str(ours / "checkpoint_last.pt"), position)
    run.run()
    again = _run(layout, data, ours)
    again.run()
    assert trainer.get_num_updates() == layouts.UPDATES + 2
    ends = [made.trainer.get_model().state_dict() for made in (run, again)]
    for name, value in ends[0].items():
        assert torch.equal(value, ends[1][name]), name
    start = layouts.weights(layout)
    assert any(not torch.equal(ends[0][n], start[n]) for n in ends[0] if n in start)


@pytest.mark.parametrize("release", layouts.RELEASES)
def test_a_run_with_sharded_parameters_goes_on_from_one_without(
    data: Path, tmp_path: Path, release: str
) -> None:
    case = (release, "transformer", False, False, False)
    layout, path = _write(data, tmp_path, case)
    sharded = ["--ddp-backend", "fully_sharded"]
    plain, shards = _run(layout, data, tmp_path), tmp_path / "shards"
    shards.mkdir()
    shutil.copy(path, shards)
    ends = []
    for run, folder in ((plain, tmp_path), (None, shards)):
        made = run or _run(layout, data, folder, *sharded)
        made.run()
        ends.append(load_file(str(folder / "checkpoint_last.pt")))
    for name, value in ends[0]["model"].items():
        # The same updates; a norm of one flat parameter adds in another order.
        torch.testing.assert_close(ends[1]["model"][name], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ([], "0 parameters"),
        ([5], "1 parameter of 5 elements"),
        ([6, 2, 2], "3 parameters"),  # the first of as many elements as all of ours
    ],
)
def test_the_state_of_another_number_of_parameters_is_rejected(
    sizes: list[int], told: str
) -> None:
    model = torch.nn.Linear(2, 2)
    shapes = [parameter.shape for parameter in model.parameters()]
    saved = {
        "state": {i: {"exp_avg": torch.zeros(n)} for i, n in enumerate(sizes)},
        "param_groups": [{"params": list(range(len(sizes)))}],
    }
    with pytest.raises(ValueError, match=f"has {told}, and this one 2 .* of 6 elem"):
        state_in_order(saved, model, model.state_dict(), shapes)


@pytest.mark.parametrize("kind", layouts.KINDS)
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_what_we_write_fits_the_last_releases(
    data: Path, tmp_path: Path, kind: str, learned: bool, shared: bool
) -> None:
    """The names, in the order in which the optimizer has them, are those of 0.12.2 and
    of the last commit, but for what these drop or make anew when they load."""
    layout, path = _write(data, tmp_path, ("HEAD", kind, learned, shared, False))
    run = _run(layout, data, tmp_path)
    run.trainer.save_checkpoint(str(path), {"train_iterator": {}})
    state = torch.load(path, weights_only=True)
    for release in ("0.12.2", "HEAD"):
        theirs = Layout(release, kind, learned, shared, False, layout.words)
        names = [e.name for e in theirs.entries() if not layouts.is_copy(e.name)]
        made = list(state["model"])
        if release == "HEAD":  # which ignores it
            made = [name for name in made if not name.endswith("_float_tensor")]
        assert made == names
    numbers = range(len(layout.parameters()))
    assert list(state["last_optimizer_state"]["state"]) == list(numbers)
    for i, entry in enumerate(layout.parameters()):
        saved = state["last_optimizer_state"]["state"][i]
        assert torch.equal(saved["exp_avg"], layouts.drawn(entry, "exp_avg"))


class TestWhatDoesNotFit:
    @pytest.fixture
    def file(self, data: Path, tmp_path: Path) -> tuple[Layout, Path]:
        return _write(data, tmp_path, ("0.12.2", "transformer", False, False, False))

    def test_another_number_of_parameters_in_the_optimizer(
        self, data: Path, tmp_path: Path, file: tuple[Layout, Path]
    ) -> None:
        layout, path = file
        state = load_file(str(path))
        state["last_optimizer_state"]["param_groups"][0]["params"].pop()
        save_file(str(path), state)
        with pytest.raises(ValueError, match=r"parameters.*--reset-optimizer"):
            _run(layout, data, tmp_path)

    def test_a_weight_that_is_missing(
        self, data: Path, tmp_path: Path, file: tuple[Layout, Path]
    ) -> None:
        layout, path = file
        state = load_file(str(path))
        del state["model"]["decoder.layers.1.fc1.bias"]
        save_file(str(path), state)
        with pytest.raises(Exception, match=r"decoder\.layers\.1\.fc1\.bias"):
            _run(layout, data, tmp_path)

    def test_an_object_of_a_class_that_is_no_meter(
        self, data: Path, tmp_path: Path, file: tuple[Layout, Path]
    ) -> None:
        layout, path = file
        state = load_file(str(path))
        state["extra_state"]["odd"] = random.Random(1)
        torch.save(state, path)
        with pytest.raises(ValueError, match="no plain data"):
            _run(layout, data, tmp_path)


def test_joined_projections_and_numbered_norms_are_loaded(
    data: Path, tmp_path: Path
) -> None:
    """Of published models, which are older than 0.9."""
    case = ("0.10", "transformer", False, True, False)
    layout, path = _write(data, tmp_path, case)
    state = load_file(str(path))
    old = dict(state["model"])
    norms = {
        "encoder": ("self_attn_layer_norm", "final_layer_norm"),
        "decoder": ("self_attn_layer_norm", "encoder_attn_layer_norm",
                    "final_layer_norm"),
    }  # fmt: skip
    for part, names in norms.items():
        for i in range(layouts.LAYERS):
            layer = f"{part}.layers.{i}"
            for kind in ("weight", "bias"):
                for n, name in enumerate(names):
                    value = old.pop(f"{layer}.{name}.{kind}")
                    old[f"{layer}.layer_norms.{n}.{kind}"] = value
                parts = [old.pop(f"{layer}.self_attn.{p}_proj.{kind}") for p in "qkv"]
                old[f"{layer}.self_attn.in_proj_{kind}"] = torch.cat(parts)
    state["model"] = old
    save_file(str(path), state)
    models, _, _ = checkpoint_utils.load_model_ensemble_and_task([str(path)])
    _check_weights(layout, models[0])
    del state["last_optimizer_state"]["param_groups"][0]["params"][-16:]
    save_file(str(path), state)
    with pytest.raises(ValueError, match="--reset-optimizer"):
        _run(layout, data, tmp_path)
