"""Which experts each request's tokens went to: counts from the routers' own indices, small enough to send.

What the router modules of a few evenly spaced layers chose is kept; after the forward all of it is counted in a
handful of tensor operations on the device, one row for each request, and comes over in one copy. Counted is each
position of a text once: what is read again after a preemption, what lies in a cache already and what is padding is
not. With several devices the groups that are counted are devices, by the placement; with one they are the experts.

A model without routers is not watched, and costs nothing.
"""

import logging
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from msgspec import Struct

from headway.scheduler.link import COUNTS_MAX, Experts, Routed, pack_counts
from headway.scheduler.spec import ModelSpec
from headway.workers.packaged import LoadError
from headway.workers.routers import Routers, find_routers

log = logging.getLogger("headway.worker")

LAYERS_MAX = 8  # composing on one layer in three keeps nine tenths of the gain
REPORT_EVERY = 32  # decoded tokens between two reports of a request
COUNT_MAX = (1 << 16) - 1

Key = tuple[int, int]  # (batch, request), as the engine has them


class Share(NamedTuple):
    """One request's part of a forward: `tokens` from position `start`, of a text whose prompt ends at `prompt`."""

    key: Key
    start: int
    tokens: int
    prompt: int


class Tally:
    """What was counted of one request: so many positions of its text; its rows of the sums are found by `slot`."""

    __slots__ = ("counted", "decoded", "prompt_done", "prompt_tokens", "slot")

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.counted = 0
        self.prompt_tokens = self.decoded = 0
        self.prompt_done = False


