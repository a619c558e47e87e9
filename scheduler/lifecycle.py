"""The lives of a request and of a worker, as tables. A move that is not in the table raises, and nothing has changed.

The tests and the diagram in docs/design.md are made from these tables.
"""

MOVES: dict[str, dict[str, str]] = {
    # a request: state -> event -> next state
    "waiting": {
        "dispatch": "running",
        "finish": "ended",  # its answer was found complete just when its worker was lost
        "cancel": "ended",
        "expire": "ended",
        "give_up": "ended",  # no worker will come, or the drain is over
    },
    "running": {
        "finish": "ended",
        "fail": "ended",
        "cancel": "ended",
        "expire": "ended",
        "give_up": "ended",
        "requeue": "waiting",  # its worker was lost, or its batch failed in company
    },
    "ended": {},
}

WORKER_MOVES: dict[str, dict[str, str]] = {
    "ready": {"lose": "lost"},
    "lost": {},
}


class IllegalMoveError(Exception):
    """A move that the table does not know: a fault of the core itself."""


def move(state: str, event: str, table: dict[str, dict[str, str]] = MOVES) -> str:
    """The state after `event` in `state`. Raises IllegalMoveError if the table has no such move."""
    try:
        return table[state][event]
    except KeyError:
        raise IllegalMoveError(f"no move {event!r} from state {state!r}") from None
