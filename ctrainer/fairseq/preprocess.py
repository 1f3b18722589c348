"""`ctrainer fairseq-preprocess`: dictionaries and binarised data of text.

Options, names of files and their formats are those of fairseq-preprocess.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
from typing import Any

from ctrainer.fairseq import tasks
from ctrainer.fairseq.binarizer import binarize_file
from ctrainer.fairseq.program_log import log_to_stdout
from ctrainer.fairseq.utils import import_user_module
from ctrainer.runtime.command_line import HelpFormatter

logger = logging.getLogger(__name__)

_OPTIONS: list[tuple[tuple[str, ...], dict[str, Any]]] = [
    (("-s", "--source-lang"), {"help": "Language of the source."}),
    (("-t", "--target-lang"), {"help": "Language of the target."}),
    (("--trainpref",), {"help": "Training text, a sentence a line, without its "
     ".LANG."}),
    (("--validpref",), {"help": "Validation texts, separated by commas: valid, "
     "valid1 and so on."}),
    (("--testpref",), {"help": "Test texts, likewise."}),
    (("--destdir",), {"default": "data-bin", "help": "Folder of what is written."}),
    (("--thresholdsrc",), {"type": int, "default": 0, "help": "Words of the source "
     "seen less often count as unknown."}),
    (("--thresholdtgt",), {"type": int, "default": 0, "help": "The same of the "
     "target."}),
    (("--nwordssrc",), {"type": int, "default": -1, "help": "Words of the source's "
     "dictionary at most, special words included; -1: all."}),
    (("--nwordstgt",), {"type": int, "default": -1, "help": "The same of the "
     "target's."}),
    (("--srcdict",), {"help": "A dictionary to use for the source."}),
    (("--tgtdict",), {"help": "A dictionary to use for the target."}),
    (("--joined-dictionary",), {"action": "store_true", "help": "One dictionary for "
     "both."}),
    (("--only-source",), {"action": "store_true", "help": "There is no target."}),
    (("--padding-factor",), {"type": int, "default": 8, "help": "Number of which a "
     "dictionary's size is a multiple."}),
    (("--workers",), {"type": int, "default": 1, "help": "Processes."}),
    (("--dict-only",), {"action": "store_true", "help": "Write the dictionaries "
     "alone."}),
    (("--dataset-impl",), {"default": "mmap", "choices": ["raw", "mmap"],
     "help": "Format of the data."}),
    (("--task",), {"default": "translation", "help": "Task whose dictionaries are "
     "made."}),
    (("--user-dir",), {"help": "Python package with tasks of your own."}),
]  # fmt: skip


def parse_args(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="ctrainer fairseq-preprocess",
        description="Make dictionaries and binarised data of text.",
        formatter_class=HelpFormatter,
    )
    for names, details in _OPTIONS:
        parser.add_argument(*names, **details)
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """The command; 0."""
    log_to_stdout()
    preprocess(parse_args(arguments))
    return 0


def preprocess(args: argparse.Namespace) -> None:
    """Write dict[.LANG].txt and SPLIT[.SRC-TGT.LANG].bin and .idx into args.destdir.

    Raises:
        FileExistsError: a dictionary is there already and is not the one to use.
        FileNotFoundError: a text is missing.
        ValueError: options that exclude each other.
    """
    import_user_module(args)
    os.makedirs(args.destdir, exist_ok=True)
    sides = [("src", args.source_lang)]
    if not args.only_source:
        sides.append(("tgt", args.target_lang))
    dictionaries = _dictionaries(args, [side for side, _ in sides])
    for side, language in sides:
        dictionaries[side].save(_dictionary_path(args, language))
    if args.dict_only:
        return
    for side, language in sides:
        for source, split in _splits(args):
            _convert(args, dictionaries[side], source, split, language)
    logger.info("Wrote preprocessed data to %s", args.destdir)


def _splits(args: argparse.Namespace) -> list[tuple[str, str]]:
    """(prefix of the text, name of the split); further ones are valid1 and so on."""
    found = [(args.trainpref, "train")] if args.trainpref else []
    for prefixes, name in ((args.validpref, "valid"), (args.testpref, "test")):
        for i, prefix in enumerate(prefixes.split(",") if prefixes else []):
            found.append((prefix, f"{name}{i or ''}"))
    return found


def _text(prefix: str, language: str | None) -> str:
    return prefix if language is None else f"{prefix}.{language}"


def _dictionary_path(args: argparse.Namespace, language: str | None) -> str:
    return os.path.join(args.destdir, _text("dict", language) + ".txt")


def _dictionaries(args: argparse.Namespace, sides: list[str]) -> dict[str, Any]:
    """The dictionary of each side, loaded or made."""
    languages = {"src": args.source_lang, "tgt": args.target_lang}
    for side in sides:
        path = _dictionary_path(args, languages[side])
        if not getattr(args, f"{side}dict") and os.path.exists(path):
            raise FileExistsError(
                f"{path} is there already; use it with --{side}dict, or choose another "
                "--destdir"
            )
    if not args.joined_dictionary:
        return {side: _dictionary(args, side, [languages[side]]) for side in sides}
    if args.srcdict and args.tgtdict:
        raise ValueError(
            "cannot use both --srcdict and --tgtdict with --joined-dictionary"
        )
    one = _dictionary(args, "tgt" if args.tgtdict else "src", list(languages.values()))
    return dict.fromkeys(sides, one)


def _dictionary(
    args: argparse.Namespace, side: str, languages: list[str | None]
) -> Any:
    task = tasks.get_task(args.task)
    given = getattr(args, f"{side}dict")
    if given:
        return task.load_dictionary(given)
    if not args.trainpref:
        raise ValueError(f"--trainpref must be set if --{side}dict is not specified")
    return task.build_dictionary(
        [_text(args.trainpref, language) for language in dict.fromkeys(languages)],
        workers=args.workers,
        threshold=getattr(args, f"threshold{side}"),
        nwords=getattr(args, f"nwords{side}"),
        padding_factor=args.padding_factor,
    )


def _convert(
    args: argparse.Namespace,
    dictionary: Any,
    source: str,
    split: str,
    language: str | None,
) -> None:
    prefix = os.path.join(args.destdir, split)
    if language is not None:
        prefix += f".{args.source_lang}-{args.target_lang}.{language}"
    elif not args.only_source:
        prefix += f".{args.source_lang}-{args.target_lang}"
    text = _text(source, language)
    if args.dataset_impl == "raw":
        shutil.copyfile(text, prefix)
        return
    found = binarize_file(text, dictionary, prefix, args.dataset_impl, args.workers)
    logger.info(
        "[%s] %s: %d sents, %d tokens, %.3g%% replaced by %s",
        language, text, found.num_seq, found.num_tok, found.replaced_percent,
        dictionary.unk_word,
    )  # fmt: skip