class Telemetry:
    """Counts what `routers` chose and reports it. `devices`: how many share the experts, as `place` says.

    Without a placement equal runs of experts lie on each device. Raises LoadError if they do not divide.
    """

    def __init__(self, routers: Routers, device: Any, *, devices: int = 1, revision: str = "", shared: int = 0) -> None:
        self._routers, self._device = routers, device
        self._revision, self._shared = revision, shared
        self._tallies: dict[Key, Tally] = {}
        self._touched: dict[Key, Share] = {}
        self.critical = self.active = 0  # of the last forward: hottest groups' tokens, and experts used, over layers
        if routers.expert_count % devices:
            raise LoadError(f"{routers.expert_count} experts do not divide into expert_devices {devices}")
        slots = [list(range(routers.expert_count))] * routers.layers
        self.place(slots, devices, 0)

    def __repr__(self) -> str:
        return f"<Telemetry {self._routers!r} in {self.groups} groups, {len(self._tallies)} requests>"

    def place(self, slots: Sequence[Sequence[int]], devices: int, revision: int) -> None:
        """Experts have moved: `slots[layer][slot]` is the expert there, devices hold equal runs of slots.

        An expert may have several slots (replicas), which share its tokens equally. What is half counted is forgotten.
        Raises LoadError if the map does not fit the model.
        """
        experts, groups = self._routers.expert_count, devices if devices > 1 else self._routers.expert_count
        _check_slots(slots, self._routers, devices)
        if groups > COUNTS_MAX:
            raise LoadError(f"{groups} groups of experts do not fit in a report of {COUNTS_MAX} counts")
        self._routers.sample(min(LAYERS_MAX, COUNTS_MAX // groups))
        self.groups, self._placement, self._devices = groups, revision, devices
        share = torch.zeros(len(self._routers.sampled), experts, groups)
        for at, layer in enumerate(self._routers.sampled):
            row = slots[layer]
            for slot, expert in enumerate(row):
                share[at, expert, slot * devices // len(row) if devices > 1 else expert] += 1.0
        self._share = (share / share.sum(2, keepdim=True)).to(self._device)
        single = bool((self._share.amax(2) == 1.0).all())
        self._group = self._share.argmax(2) if single else None  # where no expert has replicas on several devices
        layers = len(self._routers.sampled)
        self._layer = torch.arange(layers, device=self._device)[:, None, None]
        self._sums = torch.zeros(0, layers, groups)
        self._free: list[int] = []
        self._tallies.clear()
        self._touched.clear()

    @property
    def card(self) -> Experts:
        """What the scheduler has to know of it."""
        return Experts(
            layers=self._routers.layers,
            sampled=self._routers.sampled,
            experts=self._routers.expert_count,
            top_k=self._routers.top_k,
            groups=self.groups,
            devices=self._devices,
            revision=self._revision,
            placement=self._placement,
            shared=self._shared,
        )

    def count(self, shares: Sequence[Share]) -> None:
        """Count the last forward, whose row of tokens was made of `shares`, in order."""
        indices = self._routers.take()
        self.critical = self.active = 0
        if indices is None:
            return
        owners, places = self._shared_out(shares)
        if len(owners) != indices.shape[1]:
            raise ValueError(f"{len(owners)} tokens were shared out, the routers saw {indices.shape[1]}")
        counts = self._counted(indices, torch.tensor(owners, device=self._device), len(places)).cpu()  # the one copy
        self._sum_up(counts)
        self._sums.index_add_(0, torch.tensor(list(places)), counts)

    def _shared_out(self, shares: Sequence[Share]) -> tuple[list[int], dict[int, int]]:
        """For each token its place among those rows of the sums that get any; row 0 is for what is not counted."""
        owners: list[int] = []
        places: dict[int, int] = {}
        for share in shares:
            tally = self._tallies.get(share.key) or self._new(share.key)
            self._touched[share.key] = share
            before = min(share.tokens, max(0, tally.counted - share.start))
            prompt = min(share.tokens - before, max(0, share.prompt - share.start - before))
            decoded = share.tokens - before - prompt
            row = 2 * tally.slot + 1
            for at, count in ((0, before), (row, prompt), (row + 1, decoded)):
                if count:
                    owners += [places.setdefault(at, len(places))] * count
            tally.prompt_tokens += prompt
            tally.decoded += decoded
            tally.counted = max(tally.counted, share.start + share.tokens)
        return owners, places

    def count_padded(self, mask: Any) -> Any:
        """Counts [requests, layers, groups] of a padded forward: `mask` [requests, tokens] is true where a token is.

        None if there was no forward. `critical` and `active` are of all that was computed, padding included.
        """
        indices = self._routers.take()
        self.critical = self.active = 0
        if indices is None:
            return None
        requests, width = mask.shape
        if requests * width != indices.shape[1]:
            raise ValueError(f"{requests} x {width} tokens are padded, the routers saw {indices.shape[1]}")
        owners = torch.arange(1, requests + 1, device=self._device)[:, None].expand(requests, width)
        owners = torch.where(mask.to(self._device).bool(), owners, 0).reshape(-1)
        counts = self._counted(indices, owners, requests + 1).cpu()
        self._sum_up(counts)
        return counts[1:]

    def report(self, batch: int, rid: int, tokens: int, counts: Any) -> Routed:
        """The report of one whole input, of `counts` [layers, groups] as they were counted."""
        packed, saturated = _packed(counts)
        return Routed(batch, rid, True, tokens, packed, saturated, self._placement)

    def stop(self) -> None:
        """Count nothing any more."""
        self._routers.stop()

    def _sum_up(self, counts: Any) -> None:
        """What the last forward asked for, all rows of `counts` [rows, layers, groups] together."""
        total = counts.sum(0)
        self.critical = int(total.amax(1).sum())
        self.active = int(torch.count_nonzero(total)) if self._devices == 1 else 0

    def take(self, live: Container[Key]) -> list[Routed]:
        """Reports that are due: prompts that were read, REPORT_EVERY decoded tokens, the rest of those not `live`."""
        due = []
        for key, share in self._touched.items():
            tally = self._tallies[key]
            if not tally.prompt_done and tally.counted >= share.prompt:
                tally.prompt_done = True
                due.append(self._report(key, tally, share, prompt=True))
            if tally.decoded and (tally.decoded >= REPORT_EVERY or key not in live):
                due.append(self._report(key, tally, share, prompt=False))
        self._touched.clear()
        for key in [key for key in self._tallies if key not in live]:
            self._free.append(self._tallies.pop(key).slot)
        return due

    def _counted(self, indices: Any, owners: Any, count: int) -> Any:
        """Sums [count, layers, groups] on the device: `owners` [tokens] says which row each token belongs to."""
        layers = len(self._routers.sampled)
        if self._group is not None:
            width, column = self.groups, self._group[self._layer, indices]
        else:
            width, column = self._routers.expert_count, indices
        flat = (owners[None, :, None] * layers + self._layer) * width + column
        sums = torch.zeros(count * layers * width, device=self._device)
        sums.scatter_add_(0, flat.reshape(-1), torch.ones(1, device=self._device).expand(flat.numel()))
        shaped = sums.view(count, layers, width)
        return shaped if self._group is not None else torch.einsum("cle,leg->clg", shaped, self._share)

    def _new(self, key: Key) -> Tally:
        if not self._free:
            count = len(self._sums) // 2
            self._free = list(range(count, 2 * count + 4))
            more = torch.zeros(2 * len(self._free) + (count == 0), *self._sums.shape[1:])
            self._sums = torch.cat([self._sums, more])
        self._tallies[key] = made = Tally(self._free.pop())
        return made

    def _report(self, key: Key, tally: Tally, share: Share, *, prompt: bool) -> Routed:
        row = self._sums[2 * tally.slot + (1 if prompt else 2)]
        tokens = tally.prompt_tokens if prompt else tally.decoded
        packed, saturated = _packed(row)
        report = Routed(
            batch=key[0],
            rid=key[1],
            prompt=prompt,
            tokens=tokens,
            counts=packed,
            saturated=saturated,
            placement=self._placement,
            cached=share.prompt - tokens if prompt else 0,
        )
        row.zero_()
        if not prompt:
            tally.decoded = 0
        return report


def _packed(counts: Any) -> tuple[bytes, bool]:
    """Counts as they travel, and whether one was larger than that allows."""
    whole = counts.round().clamp(max=COUNT_MAX).to(torch.int64).flatten().tolist()
    return pack_counts(whole), bool(counts.max() > COUNT_MAX)


def _check_slots(slots: Sequence[Sequence[int]], routers: Routers, devices: int) -> None:
    if len(slots) != routers.layers:
        raise LoadError(f"the expert placement has {len(slots)} layers, the model routes in {routers.layers}")
    for layer, row in enumerate(slots):
        if devices < 1 or not row or len(row) % devices:
            raise LoadError(f"layer {layer} of the expert placement has {len(row)} slots for {devices} devices")
        if missing := set(range(routers.expert_count)) ^ set(row):
            raise LoadError(
                f"layer {layer} of the expert placement: experts {sorted(missing)[:4]} are nowhere, or unknown"
            )


def watch(
    model: Any, device: Any, *, devices: int = 0, slots: Sequence[Sequence[int]] | None = None, placement: int = 0
) -> Telemetry | None:
    """Telemetry of `model`, or None if nothing in it routes tokens to experts.

    `devices`: over how many its experts lie; 0: as it was loaded, which is one unless it is expert-parallel.
    `slots`, `placement`: where, and the revision of that (see Telemetry.place).
    """
    routers = find_routers(model)
    if routers is None:
        return None
    config = model.config.get_text_config(decoder=True)
    counted = Telemetry(
        routers,
        device,
        devices=devices or _parallel(model),
        revision=str(getattr(model.config, "_commit_hash", None) or getattr(model, "name_or_path", "")),
        shared=int(getattr(config, "n_shared_experts", 0) or 0),
    )
    if slots is not None:
        counted.place(slots, devices or _parallel(model), placement)
    log.info("watching %r", counted)
    return counted


def routed(telemetry: Telemetry | None, live: Container[Key]) -> dict[str, Any]:
    """What a step's report says of experts; nothing for a model without any. `live`: requests that go on."""
    if telemetry is None:
        return {}
    return {"routed": telemetry.take(live), "critical": telemetry.critical, "active": telemetry.active}


class _PlacementFile(Struct, forbid_unknown_fields=True):
    slots: list[list[int]]
    revision: int = 0


def placement_of(spec: ModelSpec) -> dict[str, Any]:
    """What `watch` is to be told of `spec`. Raises LoadError if its placement file cannot be read.

    The file: {"slots": [[expert, ...], ...], "revision": 1}, as Telemetry.place wants them.
    """
    if not spec.expert_placement:
        return {"devices": spec.expert_devices}
    if not spec.expert_devices:
        raise LoadError("expert_placement says where experts lie; expert_devices must say on how many devices")
    try:
        found = msgspec.json.decode(Path(spec.expert_placement).expanduser().read_bytes(), type=_PlacementFile)
    except (OSError, msgspec.MsgspecError) as error:
        raise LoadError(f"cannot read expert_placement {spec.expert_placement}: {error}") from error
    return {"devices": spec.expert_devices, "slots": found.slots, "placement": found.revision}


def _parallel(model: Any) -> int:
    """Devices that a model's experts were spread over when it was loaded."""
    found = getattr(model.config, "distributed_config", None)
    return int(getattr(found, "ep_size", 0) or 1)
