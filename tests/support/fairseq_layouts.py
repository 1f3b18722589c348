"""Checkpoints of a tiny transformer as releases of fairseq write them.

What is here is read off fairseq's sources at v0.9.0, v0.10.2, v0.12.2 and its last
commit: the order in which models/transformer*, modules/transformer_layer.py and
modules/multihead_attention.py register parameters and buffers, what trainer.py and
checkpoint_utils.py put around them, and how torch of that time numbers an optimizer's
parameters. Nothing of ctrainer takes part.

Values are drawn from the names that parameters have today, so that every release's file
holds the same model.
"""

from __future__ import annotations

import sys
import zlib
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

RELEASES = ("0.9", "0.10", "0.12.2", "HEAD")
KINDS = ("transformer", "transformer_lm")
WIDTH, FFN, POSITIONS, LAYERS = 8, 12, 32, 2
UPDATES, EPOCH, BATCHES = 7, 2, 3
LR, WARMUP = 0.01, 20


class Entry(NamedTuple):
    """Of a state_dict(): its name then and today, its shape, and whether the optimizer
    has it as a parameter of its own."""

    name: str
    today: str
    shape: tuple[int, ...]
    trained: bool = True


@dataclass(frozen=True)
class Layout:
    """A release, a kind of model and its options."""

    release: str
    kind: str
    learned: bool
    shared: bool
    fp16: bool
    words: int

    def entries(self) -> Iterator[Entry]:
        """The whole state_dict(), in its order."""
        if self.kind == "transformer":
            yield from self._encoder()
        yield from self._decoder()

    def parameters(self) -> list[Entry]:
        """As the optimizer numbers them."""
        return [entry for entry in self.entries() if entry.trained]

    def _positions(self, part: str) -> Iterator[Entry]:
        # padding_idx is 1, and positions begin after it.
        where = f"{part}.embed_positions"
        if self.learned:
            yield _entry(f"{where}.weight", POSITIONS + 2, WIDTH)
        elif self.release != "HEAD":
            yield _buffer(f"{where}._float_tensor")

    def _encoder(self) -> Iterator[Entry]:
        yield _buffer("encoder.version")
        yield _entry("encoder.embed_tokens.weight", self.words, WIDTH)
        yield from self._positions("encoder")
        for i in range(LAYERS):
            layer = f"encoder.layers.{i}"
            if self.release == "0.12.2":  # Parameters of the layer itself come first.
                yield from _copies(layer)
            yield from _attention(layer, "self_attn")
            yield from _feed_forward(layer)

    def _decoder(self) -> Iterator[Entry]:
        words = "encoder.embed_tokens" if self.tied else "decoder.embed_tokens"
        output = "decoder.output_projection.weight"
        if self.release == "0.9" and not self.shared:
            yield Entry("decoder.embed_out", output, (self.words, WIDTH))
        yield _buffer("decoder.version")
        yield Entry(
            "decoder.embed_tokens.weight",
            f"{words}.weight",
            (self.words, WIDTH),
            not self.tied,
        )
        yield from self._positions("decoder")
        for i in range(LAYERS):
            layer = f"decoder.layers.{i}"
            yield from _attention(layer, "self_attn")
            if self.kind == "transformer":
                yield from _attention(layer, "encoder_attn")
            yield from _feed_forward(layer)
        if self.kind == "transformer_lm":  # whose norms stand before
            yield from _norm("decoder.layer_norm")
        if self.release != "0.9":
            today = f"{words}.weight" if self.shared else output
            yield Entry(output, today, (self.words, WIDTH), not self.shared)

    @property
    def tied(self) -> bool:
        """Do encoder and decoder have the same words?"""
        return self.shared and self.kind == "transformer"


def _entry(name: str, *shape: int) -> Entry:
    return Entry(name, name, shape)


def _buffer(name: str) -> Entry:
    return Entry(name, name, (1,), False)


