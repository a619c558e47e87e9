"""What was measured, as a person reads it; the profile as a file."""

from collections.abc import Sequence
from pathlib import Path

import yaml
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from headway.bench.tune.measure import Tried
from headway.scheduler.profile import Profile

HEAD = """# What `headway tune` measured. Name it in a model's `profile`; what the model's own keys say wins over it.
"""


def shown(tried: Sequence[Tried], profile: Profile) -> Group:
    """A row for each batch size at each length, and what follows."""
    generates = any(one.read_ms for one in tried)
    table = Table(title=f"{profile.model}: what batches cost here", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    columns = ["tokens", "at once", "step ms" if generates else "batch ms", "tokens/s" if generates else "requests/s"]
    for name in columns + (["reading all, ms"] if generates else []):
        table.add_column(name, justify="right")
    table.add_column("")
    for one in sorted(tried, key=lambda one: (one.tokens, one.requests)):
        cells = [str(one.tokens), str(one.requests)]
        cells += [f"{one.took_ms:.1f}", f"{one.rate:,.1f}"] if one.ended == "ok" else ["", ""]
        if generates:
            cells.append(f"{one.read_ms:,.0f}" if one.read_ms else "")
        table.add_row(*cells, "" if one.ended == "ok" else one.ended.replace("_", " "))
    return Group(table, Text("\n".join(f"- {reason}" for reason in profile.reasons)))


def write_profile(path: Path, profile: Profile) -> None:
    """As `scheduler/profile.py` reads it."""
    text = yaml.safe_dump(
        profile.model_dump(mode="json", exclude_none=True), sort_keys=False, width=120, allow_unicode=True
    )
    path.write_text(HEAD + text)
