"""May it in: bounded by waiting requests and waiting tokens, and refused at the door when it cannot be in time.

Refusing early is the kind thing to do: the client learns at once, with a hint when to come back, and no device time
goes into an answer that nobody waits for any more. A prediction is made only from a learned cost, and only a clear
miss (by more than half) refuses: a wrong refusal costs more than a late answer.
"""

from headway.policies.views import Admit, Arrival, DoorView, Refusal

MISS_FACTOR = 1.5  # predicted time may exceed the time left by this before the door closes
RETRY_MS_MIN, RETRY_MS_MAX = 20, 30_000


def drain_ns(door: DoorView) -> float:
    """How long the workers need for all that waits, by the learned cost; 0 while nothing is known."""
    if not door.cost.known or not door.workers:
        return 0.0
    batches = -(-door.waiting // door.max_batch)
    return (
        door.cost.a_ns * batches + door.cost.m_ns * door.waiting + door.cost.b_ns * door.waiting_tokens
    ) / door.workers


def retry_after_ms(door: DoorView) -> int:
    """When a quarter of the queue will have gone: time for room to appear, without everybody coming back together."""
    return int(min(RETRY_MS_MAX, max(RETRY_MS_MIN, drain_ns(door) / 4e6)))


def bounded(*, queue_max: int, queue_tokens_max: int) -> Admit:
    """The default: bounded by count and tokens, with refusal of a predicted miss."""

    def admit(arrival: Arrival, door: DoorView, now_ns: int) -> Refusal | None:
        if door.waiting >= queue_max:
            text = f"{door.waiting} requests are waiting; the limit is {queue_max} (policy.queue_max)"
            return Refusal("queue_full", text, retry_after_ms(door))
        if door.waiting and door.waiting_tokens + arrival.tokens > queue_tokens_max:
            text = f"{door.waiting_tokens} input tokens are waiting; the limit is {queue_tokens_max} (queue_tokens_max)"
            return Refusal("queue_full", text, retry_after_ms(door))
        if arrival.deadline_ns is not None:
            return _too_late(arrival, door, now_ns)
        return None

    return admit


def _too_late(arrival: Arrival, door: DoorView, now_ns: int) -> Refusal | None:
    left_ns = (arrival.deadline_ns or 0) - now_ns
    if left_ns <= 0:
        return Refusal("deadline_exceeded", "deadline_ms was over when the request arrived")
    needed_ns = drain_ns(door) if door.waiting else 0.0
    if needed_ns > MISS_FACTOR * left_ns:
        text = f"about {needed_ns / 1e6:.0f} ms of work is waiting, and deadline_ms leaves {left_ns / 1e6:.0f}"
        return Refusal("deadline_unreachable", text, retry_after_ms(door))
    return None
