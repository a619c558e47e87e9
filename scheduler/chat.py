"""Chat templates: from the turns of a conversation to one prompt, exactly as transformers writes it.

Lives here: the sandbox, and the names, filters and spacing that templates written for transformers rely on. Never here:
tokens. A template comes with the model and is a program: it runs in jinja2's immutable sandbox, and whatever it raises
is the request's error, with the template's own words (that is how templates refuse a conversation).
"""

import json
import time
from collections.abc import Mapping, Sequence

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import msgspec
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headway.scheduler.clock import wall_s
from headway.scheduler.errors import HeadwayError
from headway.scheduler.wire import ChatMessage

Message = ChatMessage | Mapping[str, str]


def refused(message: str) -> HeadwayError:
    """The error of messages that no prompt can be made of."""
    return HeadwayError("invalid_request", message, field="messages")


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what an assistant said, for training; here it is a block like any other."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class ChatTemplate:
    """One model's template. `special`: the names it may use, such as bos_token.

    One that does not compile is kept, and said at its first use: its model can still be prompted.
    """

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        self._special = dict(special)
        self._fault = ""
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            self._fault = f"this model's chat template does not compile: {error}; send `prompt` or `input_ids`"

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt for `messages`, ready for the assistant's turn. Raises HeadwayError `invalid_request`."""
        if self._fault:
            raise refused(self._fault)
        turns = [dict(m) if isinstance(m, Mapping) else msgspec.structs.asdict(m) for m in messages]
        names: dict[str, object] = {**self._special, "messages": turns, "tools": None, "documents": None}
        try:
            return self._template.render(**names, add_generation_prompt=True)
        except Exception as error:  # a template is a program: it may raise whatever Python does
            raise refused(f"the model's chat template refused the messages: {error}") from error


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; jinja2's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    return time.strftime(pattern, time.localtime(wall_s()))