def _linear(name: str, rows: int, columns: int) -> Iterator[Entry]:
    yield _entry(f"{name}.weight", rows, columns)
    yield _entry(f"{name}.bias", rows)


def _norm(name: str) -> Iterator[Entry]:
    yield _entry(f"{name}.weight", WIDTH)
    yield _entry(f"{name}.bias", WIDTH)


def _attention(layer: str, name: str) -> Iterator[Entry]:
    for part in ("k_proj", "v_proj", "q_proj", "out_proj"):
        yield from _linear(f"{layer}.{name}.{part}", WIDTH, WIDTH)
    yield from _norm(f"{layer}.{name}_layer_norm")


def _feed_forward(layer: str) -> Iterator[Entry]:
    yield from _linear(f"{layer}.fc1", FFN, WIDTH)
    yield from _linear(f"{layer}.fc2", WIDTH, FFN)
    yield from _norm(f"{layer}.final_layer_norm")


def _copies(layer: str) -> Iterator[Entry]:
    """The parameters of 0.12.2's fast path, which no gradient ever reaches."""
    yield _entry(f"{layer}.in_proj_weight", 3 * WIDTH, WIDTH)
    yield _entry(f"{layer}.in_proj_bias", 3 * WIDTH)
    yield _entry(f"{layer}.out_proj_weight", WIDTH, WIDTH)
    yield _entry(f"{layer}.out_proj_bias", WIDTH)
    yield _entry(f"{layer}.fc1_weight", FFN, WIDTH)
    yield _entry(f"{layer}.fc1_bias", FFN)
    yield _entry(f"{layer}.fc2_weight", WIDTH, FFN)
    yield _entry(f"{layer}.fc2_bias", WIDTH)


def is_copy(name: str) -> bool:
    parts = name.split(".")
    return parts[1] == "layers" and len(parts) == 4


# ---- values --------------------------------------------------------------------------


def drawn(entry: Entry, what: str) -> torch.Tensor:
    """The weights, "exp_avg" or "exp_avg_sq" of a parameter, by its name of today."""
    seed = zlib.crc32(f"{entry.today} {what}".encode())
    values = torch.randn(entry.shape, generator=torch.Generator().manual_seed(seed))
    return values.square() / 100 if what == "exp_avg_sq" else values / 10


def weights(layout: Layout) -> OrderedDict[str, torch.Tensor]:
    dtype = torch.float16 if layout.fp16 else torch.float32
    made: OrderedDict[str, torch.Tensor] = OrderedDict()
    for entry in layout.entries():
        if entry.name.endswith(".version"):
            value = torch.tensor([3.0])
        elif entry.name.endswith("._float_tensor"):
            value = torch.tensor([float("nan")])  # memory that nobody has written to
        else:
            value = drawn(entry, "weights")
        made[entry.name] = value.to(dtype)
    return made


def _moments(layout: Layout) -> dict[int, dict[str, Any]]:
    """By the optimizer's numbers; a parameter that had no gradient has none."""
    made: dict[int, dict[str, Any]] = {}
    for i, entry in enumerate(layout.parameters()):
        if not is_copy(entry.name):
            kinds = {k: drawn(entry, k) for k in ("exp_avg", "exp_avg_sq")}
            made[i] = {"step": UPDATES, **kinds}
    return made


def optimizer_state(layout: Layout) -> dict[str, Any]:
    """FairseqAdam's, or of fp16 FP16Optimizer's over all parameters joined to one."""
    entries, state = layout.parameters(), _moments(layout)
    numbers = list(range(len(entries)))
    if layout.fp16:
        joined: dict[str, Any] = {"step": UPDATES}
        for kind in ("exp_avg", "exp_avg_sq"):
            parts = [
                state[i][kind] if i in state else torch.zeros(entry.shape)
                for i, entry in enumerate(entries)
            ]
            joined[kind] = torch.cat([part.flatten() for part in parts])
        state, numbers = {0: joined}, [0]
    if layout.release == "0.9":  # torch before 1.5 has addresses
        addresses = [140_000_000_000 + 72 * i for i in numbers]
        state = OrderedDict((addresses[i], OrderedDict(v)) for i, v in state.items())
        numbers = addresses
    group = {
        "lr": LR * UPDATES / WARMUP, "betas": (0.9, 0.98), "eps": 1e-8,
        "weight_decay": 0.0, "amsgrad": False, "params": numbers,
    }  # fmt: skip
    made: dict[str, Any] = {"state": state, "param_groups": [group]}
    if layout.fp16:
        made["loss_scale"] = 64.0
    return made


