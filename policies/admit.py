"""May it in: bounded by waiting requests and waiting tokens, and refused at the door when it cannot be in time.

Refusing early is the kind thing to do: the client learns at once, with a hint when to come back, and no device time
goes into an answer that nobody waits for any more. A prediction is made only from a learned cost, and only a clear
miss (by more than half) refuses: a wrong refusal costs more than a late answer.
"""

from headway.policies.views import Admit, Arrival, DoorView, Refusal

MISS_FACTOR = 1.5  # predicted time may exceed the time left by this before the door closes
RETRY_MS_MIN, RETRY_MS_MAX = 20, 30_000


def drain_ns(door: DoorView) -> float:
    """How long until all that waits has begun, by the learned cost; 0 while nothing is known."""
    if not door.cost.known or not door.workers:
        return 0.0
    if door.rows_max:  # rows become free one by one: each is taken for the length of an answer
        ahead = max(0, door.waiting + door.running + 1 - door.rows_max)
        return ahead / door.rows_max * door.answer_mean * _step_ns(door, door.rows_max)
    batches = -(-door.waiting // door.max_batch)
    return (
        door.cost.a_ns * batches + door.cost.m_ns * door.waiting + door.cost.b_ns * door.waiting_tokens
    ) / door.workers


def _step_ns(door: DoorView, rows: int) -> float:
    """One step with so many rows over all workers: each row is one token of one request."""
    each = rows / door.workers
    return door.cost.a_ns + (door.cost.b_ns + door.cost.m_ns) * each


def _run_ns(arrival: Arrival, door: DoorView) -> float:
    """What the request itself takes once it runs, if it is generation; a one-shot batch is part of the drain."""
    if not door.rows_max or not door.cost.known or not door.workers:
        return 0.0
    rows = min(door.rows_max, door.running + door.waiting + 1)
    return door.cost.b_ns * arrival.tokens + min(arrival.max_new, door.answer_least) * _step_ns(door, rows)


def retry_after_ms(door: DoorView) -> int:
    """When a quarter of the queue will have gone: time for room to appear, without everybody coming back together."""
    return int(min(RETRY_MS_MAX, max(RETRY_MS_MIN, drain_ns(door) / 4e6)))


def bounded(*, queue_max: int, queue_tokens_max: int) -> Admit:
    """The default: bounded by count and tokens, with refusal of a predicted miss."""

    def admit(arrival: Arrival, door: DoorView, now_ns: int) -> Refusal | None:
        if door.waiting >= queue_max:
            text = f"{door.waiting} requests are waiting; the limit is {queue_max} (policy.queue_max)"
            return Refusal("queue_full", text, retry_after_ms(door), "queue_max")
        if door.waiting and door.waiting_tokens + arrival.tokens > queue_tokens_max:
            text = f"{door.waiting_tokens} input tokens are waiting; the limit is {queue_tokens_max} (queue_tokens_max)"
            return Refusal("queue_full", text, retry_after_ms(door), "queue_tokens_max")
        if arrival.deadline_ns is not None:
            return _too_late(arrival, door, now_ns)
        return None

    return admit


def _too_late(arrival: Arrival, door: DoorView, now_ns: int) -> Refusal | None:
    left_ns = (arrival.deadline_ns or 0) - now_ns
    if left_ns <= 0:
        return Refusal("deadline_exceeded", "deadline_ms was over when the request arrived", None, "deadline_over")
    waits_ns = drain_ns(door) if door.waiting else 0.0
    runs_ns = _run_ns(arrival, door)
    if waits_ns + runs_ns <= MISS_FACTOR * left_ns:
        return None
    work = f"about {waits_ns / 1e6:.0f} ms of work is waiting"
    if runs_ns:
        work += f", an answer takes about {runs_ns / 1e6:.0f} ms"
    text = f"{work}, and deadline_ms leaves {left_ns / 1e6:.0f}"
    return Refusal("deadline_unreachable", text, retry_after_ms(door), "predicted_miss")
