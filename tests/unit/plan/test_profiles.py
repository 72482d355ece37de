from __future__ import annotations

import re

import pytest

from disagg_plan.errors import Refusal
from disagg_plan.geometry import Group, Part
from disagg_plan.profiles import PROFILES, build_page, check_layout, find_profile, page_parts, stated_profile

HEADS = Group("attention", (0, 1), (Part("k", 8, "split", 256), Part("v", 8, "split", 256)), "attention")
LATENT = Group("mla", (0, 1), (Part("latent", 1, "replicated", 1152),), "mla")
UNEVEN = Group("mixed", (0, 1), (Part("k", 8, "split", 64), Part("scale", 1, "replicated", 4)), "mixed")


def page_of(profile, layout, group, interval, tokens):
    parts = page_parts(profile, group)
    page = build_page(profile, layout, parts, {part.name: interval for part in parts}, tokens)
    return page.model_dump(by_alias=True, exclude_none=True, mode="json")


def part(name, region, units, offset, unit_stride, token_stride, cell):
    return {
        "name": name,
        "region": region,
        "units": units,
        "offset": offset,
        "unitStride": unit_stride,
        "tokenStride": token_stride,
        "cellBytes": cell,
    }


# Heads 2 and 3 of 8, 16 tokens, 256 bytes of K and of V for each head and token.
JOINT_HND = {
    "blockTokens": 16,
    "regions": [{"bytes": 16384, "stride": 16384}],
    "parts": [part("k", 0, [2, 4], 0, 8192, 512, 256), part("v", 0, [2, 4], 256, 8192, 512, 256)],
}
JOINT_NHD = {
    "blockTokens": 16,
    "regions": [{"bytes": 16384, "stride": 16384}],
    "parts": [part("k", 0, [2, 4], 0, 512, 1024, 256), part("v", 0, [2, 4], 256, 512, 1024, 256)],
}
SEPARATE_HND = {
    "blockTokens": 16,
    "regions": [{"bytes": 8192, "stride": 8192}] * 2,
    "parts": [part("k", 0, [2, 4], 0, 4096, 256, 256), part("v", 1, [2, 4], 0, 4096, 256, 256)],
}
SEPARATE_NHD = {
    "blockTokens": 16,
    "regions": [{"bytes": 8192, "stride": 8192}] * 2,
    "parts": [part("k", 0, [2, 4], 0, 256, 512, 256), part("v", 1, [2, 4], 0, 256, 512, 256)],
}
OPAQUE = {
    "blockTokens": 16,
    "regions": [{"bytes": 16384, "stride": 16384}],
    "parts": [part("kv", 0, [2, 4], 0, 8192, 0, 8192)],
}
LATENT_HND = {
    "blockTokens": 16,
    "regions": [{"bytes": 18432, "stride": 18432}],
    "parts": [part("latent", 0, [0, 1], 0, 18432, 1152, 1152)],
}
LATENT_NHD = {
    "blockTokens": 16,
    "regions": [{"bytes": 18432, "stride": 18432}],
    "parts": [part("latent", 0, [0, 1], 0, 1152, 1152, 1152)],
}

PAGES = {
    ("vllm", "FLASH_ATTN"): {"HND": JOINT_HND, "NHD": JOINT_NHD},
    ("vllm", "FLASHINFER"): {"HND": JOINT_HND, "NHD": JOINT_NHD},
    ("vllm", "TRITON_ATTN"): {"HND": JOINT_HND, "NHD": JOINT_NHD},
    ("vllm", "CPU_ATTN"): {"HND": OPAQUE},
    ("vllm", "FLASHMLA"): {"HND": LATENT_HND, "NHD": LATENT_NHD},
    ("vllm", "CUTLASS_MLA"): {"HND": LATENT_HND, "NHD": LATENT_NHD},
    ("vllm", "TRITON_MLA"): {"HND": LATENT_HND, "NHD": LATENT_NHD},
    ("synthetic", "JOINT"): {"HND": JOINT_HND, "NHD": JOINT_NHD},
    ("synthetic", "SEPARATE"): {"HND": SEPARATE_HND, "NHD": SEPARATE_NHD},
    ("synthetic", "OPAQUE"): {"HND": OPAQUE},
    ("synthetic", "LATENT"): {"HND": LATENT_HND, "NHD": LATENT_NHD},
}


def test_every_profile_has_its_pages():
    assert sorted(PAGES) == sorted((row.engine, row.backend) for row in PROFILES)
    assert {(row.engine, row.backend): set(row.layouts) for row in PROFILES} == {
        name: set(pages) for name, pages in PAGES.items()
    }


