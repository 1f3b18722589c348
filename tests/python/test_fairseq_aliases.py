"""Our modules under fairseq's names."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ctrainer.fairseq import config, meters, metrics
from ctrainer.fairseq.aliases import install_fairseq_aliases, remove_fairseq_aliases


class TestAliases:
    @pytest.fixture(autouse=True)
    def _clean(self) -> Iterator[None]:
        yield
        remove_fairseq_aliases()

    def test_fairseqs_names_mean_our_modules_when_asked(self) -> None:
        install_fairseq_aliases()
        install_fairseq_aliases()
        from fairseq import logging
        from fairseq.logging import meters as theirs
        from fairseq.logging.metrics import aggregate

        assert aggregate is metrics.aggregate
        assert theirs is meters
        assert logging.progress_bar.__name__ == "ctrainer.fairseq.progress_bar"

    def test_the_older_names_and_the_configuration_too(self) -> None:
        install_fairseq_aliases()
        from fairseq import metrics as older
        from fairseq.dataclass import ChoiceEnum, FairseqDataclass
        from fairseq.dataclass.configs import FairseqConfig

        assert older is metrics
        assert FairseqConfig is config.FairseqConfig
        assert issubclass(FairseqConfig, FairseqDataclass)
        assert list(ChoiceEnum(["a", "b"])) == ["a", "b"]
        assert not hasattr(config, "configs")

    def test_nothing_is_installed_unasked(self) -> None:
        with pytest.raises(ModuleNotFoundError):
            __import__("fairseq")

    def test_they_can_be_taken_back(self) -> None:
        install_fairseq_aliases()
        remove_fairseq_aliases()
        remove_fairseq_aliases()
        assert not [name for name in sys.modules if name.split(".")[0] == "fairseq"]

    def test_an_installed_fairseq_keeps_its_names(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "fairseq").mkdir()
        (tmp_path / "fairseq" / "__init__.py").write_text("")
        monkeypatch.syspath_prepend(str(tmp_path))
        with pytest.raises(RuntimeError, match="fairseq is installed"):
            install_fairseq_aliases()
        assert "fairseq" not in sys.modules
