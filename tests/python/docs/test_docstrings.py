"""The docstring of every public object says what it takes, returns and raises."""

import ast
import doctest
import functools
import importlib
import inspect
import pkgutil
import re
import textwrap
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any, NamedTuple, is_typeddict

import pytest

import ctrainer
from ctrainer import optim
from ctrainer.fairseq.config import DistributedTrainingConfig, FairseqConfig

# Modules whose functions begin a user's program: each shows how.
ENTRIES = {"ctrainer"} | {
    f"ctrainer.{name}"
    for name in ("checkpoint", "comm", "fairseq", "fsdp", "optim", "schedules")
}
_HEADS = r"(?:Args|Returns|Yields|Raises|Example|Source)\b[^\n]*:"
_ENTRY = re.compile(
    r"^    (\*{0,2}\w+(?:,\s+\*{0,2}\w+)*)(?:\s+\(((?:.|\n {5,})*?)\))?:(?: |\n {5,})"
    r"(?=\S)",
    re.M,
)
_GENERATED = {"__init__", "__new__", "__post_init__"}


class Public(NamedTuple):
    """A public object: its name, itself, and the class that it is a member of."""

    name: str
    value: Any
    owner: type | None = None

    @property
    def bound(self) -> Any:
        """The object as a user gets it from its class."""
        if self.owner is None:
            return self.value
        return getattr(self.owner, self.name.rpartition(".")[2])

    @property
    def doc(self) -> str:
        return inspect.getdoc(self.bound) or ""

    @property
    def function(self) -> Any:
        """The function behind a property, a method of a class, or a decorator."""
        value = self.value
        if isinstance(value, staticmethod | classmethod):
            value = value.__func__
        if isinstance(value, property):
            value = value.fget
        return inspect.unwrap(getattr(value, "func", value))


def public_modules() -> Iterator[Any]:
    yield ctrainer
    for found in pkgutil.walk_packages(ctrainer.__path__, "ctrainer."):
        if not any(part.startswith("_") for part in found.name.split(".")):
            yield importlib.import_module(found.name)


def of_ctrainer(value: object) -> bool:
    return (getattr(value, "__module__", None) or "").startswith("ctrainer")


def members(cls: type) -> Iterator[tuple[str, Any, type]]:
    """Public methods and properties, those of private bases too; no fields."""
    for base in reversed(cls.__mro__):
        if not of_ctrainer(base):
            continue
        for name, value in vars(base).items():
            described = isinstance(value, property | functools.cached_property)
            callable_ = isinstance(value, staticmethod | classmethod)
            callable_ = callable_ or inspect.isroutine(value)
            native = inspect.isgetsetdescriptor(value) and base.__module__.endswith("C")
            if name[0] != "_" and (described or callable_ or native):
                yield name, value, base


@functools.cache
def objects() -> dict[str, Public]:
    found: dict[str, Public] = {}
    named = {
        (m.__name__, n) for m in public_modules() for n in getattr(m, "__all__", ())
    }
    for module, name in sorted(named):
        value = getattr(importlib.import_module(module), name)
        if not of_ctrainer(value) or not callable(value):
            continue
        full = f"{value.__module__}.{value.__qualname__}"
        found[full] = Public(full, value)
        if inspect.isclass(value):
            for member, what, base in members(value):
                whole = f"{base.__module__}.{base.__qualname__}.{member}"
                found[whole] = Public(whole, what, base)
    return found


def sections(doc: str) -> dict[str, str]:
    """The text of a docstring by the words that head a section."""
    parts = re.split(rf"\n\n(?={_HEADS})", "\n\n" + doc)
    return {part.strip("\n").partition(":")[0]: part.strip("\n") for part in parts[1:]}


def described(doc: str, head: str = "Args") -> dict[str, str]:
    """The arguments of an Args section, with what its parentheses say."""
    text = sections(doc).get(head, "")
    return {
        name.lstrip("*"): " ".join((details or "").split())
        for names, details in _ENTRY.findall(text)
        for name in re.split(r",\s+", names)
    }


def is_native(public: Public) -> bool:
    return public.name.startswith("ctrainer._C.")


def parameters(public: Public) -> dict[str, inspect.Parameter]:
    value = public.value
    if is_typeddict(value) or (inspect.isclass(value) and issubclass(value, Enum)):
        return {}
    if isinstance(value, property | functools.cached_property):
        return {}
    if inspect.isgetsetdescriptor(value):
        return {}
    if inspect.isclass(value):
        ours = [base for base in value.__mro__ if of_ctrainer(base)]
        if not any({"__init__", "__new__"} & vars(base).keys() for base in ours):
            return {}
    signature = inspect.signature(public.bound)
    first = {"self", "cls"}
    if public.owner is not None:  # a method of HF's Trainer that is in another module
        first.add("trainer")
    return {n: p for n, p in signature.parameters.items() if n not in first}


def docs_of(public: Public) -> list[str]:
    """Its docstring; of a class also its constructor's and its bases' of ctrainer."""
    if not inspect.isclass(public.value):
        return [public.doc]
    bases = [base for base in public.value.__mro__ if of_ctrainer(base)]
    inits = [inspect.getdoc(b.__init__) for b in bases if "__init__" in vars(b)]
    return [doc for doc in (*(b.__doc__ for b in bases), *inits) if doc]


def clean(value: object) -> str:
    return inspect.cleandoc(getattr(value, "__doc__", None) or "")


def clean_docs(public: Public) -> list[str]:
    return [inspect.cleandoc(doc) for doc in docs_of(public)]


