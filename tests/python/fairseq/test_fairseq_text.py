"""Dictionaries, binarised text and blocks of it."""

from __future__ import annotations

import io
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fairseq_program as program
import numpy as np
import pytest
import torch

from ctrainer.__main__ import main
from ctrainer.fairseq.config.tasks import LanguageModelingConfig
from ctrainer.fairseq.data import (
    Dictionary,
    MMapIndexedDataset,
    MonolingualDataset,
    TokenBlockDataset,
    TruncatedDictionary,
)
from ctrainer.fairseq.data.text_chunks import find_offsets, lines_between
from ctrainer.fairseq.tasks.language_modeling import LanguageModelingTask

TEXT = "a b a\nc a b\n\nd\n"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.write_text(TEXT)
    return path


def dictionary_of(path: Path, workers: int = 1, **limits: int) -> Dictionary:
    dictionary = Dictionary()
    Dictionary.add_file_to_dictionary(str(path), dictionary, num_workers=workers)
    dictionary.finalize(**{"padding_factor": 1, **limits})
    return dictionary


class TestDictionary:
    def test_words_are_ordered_by_count_and_then_by_name(self, text: Path) -> None:
        found = dictionary_of(text)
        assert found.symbols == ["<s>", "<pad>", "</s>", "<unk>", "a", "b", "c", "d"]
        assert found.count[4:] == [3, 2, 1, 1]
        assert found.count[found.eos()] == 1 + 4  # a line each, and itself

    def test_rare_words_and_those_beyond_the_limit_are_dropped(
        self, text: Path
    ) -> None:
        assert dictionary_of(text, threshold=2).symbols[4:] == ["a", "b"]
        assert dictionary_of(text, nwords=5).symbols[4:] == ["a"]
        padded = dictionary_of(text, threshold=2, padding_factor=4)
        assert padded.symbols[6:] == ["madeupword0000", "madeupword0001"]

    def test_processes_count_what_one_does(self, text: Path) -> None:
        assert dictionary_of(text, workers=3).count == dictionary_of(text).count

    def test_a_file_brings_back_what_was_saved(
        self, text: Path, tmp_path: Path
    ) -> None:
        found = dictionary_of(text)
        found.save(tmp_path / "new/dict.txt")
        assert (tmp_path / "new/dict.txt").read_text() == "a 3\nb 2\nc 1\nd 1\n"
        loaded = Dictionary.load(tmp_path / "new/dict.txt")
        assert loaded == found
        assert loaded.count[4:] == found.count[4:]

    def test_lines_that_are_none_are_named(self) -> None:
        with pytest.raises(ValueError, match='"lonely"'):
            Dictionary.load(io.StringIO("a 3\nlonely\n"))
        with pytest.raises(RuntimeError, match="Duplicate word found"):
            Dictionary.load(io.StringIO("a 3\na 4\n"))
        twice = Dictionary.load(io.StringIO("a 3\na 4 #fairseq:overwrite\n"))
        assert twice.get_count(twice.index("a")) == 4

    def test_text_becomes_numbers_and_text_again(self, text: Path) -> None:
        found = dictionary_of(text)
        ids = found.encode_line("b  a x\n", add_if_not_exist=False)
        assert ids.tolist() == [5, 4, found.unk(), found.eos()]
        assert ids.dtype == torch.int32
        assert found.string(ids) == "b a <unk>"
        assert found.string(ids, escape_unk=True, include_eos=True) == (
            "b a <<unk>> </s>"
        )
        split = Dictionary.load(io.StringIO("hel@@ 1\nlo 1\n"))
        both = split.encode_line("hel@@ lo lo", add_if_not_exist=False)
        assert split.string(torch.stack([both, both]), "@@ ") == "hello lo\nhello lo"

    def test_a_truncated_one_knows_its_first_words_only(self, text: Path) -> None:
        short = TruncatedDictionary(dictionary_of(text), 5)
        assert len(short) == 5
        assert short.index("a") == 4
        assert short.index("b") == short.unk()
        assert short[6] == "<unk>"


