"""Real expert parallelism: two processes of Transformers' own plan, on CPUs, one-sided batches against mixed ones.

    python -m headway.bench.experts.parallel MODEL_FOLDER RECORDING.npz [--texts 16] [--rounds 3]

Each rank holds half of the experts and half of each batch; tokens go to their experts and back by all-to-all over gloo.
Batches are made of recorded documents: those that load the first rank most, those that load the second most, and both
mixed, as the composer would. What counts is the CPU time of each rank's thread inside its experts: a step waits for the
larger. Also checked: what telemetry counts on the ranks is what a model that lies on one device counts.

Needs torch, transformers and accelerate (which loading by such a plan imports).
"""

import argparse
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from headway.bench.experts.routings import Routed, recorded
from headway.policies.experts.placement import contiguous
from headway.scheduler import clock

RANKS = 2
TOKENS = 128
TIMEOUT_S = 600


class Found(NamedTuple):
    """CPU milliseconds inside the experts, [batch][rank]: one-sided batches, and the same texts mixed."""

    one_sided: list[list[float]]
    mixed: list[list[float]]
    shares: list[float]  # of tokens that go to the first rank, in each of the four batches, as recorded
    counted_right: bool

    @property
    def saved(self) -> float:
        """Share of the critical path that mixing saves."""
        return 1.0 - sum(max(one) for one in self.mixed) / sum(max(one) for one in self.one_sided)


def pick(path: Path, texts: int) -> tuple[list[Routed], list[list[int]], list[float]]:
    """Documents, four batches of their indices (first-heavy, second-heavy, two mixed), and the first rank's shares."""
    routings = recorded(path)
    long = [one for one in routings.all if one.tokens >= TOKENS]
    layers, experts = long[0].counts.shape
    placement = contiguous(layers, experts, RANKS)
    loads = [placement.project(one.counts) for one in long]
    order = np.argsort([-float(load[:, 0].sum() / load.sum()) for load in loads], kind="stable")
    heavy, light = [int(at) for at in order[:texts]], [int(at) for at in order[-texts:]]
    half = texts // 2
    batches = [heavy, light, heavy[:half] + light[:half], heavy[half:] + light[half:]]
    shares = [
        float(sum(loads[at][:, 0].sum() for at in batch) / sum(loads[at].sum() for at in batch)) for batch in batches
    ]
    return long, batches, shares


def measure(model: Path, path: Path, *, texts: int = 16, rounds: int = 3) -> Found:
    """Run both ranks. Raises RuntimeError with what a rank said if one fails."""
    long, batches, shares = pick(path, texts)
    ids = [[long[at].ids[:TOKENS].tolist() for at in batch] for batch in batches]
    task = json.dumps({"model": str(model), "rounds": rounds, "batches": ids})
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "headway.bench.experts.parallel", "--rank"],
            env=os.environ | where | {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.write(task)
            rank.stdin.close()
            rank.stdin = None
        said = [rank.communicate(timeout=TIMEOUT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for rank, (_, error) in zip(ranks, said, strict=True):
        if rank.returncode:
            raise RuntimeError(f"a rank failed: {error[-2000:]}")
    told = [json.loads(out.splitlines()[-1]) for out, _ in said]
    times = [[one["ms"][batch] for one in told] for batch in range(len(batches))]
    return Found(times[:2], times[2:], shares, all(one["counted_right"] for one in told))


def run_rank(task: dict[str, Any]) -> dict[str, Any]:
    """One rank: the fastest of `rounds` for each batch, and whether its counts are those of the model alone."""
    import torch
    import torch.distributed
    import transformers
    from transformers.distributed import DistributedConfig

    from headway.workers.routing import watch

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    load = transformers.AutoModelForCausalLM.from_pretrained
    spread = DistributedConfig(fsdp_size=RANKS, ep_size=RANKS)
    model = load(task["model"], dtype=torch.float32, distributed_config=spread).eval()
    alone = load(task["model"], dtype=torch.float32).eval()
    spent = _time_experts(model)
    telemetry, reference = (
        watch(model, torch.device("cpu"), devices=RANKS),
        watch(alone, torch.device("cpu"), devices=RANKS),
    )
    assert telemetry is not None
    assert reference is not None
    right, best = True, []
    for batch in task["batches"]:
        mine = torch.tensor(batch[rank::RANKS])
        mask, times = torch.ones_like(mine), []
        for _ in range(task["rounds"]):
            spent.clear()
            with torch.no_grad():  # sharded weights are put together in the forward: no inference tensors
                model(mine, use_cache=False)
            times.append(sum(spent))
        counts = telemetry.count_padded(mask)
        with torch.no_grad():
            alone(mine, use_cache=False)
        right = right and bool((counts == reference.count_padded(mask)).all())
        best.append(min(times) / clock.NS_PER_MS)
    torch.distributed.destroy_process_group()
    return {"ms": best, "counted_right": right}


def _time_experts(model: Any) -> list[int]:
    """A list that grows by the CPU nanoseconds of each call of a layer's experts' own computation."""
    spent: list[int] = []
    began: list[int] = []
    for module in model.modules():
        if type(module).__name__.endswith("Experts"):
            module.register_forward_pre_hook(lambda *_: began.append(clock.cpu_ns()), prepend=True)
            module.register_forward_hook(lambda *_: spent.append(clock.cpu_ns() - began.pop()))
    return spent


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and print. Returns the exit code: 1 if mixing saves less than 8%."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("recording", type=Path, nargs="?")
    parser.add_argument("--texts", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.rank:
        print(json.dumps(run_rank(json.load(sys.stdin))))
        return 0
    if args.model is None or args.recording is None:
        parser.error("say which model and which recording of its routing")
    found = measure(args.model, args.recording, texts=args.texts, rounds=args.rounds)
    for name, times in (("one-sided", found.one_sided), ("mixed", found.mixed)):
        print(f"{name}: " + ", ".join(" / ".join(f"{ms:.1f}" for ms in ranks) for ranks in times) + " ms on the ranks")
    print("share of the first rank, as recorded: " + ", ".join(f"{share:.3f}" for share in found.shares))
    print(f"telemetry counts what one device counts: {'yes' if found.counted_right else 'NO'}")
    print(f"mixing saves {found.saved:.1%} of the experts' critical path")
    return 0 if found.saved >= 0.08 and found.counted_right else 1


if __name__ == "__main__":
    sys.exit(main())