@pytest.mark.parametrize(("name", "layout"), [(name, layout) for name, pages in PAGES.items() for layout in pages])
def test_pages(name, layout):
    engine, backend = name
    profile = find_profile(engine, "0.33.0", backend)
    assert profile.name == f"{engine}/{backend}"
    group, interval = (LATENT, (0, 1)) if profile.latent else (HEADS, (2, 4))
    assert page_of(profile, layout, group, interval, 16) == PAGES[name][layout]


@pytest.mark.parametrize(
    ("backend", "layout", "regions", "strides"),
    [
        # One head of one token: all orders of axes are the same bytes.
        ("JOINT", "HND", [512], [(0, 512, 512), (256, 512, 512)]),
        ("JOINT", "NHD", [512], [(0, 512, 512), (256, 512, 512)]),
        ("SEPARATE", "HND", [256, 256], [(0, 256, 256), (0, 256, 256)]),
        ("OPAQUE", "HND", [512], [(0, 512, 0)]),
    ],
)
def test_smallest_page(backend, layout, regions, strides):
    page = page_of(find_profile("synthetic", "1", backend), layout, HEADS, (7, 8), 1)
    assert [region["bytes"] for region in page["regions"]] == regions
    assert [(p["offset"], p["unitStride"], p["tokenStride"]) for p in page["parts"]] == strides


def test_parts_of_a_separate_page_may_differ():
    profile = find_profile("synthetic", "1", "SEPARATE")
    page = build_page(profile, "NHD", page_parts(profile, UNEVEN), {"k": (0, 4), "scale": (0, 1)}, 8)
    assert page.model_dump(by_alias=True, exclude_none=True, mode="json") == {
        "blockTokens": 8,
        "regions": [{"bytes": 2048, "stride": 2048}, {"bytes": 32, "stride": 32}],
        "parts": [part("k", 0, [0, 4], 0, 64, 256, 64), part("scale", 1, [0, 1], 0, 4, 4, 4)],
    }


def test_page_parts():
    joint, separate, opaque = (find_profile("synthetic", "1", name) for name in ("JOINT", "SEPARATE", "OPAQUE"))
    assert page_parts(joint, HEADS) == page_parts(separate, HEADS) == HEADS.parts
    assert page_parts(opaque, HEADS) == (Part("kv", 8, "split", 512),)
    assert page_parts(opaque, LATENT) == (Part("latent", 1, "replicated", 1152),)


@pytest.mark.parametrize("version", ["0.30", "0.30.0", "0.33.0", "0.33.0+cpu", "0.33.0-rc1", "0.34.0.dev12", "0.99"])
def test_versions_that_are_known(version):
    assert find_profile("vllm", version, "FLASH_ATTN").arrangement == "joint"


@pytest.mark.parametrize("version", ["0.29.9", "0.8.5", "0.7", "1.0.0", "1.0", "2.1"])
def test_versions_that_are_not(version):
    with pytest.raises(Refusal) as refused:
        find_profile("vllm", version, "FLASH_ATTN")
    refusal = refused.value
    assert (refusal.code, refusal.field) == ("UnknownProfile", "engine.version")
    assert refusal.message == f"the page layout of vllm {version} with FLASH_ATTN is not known"
    first, end = re.fullmatch(
        r"Use a version >=([0-9.]+),<([0-9.]+); or state engine.pages: .*", refusal.remedy
    ).groups()
    assert find_profile("vllm", first, "FLASH_ATTN").backend == "FLASH_ATTN"
    with pytest.raises(Refusal):
        find_profile("vllm", end, "FLASH_ATTN")


@pytest.mark.parametrize("version", ["", "latest", "v0.33.0", "0..1", "0.33.0rc1", "²", "0.x", "nightly-0.33", " 0.33"])
def test_versions_that_are_none(version):
    with pytest.raises(Refusal) as refused:
        find_profile("vllm", version, "FLASH_ATTN", "decode.engine")
    refusal = refused.value
    assert (refusal.code, refusal.field) == ("UnknownProfile", "decode.engine.version")
    assert refusal.message == f"version {version!r} is not numbers and dots"
    assert find_profile("vllm", refusal.remedy.removeprefix("Write e.g. "), "FLASH_ATTN")


def test_unknown_engine():
    with pytest.raises(Refusal) as refused:
        find_profile("sglang", "0.5", "FLASH_ATTN")
    refusal = refused.value
    assert (refusal.code, refusal.field) == ("UnknownProfile", "engine.name")
    assert refusal.message == "engine 'sglang' has no page layouts"
    assert refusal.remedy == "Use synthetic, vllm; or state engine.pages: `disagg probe` finds it in a started engine"
    assert find_profile("synthetic", "0.5", "JOINT").engine == "synthetic"


