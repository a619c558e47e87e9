"""What `status` says, as metrics in Prometheus' terms: stable names, seconds, counters that only grow, a sentence each.

Here one reply becomes metric families; who asks for it, and who serves them, is the command's business (`headway
metrics`). Every number of a reply becomes a sample, also one that is not in the tables below: a newer server's. Lists
of events (the last batches) are no metrics. Imports prometheus_client, an extra: nothing else imports this file.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from headway.scheduler import wire

STATES = ("serving", "draining", "failed")
UNITS = {"_ms": 1e-3, "_us": 1e-6, "_s": 1.0}  # how keys of status end, in seconds

PARTED = {  # counters "<what>.<which>": name, label, meaning
    "ended": ("requests_ended", "code", "Endings of requests that were taken in: ok, or an error code."),
    "refused": ("requests_refused", "code", "Requests refused at the door, by error code."),
    "refusal": ("refusals", "reason", "Requests refused at the door, by what exactly they met."),
    "launched": ("batches_launched", "reason", "Batches, by why they were launched."),
    "held": ("lane_holds", "reason", "How often a lane began to wait, by reason."),
    "placed": ("batches_placed", "reason", "Batches, by why they went to their worker."),
    "tokens": ("oneshot_tokens", "part", "Tokens of one-shot batches: input, and computed with padding included."),
}
COUNTERS = {
    "received": "Requests that reached the core.",
    "deferred": "Requests held at the door and tried once more.",
    "first_tokens": "Requests that began to be answered.",
    "batches": "Batches launched.",
    "batches_failed": "Batches that failed together.",
    "requeued": "Requests that ran again after a failed batch or a lost worker.",
    "memory_shortages": "Times that memory ran out in a batch or step.",
    "prefix_tokens": "Input tokens that were not read again, as a text of the same tenant began alike.",
    "compute_us": "Time that engines say they computed, in all workers.",
    "workers_joined": "Registrations of workers.",
    "workers_lost": "Workers that were lost.",
    "late_reports": "Reports about what is over.",
    "late_rows": "Rows of steps about what is over.",
    "late_cancels": "Cancels of what is over.",
    "bad_messages": "Messages from clients that made no sense.",
    "bad_link_messages": "Messages from workers that made no sense.",
    "full_clients": "Clients whose queue was full.",
    "slow_readers": "Clients that were over their outbox.",
    "undelivered": "Answers that nobody could be given.",
    "window_faults": "Times that a window of the operator's own raised or made no sense.",
    "identity_taken_over": "Connections that took another's routing id.",
}
LANES = {
    "waiting": "Requests that wait.",
    "waiting_tokens": "Their input tokens.",
    "oldest_ms": "How long the oldest has waited.",
    "window_ms": "The effective window: how long a request that comes now would wait for others.",
    "waits_ms": "How long the open window still lasts.",
    "longest_ms": "The longest wait that can pay.",
    "intervals": "Intervals between arrivals that are known.",
    "censored": "Those of them that are idle gaps.",
    "censored_share": "Their share.",
    "interval_p95_ms": "P95 of all intervals.",
    "rule_ms": "The raw rule: 1.5 times that.",
    "cost_fixed_ms": "Learned cost of a batch or step: fixed.",
    "cost_per_token_ms": "Learned cost of a batch or step: of a token.",
    "cost_per_request_ms": "Learned cost of a batch or step: of a request.",
    "cost_known": "Whether the cost has been measured.",
}
WORKERS = {
    "pid": "Process id; 0 on another machine.",
    "running": "Requests that it runs.",
    "cap": "Requests that it takes at once.",
    "failures": "Failed batches in a row.",
    "kv_used": "Tokens of its KV cache that are taken.",
    "kv_total": "Tokens of its KV cache.",
}
EXPERTS = {
    "layers": "Sampled layers that are reported.",
    "groups": "Groups of experts that are counted: devices, or the experts themselves on one device.",
    "grouping": "Whether similar requests are grouped, as all experts lie on one device.",
    "devices": "Devices that share the experts.",
    "experts": "Experts of a layer.",
    "placement": "Revision of where experts lie.",
    "r2": "Share of the requests' deviations that was predicted one step ahead.",
    "surprise": "Mean relative error of a prediction before it was learned from.",
    "rows_used": "Rows of the predictor that some token has reached.",
    "memory_bytes": "Memory of the predictor.",
    "imbalance_fifo": "Hottest device over mean of batches first come, first served, lately.",
    "imbalance_composed": "Hottest device over mean of composed batches, lately.",
    "imbalance_predicted": "The same of composed batches, as it was forecast.",
    "gain": "How much less the expert part of a step takes where batches are composed.",
    "hot_device_share": "Share of the waiting work that is on the hottest device.",
    "step_error": "Mean relative error of predicted steps.",
    "pad_share": "Share of padding in the tokens of one-shot batches, lately.",
    "compose_s": "CPU time of choosing one batch, lately.",
    "retry_after_s": "When those who were refused were told to come back, lately.",
}
EXPERT_COUNTERS = {
    "reports": ("predictor_reports", "Reports that the predictor has learned from."),
    "reports_dropped": ("reports_dropped", "Reports that came too fast, or were of another placement; of all models."),
    "changes": ("predictor_changes", "Times that reports said the model had changed."),
}
EXPERT_PARTS = {
    "batches": ("batches", "Batches, by why these requests: composed, grouped, or why as they came."),
    "door": ("door", "Arrivals that were priced, by verdict."),
    "forced": ("forced", "Requests that went first because they were overdue."),
    "reports": ("reports", "Reports of requests that came."),
}


class Sheet:
    """Metric families by name; samples of one family have the same labels."""

    def __init__(self) -> None:
        self.families: dict[str, Metric] = {}

    def gauge(self, name: str, words: str, value: float, labels: Mapping[str, str]) -> None:
        """One sample of what may rise and fall."""
        family = self.families.setdefault(name, GaugeMetricFamily(name, words, labels=list(labels)))
        assert isinstance(family, GaugeMetricFamily)
        family.add_metric(list(labels.values()), float(value))

    def counter(self, name: str, words: str, value: float, labels: Mapping[str, str]) -> None:
        """One sample of what only grows while the server lives; its name gets `_total`."""
        family = self.families.setdefault(name, CounterMetricFamily(name, words, labels=list(labels)))
        assert isinstance(family, CounterMetricFamily)
        family.add_metric(list(labels.values()), float(value))

    def histogram(
        self, name: str, words: str, counts: Mapping[str, int], total: float, labels: Mapping[str, str]
    ) -> None:
        """`counts`: in each bucket alone, by its upper end; the last end is +Inf, whatever it is called."""
        family = self.families.setdefault(name, HistogramMetricFamily(name, words, labels=list(labels)))
        assert isinstance(family, HistogramMetricFamily)
        so_far, buckets = 0, []
        for at, (end, count) in enumerate(counts.items(), 1):
            so_far += count
            buckets.append(("+Inf" if at == len(counts) else str(float(end)), float(so_far)))
        family.add_metric(list(labels.values()), buckets, total)

    def numbers(self, prefix: str, row: Mapping[str, Any], words: Mapping[str, str], labels: Mapping[str, str]) -> None:
        """A gauge for each number of a row."""
        for key, value in row.items():
            if isinstance(value, (bool, int, float)):
                name, scale = _named(key)
                self.gauge(f"{prefix}_{name}", words.get(key) or _words(key), value * scale, labels)


def families(reply: wire.StatusReply | None) -> Iterator[Metric]:
    """All metrics of a server's reply; None: it did not answer in time, and `headway_up` is 0."""
    sheet = Sheet()
    sheet.gauge("headway_up", "Whether the server answered in time.", float(reply is not None), {})
    if reply is not None:
        sheet.gauge("headway_uptime_seconds", "Since the server started.", reply.uptime_s, {})
        for state in dict.fromkeys((*STATES, reply.state)):
            sheet.gauge("headway_state", "1 for the state it is in.", float(state == reply.state), {"state": state})
        _counters(sheet, "headway", reply.counters)
        for lane in reply.lanes:
            _lane(sheet, lane)
        for worker in reply.workers:
            _worker(sheet, worker)
    yield from sheet.families.values()


