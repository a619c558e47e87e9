"""Reads settings into a ServerSpec: flag, else environment, else file, else default.

Each source becomes a nested map of the same keys; the maps are laid over each other and checked once, as a whole.
Nothing is ignored: an unknown key or HEADWAY_ variable is refused and the nearest known one is named. Every complaint
says where the value came from, for that is what a person has to change. What the keys are is `spec.py`'s job.
"""

import json
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict, SettingsError

from headway.scheduler.keys import (
    NEST,
    PREFIX,
    Location,
    dotted,
    is_variable,
    nearest,
    nearest_key,
    nearest_variable,
    variable,
)
from headway.scheduler.profile import ProfileError, profile_of
from headway.scheduler.spec import ModelSpec, PolicySpec, ServerSpec

FILE_BYTES_MAX = 1 << 20  # a settings file is read by people; a larger one is some other file
VALUE_CHARS_MAX = 80  # of a wrong value, in a message

_MUST = re.compile(r"^(Input|String|Tuple|Value|List|Dictionary) should")


class ConfigError(ValueError):
    """Settings that cannot be used. The message is one paragraph for a person: what, where, and what would do."""


class _Environment(ServerSpec, BaseSettings):
    """ServerSpec as pydantic-settings wants it, to read variables with; never made."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, env_nested_delimiter=NEST, env_ignore_empty=True)


@dataclass(frozen=True, slots=True)
class _Source:
    """A map of settings, and where it came from: kind is "flag", "environment" or the path of a file."""

    kind: str
    values: dict[str, Any]

    def name(self, at: Location) -> str:
        """What a person changes to change the value at `at`."""
        if self.kind == "flag":
            return "--option" if "options" in at else f"--{at[-1]}".replace("_", "-")
        return variable(at) if self.kind == "environment" else self.kind

    def has(self, at: Location) -> bool:
        node: Any = self.values
        for part in at:
            if isinstance(node, list) and isinstance(part, int):
                node = dict(enumerate(node))
            key = part if isinstance(node, dict) and part in node else str(part)
            if not isinstance(node, dict) or key not in node:
                return False
            node = node[key]
        return True


def load(path: str | os.PathLike[str] | None = None, flags: Mapping[str, Any] | None = None) -> ServerSpec:
    """All settings of a server.

    `path`: a YAML or TOML file; None: the one HEADWAY_CONFIG names, if any. `flags`: flat key -> value, as on the
    command line; keys of a model go to models[0], keys of the policy to `policy`; None counts as not given. Raises
    ConfigError.
    """
    named = path or os.environ.get("HEADWAY_CONFIG") or None
    sources = [_from_flags(flags or {}), _from_environment()]
    if named is not None:
        sources.append(_from_file(Path(named)))
    merged: dict[str, Any] = {}
    for source in reversed(sources):
        merged = _over(merged, source.values)
    _number_models(merged, sources)
    try:
        spec = ServerSpec.model_validate(merged)
        for model in spec.models:
            profile_of(model)  # read again by each worker; what is wrong with it is said before any starts
    except ValidationError as error:
        raise ConfigError(_paragraph([_sentence(detail, sources) for detail in _roots(error.errors())])) from None
    except ProfileError as error:
        raise ConfigError(str(error)) from None
    return spec


def parse_options(pairs: list[str]) -> dict[str, Any]:
    """`key=value` pairs as a map; a value that is JSON is taken as such, any other as text. Raises ConfigError."""
    options: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key:
            raise ConfigError(f"--option takes key=value, as in --option delay_ms=5; found {pair!r}")
        try:
            options[key] = json.loads(text)
        except ValueError:
            options[key] = text
    return options


# ---------------------------------------------------------------- the sources


def _from_flags(flags: Mapping[str, Any]) -> _Source:
    """A key's place follows from its name; what a model can have for itself, too, is the policy's (a test holds it)."""
    values: dict[str, Any] = {}
    for key, value in flags.items():
        if value is None:
            continue
        if key in PolicySpec.model_fields:
            values.setdefault("policy", {})[key] = value
        elif key in ModelSpec.model_fields:
            values.setdefault("models", {}).setdefault("0", {})[key] = value
        elif key in ServerSpec.model_fields:
            values[key] = value
        else:
            known = [*ModelSpec.model_fields, *PolicySpec.model_fields, *ServerSpec.model_fields]
            raise ConfigError(f"there is no flag --{key.replace('_', '-')}{nearest(key, known)}")
    return _Source("flag", values)


def _from_environment() -> _Source:
    unknown = [name for name in sorted(os.environ) if name.startswith(PREFIX) and not is_variable(name)]
    if unknown:
        raise ConfigError(
            _paragraph([f"{name} is set, but there is no such setting{nearest_variable(name)}" for name in unknown])
        )
    if os.environ.get(f"{PREFIX}MODELS") and any(name.startswith(f"{PREFIX}MODELS{NEST}") for name in os.environ):
        name = variable(("models", 0, "name"))
        raise ConfigError(f"{PREFIX}MODELS is all of the models, as JSON; unset it to set single keys, as in {name}")
    try:
        values = EnvSettingsSource(_Environment)()
    except SettingsError as error:
        field = re.search(r'field "(\w+)"', str(error))
        name = variable((field.group(1),)) if field else f"a {PREFIX} variable"
        raise ConfigError(f"{name} is not valid JSON; set single keys, as in {PREFIX}POLICY{NEST}WINDOW") from None
    for model in _items(values.get("models")):
        if isinstance(model, dict) and isinstance(model.get("options"), str):
            model["options"] = _json_of("options", model["options"])
    return _Source("environment", values)


def _json_of(key: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise ConfigError(f"{PREFIX}MODELS{NEST}n{NEST}{key.upper()} must be JSON; found {_shown(text)}") from None


class _Loader(yaml.SafeLoader):
    """YAML that refuses a key written twice: the second would win, silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value]
        twice = sorted({str(name) for name in names if names.count(name) > 1})
        if twice:
            raise yaml.constructor.ConstructorError(None, None, f"{', '.join(twice)} is there twice", node.start_mark)
        return super().construct_mapping(node, deep)


