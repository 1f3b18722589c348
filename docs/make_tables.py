"""Writes the tables of the reference pages from docstrings and tables of the code.

python docs/make_tables.py            rewrites the tables
python docs/make_tables.py --check    exits 1 when one is not current

A table stands between `<!-- table: KIND NAME -->` and `<!-- table: end -->`. KIND is
`arguments` of a class or a method, `methods` of a class, `commands` of a module,
`names` of modules' `__all__`, `options` of a table for argparse, `keys` of a module's
describe(), `events` of the class
of callbacks, `schedules` of the function that makes them, or `optimizers` and
`optimizer_names` of a module.
"""

import importlib
import inspect
import pkgutil
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

DOCS = Path(__file__).parent
CSRC = DOCS.parent / "csrc"
PAGES = sorted(DOCS.rglob("*.md"))
TABLE = re.compile(r"(<!-- table: (\w+) ([\w.]+) -->\n).*?(<!-- table: end -->)", re.S)
WITHOUT_EFFECT = ("params", "foreach", "fused", "capturable", "differentiable")
ENTRY = re.compile(r"([\w*, ]+) \((.*?)(?:, default (.*?))?\): (.*)")


def found(name: str) -> Any:
    """A class, a function, or a method of a class, by its whole name."""
    return pkgutil.resolve_name(name)


def made(head: str, rows: list[tuple[str, ...]]) -> str:
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return "\n".join([head, "|" + " --- |" * len(rows[0]), *lines, ""])


def summary(value: Any) -> str:
    """The first paragraph of a docstring, in one line."""
    return " ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split())


def quoted(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def arguments(
    name: str, head: str = "Args", defaults: Mapping[str, str] | None = None
) -> str:
    """A row for each entry of its Args: name, default, type and meaning."""
    text = inspect.getdoc(found(name)) or ""
    entries = re.findall(r"^    \S.*(?:\n {8}.*)*", _section(text, head), re.M)
    rows = []
    for entry in entries:
        parts = ENTRY.fullmatch(" ".join(entry.split()))
        assert parts is not None, f"{name}: {entry}"
        names, kind, default, meaning = parts.groups()
        default = default or (defaults or {}).get(names)
        words = quoted(names.split(", "))
        rows.append((words, f"`{default}`" if default else "", f"`{kind}`", meaning))
    return made("| argument | default | type | meaning |", rows)


def _section(text: str, head: str) -> str:
    return text.partition(f"\n{head}:\n")[2].partition("\n\n")[0]


def methods(name: str) -> str:
    """A row for each public method of the class itself: its call, and what it does."""
    rows = []
    for member, value in vars(found(name)).items():
        plain = getattr(value, "__func__", value)
        if member[0] != "_" and inspect.isroutine(plain):
            rows.append((f"`{member}{_call(plain)}`", summary(plain)))
    return made("| method | what it does |", sorted(rows))


def _call(method: Any) -> str:
    """The arguments with their defaults, without self and annotations."""
    taken = list(inspect.signature(method).parameters.values())
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in taken]
    return str(inspect.Signature([p for p in bare if p.name not in ("self", "cls")]))


def names(name: str) -> str:
    """A row for each class and function of the module's __all__."""
    module = importlib.import_module(name)
    rows = [(f"`{n}`", summary(getattr(module, n))) for n in module.__all__]
    return made("| name | what it is or does |", rows)


def commands(name: str) -> str:
    """A row for each command of the module: its name, and what it does."""
    known = importlib.import_module(name).COMMANDS
    rows = [(f"`ctrainer {command}`", does) for command, (_, does) in known.items()]
    return made("| command | what it does |", rows)


def options(name: str) -> str:
    """A row for each option of a table of names and keywords of add_argument()."""
    rows = []
    for names, details in found(name):
        default = f"`{details['default']}`" if "default" in details else ""
        rows.append((quoted(names), default, details["help"]))
    return made("| option | default | meaning |", rows)


def keys(name: str) -> str:
    """A row for each key of a configuration that the module describes."""
    described = importlib.import_module(name).describe()
    rows = [(f"`{key}`", status, note) for key, status, note in described]
    return made("| key | status | what it does, or why not |", rows)


def events(name: str) -> str:
    """A row for each line of events.def, with what the method of the class says."""
    lines = (CSRC / "binding/callbacks/events.def").read_text()
    rows = []
    for event, *rest in re.findall(r"^\w+\((on_\w+), (.*?), (.*)\)", lines, re.M):
        passed, lowered = (quoted(re.findall(r"NAME\((\w+)\)", part)) for part in rest)
        does = summary(getattr(found(name), event))
        rows.append((f"`{event}`", does, passed, lowered))
    return made("| event | when | passes | sets to False before |", rows)