def _named(key: str) -> tuple[str, float]:
    """A key of status as a metric's name, and what its value is to be multiplied with."""
    for ending, scale in UNITS.items():
        if key.endswith(ending):
            return f"{key.removesuffix(ending)}_seconds", scale
    return key, 1.0


def _words(key: str) -> str:
    """What is said of a number that the tables do not know."""
    return f"`{key}` of status."


def _counters(sheet: Sheet, prefix: str, counters: Mapping[str, int]) -> None:
    for key, count in counters.items():
        what, _, which = key.partition(".")
        if which:
            name, label, words = PARTED.get(what, (what, "reason", _words(what)))
            sheet.counter(f"{prefix}_{name}", words, count, {label: which})
            continue
        name, scale = _named(key)
        sheet.counter(f"{prefix}_{name}", COUNTERS.get(key) or _words(key), count * scale, {})


def _lane(sheet: Sheet, lane: Mapping[str, Any]) -> None:
    labels = {name: str(lane.get(name, "")) for name in ("model", "kind", "lane")}
    sheet.numbers("headway_lane", lane, LANES, labels)
    window = labels | {"window": str(lane.get("window", ""))}
    sheet.gauge("headway_lane_window", "1 for the window that the lane has.", 1.0, window)
    if held := lane.get("held"):
        sheet.gauge("headway_lane_held", "1 for why its first is not running.", 1.0, labels | {"reason": str(held)})
    if isinstance(experts := lane.get("experts"), Mapping):
        _experts(sheet, experts, {name: labels[name] for name in ("model", "kind")})


