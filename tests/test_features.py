"""docs/development/features.md names every file of the product, once, and tests."""

from collections import Counter

from tests.support.features import ROOT, code_lines, files_of, product, quoted, rows


def test_every_file_is_of_one_feature() -> None:
    found = Counter(file for row in rows() for file in files_of(row))
    wrong = {file: found[file] for file in product() if found[file] != 1}
    assert not wrong, f"features of files, each to be of one: {wrong}"


def test_every_pattern_has_files() -> None:
    for row in rows():
        for glob in quoted(row[1]):
            assert any(ROOT.glob(glob)), f"{row[0]}: {glob} is no file"


def test_every_feature_has_a_user_and_a_test() -> None:
    for name, _, lines, user, test in rows():
        assert user, name
        assert lines != "0", f"{name}: run python -m tests.support.features"
        for path in quoted(test):
            assert (ROOT / path).is_file(), f"{name}: {path} is no file"


def test_lines_of_code_are_counted_without_comments_and_docstrings() -> None:
    assert code_lines("ctrainer/fairseq/tokenizer.py") == 3