def unnamed(docs: list[str], names: Iterator[str] | list[str]) -> list[str]:
    """The parameters that no Args section has."""
    known = {name for doc in docs for name in described(doc)}
    return [name for name in names if name not in known]


def unsaid(public: Public) -> list[str]:
    """The parameters that are not described. Those of C may be in prose, since each
    line of a literal is a line of code, or in the class's wrapper in Python."""
    names = [name for name in parameters(public) if name.strip("_")]
    shared = described(clean(public.owner), "Args of every method")
    if is_native(public):
        text = " ".join(
            [*clean_docs(public), *of_methods(public.owner or public.value)]
        )
        return [name for name in names if not re.search(rf"\b{name}\b", text)]
    return unnamed(clean_docs(public), [name for name in names if name not in shared])


def of_methods(native: type) -> list[str]:
    """The sections that describe the arguments of methods, of its wrappers too."""
    values = [public.value for public in objects().values() if public.owner is None]
    classes = [v for v in (native, *values) if inspect.isclass(v)]
    return [
        text
        for cls in classes
        if inspect.isclass(native) and issubclass(cls, native)
        for head, text in sections(clean(cls)).items()
        if head.startswith("Args of")
    ]


def returns_something(public: Public) -> bool:
    if inspect.isclass(public.value) or isinstance(public.value, property):
        return False
    told = getattr(public.function, "__annotations__", {}).get("return")
    return told not in (None, "None", "NoReturn", type(None))


def says_what_it_returns(public: Public) -> bool:
    begins = re.match(r"(Return|Yield)\b", public.doc)
    begins = begins or re.search(r"(;|,? and)\s+(return|yield)\b", public.doc)
    shared = "Returns of every method" in sections(clean(public.owner))
    return bool({"Returns", "Yields"} & sections(public.doc).keys() or begins or shared)


def raised(public: Public) -> set[str]:
    """The exceptions that the object's own body names in `raise`."""
    functions: list[Any] = [public.function]
    if inspect.isclass(public.value) and issubclass(public.value, Enum):
        return set()
    if inspect.isclass(public.value):
        functions = [vars(public.value).get(name) for name in sorted(_GENERATED)]
    found = set()
    for function in functions:
        function = inspect.unwrap(function) if function else None
        if not inspect.isfunction(function) or function.__code__.co_filename[0] == "<":
            continue
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        for node in ast.walk(tree):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                if isinstance(node.exc.func, ast.Name):
                    found.add(node.exc.func.id)
    return found - {"NotImplementedError", "AttributeError"}


def wrong(check: Callable[[Public], object]) -> list[str]:
    """The objects that fail, with what fails."""
    failures = {name: check(public) for name, public in objects().items()}
    return [f"{name}: {found}" for name, found in failures.items() if found]


def test_every_object_has_a_docstring() -> None:
    assert wrong(lambda public: not public.doc.strip()) == []


def test_every_parameter_is_described() -> None:
    assert wrong(unsaid) == []


def test_what_is_returned_is_said() -> None:
    def silent(public: Public) -> bool:
        return returns_something(public) and not says_what_it_returns(public)

    assert wrong(silent) == []


def test_what_is_raised_is_said() -> None:
    def silent(public: Public) -> set[str]:
        text = " ".join(clean_docs(public))
        return {name for name in raised(public) if name not in text}

    assert wrong(silent) == []


def test_defaults_are_the_signature_s() -> None:
    def other(public: Public) -> list[str]:
        told = {
            n: t for doc in clean_docs(public)[:1] for n, t in described(doc).items()
        }
        found = []
        for name, parameter in parameters(public).items():
            default = re.search(r"(?:^|, )default (.+)$", told.get(name, ""))
            expected = plain(repr(parameter.default))
            if default and expected and plain(default[1]) != expected:
                found.append(f"{name}: {default[1]}, not {expected}")
        return found

    def plain(text: str) -> str:
        try:
            return repr(ast.literal_eval(text))
        except (SyntaxError, ValueError):
            return ""  # of no literal: nothing to compare

    assert wrong(other) == []


def test_the_default_of_a_group_is_written_as_a_call() -> None:
    told = described(inspect.cleandoc(FairseqConfig.__doc__ or ""))
    assert told["dataset"] == "DatasetConfig, default DatasetConfig()"


def test_every_class_and_entry_shows_an_example() -> None:
    def bare(public: Public) -> bool:
        if inspect.isclass(public.value):
            return not any(">>>" in doc for doc in docs_of(public))
        is_entry = public.owner is None and any(
            getattr(importlib.import_module(m), public.value.__name__, None)
            is public.value
            for m in ENTRIES
        )
        return is_entry and ">>>" not in public.doc

    assert wrong(bare) == []


EXAMPLES = [name for name, public in objects().items() if ">>>" in public.doc]


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_runs(name: str, tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    text = objects()[name].doc
    example = doctest.DocTestParser().get_doctest(text, {}, name, None, 0)
    told: list[str] = []
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    doctest.DocTestRunner(optionflags=flags).run(example, out=told.append)
    assert not told, "".join(told)


@pytest.mark.parametrize(
    "value", [optim.AdamW, ctrainer.TrainingArguments, DistributedTrainingConfig]
)
def test_a_removed_line_of_args_is_seen(value: type) -> None:
    doc = inspect.cleandoc(value.__doc__ or "")
    names = list(described(doc))
    assert len(names) > 5
    for name in names:
        less = re.sub(
            rf"^    \*{{0,2}}{name}\b.*\n(?: {{5,}}.*\n)*", "", doc, flags=re.M
        )
        assert unnamed([less], names) == [name]