def _worker(sheet: Sheet, worker: Mapping[str, Any]) -> None:
    labels = {name: str(worker.get(name, "")) for name in ("worker", "model", "kind")}
    row = {key: value for key, value in worker.items() if key != "progress"}
    sheet.numbers("headway_worker", row, WORKERS, labels)
    sheet.counter("headway_worker_progress", "Grows while it works.", worker.get("progress", 0), labels)


def _experts(sheet: Sheet, experts: Mapping[str, Any], labels: dict[str, str]) -> None:
    """What is known of a mixture-of-experts model."""
    row = {key: value for key, value in experts.items() if key not in EXPERT_COUNTERS}
    sheet.numbers("headway_moe", row, EXPERTS, labels)
    for key, (name, words) in EXPERT_COUNTERS.items():
        if key in experts:
            sheet.counter(f"headway_moe_{name}", words, experts[key], labels)
    for key, count in experts.get("counters", {}).items():
        what, _, which = key.partition(".")
        name, words = EXPERT_PARTS.get(what, (what, _words(what)))
        sheet.counter(f"headway_moe_{name}", words, count, labels | ({"reason": which} if which else {}))
    for device, seconds in enumerate(experts.get("device_backlog_s", ())):
        words = "What waits for each device."
        sheet.gauge("headway_moe_device_backlog_seconds", words, seconds, labels | {"device": str(device)})
    for tenant, share in experts.get("tenant_dominant_share", {}).items():
        words = "The largest tenants' shares of the device that each uses most."
        sheet.gauge("headway_moe_tenant_dominant_share", words, share, labels | {"tenant": tenant})
    for one in experts.get("shed", ()):
        who = labels | {"tenant": str(one["tenant"]), "reason": str(one["reason"])}
        sheet.counter(
            "headway_moe_shed", "Requests refused for their experts, of the tenants with most.", one["count"], who
        )
    if sampled := experts.get("sampled_layers"):
        words = "1 for each layer whose routing is reported."
        for layer in sampled:
            sheet.gauge("headway_moe_sampled_layer", words, 1.0, labels | {"layer": str(layer)})
    for policy, spread in experts.get("imbalance", {}).items():
        words = "Hottest device over mean, of batches by their true counts."
        sheet.histogram("headway_moe_imbalance", words, spread["counts"], spread["sum"], labels | {"policy": policy})
    if passed := experts.get("passed_over"):
        counts = {str(end): passed.get(str(end), 0) for end in range(max(map(int, passed)) + 1)}
        total = sum(int(end) * count for end, count in counts.items())
        words = "By how many batches' worth of younger requests those who ran were overtaken."
        sheet.histogram("headway_moe_pass_overs", words, counts | {"more": 0}, float(total), labels)
