"""From settings to the window of a model and kind: one of headway's own by name, or an operator's by import path.

A model's entry overrides the policy's keys for itself. A path is imported, and its factory called once to see that it
makes a window, before anything starts; then it is called for each model and kind, so that what a window learns stays
apart.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from headway.policies.views import LaneView, Launch, WindowChoice, WindowOf
from headway.policies.windows import MAKERS, WindowSettings, make
from headway.scheduler import clock
from headway.scheduler.config import ConfigError
from headway.scheduler.imports import ImportPathError, load_path
from headway.scheduler.spec import ENGINES, WINDOW_KEYS, ModelSpec, PolicySpec

Factory = Callable[[], Any]


def window_of(policy: PolicySpec, models: Sequence[ModelSpec]) -> WindowOf:
    """Which window a model and kind has: its entry's, else the policy's. Raises ConfigError, which names the field."""
    common = _maker(policy, "policy.window")
    own = [_maker(*_over(policy, model, index)) for index, model in enumerate(models)]

    def choose(model: str, kind: str) -> WindowChoice:
        named = [index for index, entry in enumerate(models) if entry.name == model]
        if not named:
            return common()
        # a custom engine says its kind only when it registers: what fits no other entry of that name is its
        return own[min(named, key=lambda index: (models[index].kind != kind, models[index].engine in ENGINES))]()

    return choose


def _over(policy: PolicySpec, model: ModelSpec, index: int) -> tuple[PolicySpec, str]:
    """The policy with the keys that the model's entry has, and which field names the window."""
    own = {key: getattr(model, key) for key in WINDOW_KEYS if getattr(model, key) is not None}
    return policy.model_copy(update=own), f"models[{index}].window" if "window" in own else "policy.window"


def _maker(policy: PolicySpec, field: str) -> Callable[[], WindowChoice]:
    """What makes a new window of these settings."""
    given = WindowSettings(
        cap_ns=int(policy.max_wait_cap_ms * clock.NS_PER_MS),
        fixed_ns=int(policy.fixed_wait_ms * clock.NS_PER_MS),
        target_ns=int(policy.aimd_target_ms * clock.NS_PER_MS),
    )
    if policy.window in MAKERS:
        return partial(make, policy.window, given)
    try:
        factory = load_path(policy.window)
        _check(policy.window, factory)
    except ImportPathError as error:
        raise ConfigError(f"{field}: {error}") from error
    return partial(_own, policy.window, factory, given.cap_ns)


def _check(path: str, factory: Any) -> None:
    """That it makes windows. Raises ImportPathError."""
    if not callable(factory):
        raise ImportPathError(
            f"{path} is of type {type(factory).__name__}, which cannot be called; "
            "name a callable without arguments that returns a window"
        )
    try:
        window = factory()
    except Exception as error:
        raise ImportPathError(
            f"{path} raised {type(error).__name__}: {error}; it is called without arguments and returns a window"
        ) from error
    if not _is_window(window):
        raise ImportPathError(
            f"{path} returned a {type(window).__name__}, which is no window; "
            "a window is called with (view, now_ns) and returns Launch or Wait"
        )


def _is_window(window: Any) -> bool:
    if not callable(window) or inspect.isclass(window) or inspect.iscoroutinefunction(window):
        return False
    try:
        inspect.signature(window).bind(None, 0)
    except TypeError:
        return False
    except ValueError:  # a builtin without a signature: the core will see
        return True
    return True


def _own(path: str, factory: Factory, bound_ns: int) -> WindowChoice:
    """A new window of the operator's own. It made one at the start; if it no longer does, the core counts that."""
    try:
        window = factory()
    except Exception as error:
        window = partial(_broken, f"{path} raised {type(error).__name__}: {error}")
    return WindowChoice(path, window, bound_ns)


def _broken(why: str, view: LaneView, now_ns: int) -> Launch:
    del view, now_ns
    raise RuntimeError(why)
