"""A profile: what `headway tune` measured of one model on one machine, as the server reads it.

The worker takes from it what its spec leaves open: how many requests to run at once, and the cost that the scheduler
starts from before it has learned its own. A cost measured on another kind of device or in another dtype is not used.
Here: the file's shape and reading it. Never here: measuring.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError

from headway.scheduler.spec import Frozen, ModelSpec

PROFILE_BYTES_MAX = 1 << 20  # a profile is a page
SAME = ("device", "dtype", "threads")  # facts that a cost depends on

Nanoseconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=65536)]


class ProfileError(ValueError):
    """A profile that cannot be used. The message says which, and why."""


class Recommended(Frozen):
    """Keys of a ModelSpec that were found to be best."""

    max_num_seqs: Count | None = None
    max_batch: Annotated[int, Field(ge=1, le=4096)] | None = None


class Profile(Frozen):
    """`cost_ns`: of a batch or step: fixed, per token, per request. `facts`: of the worker that was measured.

    `error`: how far the cost is from what was measured, as shares. `measured`, `memory`, `reasons`: for people.
    """

    headway_profile: Literal[1]
    model: str
    engine: str
    cost_ns: tuple[Nanoseconds, Nanoseconds, Nanoseconds]
    recommended: Recommended = Recommended()
    facts: Annotated[dict[str, str], Field(default_factory=dict)]
    error: Annotated[dict[str, float], Field(default_factory=dict)]
    memory: Annotated[dict[str, int], Field(default_factory=dict)]
    measured: Annotated[dict[str, Any], Field(default_factory=dict)]
    reasons: tuple[str, ...] = ()


def read_profile(path: str) -> Profile:
    """The profile in a YAML (or JSON) file. Raises ProfileError."""
    try:
        with open(path, "rb") as file:
            data = file.read(PROFILE_BYTES_MAX + 1)
        if len(data) > PROFILE_BYTES_MAX:
            raise ProfileError(f"{path} has more than {PROFILE_BYTES_MAX} bytes; that is no profile")
        return Profile.model_validate(yaml.safe_load(data.decode()))
    except OSError as error:
        raise ProfileError(f"{path} cannot be read: {error.strerror or error}") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ProfileError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    except ValidationError as error:
        said = "; ".join(f"{'.'.join(map(str, one['loc'])) or 'it'}: {one['msg']}" for one in error.errors())
        raise ProfileError(f"{path} is not a profile that headway tune wrote: {said}") from None


def profile_of(spec: ModelSpec) -> Profile | None:
    """The profile that a spec names, or None if it names none. Raises ProfileError, also if it is another model's."""
    if not spec.profile:
        return None
    found = read_profile(spec.profile)
    if (found.model, found.engine) != (spec.model, spec.engine):
        raise ProfileError(
            f"{spec.profile} is of {found.engine} {found.model!r}, but the model is {spec.engine} {spec.model!r}"
        )
    return found


def tuned(spec: ModelSpec, profile: Profile | None) -> ModelSpec:
    """The spec with what its profile recommends where it says nothing itself."""
    if profile is None:
        return spec
    found = {key: value for key, value in profile.recommended if value is not None and key not in spec.model_fields_set}
    return spec.model_copy(update=found)


def cost_for(profile: Profile, facts: Mapping[str, str]) -> tuple[tuple[float, ...], list[str]]:
    """The profile's cost for a worker with these facts; or nothing, and the facts that differ, in words."""
    differ = [
        f"{name} {facts[name]}, not {profile.facts[name]}"
        for name in SAME
        if name in facts and name in profile.facts and facts[name] != profile.facts[name]
    ]
    return ((), differ) if differ else (profile.cost_ns, [])
