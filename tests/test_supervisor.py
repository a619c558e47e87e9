"""Starting workers again: with a growing pause, so many times, and not at all where that mends nothing.

The processes are real and short; time is an argument.
"""

import subprocess
import sys

import pytest

from headway.scheduler.clock import NS_PER_MS, NS_PER_S
from headway.scheduler.spec import ModelSpec, ServerSpec
from headway.scheduler.supervisor import PAUSE_NS, POLL_NS, SETTLED_NS, Slot, Supervisor


def supervisor(monkeypatch: pytest.MonkeyPatch, code: int, **keys: int) -> Supervisor:
    """Its workers are processes that end at once with `code`."""

    def start(_self: Supervisor, slot: Slot) -> None:
        slot.ready_ns = 0
        slot.process = subprocess.Popen([sys.executable, "-c", f"raise SystemExit({code})"])

    monkeypatch.setattr(Supervisor, "_start", start)
    return Supervisor(ServerSpec(models=(ModelSpec(engine="echo", name="m"),), **keys), "ipc://nowhere")


def lives(subject: Supervisor, now_ns: int) -> tuple[int, str]:
    """Start the worker, wait for its end and let it be noticed: when the next is due, and why there is none."""
    subject.poll(now_ns)
    (slot,) = subject.slots
    assert slot.process is not None
    slot.process.wait()
    (ended,) = subject.poll(now_ns + POLL_NS)
    return slot.start_at_ns - now_ns - POLL_NS, ended.given_up


def test_a_loader_that_always_fails_is_tried_again_ever_later_and_then_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    subject = supervisor(monkeypatch, 1, restarts_max=3)
    now_ns, pauses = 0, []
    while True:
        pause_ns, given_up = lives(subject, now_ns)
        if given_up:
            break
        pauses.append(pause_ns // PAUSE_NS)
        assert subject.poll(now_ns + POLL_NS + pause_ns - 1) == []
        assert subject.slots[0].process is None, "it was started before its pause was over"
        now_ns += 2 * POLL_NS + pause_ns
    assert pauses == [1, 2, 4]
    assert given_up == "it ended 4 times in a row, last it ended with exit code 1; see its log above"
    assert subject.hopeless(subject._spec.models[0]) == given_up
    subject.poll(now_ns + 3600 * NS_PER_S)
    assert subject.slots[0].process is None


def test_one_that_says_it_cannot_load_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = supervisor(monkeypatch, 2)
    assert lives(subject, 0)[1] == "it cannot load its model; see its log above"


def test_one_that_served_for_a_while_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = supervisor(monkeypatch, 1, restarts_max=1)
    assert lives(subject, 0) == (PAUSE_NS, "")
    now_ns = POLL_NS + PAUSE_NS
    subject.poll(now_ns)
    (slot,) = subject.slots
    assert slot.process is not None
    subject.ready(slot.pid, now_ns)
    slot.process.wait()
    (ended,) = subject.poll(now_ns + SETTLED_NS + NS_PER_MS)
    assert not ended.given_up
