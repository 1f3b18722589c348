"""`fairseq-train` on a translation that copies its source."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fairseq_program as program
import pytest
import torch
from draws import draws

from ctrainer.__main__ import main
from ctrainer.fairseq import checkpoint_utils, tasks
from ctrainer.fairseq.config.tasks import TranslationConfig
from ctrainer.fairseq.data import Dictionary, LanguagePairDataset
from ctrainer.fairseq.indexed_dataset import make_builder
from ctrainer.fairseq.tasks.translation import load_langpair_dataset


def sentence(generator: random.Random) -> str:
    return " ".join(f"w{generator.randrange(8)}" for _ in range(3))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text of which one language is the other's copy."""
    folder = tmp_path_factory.mktemp("pairs")
    generator = random.Random(5)
    for split, count in (("train", 512), ("valid", 32)):
        text = "".join(f"{sentence(generator)}\n" for _ in range(count))
        for language in ("xx", "yy"):
            (folder / f"{split}.{language}").write_text(text)
    prefixes = ["--trainpref", folder / "train", "--validpref", folder / "valid"]
    options = [*prefixes, "--destdir", folder / "bin", "-s", "xx", "-t", "yy"]
    assert main(["fairseq-preprocess", *map(str, options), "--joined-dictionary"]) == 0
    return folder / "bin"


def arguments(data: Path, save_dir: Path, *more: str) -> list[str]:
    text = f"""fairseq-train {data} --arch transformer_tiny --save-dir {save_dir}
        --encoder-embed-dim 32 --encoder-layers 1 --decoder-layers 1 --dropout 0
        --share-all-embeddings --criterion label_smoothed_cross_entropy
        --label-smoothing 0 --report-accuracy --batch-size 64 --max-epoch 40
        --optimizer adam --lr 0.01 --lr-scheduler inverse_sqrt --warmup-updates 20
        --clip-norm 1 --log-format json --cpu --num-workers 0 --no-epoch-checkpoints
        --validate-interval 10 --save-interval 40"""
    return [*text.split(), *more]


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("copied")
    assert main(arguments(data, folder)) == 0
    return folder / "checkpoint_best.pt"


def test_copying_is_learnt(trained: Path) -> None:
    state = torch.load(trained, weights_only=True)
    assert state["extra_state"]["val_loss"] < 0.05  # bits a word, of 3 at first


def greedy(model: Any, sample: Any, words: Any) -> torch.Tensor:
    """The likeliest words one after another."""
    source = sample["net_input"]
    with torch.no_grad():
        encoded = model.encoder(source["src_tokens"], source["src_lengths"])
        rows = torch.full((len(source["src_tokens"]), 1), words.eos())
        for _ in range(4):
            logits, _ = model.decoder(rows, encoded)
            rows = torch.cat([rows, logits[:, -1:].argmax(-1)], 1)
    return rows[:, 1:]


def test_a_checkpoint_translates_word_by_word(data: Path, trained: Path) -> None:
    models, _, task = checkpoint_utils.load_model_ensemble_and_task([str(trained)])
    model = models[0].eval()
    task.load_dataset("valid")
    dataset = task.dataset("valid")
    sample = dataset.collater([dataset[i] for i in range(8)])
    words = task.target_dictionary
    assert torch.equal(greedy(model, sample, words), sample["target"])