def test_unknown_backend():
    with pytest.raises(Refusal) as refused:
        find_profile("vllm", "0.33.0", "FLEX_ATTENTION")
    refusal = refused.value
    assert (refusal.code, refusal.field) == ("UnknownProfile", "engine.backend")
    assert refusal.message == "vllm backend 'FLEX_ATTENTION' has no page layout"
    for backend in refusal.remedy.removeprefix("Use ").partition(";")[0].split(", "):
        assert find_profile("vllm", "0.33.0", backend).backend == backend


def test_layouts():
    joint, opaque = find_profile("vllm", "0.33.0", "FLASHINFER"), find_profile("vllm", "0.33.0", "CPU_ATTN")
    assert check_layout(joint, None, "kvCache.layout") == "HND"
    assert check_layout(joint, "HND", "kvCache.layout") == "HND"
    assert check_layout(joint, "NHD", "kvCache.layout") == "NHD"
    assert check_layout(opaque, None, "kvCache.layout") == "HND"


@pytest.mark.parametrize(
    ("arrangement", "group", "layout", "page"),
    [
        ("joint", HEADS, None, JOINT_HND),
        ("joint", HEADS, "NHD", JOINT_NHD),
        ("separate", HEADS, "HND", SEPARATE_HND),
        ("separate", HEADS, "NHD", SEPARATE_NHD),
        ("opaque", HEADS, "HND", OPAQUE),
        ("joint", LATENT, "NHD", LATENT_NHD),
    ],
)
def test_stated_pages_are_those_of_a_known_backend(arrangement, group, layout, page):
    profile = stated_profile("vllm", "FLEX_ATTENTION", arrangement)
    assert profile.name == "vllm/FLEX_ATTENTION"
    chosen = check_layout(profile, layout, "kvCache.layout")
    assert page_of(profile, chosen, group, (0, 1) if group is LATENT else (2, 4), 16) == page


def test_stated_opaque_pages_have_one_order():
    with pytest.raises(Refusal, match="cannot use layout 'NHD'"):
        check_layout(stated_profile("vllm", "FLEX_ATTENTION", "opaque"), "NHD", "kvCache.layout")


@pytest.mark.parametrize(
    ("backend", "layout", "known"), [("CPU_ATTN", "NHD", "HND"), ("FLASH_ATTN", "hnd", "HND or NHD")]
)
def test_unknown_layout(backend, layout, known):
    profile = find_profile("vllm", "0.33.0", backend)
    with pytest.raises(Refusal) as refused:
        check_layout(profile, layout, "decode.kvCache.layout")
    refusal = refused.value
    assert (refusal.code, refusal.field) == ("UnknownLayout", "decode.kvCache.layout")
    assert refusal.message == f"vllm/{backend} cannot use layout {layout!r}"
    assert refusal.remedy == f"Use {known}"
    for name in known.split(" or "):
        assert check_layout(profile, name, "decode.kvCache.layout") == name


@pytest.mark.parametrize("backend", ["JOINT", "OPAQUE"])
def test_unlike_parts_do_not_lie_side_by_side(backend):
    profile = find_profile("synthetic", "1", backend)
    with pytest.raises(Refusal) as refused:
        page_parts(profile, UNEVEN)
    refusal = refused.value
    assert (refusal.code, refusal.field) == ("UnsupportedLayout", "model.geometry.groups[mixed].parts")
    assert f"synthetic/{backend} keeps the parts of a head side by side" in refusal.message
    assert "separate regions" in refusal.remedy
    assert page_parts(find_profile("synthetic", "1", "SEPARATE"), UNEVEN) == UNEVEN.parts
    assert len(page_parts(profile, HEADS)) == (2 if backend == "JOINT" else 1)


@pytest.mark.parametrize(
    ("backend", "group", "message"),
    [
        ("FLASH_ATTN", LATENT, "group 'mla' is a latent (replicated) cache, vllm/FLASH_ATTN serves a per-head cache"),
        ("CPU_ATTN", LATENT, "group 'mla' is a latent (replicated) cache, vllm/CPU_ATTN serves a per-head cache"),
        ("FLASHMLA", HEADS, "group 'attention' is a per-head cache, vllm/FLASHMLA serves a latent (replicated) cache"),
    ],
)
def test_backends_serve_one_kind_of_cache(backend, group, message):
    with pytest.raises(Refusal) as refused:
        page_parts(find_profile("vllm", "0.33.0", backend), group)
    refusal = refused.value
    assert (refusal.code, refusal.field) == ("UnsupportedLayout", "engine.backend")
    assert refusal.message == message
    named = refusal.remedy.removeprefix("Use one of ").split(", ")
    assert backend not in named
    for name in named:
        assert page_parts(find_profile("vllm", "0.33.0", name), group)
