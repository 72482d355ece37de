"""Page layouts: how an engine version lays out the cache of a block.

A profile is one row of `PROFILES`: engine, versions, attention backend, and how its pages are arranged. Adding a
backend is one row and one test. The plan exists before any engine does, so a layout must be known here, or be stated
(`stated_profile`); what an engine then registers is compared with it.

Three arrangements cover the engines:

* `joint`: all parts of a head and token side by side in one tensor, `[…, head, token, k|v]` (HND) or
  `[…, token, head, k|v]` (NHD), as in vLLM from 0.30 on, where K and V share the last axis;
* `separate`: one tensor per part, as where K and V are two allocations;
* `opaque`: one run per head and block whose inside belongs to the kernel (vLLM's CPU backend keeps K of all
  tokens before V of all tokens): sliced by head, never by token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from disagg_plan.errors import Refusal
from disagg_plan.geometry import Group, Part
from disagg_plan.wire import Page, PagePart, Region

Arrangement = Literal["joint", "separate", "opaque"]
Layout = Literal["HND", "NHD"]
Interval = tuple[int, int]


@dataclass(frozen=True)
class Profile:
    """How one backend of one engine lays out its pages.

    Attributes:
        engine: engine name as in `spec.engine.name`.
        backend: attention backend as the engine names it.
        versions: half-open range `[first, last)` of engine versions, compared as integer tuples.
        arrangement: see the module.
        layouts: accepted orders of axes, the first one is the default.
        latent: whether the backend serves latent (MLA) caches, else per-head ones; None where that is not known.
    """

    engine: str
    backend: str
    versions: tuple[tuple[int, ...], tuple[int, ...]]
    arrangement: Arrangement
    layouts: tuple[Layout, ...]
    latent: bool | None = False

    @property
    def name(self) -> str:
        """`engine/backend`, the name that compatibility factors carry."""
        return f"{self.engine}/{self.backend}"


_VERSION = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})*)(?:\.(?:dev|post)[0-9]+)?(?:[-+].*)?")
"""Numbers and dots; what a build adds behind them does not count."""

_ANY = ((0,), (1 << 30,))
_VLLM_JOINT = ((0, 30), (1, 0))

PROFILES: tuple[Profile, ...] = (
    Profile("vllm", "FLASH_ATTN", _VLLM_JOINT, "joint", ("HND", "NHD")),
    Profile("vllm", "FLASHINFER", _VLLM_JOINT, "joint", ("HND", "NHD")),
    Profile("vllm", "TRITON_ATTN", _VLLM_JOINT, "joint", ("HND", "NHD")),
    Profile("vllm", "CPU_ATTN", _VLLM_JOINT, "opaque", ("HND",)),
    Profile("vllm", "FLASHMLA", _VLLM_JOINT, "joint", ("HND", "NHD"), latent=True),
    Profile("vllm", "CUTLASS_MLA", _VLLM_JOINT, "joint", ("HND", "NHD"), latent=True),
    Profile("vllm", "TRITON_MLA", _VLLM_JOINT, "joint", ("HND", "NHD"), latent=True),
    Profile("synthetic", "JOINT", _ANY, "joint", ("HND", "NHD")),
    Profile("synthetic", "SEPARATE", _ANY, "separate", ("HND", "NHD")),
    Profile("synthetic", "OPAQUE", _ANY, "opaque", ("HND",)),
    Profile("synthetic", "LATENT", _ANY, "joint", ("HND", "NHD"), latent=True),
)
"""Every layout that is known."""

_STATED_LAYOUTS: dict[Arrangement, tuple[Layout, ...]] = {
    "joint": ("HND", "NHD"),
    "separate": ("HND", "NHD"),
    "opaque": ("HND",),
}
_STATE_PAGES = "or state {field}.pages: `disagg probe` finds it in a started engine"


def stated_profile(engine: str, backend: str, arrangement: Arrangement) -> Profile:
    """The profile of a backend whose arrangement is stated instead of looked up; it wins over every row."""
    return Profile(engine, backend, _ANY, arrangement, _STATED_LAYOUTS[arrangement], latent=None)


def find_profile(engine: str, version: str, backend: str, field: str = "engine") -> Profile:
    """The row for an engine, version and backend.

    Raises:
        Refusal: `UnknownProfile` with the backends and versions that are known, and how to do without a row.
    """
    otherwise = _STATE_PAGES.format(field=field)
    rows = [row for row in PROFILES if row.engine == engine]
    if not rows:
        known = ", ".join(sorted({row.engine for row in PROFILES}))
        raise Refusal(
            "UnknownProfile", f"{field}.name", f"engine {engine!r} has no page layouts", f"Use {known}; {otherwise}"
        )
    named = [row for row in rows if row.backend == backend]
    if not named:
        known = ", ".join(row.backend for row in rows)
        raise Refusal(
            "UnknownProfile",
            f"{field}.backend",
            f"{engine} backend {backend!r} has no page layout",
            f"Use {known}; {otherwise}",
        )
    number = _version(version, f"{field}.version")
    for row in named:
        if row.versions[0] <= number < row.versions[1]:
            return row
    spans = ", ".join(f">={_dotted(row.versions[0])},<{_dotted(row.versions[1])}" for row in named)
    raise Refusal(
        "UnknownProfile",
        f"{field}.version",
        f"the page layout of {engine} {version} with {backend} is not known",
        f"Use a version {spans}; {otherwise}",
    )


def check_layout(profile: Profile, layout: str | None, field: str) -> Layout:
    """The layout to use: the profile's default, or the one asked for.

    Raises:
        Refusal: `UnknownLayout` if the backend cannot have it.
    """
    for known in profile.layouts:
        if layout is None or layout == known:
            return known
    raise Refusal(
        "UnknownLayout",
        field,
        f"{profile.name} cannot use layout {layout!r}",
        f"Use {' or '.join(profile.layouts)}",
    )


def page_parts(profile: Profile, group: Group) -> tuple[Part, ...]:
    """The parts that copies name: those of the group, or one opaque part where the inside is the kernel's.

    The cell of an opaque part is given per token, as for any part; the page holds whole blocks of it.

    Raises:
        Refusal: `UnsupportedLayout` if the group's parts do not fit the arrangement.
    """
    _check_kind(profile, group)
    if profile.arrangement == "separate":
        return group.parts
    if len({(part.units, part.sharding) for part in group.parts}) != 1:
        raise Refusal(
            "UnsupportedLayout",
            f"model.geometry.groups[{group.name}].parts",
            f"{profile.name} keeps the parts of a head side by side, and these parts differ in units or sharding",
            "Give them equal units and sharding, or use a backend with separate regions",
        )
    if profile.arrangement == "joint":
        return group.parts
    first = group.parts[0]
    total = sum(part.cell_bytes for part in group.parts)
    return (Part("".join(part.name for part in group.parts), first.units, first.sharding, total),)


def _check_kind(profile: Profile, group: Group) -> None:
    latent = all(part.sharding == "replicated" for part in group.parts)
    if profile.engine != "synthetic" and profile.latent is not None and latent != profile.latent:
        kinds = {True: "a latent (replicated) cache", False: "a per-head cache"}
        raise Refusal(
            "UnsupportedLayout",
            "engine.backend",
            f"group {group.name!r} is {kinds[latent]}, {profile.name} serves {kinds[profile.latent]}",
            "Use one of "
            f"{', '.join(row.backend for row in PROFILES if row.engine == profile.engine and row.latent == latent)}",
        )


def build_page(
    profile: Profile, layout: Layout, parts: tuple[Part, ...], units: Mapping[str, Interval], block_tokens: int
) -> Page:
    """The page of one block of one layer on one rank.

    Args:
        parts: as `page_parts` returns them.
        units: half-open interval of units that the rank holds, per part.
        block_tokens: tokens of a block.
    """
    if profile.arrangement == "separate":
        placed = [_tensor(layout, (part,), units, block_tokens, index) for index, part in enumerate(parts)]
    elif profile.arrangement == "joint":
        placed = [_tensor(layout, parts, units, block_tokens, 0)]
    else:
        placed = [_opaque(parts[0], units[parts[0].name], block_tokens)]
    regions = [region for region, _ in placed]
    return Page(block_tokens=block_tokens, regions=regions, parts=[part for _, inner in placed for part in inner])


def _tensor(
    layout: Layout, parts: tuple[Part, ...], units: Mapping[str, Interval], tokens: int, region: int
) -> tuple[Region, list[PagePart]]:
    row = sum(part.cell_bytes for part in parts)
    first, end = units[parts[0].name]
    held = end - first
    unit_stride, token_stride = (tokens * row, row) if layout == "HND" else (row, held * row)
    placed = []
    offset = 0
    for part in parts:
        placed.append(
            PagePart(
                name=part.name,
                region=region,
                units=(first, end),
                offset=offset,
                unit_stride=unit_stride,
                token_stride=token_stride,
                cell_bytes=part.cell_bytes,
            )
        )
        offset += part.cell_bytes
    size = held * tokens * row
    return Region(bytes=size, stride=size), placed


def _opaque(part: Part, units: Interval, tokens: int) -> tuple[Region, list[PagePart]]:
    run = part.cell_bytes * tokens
    size = (units[1] - units[0]) * run
    placed = PagePart(name=part.name, region=0, units=units, offset=0, unit_stride=run, token_stride=0, cell_bytes=run)
    return Region(bytes=size, stride=size), [placed]


def _version(text: str, field: str) -> tuple[int, ...]:
    match = _VERSION.fullmatch(text)
    if match is None:
        raise Refusal("UnknownProfile", field, f"version {text!r} is not numbers and dots", "Write e.g. 0.33.0")
    return tuple(int(piece) for piece in match[1].split("."))


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(str(piece) for piece in version)