# ---- files ---------------------------------------------------------------------------


def options(layout: Layout, data: Path) -> dict[str, Any]:
    """What the run's command line was, flat."""
    common = {
        "data": str(data), "arch": layout.kind, "seed": 1, "cpu": True,
        "fp16": layout.fp16, "criterion": "cross_entropy", "optimizer": "adam",
        "lr": [LR], "adam_betas": "(0.9, 0.98)", "adam_eps": 1e-8,
        "weight_decay": 0.0, "lr_scheduler": "inverse_sqrt", "warmup_updates": WARMUP,
        "warmup_init_lr": -1, "max_tokens": None, "update_freq": [1],
        "save_dir": "checkpoints", "no_progress_bar": True, "user_dir": None,
        "dropout": 0.0, "attention_dropout": 0.0, "decoder_embed_dim": WIDTH,
        "decoder_ffn_embed_dim": FFN, "decoder_layers": LAYERS,
        "decoder_attention_heads": 2, "decoder_learned_pos": layout.learned,
        "decoder_input_dim": WIDTH, "decoder_output_dim": WIDTH,
        "share_decoder_input_output_embed": layout.shared,
        "max_target_positions": POSITIONS,
    }  # fmt: skip
    if layout.kind == "transformer_lm":
        task = {"task": "language_modeling", "tokens_per_sample": POSITIONS,
                "sample_break_mode": "complete", "add_bos_token": False}  # fmt: skip
        return {**common, **task, "max_sentences": None, "max_tokens": 64}
    return {
        **common, "task": "translation", "source_lang": "xx", "target_lang": "yy",
        "encoder_embed_dim": WIDTH, "encoder_ffn_embed_dim": FFN,
        "encoder_layers": LAYERS, "encoder_attention_heads": 2,
        "encoder_learned_pos": layout.learned, "share_all_embeddings": layout.shared,
        "max_source_positions": POSITIONS, "left_pad_source": True,
        "left_pad_target": False, "max_tokens": 64,
    }  # fmt: skip


def _config(layout: Layout, data: Path) -> dict[str, Any]:
    """The groups of 0.12 and later, those of their options that matter here. The
    translation's model has no dataclass there, so it keeps all options, flat."""
    flat = options(layout, data)

    def group(*names: str, **more: Any) -> dict[str, Any]:
        return {"_name": None, **{n: flat[n] for n in names if n in flat}, **more}

    model: Any = Namespace(**flat, _name=layout.kind)
    if layout.kind == "transformer_lm":
        model = group(
            "dropout", "attention_dropout", "decoder_embed_dim",
            "decoder_ffn_embed_dim", "decoder_layers", "decoder_attention_heads",
            "decoder_learned_pos", "decoder_input_dim", "decoder_output_dim",
            "share_decoder_input_output_embed", "max_target_positions",
            "tokens_per_sample", "add_bos_token", activation_fn="relu",
        )  # fmt: skip
        model["_name"] = layout.kind
        task = group("data", "tokens_per_sample", "sample_break_mode", "add_bos_token",
                     max_target_positions=POSITIONS)  # fmt: skip
    else:
        task = group("data", "source_lang", "target_lang", "left_pad_source",
                     "left_pad_target", "max_source_positions",
                     "max_target_positions")  # fmt: skip
    task["_name"] = flat["task"]
    return {
        "_name": None,
        "common": group("seed", "cpu", "fp16", "no_progress_bar", "user_dir"),
        "common_eval": group(path=None, results_path=None),
        "distributed_training": group(distributed_world_size=1),
        "dataset": group("max_tokens", batch_size=None),
        "optimization": group("lr", "update_freq", clip_norm=0.0),
        "checkpoint": group("save_dir"),
        "bmuf": group(block_lr=1.0),
        "generation": group(beam=5),
        "eval_lm": group(context_window=0),
        "interactive": group(buffer_size=0),
        "model": model,
        "task": task,
        "criterion": group(sentence_avg=False, _name="cross_entropy"),
        "optimizer": group("lr", "adam_betas", "adam_eps", "weight_decay",
                           _name="adam"),
        "lr_scheduler": group("lr", "warmup_updates", "warmup_init_lr",
                              _name="inverse_sqrt"),
        "scoring": group(_name="bleu"),
        "bpe": None,
        "tokenizer": None,
        "ema": group(store_ema=False),
    }  # fmt: skip