def _from_file(path: Path) -> _Source:
    if path.suffix not in (".yaml", ".yml", ".toml"):
        raise ConfigError(f"{path}: a settings file ends in .yaml, .yml or .toml")
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
        if len(data) > FILE_BYTES_MAX:
            raise ConfigError(f"{path} has more than {FILE_BYTES_MAX} bytes; that is no settings file")
        text = data.decode()
        values = tomllib.loads(text) if path.suffix == ".toml" else yaml.load(text, _Loader)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text") from None
    except (yaml.YAMLError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} is not valid {path.suffix[1:].upper()}: {' '.join(str(error).split())}") from None
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must be a map of keys at its top, as in `bind: tcp://127.0.0.1:5555`")
    return _Source(str(path), values)


# ---------------------------------------------------------------- laying one over another


def _over(low: Any, high: Any) -> Any:
    """`high` laid over `low`: maps key by key, a list by numbered keys; anything else is replaced."""
    if isinstance(high, dict) and isinstance(low, list) and all(str(key).isdigit() for key in high):
        low = {str(index): item for index, item in enumerate(low)}
    if isinstance(high, dict) and isinstance(low, dict):
        return low | {key: _over(low.get(key), value) for key, value in high.items()}
    return high


def _number_models(merged: dict[str, Any], sources: list[_Source]) -> None:
    """Models that were given by number become a list again."""
    models = merged.get("models")
    if not isinstance(models, dict) or not models or not all(str(key).isdigit() for key in models):
        return
    order = sorted(models, key=int)
    for index, key in enumerate(order):
        if int(key) != index:
            at: Location = ("models", int(key))
            raise ConfigError(
                f"{_origin(at, sources)}models[{key}] is set, but there is no models[{index}]; count from 0"
            )
    merged["models"] = [models[key] for key in order]


def _items(models: Any) -> list[Any]:
    return list(models.values()) if isinstance(models, dict) else models if isinstance(models, list) else []


# ---------------------------------------------------------------- what is wrong, in words


def _roots(details: list[ErrorDetails]) -> list[ErrorDetails]:
    """The faults that are no consequence of another: pydantic also calls a list too short whose items were refused."""
    places = [detail["loc"] for detail in details]
    return [
        detail
        for detail, at in zip(details, places, strict=True)
        if not any(len(other) > len(at) and other[: len(at)] == at for other in places)
    ]


def _sentence(detail: ErrorDetails, sources: list[_Source]) -> str:
    """One fault that validation found. Keys of CURVE are not shown: they are secrets."""
    at = detail["loc"]
    if detail["type"] == "extra_forbidden":
        return f"{_origin(at, sources)}there is no key {dotted(at)}{nearest_key(at)}"
    if detail["type"] == "missing":
        return f"{_origin(at[:-1], sources)}{dotted(at)} is missing"
    limit = detail["msg"].removeprefix("Value error, ").removesuffix(" after validation, not 0")
    limit = _MUST.sub("must", limit).replace("tuple", "list")
    if detail["type"] == "value_error":  # a relation: it names its keys itself
        return f"{limit}{_origins_of(limit, sources)}"
    shown = "" if at[0] == "curve" else f" is {_shown(detail['input'])}, but"
    return f"{_origin(at, sources)}{dotted(at)}{shown} {limit}"


def _origin(at: Location, sources: list[_Source]) -> str:
    return next((f"{source.name(at)}: " for source in sources if at and source.has(at)), "")


def _origins_of(sentence: str, sources: list[_Source]) -> str:
    """Where the top-level keys that a sentence names were set, for those that were."""
    names = [name for name in ServerSpec.model_fields if re.search(rf"\b{name}\b", sentence)]
    origins = {source.name((name,)) for name in names for source in sources[-1::-1] if source.has((name,))}
    return f" (set by {', '.join(sorted(origins))})" if origins else ""


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= VALUE_CHARS_MAX else text[: VALUE_CHARS_MAX - 1] + "…"


def _paragraph(sentences: list[str]) -> str:
    if len(sentences) == 1:
        return sentences[0]
    return f"{len(sentences)} settings cannot be used: " + "; ".join(sentences)
