"""From an operator's settings to the policies the core asks."""

from collections.abc import Sequence
from typing import Any

from headway.policies.admit import bounded
from headway.policies.forecast import ExpertFacts
from headway.policies.order import due_time
from headway.policies.place import least_loaded
from headway.policies.size import by_cost, largest
from headway.policies.views import BYPASS_AUTO, Policies
from headway.scheduler import clock
from headway.scheduler.spec import ModelSpec, PolicySpec
from headway.scheduler.windows import window_of


def expert_aware(facts: ExpertFacts) -> Any:
    """The policy of a service whose model has experts. Needs numpy, which only this needs."""
    from headway.policies.experts.policy import ExpertAware

    return ExpertAware.of(facts, stopwatch=clock.cpu_ns)


def policies_of(spec: PolicySpec, models: Sequence[ModelSpec] = ()) -> Policies:
    """The policies an operator asked for; a model may have its own window. Raises ConfigError for one that is none."""
    return Policies(
        admit=bounded(queue_max=spec.queue_max, queue_tokens_max=spec.queue_tokens_max),
        order=due_time,
        window_of=window_of(spec, models),
        place=least_loaded,
        size=by_cost if spec.batch_size == "cost" else largest,
        bypass_tokens=BYPASS_AUTO if spec.bypass_tokens == "auto" else spec.bypass_tokens,
        batch_tokens_max=spec.batch_tokens_max,
        experts=None if spec.expert_aware == "off" else expert_aware,
        tenant_weights=spec.tenant_weights,
        long_concurrency=spec.long_concurrency,
        in_flight_fraction=spec.in_flight_fraction,
        poison_after=spec.poison_after,
    )
