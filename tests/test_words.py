"""The field's words (docs/glossary.md), and none of ours in their senses."""

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TEXTS = (
    "README.md CONTRIBUTING.md docs/**/*.md docs/*.py csrc/**/*.[ch] csrc/**/*.def "
    "cuda/*.c cuda/*.h cuda/*.cu cuda/*.cuh ctrainer/**/*.py ctrainer/**/*.pyi"
)
NAMED = TEXTS + " tests/**/*.py tests/**/*.[ch] tests/**/*.cpp"
# Ours in the sense of theirs: the regular expression, and theirs. A word ends where
# another begins: `ct_crew` and `crewBytes` are found, `screwed` is not.
OURS = {
    r"crews?": "process barrier",
    r"codes|code_(block|at)|(load|store|view|update|state)_coded?": "quantized values",
    r"(ct|join)_lanes?|in lanes|peer lanes?": "peer buffers",
    r"(ct|comm)_levels": "hierarchical",
    r"meetings?": "thread barrier, rendezvous",
    r"bmuf_(meet|depart|arrive|land)|pass_(meet|depart|arrive)": "synchronize, begin, "
    "finish, abandon",
    r"ct_stretch\w*|stretch(es)?": "tile",
    r"ct_cuts\w*": "partition",
    r"ct_spares?|spares": "cached block, block cache",
    r"census": "counts",
    r"company": "dummy batch",
    r"reducer_lend|eval_lend|lenders?": "set_memory, broadcast, owner",
    r"faces?": "API, wrapper",
    r"honour(s|ed)?": "support",
    r"refus(e|es|ed|ing|al)": "reject",
    r"distances?": "parameter delta",
    r"flat rows?|row of all (parameters|elements)|one row a unit": "flat parameter, "
    "flat buffer",
    r"(deal|hand|shar)(s|e|es|ed|t|ing)? out|dealt|"
    r"(who|ranks that) shares?": "shard, partition, distribute, sharding group",
    r"(is|are|was|were|been|and|torch|transformers|fairseq|constructor) "
    r"pass(ed|es) over": "skip, ignore",
    r"(go|goes|going|went|gone) on": "resume, continue",
    r"train(s|ed|ing)? apart|ranks meet|meet where|meets? at": "local steps, "
    "synchronize",
    r"(gather|fetch|load|read)(s|ed|ing)? ahead|(samples|batches) ahead": "prefetch",
    r"(give|gives|given|giving|gave) (it |them |\w+ )?back": "return, restore, free",
    r"(codes|it|they|them) (have |has )?miss(ed)?": "error-feedback residual",
    r"(codes|state) of (8|4|16|few|so many) bits": "8-bit state, quantized values",
    r"processor time": "CPU time",
    r"(?<=[\w'][ _])(?<!learning[ _])(?<!decay_)(?<!om_)(?<!ep_)(?<!lr_)"
    r"rates?": "learning rate",
    r"tell(?!\()|tells|told|telling": "report, print, show",
    r"two[ _-]levels?\w*|(in|of) levels": "hierarchical",
    r"(ct_)?stage_meet|(they have|have been) met|place to meet": "rendezvous, compare, "
    "synchronize",
    r"_?trains?_apart|bool apart|!apart": "local steps",
    r"(of|in|or) 16 bits?|16[- ]bit (\w+)": "bf16 or fp16",
    r"roll_?calls?": "remaining ranks",
    r"give(s|n)?_(ahead|by)|given_by": "publish",
    r"mega_?batch(es)?": "batch of batches, chunk",
    r"tax(es|ed)?": "overhead",
    r"borne|bears? out": "confirm",
    r"(?<!error)(?<!error[-_ ])feedback": "error feedback, error-feedback residual",
    r"(comm|Communicator|PyObject) \*replicas|shards, replicas|->replicas": "replicate "
    "group",
    r"give_(?!up)\w+|release_given|->given|gives? (\w+ ){1,5}back": "announce, "
    "publish, return",
    r"(is|are) handed|hand(s|ed|ing)? (\w+ ){0,4}over": "export, send, pass",
}
# Right where they are: the path, and the words.
ALLOWED = {
    "csrc/core/base/status.h": r"codes",  # of errors
    "csrc/binding/runtime/dlpack_abi.h": r"codes",  # of dtypes
    "ctrainer/fairseq/indexed_dataset.py": r"codes|CODES",  # of dtypes, and Huffman's
    "ctrainer/fsdp/memory_plan.py": r"codes|feedback",  # an alias, and a field
    "docs/reference/fsdp.md": r"feedback",  # public methods
    "ctrainer/fsdp/module.py": r"feedback",  # public methods
    "ctrainer/trainer/shards.py": r"feedback",  # these, and an old file's name
    "ctrainer/fairseq/_trainer_checkpoint.py": r"feedback",  # the same
    "docs/reference/display.md": r"codes",  # of terminals
    "ctrainer/bmuf.py": r"roll_call",  # an alias
    "docs/concepts/scaling.md": r"\S+ 16 bits|16-bit rows",  # columns of the benchmark
    "csrc/math/half.h": r"spares|16-bit lanes",  # a processor time; of vectors
    "csrc/cpu/gemm.c": r"two levels",  # of caches
    "csrc/core/schedule/deepspeed.c": r"rate|RATE",  # of a decay or a range
    "ctrainer/display/*": r"rate|RATE",  # of samples
    "ctrainer/fairseq/metrics.py": r"rate",  # per second
    "ctrainer/trainer_utils.py": r"rates?",  # per second
    "csrc/core/base/crc.c": r"distance",  # in bits
    "ctrainer/arguments/deepspeed_keys.py": r"distance",  # DeepSpeed's key
    "ctrainer/compat/deepspeed/_config.py": r"distance",
    "docs/reference/deepspeed.md": r"distance",
    "csrc/core/schedule/schedule.c": r"distance",  # of two words
    "csrc/binding/bmuf/bmuf.c": r"and passes over",  # loops over tensors
    "ctrainer/adapters/*": r"stretch(es)?",  # of sorted batches, as transformers' own
    "ctrainer/display/html.py": r"stretch",  # of a curve
    "README.md": r"Face",  # Hugging Face
    "docs/*": r"Face",
    "ctrainer/*": r"Face",
}
SHARE = 2.2  # per cent of the words of C comments; 3.5 at most was the aim
SUFFIXES = {".c", ".h", ".cu", ".cuh"}
POINTING = frozenset("what those these it its they them one which where whose".split())


