"""The group `generation`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ctrainer.fairseq.config.base import FairseqDataclass, opt

Constraints = Literal["ordered", "unordered"]
DecodingFormat = Literal["unigram", "ensemble", "vote", "dp", "bs"]

_LENGTH = "Longest output is a * source length + b; this is {}."


@dataclass
class GenerationConfig(FairseqDataclass):
    """Search, sampling and what is printed of it."""

    beam: int = opt(5, "Hypotheses that are followed.")
    beam_mt: int = opt(0, "Hypotheses that the first of two decoders follows.")
    nbest: int = opt(1, "Hypotheses that are given out.")
    max_len_a: float = opt(0, _LENGTH.format("a"))
    max_len_b: int = opt(200, _LENGTH.format("b"))
    max_len_a_mt: float = opt(0, _LENGTH.format("a of the first of two decoders"))
    max_len_b_mt: int = opt(200, _LENGTH.format("b of the first of two decoders"))
    min_len: int = opt(1, "Shortest output.")
    match_source_len: bool = opt(False, "Give outputs the length of the source.")
    unnormalized: bool = opt(False, "Compare scores without regard to length.")
    no_early_stop: bool = opt(False, "Deprecated.")
    no_beamable_mm: bool = opt(False, "Deprecated.")
    lenpen: float = opt(1, "Penalty on length: below 1 short outputs win, above long.")
    lenpen_mt: float = opt(1, "The same for the first of two decoders.")
    unkpen: float = opt(0, "Penalty on unknown words; below 0 there are more of them.")
    replace_unk: str | None = opt(
        None,
        "Replace unknown words by the source's, or through a dictionary in a file.",
        argparse_const="@@ ",
    )
    sacrebleu: bool = opt(False, "Score with sacrebleu.")
    score_reference: bool = opt(False, "Score the reference alone.")
    prefix_size: int = opt(0, "Words of the target that are given.")
    no_repeat_ngram_size: int = opt(0, "Length of runs that may not repeat; 0: none.")
    sampling: bool = opt(False, "Sample instead of searching.")
    sampling_topk: int = opt(-1, "Sample from the k most likely words; -1: from all.")
    sampling_topp: float = opt(
        -1.0, "Sample from the likeliest words that make up this mass; -1: from all."
    )
    constraints: Constraints | None = opt(
        None, "Words that must occur, in order or not.", argparse_const="ordered"
    )
    temperature: float = opt(1.0, "Divides the scores before the softmax.")
    diverse_beam_groups: int = opt(-1, "Groups of diverse beam search; -1: none.")
    diverse_beam_strength: float = opt(0.5, "Penalty of diverse beam search.")
    diversity_rate: float = opt(-1.0, "Penalty of diverse siblings search; -1: none.")
    print_alignment: Literal["hard", "soft"] | None = opt(
        None, "Print how output aligns with the source.", argparse_const="hard"
    )
    print_step: bool = opt(False, "Print the steps.")
    lm_path: str | None = opt(None, "Language model whose scores are added.")
    lm_weight: float = opt(0.0, "Weight of its scores.")
    iter_decode_eos_penalty: float = opt(
        0.0, "Penalty on stopping early in iterative refinement."
    )
    iter_decode_max_iter: int = opt(10, "Rounds of refinement at most.")
    iter_decode_force_max_iter: bool = opt(False, "Always do all rounds.")
    iter_decode_with_beam: int = opt(1, "Lengths that are tried.")
    iter_decode_with_external_reranker: bool = opt(
        False, "The last checkpoint ranks the outputs of the others."
    )
    retain_iter_history: bool = opt(False, "Return every round.")
    retain_dropout: bool = opt(False, "Apply dropout when generating.")
    retain_dropout_modules: Any = opt(
        None, "Modules to apply it in; None: in all of them."
    )
    decoding_format: DecodingFormat | None = opt(
        None, "Special format of advanced decoding."
    )
    no_seed_provided: bool = opt(False, "Do not seed the random numbers.")
    eos_token: str | None = opt(None, "Word that ends a sequence.")
