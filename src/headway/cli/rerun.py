"""`headway rerun`: a flight record through another policy or version, up to the first decision that differs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.cli.exits import USAGE, exits, teach
from headway.cli.flags import with_flags
from headway.cli.show import console

if TYPE_CHECKING:
    from headway.bench.replay.rerun import Rerun
    from headway.scheduler.actions import Action

RERUN = teach(
    "Run a server's flight record (key flight_record) again, and show the first decision that differs.",
    "With flags of the policy, the policy as recorded against the same with these changes. Without, what the recorded "
    "version decided against what this version decides.",
    examples=[
        "headway serve --flight-record flight.msgpack",
        "headway rerun flight.msgpack --window greedy",
        "headway rerun flight.msgpack",
    ],
)


@with_flags("Policy")
def rerun(
    record: Annotated[Path, typer.Argument(metavar="FILE", help="what a server wrote to its flight_record")],
    session: Annotated[int, typer.Option(min=0, help="which start of the server; 0: the last")] = 0,
    reasons: Annotated[bool, typer.Option(help="other reasons for the same deed count, too")] = False,
    **flags: Any,
) -> None:
    from headway.bench.replay.rerun import rerun as run

    changes = {key: value for key, value in flags.items() if value is not None}
    _show(run(record, changes, session=session, reasons=reasons))


def _show(found: "Rerun") -> None:
    print_ = console().print
    span = f"{found.steps:,} steps, {found.batches:,} batches, {found.span_s:,.1f} s"
    first, second = found.names
    parting = found.parting
    if parting is None:
        print_(f"{first} and {second} decide the same: {span}")
        return
    print_(f"{first} and {second} part at step {parting.step:,}, after {span}")
    for line in parting.before:
        print_(f"  {line}", markup=False, style="dim")
    print_(f"  {parting.at_ns / 1e6:,.3f} ms: {parting.event}", markup=False)
    print_(f"  {parting.core}", markup=False, style="dim")
    for name, actions in ((first, parting.first), (second, parting.second)):
        print_(f"{name}:")
        for line in _lines(actions):
            print_(f"  {line}", markup=False)


def _lines(actions: "list[Action]") -> list[str]:
    return [repr(action) for action in actions] or ["nothing"]


def register(app: typer.Typer) -> None:
    app.command(help=RERUN, epilog=exits(USAGE))(rerun)
