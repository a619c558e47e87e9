"""docs/configuration.md, made from the spec's own types, so that it cannot fall behind (a test compares them)."""

from collections.abc import Sequence
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from headway.cli.exits import EXITS
from headway.scheduler.keys import KEYS, VARIABLES, Location, group_of, variable

HEAD = """# Configuration

Every setting of `headway serve`, made from `scheduler/spec.py`. A setting can be given in four ways; the first that is
there counts:

1. a flag, the key with dashes: `--max-batch 8`; `--option key=value` for `options`. Flags of a model set the first one;
   `--window` and its like set the policy's, and a model's own, if it has one, wins over it.
2. an environment variable: `HEADWAY_POLICY__WINDOW=efficiency`, `HEADWAY_MODELS__0__THREADS=2`. An empty one counts as
   not given. `HEADWAY_MODELS` and `HEADWAY_POLICY` take a whole group as JSON.
3. a file, YAML or TOML by its suffix: `headway serve --config headway.yaml`, or `HEADWAY_CONFIG`.
4. the default.

Nothing is ignored: an unknown key, variable or flag is refused and the nearest known one is named; a value outside its
limits is refused with the key, the value, the limit, and where it was set. All settings are checked before anything
starts, and `headway serve` then ends with exit code 2. Two rules relate keys: `lost_after_ms` is more than twice
`heartbeat_ms`, and no two models have the same name and the same engine.

```yaml
bind: tcp://127.0.0.1:5555
models:
  - model: smollm2        # name and engine follow from the model
    threads: 2
  - model: minilm
    workers: 2
    window: greedy        # for this model; the others keep the policy's
policy:
  window: adaptive
```
"""

GROUPS: list[tuple[str, str, tuple[str | int, ...]]] = [
    ("Server", "At the top of the file.", ()),
    ("Models", "`models` is a list; each has these keys. Several workers of one model share its load.", ("models", 0)),
    ("Policy", "Under `policy`.", ("policy",)),
    ("CURVE", "Under `curve`, or leave it out. Keys are Z85 text, as made by `zmq.curve_keypair()`.", ("curve",)),
]

DERIVED = {
    "name": "the model's name",
    "engine": "`embed` for minilm, else `generate`",
    "model": "`smollm2` to generate, `minilm` to embed",
}
UNITS = {"_ms": "ms", "_mib": "MiB", "_tokens": "tokens", "_fraction": "share"}


def markdown() -> str:
    """The whole document."""
    parts = [HEAD]
    for title, text, group in GROUPS:
        parts.append(f"## {title}\n\n{text}\n\n{_table(group)}\n")
    parts.append(f"## Variables that are no settings\n\n{_rows(('variable', 'meaning'), _variables())}\n")
    exits = [(str(code), meaning) for code, meaning in EXITS.items()]
    parts.append(f"## Exit codes\n\nOf every `headway` command.\n\n{_rows(('code', 'meaning'), exits)}\n")
    return "\n".join(parts)


def _table(group: Location) -> str:
    rows = [_row(at, field) for at, field in KEYS.items() if at[:-1] == group and group_of(field) is None]
    return _rows(("key", "type", "default", "unit", "meaning", "variable"), rows)


def _row(at: Location, field: FieldInfo) -> tuple[str, ...]:
    name = str(at[-1])
    unit = next((unit for suffix, unit in UNITS.items() if name.endswith(suffix)), "")
    return f"`{name}`", _type(field), _default(at, field), unit, field.description or "", f"`{variable(at)}`"


def _type(field: FieldInfo) -> str:
    kind = _plain(field.annotation)
    if get_origin(kind) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(kind))
    names = {str: "text", int: "integer", float: "number", bool: "yes or no"}
    limits = _limits(field)
    return f"{names.get(kind, 'map')}{f', {limits}' if limits else ''}"


def _plain(kind: Any) -> Any:
    """A type without "or none" and without what is checked besides."""
    kind = next((part for part in get_args(kind) if part is not NoneType), kind) if NoneType in get_args(kind) else kind
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _limits(field: FieldInfo) -> str:
    words = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<", "min_length": "characters ≥", "max_length": "characters ≤"}
    found = [
        f"{sign} {getattr(limit, name):,}"
        for limit in field.metadata
        for name, sign in words.items()
        if getattr(limit, name, None) is not None
    ]
    return ", ".join(found)


def _default(at: Location, field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if at[:1] == ("models",) and at[-1] in DERIVED:
        return DERIVED[str(at[-1])]
    if isinstance(field.default, bool):
        return "yes" if field.default else "no"
    if field.default is None:
        return "the policy's"
    return f"`{field.default}`" if field.default != "" else "empty"


def _variables() -> list[tuple[str, ...]]:
    return [(f"`{name}`", meaning) for name, meaning in VARIABLES.items()]


def _rows(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [heads, tuple("---" for _ in heads), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