@pytest.mark.parametrize(("size", "words"), [(-1, 8), (0, 0), (6, 6), (99, 8)])
def test_a_language_model_may_output_fewer_words(
    text: Path, tmp_path: Path, size: int, words: int
) -> None:
    dictionary_of(text).save(tmp_path / "dict.txt")
    config = LanguageModelingConfig(data=str(tmp_path), output_dictionary_size=size)
    whole, short = LanguageModelingTask.setup_dictionary(config)
    assert (len(whole), len(short)) == (8, words)
    assert short.index("a") == (4 if words > 4 else whole.unk())


class TestChunks:
    @pytest.mark.parametrize("chunks", [1, 2, 3, 7])
    def test_each_line_is_in_one_chunk(self, text: Path, chunks: int) -> None:
        offsets = find_offsets(text, chunks)
        assert len(offsets) == chunks + 1
        pairs = pairwise(offsets)
        lines = [line for ends in pairs for line in lines_between(text, *ends)]
        assert "".join(lines) == TEXT

    def test_a_line_that_is_no_text_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "bad").write_bytes(b"good\n\xff\xfe\n")
        with pytest.raises(ValueError, match="the line at byte 5 is not UTF-8"):
            list(lines_between(tmp_path / "bad", 0, 8))


class TestPreprocess:
    def test_lines_become_items(self, tmp_path: Path) -> None:
        target = program.preprocess(tmp_path)
        words = Dictionary.load(target / "dict.txt")
        items = MMapIndexedDataset(str(target / "train"))
        lines = (tmp_path / "train").read_text().splitlines()
        assert len(items) == len(lines)
        assert [words.string(item) for item in items] == lines
        assert items.dtype == np.uint16
        counted = Counter(word for line in lines for word in line.split())
        assert {w: words.get_count(words.index(w)) for w in counted} == counted

    def test_any_number_of_processes_writes_the_same_files(
        self, tmp_path: Path
    ) -> None:
        one = program.preprocess(tmp_path)
        kept = {p.name: p.read_bytes() for p in one.iterdir()}
        for path in one.iterdir():
            path.unlink()
        three = program.preprocess(tmp_path, "--workers", "3")
        assert {p.name: p.read_bytes() for p in three.iterdir()} == kept

    def test_languages_have_dictionaries_and_files_of_their_own(
        self, tmp_path: Path
    ) -> None:
        for language, word in (("en", "one"), ("de", "eins")):
            for split in ("train", "valid"):
                (tmp_path / f"{split}.{language}").write_text(f"{word}\n")
        options = ["--trainpref", "train", "--validpref", "valid", "--destdir", "bin",
                   "-s", "en", "-t", "de"]  # fmt: skip
        paths = [str(tmp_path / o) if o in ("train", "valid", "bin") else o
                 for o in options]  # fmt: skip
        assert main(["fairseq-preprocess", *paths]) == 0
        names = {p.name for p in (tmp_path / "bin").iterdir()}
        assert {"dict.en.txt", "dict.de.txt", "train.en-de.en.bin",
                "valid.en-de.de.idx"} < names  # fmt: skip
        assert "eins" not in (tmp_path / "bin/dict.en.txt").read_text()
        with pytest.raises(FileExistsError, match="--srcdict"):
            main(["fairseq-preprocess", *paths])
        joined = [*paths[:-5], str(tmp_path / "both"), *paths[-4:]]
        assert main(["fairseq-preprocess", *joined, "--joined-dictionary"]) == 0
        both = [(tmp_path / f"both/dict.{x}.txt").read_text() for x in ("en", "de")]
        assert both[0] == both[1]
        assert "one" in both[0]
        assert "eins" in both[0]


class Items(list[Any]):
    """A data set of tensors."""

    @property
    def sizes(self) -> Any:
        return np.array([len(item) for item in self])


def items(*sizes: int) -> Items:
    """Items of consecutive numbers from 10."""
    starts = np.cumsum([0, *sizes])
    return Items(torch.arange(10 + a, 10 + b) for a, b in pairwise(starts))


