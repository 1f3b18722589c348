"""A task of the old kind, which declares its options with argparse."""

import os

from fairseq.data import Dictionary, MonolingualDataset, TokenBlockDataset, data_utils
from fairseq.tasks import LegacyFairseqTask, register_task


@register_task("lines")
class LinesTask(LegacyFairseqTask):
    @staticmethod
    def add_args(parser):
        parser.add_argument("data", help="path to data directory")
        parser.add_argument("--most-words", default=32, type=int)

    def __init__(self, args, dictionary):
        super().__init__(args)
        self.dictionary = dictionary

    @classmethod
    def setup_task(cls, args, **kwargs):
        return cls(args, Dictionary.load(os.path.join(args.data, "dict.txt")))

    def load_dataset(self, split, combine=False, **kwargs):
        lines = data_utils.load_indexed_dataset(
            os.path.join(self.args.data, split), self.dictionary, self.args.dataset_impl
        )
        blocks = TokenBlockDataset(
            lines,
            lines.sizes,
            self.args.most_words,
            self.dictionary.pad(),
            self.dictionary.eos(),
            break_mode="eos",
            include_targets=True,
        )
        self.datasets[split] = MonolingualDataset(
            blocks,
            blocks.sizes,
            self.dictionary,
            self.dictionary,
            add_eos_for_other_targets=False,
            shuffle=True,
            targets=["future"],
        )

    @property
    def source_dictionary(self):
        return self.dictionary

    @property
    def target_dictionary(self):
        return self.dictionary

    def max_positions(self):
        return self.args.most_words
