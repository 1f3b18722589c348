"""Train a small GPT from nothing on the sources of Python's standard library.

The model reads bytes, so there is no tokenizer to train. Files are held out whole, the
loss on them is printed in bits a byte, checkpoints are taken on the way, and at the end
the model writes a function of its own.

    python examples/pretrain_gpt.py                 two to three minutes on two cores
    python examples/pretrain_gpt.py --resume        go on where a run was stopped
"""

import argparse
import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from code_pairs import source_files, standard_library
from torch import nn

import ctrainer

HELD_OUT_ONE_IN = 20


class Block(nn.Module):
    """Attention to what came before, then two layers on each position by itself."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.before_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        qkv = self.qkv(self.before_attention(x))
        q, k, v = qkv.view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).reshape(rows, length, width))
        return x + self.mlp(self.before_mlp(x))


class GPT(nn.Module):
    """Bytes in, the next byte's logits out; with labels, their mean cross entropy."""

    def __init__(self, block: int, width: int, layers: int, heads: int = 4) -> None:
        super().__init__()
        self.block = block
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Embedding(block, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.apply(self.draw)

    @staticmethod
    def draw(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    def forward(self, input_ids, labels=None) -> dict[str, torch.Tensor]:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.bytes(input_ids) + self.places(places)
        for layer in self.layers:
            x = layer(x)
        logits = self.norm(x) @ self.bytes.weight.T
        if labels is None:
            return {"logits": logits}
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}

    @torch.inference_mode()
    def write(self, prompt: str, count: int, temperature: float = 0.7) -> str:
        """The prompt and what the model goes on with, a byte at a time."""
        self.eval()
        device = self.bytes.weight.device
        text = torch.tensor([list(prompt.encode())], device=device)
        for _ in range(count):
            logits = self(text[:, -self.block :])["logits"][0, -1]
            drawn = torch.multinomial((logits / temperature).softmax(-1), 1)
            text = torch.cat([text, drawn[None]], dim=1)
        return bytes(text[0].tolist()).decode(errors="replace")


class Windows(torch.utils.data.Dataset):
    """Windows of a text, end to end; the labels are the same bytes, one later."""

    def __init__(self, text: bytes, block: int, limit: int | None = None) -> None:
        self.text = np.frombuffer(text, np.uint8).astype(np.int64)
        self.block = block
        self.count = (len(self.text) - 1) // block
        if limit is not None:
            self.count = min(self.count, limit)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        start = index * self.block
        window = self.text[start : start + self.block + 1]
        return {"input_ids": window[:-1], "labels": window[1:]}


def corpus(folder: Path) -> tuple[bytes, bytes]:
    """The files to train on and the files held out, each joined into one text."""
    files = [path.read_bytes() for path in source_files(folder)]
    if len(files) < HELD_OUT_ONE_IN:
        raise SystemExit(f"{folder} holds too few Python files: {len(files)}")
    held_out = files[::HELD_OUT_ONE_IN]
    train = [text for i, text in enumerate(files) if i % HELD_OUT_ONE_IN]
    return b"\n".join(train), b"\n".join(held_out)


def arguments(options: argparse.Namespace) -> ctrainer.TrainingArguments:
    return ctrainer.TrainingArguments(
        output_dir=str(options.out),
        max_steps=options.steps,
        per_device_train_batch_size=options.batch,
        per_device_eval_batch_size=options.batch,
        prediction_loss_only=True,
        optim=options.optim,
        seed=options.seed,
        learning_rate=2e-3,
        weight_decay=0.1,
        adam_beta2=0.95,
        lr_scheduler_type="cosine",
        warmup_steps=max(1, options.steps // 20),
        logging_steps=max(1, options.steps // 20),
        eval_strategy="steps",
        eval_steps=max(1, options.steps // 4),
        save_steps=max(1, options.steps // 4),
        save_total_limit=2,
        report_to="none",
    )


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=standard_library())
    parser.add_argument("--out", type=Path, default=Path("out/pretrain_gpt"))
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--block", type=int, default=128, help="bytes in a window")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--optim", default="adamw_torch")
    parser.add_argument("--dtype", default="float32", help="of the weights")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    ctrainer.set_seed(options.seed)
    train, held_out = corpus(options.folder)
    model = GPT(options.block, options.width, options.layers)
    model.to(getattr(torch, options.dtype))
    size = sum(parameter.numel() for parameter in model.parameters())
    print(f"{size / 1e6:.1f}M parameters, {len(train) / 1e6:.1f}M bytes to learn from")
    trainer = ctrainer.Trainer(
        model=model,
        args=arguments(options),
        train_dataset=Windows(train, options.block),
        eval_dataset=Windows(held_out, options.block, limit=200),
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train(resume_from_checkpoint=options.resume or None)
    evaluated = [row for row in trainer.state.log_history if "eval_loss" in row]
    after = evaluated[-1]["eval_loss"]
    trainer.save_model(str(options.out / "model"))
    bits = (before / math.log(2), after / math.log(2))
    print(f"bits a byte on held-out files: {bits[0]:.3f} before, {bits[1]:.3f} after")
    print(model.write("def read_lines(path):\n", 300))


if __name__ == "__main__":
    main()
