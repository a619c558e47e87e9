"""What an operator names by import path, `package.module:attribute`: an engine, a window. Found here, checked by
whoever asked. A path comes from a flag, a variable or a file of the operator, never from the wire.
"""

import importlib
import os
import sys
from typing import Any


class ImportPathError(ValueError):
    """A path that leads nowhere; the text says why and what to do."""


def load_path(path: str) -> Any:
    """The object at `package.module:attribute`, looked for in the current directory too. Raises ImportPathError."""
    module_name, _, attribute = path.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    found: Any = _module(module_name)
    for name in attribute.split("."):
        if not hasattr(found, name):
            raise ImportPathError(f"module {module_name} has no {attribute!r}; define it there, or correct {path!r}")
        found = getattr(found, name)
    return found


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            raise ImportPathError(
                f"there is no module {error.name!r}; start in the directory that holds it, or install it"
            ) from error
        raise ImportPathError(f"module {name} needs {error.name!r}, which is not installed") from error
    except Exception as error:
        raise ImportPathError(
            f"importing {name} raised {type(error).__name__}: {error}; it must be importable on its own"
        ) from error