def schedules(name: str) -> str:
    """A row for each schedule of schedule.c, then one for each of their options, which
    the docstring describes."""
    text = (CSRC / "core/schedule/schedule.c").read_text()
    table = re.findall(r'\[(\w+)\] = \w+\("(\w+)", .*?(\S+)\),\n', text)
    shapes = re.search(r"shapes\[\] = \{(.*), NULL\}", text)
    assert shapes is not None
    words = re.findall(r"^    (SHAPE_\w+)", text, re.M)
    values = {"CT_NONE": "", **dict(zip(words, shapes[1].split(", "), strict=True))}
    defaults = {option: values.get(value, value) for _, option, value in table}
    sets = {slot: {option} for slot, option, _ in table}

    def members(bits: str) -> set[str]:
        words = re.findall(r"\w+", bits)
        return set().union(*(sets[word] for word in words if word in sets))

    for word, bits in re.findall(r"^    ([A-Z]+) = ([^,}]*CT_BIT[^,}]*)", text, re.M):
        sets[word] = members(bits)
    rows = []
    for kind, *bits in re.findall(r'CT_KIND\("(\w+)", ([^,]+),\s([^,]+),', text):
        takes, needs = (members(part) - {"lr_init"} for part in bits)
        needed = quoted(option for option in defaults if option in needs)
        others = quoted(option for option in defaults if option in takes - needs)
        rows.append((f"`{kind}`", needed, others))
    meanings = arguments(name, "Args of scheduler_specific_kwargs", defaults)
    known = re.findall(r"`(\w+)`", re.sub(r" \|.*", "", meanings[1:]))
    counts = {"num_warmup_steps", "num_training_steps", "lr_init"}
    assert set(known) == defaults.keys() - counts, known
    return made("| schedule | needs | other options |", rows) + "\n" + meanings


def optimizers(name: str) -> str:
    """A row for each optimizer of the module; its state is that after a step."""
    rows = []
    for cls in map(vars(found(name)).get, found(name).__all__):
        is_one = isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)
        own = inspect.signature(cls).parameters if is_one else {}
        if "params" in own:
            taken = [p for p in own.values() if p.name not in WITHOUT_EFFECT]
            taken = [p for p in taken if p.kind is not p.VAR_KEYWORD]
            bare = quoted(str(p.replace(annotation=p.empty)) for p in taken)
            source = re.search(r"^Source: ((.+\n)*.+)", inspect.getdoc(cls) or "", re.M)
            cited = " ".join(source[1].split()) if source else ""
            about = (summary(cls), bare, _state(cls, taken), cited)
            rows.append((f"`{cls.__name__}`", *about))
    return made("| class | what it is | arguments | `state[p]` | source |", rows)


def _state(cls: Any, taken: list[inspect.Parameter]) -> str:
    """The keys of a matrix's state, and those that bfloat16 or an option brings."""
    needed = {p.name: 1e-3 for p in taken if p.default is p.empty}
    keys = _keys(cls, needed)
    parts = [quoted(keys)] if keys else []
    of_bf16 = [k for k in _keys(cls, needed, torch.bfloat16) if k not in keys]
    parts += [f"{quoted(of_bf16)} of bfloat16"] if of_bf16 else []
    for option in taken:
        if option.default in (0, None):
            chosen = {option.name: option.default is False or 0.5}
            try:
                more = [k for k in _keys(cls, needed | chosen) if k not in keys]
            except (TypeError, ValueError):  # the option needs another one
                continue
            parts += [f"{quoted(more)} with `{option.name}`"] if more else []
    return ", ".join(parts)


def _keys(
    cls: Any, options: dict[str, float], dtype: torch.dtype = torch.float32
) -> list[str]:
    # large enough for 8-bit state
    weight = torch.nn.Parameter(torch.ones(64, 64, dtype=dtype))
    weight.grad = torch.ones_like(weight)
    optimizer = cls([weight], **options)
    getattr(optimizer, "train", bool)()  # of those without a schedule
    optimizer.step()
    return list(optimizer.state[weight])


def optimizer_names(name: str) -> str:
    """A row for each class, then for each package, with the values of `optim`."""
    makers = defaultdict(list)
    for word, recipe in found(name).RECIPES.items():
        makers[f"`{recipe.cls}`"].append(word)
    for word, package in found(name).PACKAGES.items():
        why = f"rejected: {package.reason}" if package.reason else ""
        makers[why or f"of the package `{package.name}`"].append(word)
    rows = [(quoted(words), maker) for maker, words in makers.items()]
    return made("| `optim` | class |", rows)


KINDS = {
    "arguments": arguments,
    "methods": methods,
    "names": names,
    "keys": keys,
    "commands": commands,
    "options": options,
    "events": events,
    "schedules": schedules,
    "optimizers": optimizers,
    "optimizer_names": optimizer_names,
}


def current(text: str) -> str:
    """The page with its tables made anew."""
    return TABLE.sub(lambda m: f"{m[1]}{KINDS[m[2]](m[3])}{m[4]}", text)


def main() -> int:
    changed = [page for page in PAGES if page.read_text() != current(page.read_text())]
    if "--check" in sys.argv[1:]:
        print(*changed, sep="\n")
        return int(bool(changed))
    for page in changed:
        page.write_text(current(page.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
