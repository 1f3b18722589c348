"""Words and their numbers, in fairseq's dict.txt, by the name of data/dictionary.py."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import IO, Any

import torch

from ctrainer.fairseq.data.text_chunks import count_words
from ctrainer.fairseq.tokenizer import tokenize_line

Tokenizer = Callable[[str], Sequence[str]]
_OVERWRITE = "#fairseq:overwrite"


class Dictionary:
    """Words, numbered from 0: `<s>`, `<pad>`, `</s>`, `<unk>`, special ones, the rest.

    `symbols`, `count` and `indices` are fairseq's: the words, how often each was seen,
    and the number of each. Words that are not there have the number of <unk>.

    Args:
        bos, pad, eos, unk (str): The special words.
        extra_special_symbols (Iterable[str] | None, default None): Further ones.

    Example:
        >>> from ctrainer.fairseq.data import Dictionary
        >>> words = Dictionary()
        >>> words.add_symbol("hello"), words.index("world"), len(words)
        (4, 3, 5)
    """

    def __init__(
        self,
        *,
        bos: str = "<s>",
        pad: str = "<pad>",
        eos: str = "</s>",
        unk: str = "<unk>",
        extra_special_symbols: Iterable[str] | None = None,
    ) -> None:
        self.bos_word, self.unk_word, self.pad_word, self.eos_word = bos, unk, pad, eos
        self.symbols: list[str] = []
        self.count: list[int] = []
        self.indices: dict[str, int] = {}
        self.bos_index = self.add_symbol(bos)
        self.pad_index = self.add_symbol(pad)
        self.eos_index = self.add_symbol(eos)
        self.unk_index = self.add_symbol(unk)
        for symbol in extra_special_symbols or ():
            self.add_symbol(symbol)
        self.nspecial = len(self.symbols)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Dictionary) and self.indices == other.indices

    __hash__ = object.__hash__

    def __getitem__(self, idx: int) -> str:
        return self.symbols[idx] if idx < len(self.symbols) else self.unk_word

    def get_count(self, idx: int) -> int:
        """Return how often a word was seen.

        Args:
            idx (int): Its number.
        """
        return self.count[idx]

    def __len__(self) -> int:
        return len(self.symbols)

    def __contains__(self, sym: object) -> bool:
        return sym in self.indices

    def index(self, sym: str) -> int:
        """Return the number of a word, or that of <unk>.

        Args:
            sym (str): The word.
        """
        return self.indices.get(sym, self.unk_index)

    def bos(self) -> int:
        """Return the number of <s>."""
        return self.bos_index

    def pad(self) -> int:
        """Return the number of <pad>."""
        return self.pad_index

    def eos(self) -> int:
        """Return the number of </s>."""
        return self.eos_index

    def unk(self) -> int:
        """Return the number of <unk>."""
        return self.unk_index

    def unk_string(self, escape: bool = False) -> str:
        """Return the word <unk>.

        Args:
            escape (bool, default False): In angle brackets once more.
        """
        return f"<{self.unk_word}>" if escape else self.unk_word

    # ---- text ------------------------------------------------------------------------

    def string(
        self,
        tensor: Any,
        bpe_symbol: str | None = None,
        escape_unk: bool = False,
        extra_symbols_to_ignore: Iterable[int] | None = None,
        unk_string: str | None = None,
        include_eos: bool = False,
        separator: str = " ",
    ) -> str:
        """Return the words of a tensor of numbers, of two dimensions a line a row.

        Args:
            tensor: Numbers of words; <s>, and </s> unless include_eos, are left out.
            bpe_symbol (str | None, default None): The mark of split words, such as "@@
                ", which is removed; None: none.
            escape_unk (bool, default False): Write <unk> in angle brackets once more.
            extra_symbols_to_ignore (Iterable[int] | None, default None): Numbers of
                words that are left out, too.
            unk_string (str | None, default None): In place of <unk>.
            include_eos (bool, default False): Keep </s>.
            separator (str, default ' '): Between words.
        """
        if torch.is_tensor(tensor) and tensor.dim() == 2:
            options = (bpe_symbol, escape_unk, extra_symbols_to_ignore, unk_string)
            rows = (
                self.string(row, *options, include_eos, separator) for row in tensor
            )
            return "\n".join(rows)
        ignored = {*(extra_symbols_to_ignore or ()), self.bos()}
        if not include_eos:
            ignored.add(self.eos())
        unknown = self.unk_string(escape_unk) if unk_string is None else unk_string
        text = separator.join(
            unknown if i == self.unk() else self[i]
            for i in map(int, tensor)
            if i not in ignored
        )
        return text if bpe_symbol is None else _without_marks(text, bpe_symbol)

    def encode_line(
        self,
        line: str,
        line_tokenizer: Tokenizer = tokenize_line,
        add_if_not_exist: bool = True,
        consumer: Callable[[str, int], object] | None = None,
        append_eos: bool = True,
        reverse_order: bool = False,
    ) -> torch.Tensor:
        """Return the numbers of a line's words: int32 of one dimension.

        Args:
            line (str): The line.
            line_tokenizer (Tokenizer, default tokenize_line): Divides it into words.
            add_if_not_exist (bool, default True): Add new words; else they are <unk>.
            consumer (Callable[[str, int], object] | None, default None): Called with
                each word and its number.
            append_eos (bool, default True): Put </s> at the end.
            reverse_order (bool, default False): Turn the words round.
        """
        words = list(line_tokenizer(line))
        if reverse_order:
            words.reverse()
        find = self.add_symbol if add_if_not_exist else self.index
        ids = [find(word) for word in words]
        if consumer is not None:
            for word, idx in zip(words, ids, strict=True):
                consumer(word, idx)
        if append_eos:
            ids.append(self.eos_index)
        return torch.IntTensor(ids)

    # ---- making one ------------------------------------------------------------------

    def add_symbol(self, word: str, n: int = 1, overwrite: bool = False) -> int:
        """Count a word n times more, adding it where it is new; return its number.

        Args:
            word (str): The word.
            n (int, default 1): Times.
            overwrite (bool, default False): Add it as new where it is there, which
                gives it another number.
        """
        if word in self.indices and not overwrite:
            idx = self.indices[word]
            self.count[idx] += n
            return idx
        idx = len(self.symbols)
        self.indices[word] = idx
        self.symbols.append(word)
        self.count.append(n)
        return idx

    def update(self, new_dict: Dictionary) -> None:
        """Add another dictionary's words and counts.

        Args:
            new_dict (Dictionary): The other one.
        """
        for word, count in zip(new_dict.symbols, new_dict.count, strict=True):
            self.add_symbol(word, count)

    def finalize(
        self, threshold: int = -1, nwords: int = -1, padding_factor: int = 8
    ) -> None:
        """Order the words by count, the most frequent first, equal ones by name.

        Args:
            threshold (int, default -1): Words seen less often are dropped.
            nwords (int, default -1): Words that are kept at most, the special ones
                included; 0 or less: all.
            padding_factor (int, default 8): Words of no text fill up to a multiple of
                it.
        """
        special = slice(0, self.nspecial)
        room = (nwords if nwords > 0 else len(self)) - self.nspecial
        others = zip(
            self.symbols[self.nspecial :], self.count[self.nspecial :], strict=True
        )
        ordered = sorted(others, key=lambda pair: (-pair[1], pair[0]))
        kept = [pair for pair in ordered[: max(room, 0)] if pair[1] >= threshold]
        self.symbols = [*self.symbols[special], *(word for word, _ in kept)]
        self.count = [*self.count[special], *(count for _, count in kept)]
        self.indices = {word: i for i, word in enumerate(self.symbols)}
        self.pad_to_multiple_(padding_factor)

    def pad_to_multiple_(self, padding_factor: int) -> None:
        """Add madeupword0000 and so on.

        Args:
            padding_factor (int): Up to a multiple of this many words.
        """
        i = 0
        while padding_factor > 1 and len(self) % padding_factor != 0:
            self.add_symbol(f"madeupword{i:04d}", n=0)
            i += 1

    @staticmethod
    def add_file_to_dictionary(
        filename: str,
        dict: Dictionary,
        tokenize: Tokenizer = tokenize_line,
        num_workers: int = 1,
    ) -> None:
        """Count a text file's words, and </s> for each line.

        Args:
            filename (str): The file.
            dict (Dictionary): To which they are added.
            tokenize (Tokenizer, default tokenize_line): Divides a line into words.
            num_workers (int, default 1): Processes.
        """
        counter: Counter[str] = count_words(
            filename, tokenize, dict.eos_word, num_workers
        )
        for word, count in sorted(counter.items()):
            dict.add_symbol(word, count)

    # ---- files -----------------------------------------------------------------------

    @classmethod
    def load(cls, f: str | os.PathLike[str] | IO[str]) -> Dictionary:
        """Return the dictionary of a file with a line "WORD COUNT" for each word that
        is not special.

        Args:
            f (str | os.PathLike[str] | IO[str]): The file, or its path.

        Raises:
            ValueError: another line; the message names it.
        """
        dictionary = cls()
        dictionary.add_from_file(f)
        return dictionary

    def add_from_file(self, f: str | os.PathLike[str] | IO[str]) -> None:
        """Add a file's words.

        Args:
            f (str | os.PathLike[str] | IO[str]): The file, or its path.

        Raises:
            ValueError: a file that is not UTF-8, a line that is not "WORD COUNT".
            RuntimeError: a word that is there already, whose line does not end in
                #fairseq:overwrite.
        """
        if isinstance(f, (str, os.PathLike)):
            try:
                with open(f, encoding="utf-8") as file:
                    return self.add_from_file(file)
            except UnicodeError as error:
                raise ValueError(
                    f"Incorrect encoding detected in {f}, please rebuild the dataset: "
                    f"{error}"
                ) from error
        lines = f.readlines()
        for line in lines[self._load_meta(lines) :]:
            self._add_line(line.rstrip("\n"))

    def _add_line(self, text: str) -> None:
        word, _, field = text.rstrip().rpartition(" ")
        overwrite = field == _OVERWRITE
        if overwrite:
            word, _, field = word.rpartition(" ")
        if not word or not field.isdecimal():
            raise ValueError(
                "Incorrect dictionary format, expected '<token> <cnt> [flags]': "
                f'"{text}"'
            )
        if word in self and not overwrite:
            raise RuntimeError(
                f"Duplicate word found when loading Dictionary: '{word}'. A later line "
                f"replaces an earlier one where it ends in {_OVERWRITE}"
            )
        self.add_symbol(word, int(field), overwrite)

    def save(self, f: str | os.PathLike[str] | IO[str]) -> None:
        """Write what load() reads.

        Args:
            f (str | os.PathLike[str] | IO[str]): A file, or its path.
        """
        if isinstance(f, (str, os.PathLike)):
            os.makedirs(os.path.dirname(f) or ".", exist_ok=True)
            with open(f, "w", encoding="utf-8") as file:
                return self.save(file)
        keys, values = self._get_meta()
        words = [*keys, *self.symbols[self.nspecial :]]
        counts = [*values, *self.count[self.nspecial :]]
        f.writelines(f"{w} {n}\n" for w, n in zip(words, counts, strict=True))

    def _get_meta(self) -> tuple[list[str], list[Any]]:
        """Lines before the words, for subclasses."""
        return [], []

    def _load_meta(self, lines: list[str]) -> int:
        """How many of the first lines are not words, for subclasses."""
        return 0


class TruncatedDictionary:
    """The first words of a dictionary; all others are `<unk>`.

    Args:
        wrapped_dict (Dictionary): The dictionary.
        length (int): Words.

    Example:
        >>> from ctrainer.fairseq.data import Dictionary, TruncatedDictionary
        >>> words = Dictionary()
        >>> index = words.add_symbol("hello")
        >>> TruncatedDictionary(words, 4).index("hello")
        3
    """

    def __init__(self, wrapped_dict: Dictionary, length: int) -> None:
        self.wrapped_dict = wrapped_dict
        self.length = min(len(wrapped_dict), length)

    def __getattr__(self, name: str) -> Any:
        if name == "wrapped_dict":  # asked for before __init__, by copy and pickle
            raise AttributeError(name)
        return getattr(self.wrapped_dict, name)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> str:
        return self.wrapped_dict[i if i < self.length else self.unk()]

    def index(self, sym: str) -> int:
        """Return the number of a word, or that of <unk>.

        Args:
            sym (str): The word.
        """
        found = self.wrapped_dict.index(sym)
        return found if found < self.length else int(self.unk())


def _without_marks(text: str, mark: str) -> str:
    if mark == "sentencepiece":
        return text.replace(" ", "").replace("\u2581", " ").strip()
    mark = "@@ " if mark in ("subword_nmt", "@@ ") else mark
    return (text + " ").replace(mark, "").rstrip()
