"""What to declare for a probed engine: whether a known page layout fits, and which arrangement to state if none does.

The tensors of an engine say where the bytes of a head are. They do not always say what is inside: where K and V of a
head share one axis, a kernel may keep an order of its own. Only a known profile says more than the tensors, so without
one the answer is `opaque`, which cuts by head and never by token.
"""

from __future__ import annotations

from dataclasses import dataclass

from disagg_plan.architectures import from_config
from disagg_plan.dtypes import dtype_bytes
from disagg_plan.errors import Refusal
from disagg_plan.geometry import Geometry
from disagg_plan.probed import Merged
from disagg_plan.profiles import Arrangement, Layout, Profile, find_profile
from disagg_plan.topology import default_stages


@dataclass(frozen=True)
class Choice:
    """What to declare, and why.

    Attributes:
        pages: arrangement; to be stated (`engine.pages`) only where no profile fits.
        profile: the known profile that fits, if one does.
        why: why `pages` is this.
        profile_says, config_says: whether the known profile fits, and whether the geometry follows from config.json.
        derived: the geometry need not be stated, config.json gives the same.
        notes: further sentences for whoever declares it.
    """

    pages: Arrangement
    layout: Layout
    profile: Profile | None
    why: str
    profile_says: str
    config_says: str
    derived: bool
    notes: tuple[str, ...]


def choose(merged: Merged) -> Choice:
    """Decide what to declare for a probed engine."""
    profile, profile_says = _profile(merged)
    derived, config_says = _config(merged)
    layout = profile.layouts[0] if profile and profile.layouts[0] in merged.layouts else merged.layouts[0]
    if profile is not None:
        pages, why = profile.arrangement, f"as {profile.name} is known to arrange them, and the tensors agree"
    else:
        pages, why = _arrangement(merged, layout)
    notes = _notes(merged, profile, pages)
    return Choice(pages, layout, profile, why, profile_says, config_says, derived, notes)


def _arrangement(merged: Merged, layout: Layout) -> tuple[Arrangement, str]:
    if merged.order == "separate":
        return "separate", "K and V lie in regions of their own"
    if merged.order == "joint":
        return "joint", "an axis of its own puts K and V of each head and token side by side"
    if layout == "HND":
        return "opaque", (
            "K and V of a head share one axis, and nothing says in which order a kernel keeps them, so pages are cut "
            "by head only"
        )
    return "joint", (
        "tokens lie outside heads, so a head is no single run, and the engine's own axes are taken for where its bytes "
        "are"
    )


def _profile(merged: Merged) -> tuple[Profile | None, str]:
    """The known profile if the tensors agree with it, and a sentence either way."""
    facts = merged.facts
    try:
        profile = find_profile(facts.engine, facts.version, facts.backend)
    except Refusal as refusal:
        return None, f"no known profile: {refusal.message}; so state engine.pages"
    latent = {all(part.sharding == "replicated" for part in group.parts) for group in merged.geometry.groups}
    if (merged.order == "separate") != (profile.arrangement == "separate"):
        what = f"it has {profile.arrangement} pages, the tensors are {merged.order}"
    elif not set(profile.layouts) & set(merged.layouts):
        what = f"it has the order {'/'.join(profile.layouts)}, the tensors {'/'.join(merged.layouts)}"
    elif latent != {profile.latent}:
        what = f"it serves {'latents' if profile.latent else 'per-head caches'} only"
    else:
        return profile, f"the known profile {profile.name} fits: engine.pages need not be stated"
    return None, f"the known profile {profile.name} does not fit: {what}; so state engine.pages"


def _config(merged: Merged) -> tuple[bool, str]:
    """Whether config.json gives the same geometry, and a sentence either way."""
    facts = merged.facts
    model_type = facts.config.get("model_type")
    try:
        derived = from_config(facts.config, dtype_bytes(facts.dtype))
    except Refusal as refusal:
        return False, f"config.json does not give the geometry: {refusal.message}; so state model.geometry"
    if _cells(derived) == _cells(merged.geometry):
        return True, f"config.json (model_type {model_type!r}) gives the same: no explicit geometry is needed"
    return False, (
        f"config.json (model_type {model_type!r}) gives another geometry ({derived.bytes_per_token} bytes per token, "
        f"the engine keeps {merged.geometry.bytes_per_token}); so state model.geometry"
    )


def _cells(geometry: Geometry) -> dict[int, list[tuple[int, str, int]]]:
    """What each layer keeps, names left out."""
    found: dict[int, list[tuple[int, str, int]]] = {}
    for group in geometry.groups:
        for layer in group.layers:
            found.setdefault(layer, []).extend((part.units, part.sharding, part.cell_bytes) for part in group.parts)
    return found


def _notes(merged: Merged, profile: Profile | None, pages: Arrangement) -> tuple[str, ...]:
    notes = list(merged.notes)
    if profile is None and pages != "opaque":
        notes.append(
            "pages: use equal block sizes on both sides, unless you know that its kernel keeps no order of its own "
            "inside a block"
        )
    if tuple(merged.stages) != default_stages(merged.geometry.layers, len(merged.stages)):
        notes.append("stages: the engine does not split layers evenly; set parallelism.pipelineLayers, see below")
    return tuple(notes)
