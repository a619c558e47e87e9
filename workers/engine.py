"""The engine protocol: what a worker needs of whatever it runs.

Describe yourself, add work, cancel, step, report. One-shot models, iteration-level generation and a user's own Python
callable are all engines; the scheduler knows only costs and counts. An engine is used from one thread.
"""

from collections.abc import Sequence
from typing import Protocol

from headway.scheduler.link import Card, Done, Failed, Item, Step

Report = Done | Failed | Step


class Engine(Protocol):
    """What the worker process drives.

    `add` takes ownership of a batch's items: each owes one ending in a later report (a Done with its Outcome, a Failed
    that names its batch, or a Row with a finish). `cancel` may only hurry that ending along; unknown ids are ignored.
    `step` does one bounded piece of work, or nothing if not busy, and must not raise for a fault of a request:
    that is reported. An exception from `step` means the engine is broken and ends the worker.
    """

    @property
    def card(self) -> Card: ...

    @property
    def busy(self) -> bool: ...

    def add(self, batch: int, items: Sequence[Item]) -> None: ...

    def cancel(self, batch: int, rids: Sequence[int]) -> None: ...

    def step(self) -> list[Report]: ...

    def close(self) -> None: ...
