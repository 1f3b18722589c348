"""Imports modules, and prints which of others are loaded then: names, "--", names."""

import sys
from importlib import import_module

end = sys.argv.index("--")
for name in sys.argv[1:end]:
    import_module(name)
print([name for name in sys.argv[end + 1 :] if name in sys.modules])
