"""The names of the settings: each key of `spec.py` with its place, and how it is written in a file and a variable.

Derived from the spec's types, never listed by hand, so that files, variables, flags and the documentation agree.
"""

import difflib
from collections.abc import Iterator, Sequence
from types import UnionType
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from headway.scheduler.spec import ServerSpec

PREFIX = "HEADWAY_"
NEST = "__"

# Variables that are no keys of a ServerSpec.
VARIABLES = {
    "HEADWAY_CONFIG": "the settings file, if `--config` names none",
    "HEADWAY_CACHE": "folder where converted packaged models are kept; default: ~/.cache/headway",
    "HEADWAY_CONNECT": "the server's address, for client commands without `--connect`",
    "HEADWAY_SERVER_KEY": "the server's public CURVE key, for client commands and workers without `--server-key`",
}

Location = tuple[str | int, ...]  # ("policy", "window"), ("models", 0, "name")


def group_of(field: FieldInfo) -> type[BaseModel] | None:
    """The group of keys that a field holds, one or several times; None if it holds a value."""
    kinds: tuple[Any, ...] = (field.annotation,)
    if isinstance(field.annotation, UnionType) or get_origin(field.annotation) is tuple:
        kinds = get_args(field.annotation)
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def walk(group: type[BaseModel], at: Location = ()) -> Iterator[tuple[Location, FieldInfo]]:
    """Every field below `group`; one that is a group comes before its keys; models[0] stands for all models."""
    for name, field in group.model_fields.items():
        yield (*at, name), field
        inner = group_of(field)
        if inner is not None:
            numbered = get_origin(field.annotation) is tuple
            yield from walk(inner, (*at, name, 0) if numbered else (*at, name))


KEYS: dict[Location, FieldInfo] = dict(walk(ServerSpec))


def dotted(at: Location) -> str:
    """A key as a person writes it: models[0].max_batch."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in at).removeprefix(".")


def variable(at: Location) -> str:
    """The environment variable of a key: HEADWAY_POLICY__WINDOW."""
    return PREFIX + NEST.join(str(part) for part in at).upper()


def is_variable(name: str) -> bool:
    """Whether HEADWAY_… is one that is read. `options` holds any names."""
    parts = name.removeprefix(PREFIX).lower().split(NEST)
    at = tuple(0 if index == 1 and part.isdigit() else part for index, part in enumerate(parts))
    return name in VARIABLES or at in KEYS or at == ("models", 0) or at[:3] == ("models", 0, "options")


def nearest_variable(name: str) -> str:
    """What a person who set `name` may have meant, as the end of a sentence."""
    return _did_you_mean(name, {known: known for known in [*map(variable, KEYS), *VARIABLES]})


def nearest_key(at: Location) -> str:
    """What a person who wrote `at` may have meant: a key of the same group, else one of another."""
    plain = tuple(0 if isinstance(part, int) else part for part in at)
    siblings = {str(key[-1]): str(key[-1]) for key in KEYS if key[:-1] == plain[:-1]}
    later = sorted(KEYS, key=lambda key: key[0] == "models")  # a name that a model can have for itself is the policy's
    elsewhere = {str(key[-1]): dotted(key) for key in reversed(later)}
    return _did_you_mean(str(at[-1]), siblings) or _did_you_mean(str(at[-1]), elsewhere)


def nearest(name: str, known: Sequence[str]) -> str:
    """The nearest of `known`, as the end of a sentence; empty if none is near."""
    return _did_you_mean(name, {word: word for word in known})


def _did_you_mean(name: str, places: dict[str, str]) -> str:
    found = difflib.get_close_matches(name.replace("-", "_"), places, n=1, cutoff=0.65)
    return f"; did you mean {places[found[0]]}?" if found else ""