def files(patterns: str) -> list[Path]:
    found = {p for pattern in patterns.split() for p in ROOT.glob(pattern)}
    return sorted(p for p in found if p != Path(__file__))


@pytest.mark.parametrize("ours", OURS)
def test_ours_are_not_said(ours: str) -> None:
    pattern = re.compile(rf"(?<![a-z])({ours})(?![a-z])", re.IGNORECASE)
    found = []
    for path in files(TEXTS):
        name = str(path.relative_to(ROOT))
        allowed = [words for glob, words in ALLOWED.items() if fnmatch(name, glob)]
        found += [
            f"{name}:{number}: {line.strip()}"
            for number, line in enumerate(path.read_text().split("\n"), 1)
            for hit in pattern.finditer(line)
            if not any(re.fullmatch(words, hit[0]) for words in allowed)
        ]
    named = [p.name for p in files(NAMED) if pattern.search(p.stem)]
    assert not found + named, f"say {OURS[ours]}:\n" + "\n".join(found + named)


def test_the_glossary_has_fifty_nouns_at_most() -> None:
    rows = (ROOT / "docs/glossary.md").read_text().count("\n| ") - 2
    assert 30 <= rows <= 50


def test_comments_of_c_have_nouns() -> None:
    """A ratchet: lower SHARE when this share is lower."""
    text = "".join(p.read_text() for p in files(TEXTS) if p.suffix in SUFFIXES)
    words = re.findall(
        r"[a-z']+", " ".join(re.findall(r"/\*.*?\*/", text, re.S)).lower()
    )
    share = 100 * sum(word in POINTING for word in words) / len(words)
    assert share <= SHARE, f"{share:.2f} % of {len(words)} words"
