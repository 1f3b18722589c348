"""What `make docs` adds to the pages: the reference of the code, and the navigation.

MkDocs calls these functions. A page of a module holds directives alone, which
mkdocstrings replaces by the docstrings: nothing of them is written by hand.
"""

import importlib
import inspect
import re
from typing import Any

from mkdocs.structure.files import File, Files

FOLDERS = {"how-to", "concepts", "reference", "api", "development"}
MODULES = (
    *("ctrainer", "ctrainer.optim", "ctrainer.schedules", "ctrainer.checkpoint"),
    *("ctrainer.comm", "ctrainer.comm.machines", "ctrainer.comm.process_group"),
    *("ctrainer.fsdp", "ctrainer.hf", "ctrainer.adapters.numpy"),
    *("ctrainer.fairseq", "ctrainer.compat.fairscale", "ctrainer.compat.deepspeed"),
    "ctrainer.deepspeed_schedules",
)


def page_of(name: str) -> str:
    """A module's classes and functions, each by its name where it is defined."""
    module = importlib.import_module(name)
    lines = [f"# {name}", inspect.getdoc(module) or ""]
    for public in getattr(module, "__all__", None) or dir(module):
        value = getattr(module, public)
        home = getattr(value, "__module__", None) or ""
        if public[0] != "_" and callable(value) and home.startswith("ctrainer"):
            heading = f"    options: {{heading: {name}.{public}}}"
            lines.append(f"::: {home}.{value.__qualname__}\n{heading}")
    return "\n\n".join(lines) + "\n"


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the modules, and list each folder's pages in the navigation."""
    for name in MODULES:
        files.append(File.generated(config, f"api/{name}.md", content=page_of(name)))
    pages = sorted(file.src_uri for file in files.documentation_pages())
    for entry in config.nav:
        for title, value in entry.items() if isinstance(entry, dict) else ():
            if isinstance(value, str) and value in FOLDERS:
                entry[title] = [uri for uri in pages if uri.startswith(f"{value}/")]
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Files beside docs/ are not of the site: their links become their names."""
    outside = r"\[([^\]\[]*)\]\((?:\.\./)+(?:examples|CONTRIBUTING|README)[^)]*\)"
    return re.sub(outside, r"`\1`", markdown)