class TestTokenBlocks:
    def blocks(self, mode: str | None, size: int | None, *sizes: int) -> Any:
        data = items(*sizes)
        return TokenBlockDataset(data, data.sizes, size, pad=1, eos=2, break_mode=mode)

    def test_full_blocks_ignore_where_items_end(self) -> None:
        found = self.blocks("none", 4, 3, 5, 1)
        assert [b.tolist() for b in found] == [
            [10, 11, 12, 13], [14, 15, 16, 17], [18]
        ]  # fmt: skip
        assert found.sizes.tolist() == [4, 4, 1]
        assert found.slice_indices.tolist() == [[0, 4], [4, 8], [8, 9]]
        assert found.block_to_dataset_index.tolist() == [
            [0, 0, 1],
            [1, 1, 1],
            [2, 0, 2],
        ]

    def test_complete_blocks_hold_whole_items(self) -> None:
        assert self.blocks("complete", 4, 3, 1, 6, 2).sizes.tolist() == [4, 6, 2]
        assert self.blocks("eos", None, 3, 1, 6).sizes.tolist() == [3, 1, 6]
        documents = self.blocks("complete_doc", 8, 3, 2, 1, 4, 1)
        assert documents.sizes.tolist() == [5, 4]

    def test_sources_are_the_tokens_before(self) -> None:
        data = items(3, 5)
        found = TokenBlockDataset(
            data, data.sizes, 2, pad=1, eos=2, break_mode="none", include_targets=True
        )
        rows = [[t.tolist() for t in found[i]] for i in range(4)]
        assert rows == [
            [[2, 10], [10, 11], [1, 2]],
            [[11, 12], [12, 13], [10, 11]],
            [[13, 14], [14, 15], [2, 13]],
            [[15, 16], [16, 17], [14, 15]],
        ]

    def test_what_cannot_be_is_rejected(self) -> None:
        with pytest.raises(ValueError, match="Invalid break_mode: words"):
            self.blocks("words", 4, 3)
        with pytest.raises(ValueError, match="block_size must be at least 1"):
            self.blocks("none", 0, 3)
        with pytest.raises(ValueError, match="2 items with 1 sizes"):
            TokenBlockDataset(items(1, 2), [1], 4, pad=1, eos=2)


class TestMonolingual:
    def dataset(self, targets: list[str] | None, **options: Any) -> Any:
        data = items(3, 4)
        blocks = TokenBlockDataset(
            data, data.sizes, None, pad=1, eos=2, break_mode="eos",
            include_targets=targets is not None,
        )  # fmt: skip
        words = Dictionary(extra_special_symbols=map(str, range(16)))
        return MonolingualDataset(
            blocks, blocks.sizes, words, targets=targets, **options
        )

    def test_batches_are_padded_on_the_right(self) -> None:
        found = self.dataset(["future"])
        batch = found.collater([found[0], found[1]])
        assert batch["net_input"]["src_tokens"].tolist() == [
            [2, 10, 11, 1], [2, 13, 14, 15]
        ]  # fmt: skip
        assert batch["target"].tolist() == [[10, 11, 12, 1], [13, 14, 15, 16]]
        assert batch["net_input"]["src_lengths"].tolist() == [3, 4]
        assert (batch["ntokens"], batch["nsentences"]) == (7, 2)
        assert found.collater([]) == {}

    def test_several_targets_are_a_list(self) -> None:
        found = self.dataset(["future", "past"], add_eos_for_other_targets=True)
        future, past = found[0]["target"]
        assert found[0]["source"].tolist() == [2, 10, 11, 2]
        assert future.tolist() == [10, 11, 12, 1]
        assert past.tolist() == [1, 2, 10, 11]

    def test_words_beyond_the_output_are_unknown(self) -> None:
        short = SimpleNamespace(unk=lambda: 3, bos=lambda: 0)
        found = self.dataset(["future"], tgt_vocab=_Sized(short, 12))
        assert found[0]["target"].tolist() == [10, 11, 3]

    def test_order_is_by_length(self) -> None:
        data = items(4, 2, 3, 2)
        blocks = TokenBlockDataset(data, data.sizes, None, 1, 2, "eos")
        ordered = MonolingualDataset(blocks, blocks.sizes, Dictionary())
        assert ordered.ordered_indices().tolist() == [1, 3, 2, 0]
        assert ordered.num_tokens_vec(np.array([0, 1])).tolist() == [4, 2]


class _Sized:
    """An object with a length."""

    def __init__(self, inner: Any, length: int) -> None:
        self._inner, self._length = inner, length

    def __len__(self) -> int:
        return self._length

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