def test_validation_tells_accuracy_and_both_losses(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    more = ["--max-epoch", "1", "--label-smoothing", "0.1", "--validate-interval", "1"]
    lines = program.train(caplog, arguments(data, tmp_path, *more))
    (valid,) = (stats for name, stats in lines if name == "valid")
    loss, nll = float(valid["valid_loss"]), float(valid["valid_nll_loss"])
    assert loss != nll
    assert float(valid["valid_ppl"]) == pytest.approx(2**nll, rel=1e-2)
    assert 0 <= float(valid["valid_accuracy"]) <= 100


class TestTask:
    def test_languages_are_found_by_the_files(self, data: Path) -> None:
        cfg = TranslationConfig(data=str(data), _name="translation")
        task = tasks.setup_task(cfg)
        assert (cfg.source_lang, cfg.target_lang) == ("xx", "yy")
        assert task.source_dictionary == task.target_dictionary

    @pytest.mark.parametrize("option", ["eval_bleu", "load_alignments"])
    def test_what_is_not_acted_on_is_rejected(self, data: Path, option: str) -> None:
        cfg = TranslationConfig(data=str(data), _name="translation", **{option: True})
        with pytest.raises(ValueError, match=f"task.{option} is True"):
            tasks.setup_task(cfg)

    def test_a_split_that_is_not_there_is_named(self, data: Path) -> None:
        cfg = TranslationConfig(data=str(data), dataset_impl=None, _name="translation")
        with pytest.raises(FileNotFoundError, match="Dataset not found: test"):
            tasks.setup_task(cfg).load_dataset("test")


class TestPairs:
    def dataset(self, **options: Any) -> LanguagePairDataset:
        words = Dictionary(extra_special_symbols="abcdef")
        source = [torch.tensor(x) for x in ([4, 5, 2], [6, 2], [4, 5, 6, 2])]
        target = [torch.tensor(x) for x in ([7, 2], [8, 9, 2], [7, 8, 9, 2])]
        sizes = [[len(x) for x in items] for items in (source, target)]
        return LanguagePairDataset(
            source, sizes[0], words, target, sizes[1], words, shuffle=False, **options
        )

    def test_sources_are_padded_on_the_left_and_the_longest_is_first(self) -> None:
        found = self.dataset()
        batch = found.collater([found[1], found[0]])
        assert batch["id"].tolist() == [0, 1]
        assert batch["net_input"]["src_tokens"].tolist() == [[4, 5, 2], [1, 6, 2]]
        assert batch["net_input"]["src_lengths"].tolist() == [3, 2]
        assert batch["target"].tolist() == [[7, 2, 1], [8, 9, 2]]
        assert batch["net_input"]["prev_output_tokens"].tolist() == [
            [2, 7, 1], [2, 8, 9]
        ]  # fmt: skip
        assert (batch["ntokens"], batch["nsentences"]) == (5, 2)

    def test_sizes_are_of_both(self) -> None:
        found = self.dataset()
        assert found.ordered_indices().tolist() == [1, 0, 2]
        assert found.num_tokens(1) == 3
        assert found.filter_indices_by_size(found.ordered_indices(), (3, 2)) == (
            pytest.approx([0]), [1, 2]
        )  # fmt: skip

    def test_pairs_have_to_match(self) -> None:
        words = Dictionary()
        with pytest.raises(ValueError, match="same number of examples, got 2 and 1"):
            LanguagePairDataset([1, 2], [1, 1], words, [1], [1], words)
        with pytest.raises(ValueError, match="pad must have one number"):
            LanguagePairDataset([1], [1], words, [1], [1], Dictionary(bos="<pad>"))


@pytest.mark.parametrize("seed", range(draws(12, 300)))
def test_pairs_are_cut_marked_and_joined_as_the_options_say(
    seed: int, tmp_path: Path
) -> None:
    """A cut source keeps its end of sentence; the first split comes upsampled."""
    chance = random.Random(seed)
    words = Dictionary()
    for word in range(9):
        words.add_symbol(f"w{word}")
    eos, splits = words.eos(), {"train": 3, "train1": 2}
    pairs: dict[str, list[list[list[int]]]] = {}
    for split, n in splits.items():
        pairs[split] = [
            [[*chance.choices(range(4, 13), k=chance.randint(1, 7)), eos]
             for _ in range(n)] for _ in "ab"
        ]  # fmt: skip
        for language, sentences in zip("ab", pairs[split], strict=True):
            prefix = str(tmp_path / f"{split}.a-b.{language}")
            builder = make_builder(f"{prefix}.bin", "mmap", vocab_size=len(words))
            for ids in sentences:
                builder.add_item(torch.tensor(ids))
            builder.finalize(f"{prefix}.idx")
    most, upsampled = chance.randint(2, 6), chance.randint(1, 3)
    combine, begins, cuts = (chance.random() < 0.5 for _ in range(3))
    found = load_langpair_dataset(
        str(tmp_path), "train", "a", words, "b", words, combine, "mmap", upsampled,
        True, False, most, 64, prepend_bos=begins, truncate_source=cuts, shuffle=False,
    )  # fmt: skip
    used = ["train"] * (upsampled if combine else 1) + ["train1"] * combine
    expected = []
    for split in used:
        for source, target in zip(*pairs[split], strict=True):
            cut = [*source[:-1][: most - 1], eos] if cuts else source
            start = [words.bos()] * begins
            expected.append(([*start, *cut], [*start, *target]))
    items = (found[i] for i in range(len(found)))
    assert [(i["source"].tolist(), i["target"].tolist()) for i in items] == expected


@pytest.mark.parametrize(
    ("limit", "used"), [(None, [0, 1, 2, 3]), ((5, 5), [0, 2]), ((7, 1), [0, 2, 3])]
)
def test_batches_are_of_the_samples_within_the_limits(
    limit: Any, used: list[int]
) -> None:
    lengths, words = [3, 9, 5, 7], Dictionary()
    texts = [torch.full((n,), words.add_symbol("w")) for n in lengths]
    dataset = LanguagePairDataset(texts, lengths, words, shuffle=False)
    task = tasks.FairseqTask(SimpleNamespace())
    options = {"max_sentences": 2, "max_positions": limit}
    options["disable_iterator_cache"] = True
    batches = task.get_batch_iterator(dataset, ignore_invalid_inputs=True, **options)
    found = [i for batch in batches.next_epoch_itr() for i in batch["id"].tolist()]
    assert sorted(found) == used
    if limit is not None:
        with pytest.raises(Exception, match=r"^Size of sample #\d is invalid"):
            task.get_batch_iterator(dataset, **options)
