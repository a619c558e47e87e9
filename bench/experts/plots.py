"""Pictures of what composing does: each batch's hottest device before and after, and the devices' shares."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from headway.bench.experts.composition import Composed
from headway.bench.sim.plots import figure

BATCHES_SHOWN = 120


def draw(
    path: Path, title: str, runs: Mapping[int, Mapping[str, Composed]], curves: Mapping[str, Sequence[float]]
) -> None:
    """One panel for each mean burst length in `runs`, one of device shares, one of learning `curves`.

    `curves`: name -> R2 after each mark; the marks are under "requests".
    """
    picture, axes = figure(len(runs) + 2)
    for axis, (burst, by_policy) in zip(axes, runs.items(), strict=False):
        for policy in ("fifo", "ours"):
            axis.plot(by_policy[policy].hottest[:BATCHES_SHOWN], label=policy, linewidth=1)
        axis.set(title=f"runs of {burst}", xlabel="batch", ylabel="hottest device over mean", ylim=(1.0, None))
        axis.legend()
    shares, learning = axes[len(runs)], axes[len(runs) + 1]
    by_policy = runs[max(runs, key=lambda burst: burst if burst <= 16 else 0)]
    devices = len(by_policy["fifo"].share)
    for offset, policy in ((-0.2, "fifo"), (0.2, "ours")):
        shares.bar(np.arange(devices) + offset, by_policy[policy].share * devices, 0.4, label=policy)
    shares.axhline(1.0, color="black", linewidth=0.8)
    shares.set(title="before and after", xlabel="device, hottest first", ylabel="load over mean, one layer")
    shares.legend()
    for name, values in curves.items():
        if name != "requests":
            learning.plot(curves["requests"], values, marker=".", label=name)
    learning.set(title="learning", xlabel="reports", ylabel="held-out R²", xscale="log", ylim=(0.0, 1.0))
    learning.legend()
    picture.suptitle(title)
    picture.savefig(path)
