"""What the search example shows at its end: a baseline, tables and a picture."""

import json
import multiprocessing
import re
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median

import numpy as np
from code_pairs import Pair

METRICS = ("top1", "top5", "mrr")


def retrieval(scores: np.ndarray) -> dict[str, float]:
    """How often row i's best column is i, is among five, and the mean 1/rank."""
    rank = (scores > np.diag(scores)[:, None]).sum(1)
    return {
        "top1": float((rank == 0).mean()),
        "top5": float((rank < 5).mean()),
        "mrr": float((1 / (rank + 1)).mean()),
    }


def words(text: str) -> str:
    """Lower-case words, with snake_case and camelCase taken apart."""
    return re.sub(r"[_\W]+", " ", re.sub(r"([a-z])([A-Z])", r"\1 \2", text)).lower()


def tfidf_scores(train: list[Pair], held_out: list[Pair]) -> dict[str, float]:
    """What counting words reaches without any model."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    corpus = [words(text) for p in (*train, *held_out) for text in (p.doc, p.code)]
    vectorizer = TfidfVectorizer(sublinear_tf=True).fit(corpus)
    docs = vectorizer.transform(words(pair.doc) for pair in held_out)
    code = vectorizer.transform(words(pair.code) for pair in held_out)
    return retrieval((docs @ code.T).toarray())


def row(name: str, scores: dict[str, float]) -> str:
    top1, top5, mrr = (scores[key] for key in METRICS)
    return f"{name:<24}{top1:>8.1%}{top5:>8.1%}{mrr:>8.3f}"


def table(result: dict) -> str:
    """Retrieval among the held-out functions, without, before and after training."""
    return "\n".join(
        [
            f"\n{result['held_out']} held-out functions      top-1   top-5     MRR",
            row("counting words (TF-IDF)", result["tfidf"]),
            row("MiniLM as shipped", result["shipped"]),
            row(f"after {result['steps']} steps", result["tuned"]),
            f"training took {result['train_seconds']:.0f} s, "
            f"evaluations included; {result['pairs']} pairs to draw from",
        ]
    )


def draw(result: dict, path: Path) -> Path:
    """A picture of the loss and of the retrieval figures over the steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    train = [entry for entry in result["history"] if "loss" in entry]
    evals = [entry for entry in result["history"] if "eval_top1" in entry]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    left.plot([e["step"] for e in train], [e["loss"] for e in train], label="training")
    steps = [e["step"] for e in evals]
    left.plot(steps, [e["eval_loss"] for e in evals], "o-", label="held out")
    left.set(title="contrastive loss", xlabel="step")
    for key, name in zip(METRICS, ("top-1", "top-5", "MRR"), strict=True):
        (line,) = right.plot(steps, [e[f"eval_{key}"] for e in evals], "o-", label=name)
        right.axhline(result["tfidf"][key], color=line.get_color(), ls=":", lw=1)
    right.set(title="held-out retrieval (dotted: TF-IDF)", xlabel="step")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        # Below the axes: within them it would hide the last points.
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def compare(train: Callable[[str, Namespace], dict], options: Namespace) -> None:
    """Both trainers in turns, each run in a process of its own."""
    runs: dict[str, list[dict]] = {"ctrainer": [], "transformers": []}
    spawn = multiprocessing.get_context("spawn")
    for _ in range(options.rounds):
        for name, results in runs.items():
            alone = Namespace(**{**vars(options), "out": options.out / f"peer-{name}"})
            with ProcessPoolExecutor(1, mp_context=spawn) as pool:
                results.append(pool.submit(train, name, alone).result())
    print(f"\n{'':<24}   top-1   top-5     MRR   wall s    CPU s  (medians)")
    for name, results in runs.items():
        scores = {k: float(np.mean([r["tuned"][k] for r in results])) for k in METRICS}
        wall = median(r["train_seconds"] for r in results)
        cpu = median(r["train_cpu_seconds"] for r in results)
        print(f"{row(name, scores)}{wall:>9.1f}{cpu:>9.1f}")
    (options.out / "peer.json").write_text(json.dumps(runs))
