"""Processes that are measured: what a whole tree of them has computed and how much memory is theirs, as Linux says.

Memory is proportional: a page shared by two workers counts half for each, so that sums mean something.
"""

import os
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def tree(pid: int) -> list[int]:
    """`pid` and all its descendants that are alive."""
    found = [pid]
    for one in found:
        for children in Path(f"/proc/{one}/task").glob("*/children"):
            try:
                found += [int(child) for child in children.read_text().split()]
            except OSError:
                continue
    return found


def cpu_s(pid: int) -> float:
    """CPU seconds of the tree, user and system."""
    total = 0
    for one in tree(pid):
        try:
            fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += int(fields[11]) + int(fields[12])
    return total / TICKS_PER_S


def memory_mib(pid: int) -> int:
    """Proportional memory of the tree."""
    kib = 0
    for one in tree(pid):
        try:
            lines = Path(f"/proc/{one}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        kib += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return kib >> 10
