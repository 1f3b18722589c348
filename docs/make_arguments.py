"""Writes docs/reference/arguments.md from the fields and the table of the code.

python docs/make_arguments.py            rewrites the page
python docs/make_arguments.py --check    exits 1 when it is not current
"""

import sys
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from ctrainer.arguments.checks import read_table
from ctrainer.arguments.docstrings import default_of, values_of
from ctrainer.arguments.fields import CurrentFields
from ctrainer.arguments.older_fields import ALIASES, OlderFields
from ctrainer.arguments.table import status_of
from ctrainer.training_args import Seq2SeqTrainingArguments, TrainingArguments

PAGE = Path(__file__).parent / "reference" / "arguments.md"

HEAD = """\
# Training arguments

Made by `python docs/make_arguments.py` from the code; change the code, not this page.

`TrainingArguments` takes the names, the order and the defaults of transformers 5.17;
arguments of earlier releases only (4.5 to 4.57), and ctrainer's own, are keyword-only.
Nothing is silently ignored. An argument is *supported*; or supported for
the listed values and rejected for others; or *rejected* when set, with a
ValueError that says what to do instead; or has *no effect*. A
`transformers.TrainingArguments` object is checked by the same table.

An unknown keyword is a TypeError with the nearest name. A value has the
type in its column, or is converted where nothing is lost: text with a number
(`"5e-5"`, `"1_000"`), a truth value (`"false"`, `"no"`, `0`) or `"None"`, whole floats
for whole numbers, NumPy's scalars, paths and members of enumerations. Any other value,
also NaN, is a ValueError with the argument, the value and its type. None means the
default of an argument whose default is 0, false or empty.
"""

FIELDS = read_table(Seq2SeqTrainingArguments)


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def row(field: Field) -> str:
    status, note = status_of(field.name)
    status = f"{status}: {note}" if note else status
    text = field.metadata.get("help", "")
    columns = (f"`{field.name}`", f"`{default_of(field)}`", values(field), text, status)
    return f"| {' | '.join(map(cell, columns))} |"


def values(field: Field) -> str:
    return values_of(*FIELDS.get(field.name, (field, Any)))


def table(chosen: list[Field]) -> str:
    head = "| argument | default | value | meaning | status |\n" + "| --- " * 5 + "|"
    return "\n".join([head, *map(row, chosen)])


def alias_table() -> str:
    lines = [f"| `{old}` | `{ALIASES[old].successor}` |" for old in sorted(ALIASES)]
    return "\n".join(["| old name | name |", "| --- | --- |", *lines])


def page() -> str:
    current = {f.name for f in fields(CurrentFields)}
    every = [f for f in fields(TrainingArguments) if f.init and f.name not in ALIASES]
    before = {f.name for f in fields(OlderFields)}
    own = [f for f in every if f.name not in before]
    older = [f for f in every if f.name in before - current]
    known = {f.name for f in fields(TrainingArguments)}
    seq2seq = [f for f in fields(Seq2SeqTrainingArguments) if f.name not in known]
    parts = [
        HEAD,
        "## ctrainer's own\n\n" + table(own),
        "## transformers 5.17\n\n" + table([f for f in every if f.name in current]),
        "## Earlier releases\n\n" + table(older),
        "## Old names\n\nSetting one sets the other, with a FutureWarning; setting "
        "both to different values raises ValueError.\n\n" + alias_table(),
        "## Seq2SeqTrainingArguments\n\n" + table(seq2seq),
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def main() -> int:
    if "--check" in sys.argv[1:]:
        return int(not PAGE.exists() or PAGE.read_text() != page())
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
