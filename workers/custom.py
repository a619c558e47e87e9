"""A user's own Python as an engine: an import path is loaded, called if it makes engines, wrapped if it is a function.

Lives here: finding the object, telling factory, engine and function apart, and values in and out of a plain function.
Never here: batching (`oneshot.py`) or what may cross the wire (`scheduler/values.py`). Each way to get it wrong has an
error that says what to do.

    # mymodel.py, in the directory where headway is started
    class Model:
        def __init__(self, folder, top=5):            # once for each worker; options of the spec come by name
            self.net = load(folder)
            self.top = top

        def __call__(self, payloads):                 # a list of what clients sent: None, bool, int, float, str, ...
            scores = self.net([p["text"] for p in payloads])
            return [s.topk(self.top).values for s in scores]   # one result for each, in order

    headway serve --engine mymodel:Model --option folder=/models/x

A result may be an Exception: it goes to that request only. One that is raised fails the batch, whose requests are then
run again until the culprit is alone. Arrays and tensors become lists. For more control (streaming, cancelling) return
an object with the methods of `headway.workers.engine.Engine`.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import msgspec

from headway.scheduler.imports import ImportPathError, load_path
from headway.scheduler.link import Card, Item, Outcome
from headway.scheduler.spec import ENGINES, ModelSpec
from headway.scheduler.values import plain
from headway.scheduler.wire import INPUT_IDS_MAX
from headway.workers.engine import Engine
from headway.workers.oneshot import OneShot, check_count, code_of, text_of

Function = Callable[[list[Any]], Sequence[Any]]


class CannotLoad(Exception):  # noqa: N818 - reads as what it says: `except CannotLoad`
    """An engine that cannot be made; the text says why and what to do."""


def load_custom(path: str, spec: ModelSpec) -> Engine:
    """The engine at `path`, `package.module:attribute`. Raises CannotLoad.

    A class, or a callable that needs no argument beyond `spec.options` (given by name), is a factory and is called.
    What it returns, or the object itself, is an Engine if it has `card` and `step`; another callable is a function from
    a list of payloads to a list of results.
    """
    found = _found(path)
    if inspect.isclass(found):
        found = _made(path, found, spec)
    elif _is_engine(found):
        return cast(Engine, found)
    elif callable(found):
        _check_lazy(path, found)
        _check_options(path, found, spec)
        if not _needed(found, spec.options):
            found = _made(path, found, spec)
        elif spec.options:
            found = functools.partial(found, **spec.options)
    if _is_engine(found):
        return cast(Engine, found)
    if not callable(found):
        raise CannotLoad(
            f"{path} gives a {type(found).__name__}, which cannot be called; "
            "name a function from a list of payloads to a list of results, or a class whose instances are one"
        )
    _check_lazy(path, found)
    return OneShot(_card(spec, path), functools.partial(_run, found))


def _found(path: str) -> Any:
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise CannotLoad(f"{path!r} is no engine; use {', '.join(ENGINES)}, or a path like package.module:attribute")
    try:
        return load_path(path)
    except ImportPathError as error:
        raise CannotLoad(str(error)) from error


def _is_engine(found: object) -> bool:
    return not inspect.isclass(found) and hasattr(found, "card") and hasattr(found, "step")


def _check_lazy(path: str, found: Callable[..., Any]) -> None:
    function = found.func if isinstance(found, functools.partial) else found
    call: Any = function if inspect.isroutine(function) else type(function).__call__
    lazy = (inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isgeneratorfunction)
    if any(is_lazy(call) for is_lazy in lazy):
        raise CannotLoad(f"{path} is async or a generator; use a plain function that returns a list of results")


def _needed(found: Callable[..., Any], options: Mapping[str, Any]) -> list[str]:
    """Parameters that must be given and are not among the options."""
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):  # builtins may have none: taken for a function of payloads
        return ["payloads"]
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in variadic and p.name not in options]


def _check_options(path: str, found: Callable[..., Any], spec: ModelSpec) -> None:
    try:
        inspect.signature(found).bind_partial(**spec.options)
    except TypeError as error:
        raise CannotLoad(f"{path} does not take these options: {error}; correct the model's options") from error
    except ValueError:
        return


def _made(path: str, factory: Callable[..., Any], spec: ModelSpec) -> Any:
    needed = _needed(factory, spec.options)
    if needed:
        raise CannotLoad(f"{path} needs {', '.join(map(repr, needed))}; give it in the model's options")
    _check_options(path, factory, spec)
    try:
        made = factory(**spec.options)
    except Exception as error:
        raise CannotLoad(f"{path} raised {text_of(error)}; it must return an engine or a function") from error
    if made is None:
        raise CannotLoad(f"{path} returned nothing; it must return an engine or a function")
    return made


def _card(spec: ModelSpec, path: str) -> Card:
    return Card(
        name=spec.name,
        kind="call",
        mode="oneshot",
        max_batch=spec.max_batch,
        max_num_seqs=spec.max_num_seqs,
        max_input_tokens=spec.max_input_tokens or INPUT_IDS_MAX,
        facts={"engine": path},
    )


# ---------------------------------------------------------------- running a function


def _run(function: Function, items: Sequence[Item]) -> Sequence[Outcome | BaseException]:
    payloads = [msgspec.msgpack.decode(item.payload) for item in items]
    results = function(payloads)
    if isinstance(results, (str, bytes, Mapping)) or not hasattr(results, "__len__"):
        raise TypeError(f"the function returned a {type(results).__name__}; it must return a list, one result for each")
    check_count(results, items)
    return [_outcome(item, result) for item, result in zip(items, results, strict=True)]


def _outcome(item: Item, result: object) -> Outcome:
    if isinstance(result, BaseException):
        return Outcome(item.rid, code=code_of(result), message=text_of(result))
    try:
        return Outcome(item.rid, value=msgspec.Raw(msgspec.msgpack.encode(plain(result, "result"))))
    except Exception as error:
        return Outcome(item.rid, code="engine_error", message=str(error))
