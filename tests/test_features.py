"""docs/development/features.md names files, users and tests that there are."""

from tests.support.features import ROOT, code_lines, files, quoted, rows


def test_every_pattern_has_files_of_its_own() -> None:
    without = [glob for glob, found in files().items() if not found]
    assert not without, f"no file has these as its longest pattern: {without}"


def test_no_pattern_is_of_two_features() -> None:
    patterns = [glob for row in rows() for glob in quoted(row[1])]
    assert len(patterns) == len(set(patterns))


def test_every_feature_has_a_user_and_a_test() -> None:
    for name, _, lines, user, test in rows():
        assert user, name
        assert lines != "0", f"{name}: run python -m tests.support.features"
        for path in quoted(test):
            assert (ROOT / path).is_file(), f"{name}: {path} is no file"


def test_lines_of_code_are_counted_without_comments_and_docstrings() -> None:
    assert code_lines("ctrainer/fairseq/tokenizer.py") == 3
