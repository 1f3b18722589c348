"""Writes docs/arguments.md from the fields and the table of the code.

python docs/make_arguments.py            rewrites the page
python docs/make_arguments.py --check    exits 1 when it is not current
"""

import sys
from dataclasses import MISSING, Field, fields
from pathlib import Path

from ctrainer._argument_table import status_of
from ctrainer._older_fields import ALIASES, OlderFields
from ctrainer._training_fields import CurrentFields
from ctrainer.training_args import Seq2SeqTrainingArguments, TrainingArguments

PAGE = Path(__file__).with_name("arguments.md")

HEAD = """\
# Training arguments

Made by `python docs/make_arguments.py` from the code; change the code, not this page.

`TrainingArguments` takes the names, the order and the defaults of transformers 5.17;
what only earlier releases have (4.5 to 4.57), and what only ctrainer has, is
keyword-only. Nothing is silently ignored. An argument is *honoured*; or honoured for
the values that are listed and refused for others; or *refused* when set, with a
ValueError that says what to do instead; or has *no effect* by its nature. A
`transformers.TrainingArguments` object is checked by the same table.
"""


def default_of(field: Field) -> str:
    if field.default_factory is not MISSING:
        return repr(field.default_factory())
    return repr(field.default)


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def row(field: Field) -> str:
    status, note = status_of(field.name)
    status = f"{status}: {note}" if note else status
    text = field.metadata.get("help", "")
    return f"| `{field.name}` | `{default_of(field)}` | {cell(text)} | {cell(status)} |"


def table(chosen: list[Field]) -> str:
    head = "| argument | default | meaning | status |\n| --- | --- | --- | --- |"
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
