"""Faults that are always tried, and those that nobody can see."""

from __future__ import annotations

from dataclasses import dataclass

from mutants.faults import Fault


@dataclass(frozen=True)
class Fixed:
    """A fault that is always among those tried: text that is there once, or comes first
    behind text that is, and what it is replaced by."""

    path: str
    operator: str
    before: str
    after: str
    why: str
    nearest: str
    behind: str = ""

    def fault(self, text: str) -> Fault:
        lines = text.split("\n")
        begin = self._only(lines, self.behind or self.before)
        at = next(i for i in range(begin, len(lines)) if self.before in lines[i])
        changed = lines[at].replace(self.before, self.after)
        return Fault(self.path, at + 1, self.operator, lines[at], changed)

    def _only(self, lines: list[str], text: str) -> int:
        found = [i for i, line in enumerate(lines) if text in line]
        assert len(found) == 1, f"{self.path} has {text!r} {len(found)} times"
        return found[0]


FIXED = (
    Fixed(
        "csrc/core/checkpoint/staging.c",
        "drop a synchronisation",
        "ct_sync_folder(staging->parent, err)",
        "CT_OK",
        "the parent is not synced after the rename",
        "core/checkpoint/test_staging.c",
    ),
    Fixed(
        "csrc/core/bmuf/bmuf.c",
        "skip a check",
        "b->alike && flat != &b->global",
        "b->alike",
        "a global model that was loaded counts as agreed",
        "core/bmuf/test_bmuf.c",
    ),
    Fixed(
        "ctrainer/trainer/checkpoint.py",
        "skip a check",
        "set(map(realpath, known[-1:]))",
        "({realpath(new)} if new else set())",
        "_rotate_checkpoints called by hand removes the last checkpoint",
        "python/checkpoint/test_trainer_checkpoints.py",
    ),
    Fixed(
        "ctrainer/trainer/evaluation.py",
        "negate a condition",
        "return length if isinstance(length, int) else -1",
        "return length if not (isinstance(length, int)) else -1",
        "rows that accelerate's loaders repeat stay in metrics",
        "python/evaluate/test_ranks_evaluation.py",
    ),
    Fixed(
        "csrc/binding/trainer/update.c",
        "negate a condition",
        "u->average_due ? u->average : NULL",
        "u->average",
        "an average is attached when none is due",
        "python/optim/test_trainer_average.py",
    ),
)