def _extra_state(layout: Layout) -> dict[str, Any]:
    position = {"epoch": EPOCH, "iterations_in_epoch": BATCHES, "shuffle": True}
    extra: dict[str, Any] = {"train_iterator": position, "val_loss": 3.5, "best": 3.25}
    if layout.release == "0.9":
        return {**extra, "train_meters": _old_meters()}
    position["version"] = 2
    average = {"val": 3.0, "sum": 300.0, "count": 100, "round": 3}
    meters = [(20, "loss", "AverageMeter", average)]
    wall = [(790, "wall", "StopwatchMeter", {"sum": 0, "n": 0, "round": 0})]
    metrics = OrderedDict(default=wall, train=meters, train_inner=[])
    return {**extra, "metrics": metrics, "previous_training_time": 12.5}


def _old_meters() -> OrderedDict[str, Any]:
    """0.9's, which are objects of classes of fairseq.meters."""
    module = sys.modules["fairseq.meters"]
    average, clock = module.AverageMeter(), module.TimeMeter()
    average.__dict__.update(val=3.0, avg=3.0, sum=300.0, count=100)
    clock.__dict__.update(init=0, start=1.5, n=100)
    stop = module.StopwatchMeter()
    stop.__dict__.update(sum=1.0, n=7, start_time=None)
    return OrderedDict(train_loss=average, wps=clock, train_wall=stop)


def _modules_of_old() -> dict[str, ModuleType]:
    """What has to be importable while 0.9's meters are pickled."""
    meters = ModuleType("fairseq.meters")
    for name in ("AverageMeter", "TimeMeter", "StopwatchMeter"):
        made = type(name, (), {"__module__": "fairseq.meters"})
        setattr(meters, name, made)
    return {"fairseq": ModuleType("fairseq"), "fairseq.meters": meters}


def write(layout: Layout, path: Path, data: Path) -> None:
    """The file, in the archive of torch's releases of that time."""
    old = {} if "fairseq" in sys.modules else _modules_of_old()
    sys.modules.update(old)
    try:
        state = _state(layout, data)
        torch.save(state, path, _use_new_zipfile_serialization=layout.release != "0.9")
    finally:
        for name in old:
            del sys.modules[name]


def _state(layout: Layout, data: Path) -> dict[str, Any]:
    flat = layout.release in ("0.9", "0.10")
    history = {
        "criterion_name": "CrossEntropyCriterion",
        "optimizer_name": "FP16Optimizer" if layout.fp16 else "FairseqAdam",
        "lr_scheduler_state": {"best": 3.25},
        "num_updates": UPDATES,
    }
    state: dict[str, Any] = {
        "args": Namespace(**options(layout, data)) if flat else None,
        "model": weights(layout),
        "optimizer_history": [history],
        "extra_state": _extra_state(layout),
        "last_optimizer_state": optimizer_state(layout),
    }
    if not flat:
        state.update(cfg=_config(layout, data), criterion=None, task_state={})
    return state
