"""The flags that set keys of a ServerSpec, made from the spec itself: a key added there is a flag here.

A flag that is not given is None, so that the environment and the file can speak (see `scheduler/config.py`).
"""

import inspect
from collections.abc import Callable, Sequence
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from headway.scheduler.keys import group_of
from headway.scheduler.spec import ModelSpec, PolicySpec, ServerSpec

PANELS: dict[str, type[BaseModel]] = {"Model": ModelSpec, "Policy": PolicySpec, "Server": ServerSpec}


def with_flags(*panels: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command that ends in `**flags` one option for each key of these groups."""

    def wrap(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command).parameters.values() if p.kind is not p.VAR_KEYWORD]
        taken = {parameter.name for parameter in own}
        made = [flag for panel in panels for flag in _flags(panel) if flag.name not in taken]
        command.__signature__ = inspect.Signature([*own, *made])  # type: ignore[attr-defined]
        command.__annotations__ |= {flag.name: flag.annotation for flag in made}
        return command

    return wrap


def _flags(panel: str) -> Sequence[inspect.Parameter]:
    """A name that the policy has, too, is the policy's."""
    fields = PANELS[panel].model_fields.items()
    elsewhere = PolicySpec.model_fields if panel == "Model" else {}
    return [
        _flag(name, field, panel)
        for name, field in fields
        if group_of(field) is None and name not in elsewhere and not _for_files(name, field)
    ]


def _for_files(name: str, field: FieldInfo) -> bool:
    """A map (but for the engine's options) is set in a file: on a command line it would need a language of its own."""
    return get_origin(field.annotation) is dict and name != "options"


def _flag(name: str, field: FieldInfo, panel: str) -> inspect.Parameter:
    dashed = "--" + name.replace("_", "-")
    text = f"{field.description or name} [dim]\\[default: {_default(name, field)}][/]"
    if name == "options":
        kind: Any = list[str] | None
        option = typer.Option(
            "--option",
            metavar="KEY=VALUE",
            help="keyword argument of the engine's factory; may be repeated",
            rich_help_panel=panel,
        )
    elif field.annotation is bool:
        kind = bool | None
        option = typer.Option(f"{dashed}/--no-{dashed[2:]}", help=text, show_default=False, rich_help_panel=panel)
    else:
        either = get_origin(field.annotation) in (Union, UnionType)
        kinds = get_args(field.annotation) if either else (field.annotation,)
        choices = [word for one in kinds if get_origin(one) is Literal for word in get_args(one)]
        kind = (str if choices else field.annotation) | None  # type: ignore[operator]
        metavar = "|".join(["NUMBER"] * either + choices) or None
        option = typer.Option(dashed, metavar=metavar, help=text, show_default=False, rich_help_panel=panel)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option])


def _default(name: str, field: FieldInfo) -> str:
    if name in ("name", "engine", "model"):
        return "follows from the others"
    if field.annotation is bool:
        return "yes" if field.default else "no"
    return str(field.default) if field.default != "" else "none"


def settings(config: str | None, flags: dict[str, Any]) -> ServerSpec:
    """The ServerSpec that these flags, the environment and the file make together. Raises ConfigError."""
    from headway.scheduler.config import load, parse_options

    options = flags.pop("options", None)
    return load(config, flags | ({"options": parse_options(options)} if options else {}))
