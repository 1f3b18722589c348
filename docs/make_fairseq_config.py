"""Writes docs/reference/fairseq_config.md from the dataclasses and their table.

python docs/make_fairseq_config.py            rewrites the page
python docs/make_fairseq_config.py --check    exits 1 when it is not current
"""

import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from fairseq_config_status import status_of

from ctrainer.arguments.docstrings import default_of
from ctrainer.arguments.settings import describe, hints
from ctrainer.fairseq import models  # noqa: F401, which registers itself
from ctrainer.fairseq.config.command_line import only_refers, spellings
from ctrainer.fairseq.config.components import component_class, component_names
from ctrainer.fairseq.config.root import COMPONENTS
from ctrainer.fairseq.config.trees import groups

PAGE = Path(__file__).parent / "reference" / "fairseq_config.md"

HEAD = """\
# fairseq's configuration

Made by `python docs/make_fairseq_config.py` from the code; change the code, not this
page.

`ctrainer.fairseq.config` has fairseq's groups with its names, types, defaults and
order. `as_config` makes a `FairseqConfig` of a dataclass, OmegaConf's DictConfig, a
dict, an `argparse.Namespace` or nothing; `parse_training_args` of a command line;
`checkpoint_config` of a checkpoint. Each is complete, with references such as
`${dataset.max_tokens}` resolved. A value of the wrong type is an error that names the
option, an unknown option an error that names the nearest ones. `as_config` accepts the
result of `to_dict`.

```python
from ctrainer.fairseq.config import as_config

cfg = as_config({"optimization": {"lr": [0.0005]}, "optimizer": "adam"})
```

A YAML file in the layout of fairseq's Hydra configs is loaded by OmegaConf, with
overrides, or by PyYAML:

```python
from ctrainer.fairseq.config import as_config
from omegaconf import OmegaConf

with open("lm.yaml", "w") as file:
    file.write("optimization: {lr: [0.0005]}")
cfg = as_config(OmegaConf.merge(OmegaConf.load("lm.yaml"), {"optimizer": "adam"}))
```

Text is converted to the option's type (`"1e-3"` for a number, `"1,2"` for a list). A
`data` is positional on the command line; a flag turns its default round. Where
fairseq's parser makes `--bf16` imply `--tpu`, ours does not.

The groups `model`, `task`, `criterion`, `optimizer`, `lr_scheduler`, `scoring`, `bpe`
and `tokenizer` are of components. `_name` chooses one, and `register_component` says
which dataclass checks its options; without one, any options are taken. The group
`generation` is kept as it is given; `common_eval`, `eval_lm` and `interactive`, of
fairseq's programs that are not here, are left out.

*Supported* options have an effect in this package; *rejected* ones raise a ValueError
that says what to do instead; *read* ones are checked and kept in the config.
"""


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def rows(group: str, cls: type) -> Iterator[str]:
    for option in fields(cls):
        if option.name == "_name":
            continue
        name = f"{group}.{option.name}"
        spelt = [] if only_refers(option) else spellings(option)
        kind = describe(hints(cls)[option.name])
        parts = [
            f"`{option.name}`",
            ", ".join(f"`{text}`" for text in spelt),
            cell(kind),
            option.metadata.get("default_text") or f"`{default_of(option)}`",
            cell(option.metadata.get("help", "")),
            status_of(name),
        ]
        yield f"| {' | '.join(parts)} |"


def table(group: str, cls: type) -> str:
    columns = ["option", "command line", "type", "default", "meaning", "status"]
    head = [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
    lines = [*head, *rows(group, cls)]
    return "\n".join(lines) if len(lines) > len(head) else "No options."


def page() -> str:
    parts = [HEAD]
    for group, cls in groups().items():
        parts.append(f"## {group}\n\n{table(group, cls)}")
    for component in COMPONENTS:
        for name in component_names(component):
            cls = component_class(component, name)
            title = f"## {component}: {name}"
            parts.append(f"{title}\n\n{table(f'{component}.{name}', cls)}")
    return "\n\n".join(part.strip() for part in parts) + "\n"


def main() -> int:
    if "--check" in sys.argv[1:]:
        return int(not PAGE.exists() or PAGE.read_text() != page())
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
