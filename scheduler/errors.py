"""What can go wrong, as a table: whose fault it is, whether trying again helps, and the equivalent HTTP status.

`CODES` is the single source; the protocol document and its test are made from it. Every error a client sees is one of
these codes plus a sentence that says what happened and what to do next.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Code:
    """One kind of failure. `retryable`: the same request may succeed later without being changed."""

    http: int
    retryable: bool
    meaning: str


CODES: dict[str, Code] = {
    "invalid_request": Code(400, False, "a field is missing, unknown, of the wrong type or outside its limits"),
    "unsupported_version": Code(400, False, "the message names a protocol version that this server does not speak"),
    "too_large": Code(413, False, "the message has more bytes than the server takes"),
    "too_long": Code(413, False, "the input, or the input plus the wanted output, exceeds the model's limit"),
    "unknown_model": Code(404, False, "no such model here, or none that serves this kind of request"),
    "duplicate_id": Code(409, False, "this client already has a live request with this id"),
    "queue_full": Code(429, True, "the server has as much waiting work as it accepts"),
    "expert_saturated": Code(
        429, True, "the devices of the experts that it needs have as much work as they can do in time"
    ),
    "deadline_unreachable": Code(503, True, "the request was predicted to miss its deadline, so it was not started"),
    "deadline_exceeded": Code(504, False, "the deadline passed before the answer was complete"),
    "cancelled": Code(499, False, "the client cancelled the request, or went away"),
    "slow_reader": Code(408, False, "the client does not read its answers as fast as they are made"),
    "shutting_down": Code(503, True, "the server is draining and takes no new work"),
    "no_worker": Code(503, True, "no worker is there to run this request, and none is expected soon"),
    "worker_lost": Code(503, True, "the worker running the request was lost, and it could not be run elsewhere"),
    "poison_request": Code(500, False, "the request was running on every worker lost to it; it is not tried again"),
    "out_of_memory": Code(503, True, "the worker ran out of memory even for this request alone"),
    "engine_error": Code(500, False, "the model or the user's engine raised an error for this request"),
    "internal": Code(500, False, "a fault of headway itself; please report it"),
    "unreachable": Code(503, True, "the client library could not reach the server (never sent by a server)"),
}


def known(code: str) -> str:
    """`code` if it is one of CODES; a worker or an engine of somebody's own may say anything: engine_error then."""
    return code if code in CODES else "engine_error"


class HeadwayError(Exception):
    """An error with a stable code. Raised by the client library and the embedded scheduler.

    Attributes: `code` (a key of CODES), `message`, `field` (the field at fault, dotted, or None), `retryable`,
    `retry_after_ms` (a hint, or None), `http` (the equivalent status), `partial` (what was answered before the error:
    a map with `text` and `token_ids`, or None).
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        field: str | None = None,
        retry_after_ms: int | None = None,
        partial: dict[str, object] | None = None,
    ) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.field = field
        self.retry_after_ms = retry_after_ms
        self.partial = partial

    @property
    def retryable(self) -> bool:
        return CODES[self.code].retryable if self.code in CODES else False

    @property
    def http(self) -> int:
        return CODES[self.code].http if self.code in CODES else 500