# Faults that change nothing that anybody can see, or that `make asan` alone sees: path,
# the line without its indent, what takes its place, and the reason.
EQUIVALENT = (
    (
        "csrc/binding/schedule/scheduler.c",
        "if (old == NULL ? PyErr_Occurred() != NULL : PyFloat_CheckExact(old)) {",
        "if (0 && (old == NULL ? PyErr_Occurred() != NULL : "
        "PyFloat_CheckExact(old))) {",
        "the short way for a float, which has no fill_: the long one ends alike",
    ),
    (
        "csrc/binding/optim/update.c",
        "const Py_ssize_t hint = k == 0 ? 0 : self->slots[k - 1].average + 1;",
        "const Py_ssize_t hint = k == 0 ? 0 : self->slots[k - 1].average;",
        "hint is where the search begins, which goes over all places whatever it is",
    ),
    (
        "csrc/core/base/pool.c",
        "(void)work_off();",
        ";",
        "the caller of a batch works on it beside the pool's threads: the results are "
        "the same without, only later",
    ),
    (
        "csrc/core/base/pool.c",
        "futex_wait(&pool.done, done);",
        ";",
        "who waits for a batch asks again and again instead of sleeping",
    ),
    (
        "csrc/core/base/pool.c",
        "atomic_fetch_sub(&pool.sleepers, 1);",
        ";",
        "sleepers says whether a wake-up can be spared: one too many changes no result",
    ),
    (
        "csrc/core/data/batches.c",
        "if (rule->max_tokens > 0 && longest > 0 && "
        "rule->max_tokens / longest < room) {",
        "if (rule->max_tokens > 0 && longest > 0 && "
        "rule->max_tokens / longest <= room) {",
        "room becomes the smaller of two numbers; where they are equal, itself",
    ),
    (
        "csrc/core/data/rows.c",
        "return b != 0 && a > SIZE_MAX / b ? SIZE_MAX : a * b;",
        "return b != 0 && a >= SIZE_MAX / b ? SIZE_MAX : a * b;",
        "where a is SIZE_MAX / b, a * b is above SIZE_MAX / 2: no region holds so much",
    ),
    (
        "csrc/core/schedule/schedule.c",
        "if (n > 0 && (size_t)n < room) {",
        "if (n >= 0 && (size_t)n < room) {",
        "where nothing was written, nothing is added to the length either way",
    ),
    (
        "csrc/core/schedule/fairseq.c",
        "if (decaying < 0.0 || (decaying == 0.0 && o[DECAY_STEPS] == 0.0)) {",
        "if (decaying <= 0.0 || (decaying == 0.0 && o[DECAY_STEPS] == 0.0)) {",
        "where a decay begins, its rate is LR * exp(-factor * 0), which is LR",
    ),
    (
        "csrc/core/engine/scaler.c",
        "const int64_t steps = scaler->iter - scaler->last_overflow;",
        "const int64_t steps = scaler->last_overflow - scaler->iter;",
        "what is asked is whether an interval divides it, whatever the sign",
    ),
    (
        "csrc/core/bmuf/bmuf.c",
        "for (int rank = 0; status == CT_OK && rank < ranks; rank++) {",
        "for (int rank = 0; status == CT_OK && rank <= ranks; rank++) {",
        "the part behind the last rank's is empty: nothing is coded or decoded",
    ),
    (
        "csrc/core/comm/exchange.c",
        "return (x < y ? y - x : x - y) < bytes;",
        "return (x < y ? y - x : y - x) < bytes;",
        "a collective's operands are equal or apart: the difference wraps to no less "
        "than bytes",
    ),
    (
        "csrc/binding/fsdp/unit.c",
        "if (status != CT_OK || job->n == 0 || factor >= 1.0) {",
        "if (status != CT_OK || job->n == 0 || factor > 1.0) {",
        "where the factor is exactly 1, every gradient times it is itself",
    ),
    (
        "csrc/core/ddp/reducer.c",
        "while (status == CT_OK && r->has_owners && r->settled + 1 < r->started &&",
        "while (status == CT_OK && r->has_owners && r->settled + 1 <= r->started &&",
        "the bucket that was started last is waited for sooner: results are the same",
    ),
    (
        "ctrainer/trainer/data.py",
        "if trainer._communicator.world_size > 1:",
        "if (trainer._communicator.world_size + 1) > 1:",
        "a group of one rank gives itself the generator that it has",
    ),
    (
        "ctrainer/fairseq/checkpoint_utils.py",
        "return value <= max(values)",
        "return value < max(values)",
        "of equal ones the later has the larger number in its name: where lower ones "
        "are better, it is the first that is deleted after the save",
    ),
    (
        "ctrainer/adapters/_torch_batches.py",
        "if kind is RandomSampler and not sampler.replacement:",
        "if False and (kind is RandomSampler and (not sampler.replacement)):",
        "the short way to a place in a shuffled order; the long one gives the same",
    ),
    (
        "csrc/binding/engine/run.c",
        "if (ranks <= 1) {",
        "if (0 && (ranks <= 1)) {",
        "a collective of one rank leaves the values as they are",
    ),
    (
        "csrc/core/base/alloc.c",
        "const size_t whole = bytes + (ALIGNMENT - bytes % ALIGNMENT) % ALIGNMENT;",
        "const size_t whole = bytes + (bytes - ALIGNMENT % ALIGNMENT) % ALIGNMENT;",
        "glibc's aligned_alloc takes any size, and this one is large enough",
    ),
    (
        "csrc/cpu/body/quantized.h",
        "CT_NAME(unpack)(quantized, single, count + count % 2);",
        "CT_NAME(unpack)(quantized, single, count + 2 % count);",
        "values behind those that are added up, and memory behind a whole block's: "
        "make asan sees it",
    ),
)
