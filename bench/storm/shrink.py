"""A failing storm made short, and told so that a person can read it.

Delta debugging (Zeller and Hildebrandt, 2002): halves, quarters, ... of the happenings are left out as long as the same
law stays broken. Any part of a plan is a plan, so nothing has to be repaired in between.
"""

from collections.abc import Callable
from pathlib import Path
from traceback import extract_tb
from typing import NamedTuple

import msgspec

from headway.bench.storm.referee import NS_PER_MS, BrokenLawError
from headway.bench.storm.world import Step, Storm
from headway.scheduler import events as ev

RUNS_MAX = 600  # storms played to make one short: half a minute


class Failure(NamedTuple):
    """What went wrong. `law`: a law of the referee, or the error and the line that raised it."""

    law: str
    text: str
    storm: Storm


def play(storm: Storm) -> Failure | None:
    """Let it happen; None if all went well."""
    try:
        storm.run()
    except BrokenLawError as broken:
        return Failure(broken.law, str(broken), storm)
    except Exception as error:  # whatever the core raises is a finding
        at = extract_tb(error.__traceback__)[-1]
        law = f"{type(error).__name__} in {Path(at.filename).name}, {at.name}"
        return Failure(law, f"{law}: {error}", storm)
    return None


def shrink(failure: Failure, watch: Callable[[int], None] = lambda _left: None) -> Failure:
    """The same law broken by fewer happenings. `watch` is told how many are left."""
    runs, pieces = 0, 2
    plan = failure.storm.plan
    until = plan._replace(happenings=tuple(one for one in plan.happenings if one.at_us * 1_000 <= failure.storm.now_ns))
    found = play(type(failure.storm)(until))
    if found is not None and found.law == failure.law:
        failure, plan = found, until
    while runs < RUNS_MAX:
        count = len(plan.happenings)
        size = max(1, count // pieces)
        for start in range(0, count, size):
            shorter = plan._replace(happenings=plan.happenings[:start] + plan.happenings[start + size :])
            runs += 1
            found = play(type(failure.storm)(shorter))
            if found is not None and found.law == failure.law:
                failure, plan = found, shorter
                watch(len(plan.happenings))
                pieces = max(2, pieces - 1)
                break
        else:
            if size == 1:
                break
            pieces = min(2 * pieces, max(2, count))
    return failure


def transcript(steps: list[Step]) -> list[str]:
    """What happened and what the core did about it, a line each; virtual milliseconds. Heartbeats that were answered
    with nothing are left out."""
    lines = []
    for now_ns, event, actions in steps:
        told = event.events if type(event) is ev.Together else [event]
        if not actions and all(type(one) is ev.Beat for one in told):
            continue
        lines.append(f"{now_ns / NS_PER_MS:12.3f}  {brief(event)}")
        lines += [f"{'':12}    -> {brief(action)}" for action in actions]
    return lines


def brief(thing: object) -> str:
    """An event or action without the fields that say nothing."""
    if isinstance(thing, msgspec.Struct):
        fields = msgspec.structs.fields(thing)
        told = [(field.name, getattr(thing, field.name)) for field in fields]
        defaults = {field.name: field.default for field in fields}
        shown = [f"{name}={brief(value)}" for name, value in told if name != "message" and value != defaults[name]]
        return f"{type(thing).__name__}({', '.join(shown)})"
    if isinstance(thing, (list, tuple)):
        return "[" + ", ".join(brief(one) for one in thing) + "]"
    return repr(thing)


def report(failure: Failure, whole: int) -> str:
    """All that a person needs: the law, the settings, the transcript, and how to see it again. `whole`: happenings
    before it was made short."""
    plan = failure.storm.plan
    policy = ", ".join(f"{name}={value}" for name, value in plan.policy.model_dump(exclude_defaults=True).items())
    return "\n".join(
        [
            f"seed {plan.seed} breaks a law: {failure.text}",
            f"{len(plan.happenings)} of {whole} happenings are enough; policy: {policy or 'the defaults'};",
            f"services {plan.services}, lost after {plan.lost_after_ms} ms, stuck after {plan.stuck_after_ms} ms",
            "",
            *transcript(failure.storm.steps),
            "",
            f"again: {failure.storm.command}",
        ]
    )
