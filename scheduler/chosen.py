"""From an operator's settings to the policies the core asks."""

from headway.policies.admit import bounded
from headway.policies.order import due_time
from headway.policies.place import least_loaded
from headway.policies.views import Policies, WindowChoice
from headway.policies.windows import WindowSettings, make
from headway.scheduler import clock
from headway.scheduler.spec import PolicySpec


def policies_of(spec: PolicySpec) -> Policies:
    """The policies an operator asked for."""
    given = WindowSettings(
        cap_ns=int(spec.max_wait_cap_ms * clock.NS_PER_MS),
        fixed_ns=int(spec.fixed_wait_ms * clock.NS_PER_MS),
        target_ns=int(spec.aimd_target_ms * clock.NS_PER_MS),
    )

    def window_of(model: str, kind: str) -> WindowChoice:
        del model, kind
        return make(spec.window, given)

    return Policies(
        admit=bounded(queue_max=spec.queue_max, queue_tokens_max=spec.queue_tokens_max),
        order=due_time,
        window_of=window_of,
        place=least_loaded,
        bypass_tokens=spec.bypass_tokens,
        long_concurrency=spec.long_concurrency,
        in_flight_fraction=spec.in_flight_fraction,
        poison_after=spec.poison_after,
    )
