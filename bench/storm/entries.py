"""What the referee writes down: requests, workers, services, and what is owed for one step. No decisions, no laws."""

from dataclasses import dataclass, field

from headway.scheduler import events as ev

NEVER_NS = 1 << 62

Key = tuple[str, str]  # (model, kind)


@dataclass(eq=False)
class Asked:
    """A live request. `batch`, `worker`: 0 while it waits. `long`: None where that is the core's to learn, until it is
    dispatched. `length_class`: the power of two above its length, 0 where batches are not padded."""

    event: ev.Submit
    order: int
    arrived_ns: int
    long: bool | None
    length_class: int = 0
    batch: int = 0
    worker: int = 0
    losses: int = 0
    suspect: bool = False

    @property
    def rid(self) -> int:
        return self.event.rid

    @property
    def key(self) -> Key:
        return (self.event.model, self.event.kind)

    @property
    def deadline_ns(self) -> int:
        return NEVER_NS if self.event.deadline_ns is None else self.event.deadline_ns

    @property
    def tokens(self) -> int:
        return self.event.tokens

    @property
    def kv_max(self) -> int:
        """What it may need of a cache at most."""
        return self.event.tokens + self.event.max_new


@dataclass(eq=False)
class Member:
    """A registered worker. `seats`: (batch, rid) -> whether it still counts as a long input; `holds`: rid -> request;
    `kv_used` of `kv_total` tokens of its cache are taken, as it last said."""

    ready: ev.WorkerReady
    cap: int
    seen_ns: int
    progress_ns: int
    progress: int = 0
    trial: int = 0
    kv_used: int = 0
    kv_total: int = 0
    seats: dict[tuple[int, int], bool] = field(default_factory=dict)
    holds: dict[int, Asked] = field(default_factory=dict)

    @property
    def key(self) -> Key:
        return (self.ready.model, self.ready.kind)

    @property
    def room(self) -> int:
        """How many requests it can take now."""
        if self.trial:
            return 0
        if self.ready.iteration:
            return max(0, min(self.ready.max_batch, self.cap - len(self.seats)))
        return 0 if self.seats else self.ready.max_batch

    def kv_taken(self, *, at_most: bool) -> int:
        """How much of its cache those on it need: at least their inputs, at most all they may grow to."""
        seated = [self.holds[rid] for _, rid in self.seats]
        return max(self.kv_used, sum(asked.kv_max if at_most else asked.tokens for asked in seated))

    def surely_fits(self, asked: Asked) -> bool:
        """Whether its cache has room for it, whatever is guessed about answers."""
        return not self.kv_total or not self.seats or asked.kv_max <= self.kv_total - self.kv_taken(at_most=True)

    def of(self, batch: int) -> list[int]:
        """Who has a seat there in this batch."""
        return [rid for other, rid in self.seats if other == batch]

    def vacate(self, batch: int, rid: int) -> bool:
        """A seat is given back. Whether there was one."""
        if self.trial == rid and (batch, rid) in self.seats:
            self.trial = 0
        return self.seats.pop((batch, rid), None) is not None


@dataclass(eq=False)
class Place:
    """A service: whether anybody will come for those who wait, and whether its batches are padded."""

    abandoned_ns: int
    down: bool = False
    padded: bool = False


@dataclass(eq=False)
class Owed:
    """What the core must have answered to one step."""

    endings: dict[int, tuple[str, str, int]] = field(default_factory=dict)  # rid -> (code, finish, batch)
    refusals: dict[int, str] = field(default_factory=dict)
    drops: list[tuple[int, int, int]] = field(default_factory=list)
    forwards: list[tuple[tuple[int, int], ...]] = field(default_factory=list)
    restarts: list[int] = field(default_factory=list)
    made: list[tuple[Key, str, int]] = field(default_factory=list)  # (service, tenant, tokens generated)
    again: bool = False  # whether somebody runs again
