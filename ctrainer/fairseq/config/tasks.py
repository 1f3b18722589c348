"""The groups of tasks and criterions, `task` and `criterion`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ctrainer.fairseq.config.base import II, FairseqDataclass, opt
from ctrainer.fairseq.config.data import DatasetImpl


@dataclass
class CrossEntropyCriterionConfig(FairseqDataclass):
    """Minus the log probability of the target."""

    sentence_avg: bool = II("optimization.sentence_avg")


@dataclass
class LabelSmoothedCrossEntropyCriterionConfig(FairseqDataclass):
    """The same with some of the target's weight spread over all words."""

    label_smoothing: float = opt(0.0, "Fraction of the weight that is spread.")
    report_accuracy: bool = opt(False, "Log the accuracy of words.")
    ignore_prefix_size: int = opt(0, "Words at the beginning that do not count.")
    sentence_avg: bool = II("optimization.sentence_avg")


@dataclass
class LanguageModelingConfig(FairseqDataclass):
    """Predict each word from those before it."""

    data: str | None = opt(None, "Folder of the data; several, separated by colons.")
    sample_break_mode: Literal["none", "complete", "complete_doc", "eos"] = opt(
        "none",
        "How text becomes samples: full blocks (none), whole sentences up to a block "
        "(complete), the same within documents (complete_doc), a sentence each (eos).",
    )
    tokens_per_sample: int = opt(1024, "Words of a sample at most.")
    output_dictionary_size: int = opt(-1, "Words that can be output; -1: all.")
    self_target: bool = opt(False, "The word itself is a target.")
    future_target: bool = opt(False, "The next word is a target.")
    past_target: bool = opt(False, "The word before is a target.")
    add_bos_token: bool = opt(False, "Begin samples with the word <s>.")
    max_target_positions: int | None = opt(None, "Words of a target at most.")
    shorten_method: Literal["none", "truncate", "random_crop"] = opt(
        "none", "What becomes of sequences beyond tokens_per_sample."
    )
    shorten_data_split_list: str = opt(
        "", "Subsets that are shortened, separated by commas; empty: all."
    )
    pad_to_fixed_length: bool | None = opt(False, "Pad to tokens_per_sample.")
    pad_to_fixed_bsz: bool | None = opt(False, "Pad to the full batch.")
    seed: int = II("common.seed")
    batch_size: int | None = II("dataset.batch_size")
    batch_size_valid: int | None = II("dataset.batch_size_valid")
    dataset_impl: DatasetImpl | None = II("dataset.dataset_impl")
    data_buffer_size: int = II("dataset.data_buffer_size")
    tpu: bool = II("common.tpu")
    use_plasma_view: bool = II("common.use_plasma_view")
    plasma_path: str = II("common.plasma_path")


@dataclass
class TranslationConfig(FairseqDataclass):
    """From one language to another."""

    data: str | None = opt(
        None, "Folders of the data, separated by colons, one an epoch in turn."
    )
    source_lang: str | None = opt(None, "Language of the source.", argparse_alias="-s")
    target_lang: str | None = opt(None, "Language of the target.", argparse_alias="-t")
    load_alignments: bool = opt(False, "Load alignments too.")
    left_pad_source: bool = opt(True, "Pad sources on the left.")
    left_pad_target: bool = opt(False, "Pad targets on the left.")
    max_source_positions: int = opt(1024, "Words of a source at most.")
    max_target_positions: int = opt(1024, "Words of a target at most.")
    upsample_primary: int = opt(-1, "Times that the first data set is repeated.")
    truncate_source: bool = opt(False, "Cut sources to max_source_positions.")
    num_batch_buckets: int = opt(0, "Lengths to which batches are padded; 0: any.")
    train_subset: str = II("dataset.train_subset")
    dataset_impl: DatasetImpl | None = II("dataset.dataset_impl")
    required_seq_len_multiple: int = II("dataset.required_seq_len_multiple")
    eval_bleu: bool = opt(False, "Validate with BLEU.")
    eval_bleu_args: str | None = opt("{}", "Options of the generation, as JSON.")
    eval_bleu_detok: str = opt("space", "How words become text; space: not at all.")
    eval_bleu_detok_args: str | None = opt("{}", "Options of that, as JSON.")
    eval_tokenized_bleu: bool = opt(False, "BLEU of words, not sacrebleu's.")
    eval_bleu_remove_bpe: str | None = opt(
        None, "Mark of split words to remove.", argparse_const="@@ "
    )
    eval_bleu_print_samples: bool = opt(False, "Print an output of each batch.")


CRITERIONS: dict[str, type[FairseqDataclass]] = {
    "cross_entropy": CrossEntropyCriterionConfig,
    "label_smoothed_cross_entropy": LabelSmoothedCrossEntropyCriterionConfig,
}
TASKS: dict[str, type[FairseqDataclass]] = {
    "language_modeling": LanguageModelingConfig,
    "translation": TranslationConfig,
}
