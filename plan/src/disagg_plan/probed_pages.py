"""How one cache entry of a started engine holds a block: from its tensors' axes and strides, never from equal sizes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from disagg_plan.errors import Refusal
from disagg_plan.probe_facts import LayerFacts, RankFacts, TensorFacts
from disagg_plan.profiles import Layout

Order = Literal["run", "joint", "separate"]
"""`run`: K and V of a head in one axis, their order inside not known; `joint`: K|V of each head and token side by
side, by an axis of their own; `separate`: K and V in regions of their own."""

LATENT = "MLAAttentionSpec"
"""Type of the KV cache spec of latents."""

_AXES = ("blocks", "tokens", "heads", "content", "parts")
_NEEDED = ("blocks", "tokens", "content")


@dataclass(frozen=True)
class Form:
    """What a block of one entry looks like on one rank.

    Attributes:
        layouts: orders of heads and tokens that its strides allow; both where they say nothing.
        heads: heads of a page.
        cells: bytes of a head and token: of all (`run`), or of K and of V.
    """

    order: Order
    layouts: tuple[Layout, ...]
    heads: int
    cells: tuple[int, ...]


def form(where: str, rank: RankFacts, layer: LayerFacts) -> Form:
    """Judge one entry.

    Args:
        where: file and entry, for refusals.

    Raises:
        Refusal: `UnknownAxes`, `KernelBlocks`, or `UnsupportedCache` where a plan cannot hold its pages.
    """
    if layer.axes_problem:
        raise _unknown(where, f"what its axes count is not known: {layer.axes_problem}")
    if len(layer.tensors) not in (1, 2):
        raise _unsupported(f"{where}.tensors", f"it has {len(layer.tensors)} tensors, one or two (K and V) are planned")
    forms = [_tensor(where, rank, layer, tensor) for tensor in layer.tensors]
    if len(forms) == 1:
        return forms[0]
    first, second = forms
    if (first.order, second.order) != ("run", "run") or first.heads != second.heads:
        raise _unsupported(f"{where}.tensors", "its two tensors are not one of K and one of V")
    layouts: tuple[Layout, ...] = tuple(layout for layout in first.layouts if layout in second.layouts)
    if not layouts:
        raise _unsupported(f"{where}.strides", f"K is ordered {first.layouts[0]} and V {second.layouts[0]}")
    return Form("separate", layouts, first.heads, (*first.cells, *second.cells))


def _tensor(where: str, rank: RankFacts, layer: LayerFacts, tensor: TensorFacts) -> Form:
    sizes, strides = _by_axis(where, layer, tensor)
    _check_sizes(where, rank, layer, sizes)
    cell = sizes["content"]
    order: Order = "run"
    if sizes["content"] > 1 and strides["content"] != 1:
        raise _unsupported(f"{where}.strides", f"elements of a head and token are {strides['content']} apart, not 1")
    if "parts" in sizes:
        # Right outside the elements of a head and token, K and V adjoin; anywhere else they lie in regions apart.
        order = "joint" if strides["parts"] == cell else "separate"
        cell *= 2 if order == "joint" else 1
    layouts = _layouts(sizes["heads"], sizes["tokens"], strides, cell)
    page = sizes["heads"] * sizes["tokens"] * cell
    if not layouts:
        raise _unsupported(
            f"{where}.strides",
            f"heads are {strides.get('heads', 0)} and tokens {strides['tokens']} elements apart, and a dense block of "
            f"{sizes['heads']} heads, {sizes['tokens']} tokens and {cell} elements each has neither order",
        )
    if layer.spec == LATENT:
        # One unit: both orders are the same bytes, on every rank of every engine.
        layouts = ("HND", "NHD")
    if sizes["blocks"] > 1 and strides["blocks"] != page:
        raise _unsupported(
            f"{where}.strides",
            f"blocks are {strides['blocks']} elements apart and hold {page}: pages that do not adjoin are not planned "
            "yet",
            "Let the engine keep each layer's blocks together (vLLM: VLLM_KV_CACHE_LAYOUT=LBHNC)",
        )
    content = sizes["content"] * tensor.element
    cells = (content,) if order == "run" else (content, content)
    return Form(order, layouts, sizes["heads"], cells)


def _by_axis(where: str, layer: LayerFacts, tensor: TensorFacts) -> tuple[dict[str, int], dict[str, int]]:
    """Sizes and strides of a tensor by axis; a latent without an axis for heads has one."""
    axes = layer.axes
    if not len(axes) == len(tensor.shape) == len(tensor.strides):
        raise _unknown(where, f"it has the axes {axes}, the shape {tensor.shape} and the strides {tensor.strides}")
    for axis, count in Counter(axes).items():
        if axis not in _AXES or count > 1:
            what = f"axis {axis!r} of size {tensor.shape[axes.index(axis)]}"
            raise _unknown(where, f"{what} stands twice" if count > 1 else f"{what} is none of {', '.join(_AXES)}")
    missing = [axis for axis in _NEEDED if axis not in axes]
    if missing:
        raise _unknown(where, f"no axis counts {' or '.join(missing)}, the axes are {axes}")
    sizes = {"heads": 1, **dict(zip(axes, tensor.shape, strict=True))}
    if min(sizes.values()) < 1:
        raise _unknown(where, f"its shape {tensor.shape} holds nothing")
    if sizes.get("parts", 2) != 2:
        raise _unknown(where, f"axis 'parts' has {sizes['parts']} entries, K and V are 2")
    return sizes, dict(zip(axes, tensor.strides, strict=True))


def _check_sizes(where: str, rank: RankFacts, layer: LayerFacts, sizes: dict[str, int]) -> None:
    if sizes["tokens"] != layer.block_tokens or sizes["blocks"] != rank.blocks:
        raise Refusal(
            "KernelBlocks",
            f"{where}.shape",
            f"the tensor has {sizes['blocks']} blocks of {sizes['tokens']} tokens, the engine's pool {rank.blocks} "
            f"blocks of {layer.block_tokens}: its kernel cuts or compresses blocks, which is not planned yet",
            f"Start the engine with --block-size {sizes['tokens']}",
        )
    if sizes["heads"] != layer.heads:
        raise _unknown(
            where, f"axis 'heads' has {sizes['heads']} entries, the engine states {layer.heads} KV heads on this rank"
        )


def _layouts(heads: int, tokens: int, strides: dict[str, int], cell: int) -> tuple[Layout, ...]:
    """Orders that the strides allow. Strides of an axis of size one move no byte, but tell what the engine meant."""
    token = strides["tokens"]
    head = strides.get("heads")
    hnd = (tokens == 1 or token == cell) and (heads == 1 or head == tokens * cell)
    nhd = (heads == 1 or head == cell) and (tokens == 1 or token == heads * cell)
    if hnd and nhd and head is not None:
        if heads == 1 and tokens > 1:
            return ("HND",) if head > token else ("NHD",)
        if tokens == 1 and heads > 1:
            return ("NHD",) if token > head else ("HND",)
    found: list[Layout] = []
    if hnd:
        found.append("HND")
    if nhd:
        found.append("NHD")
    return tuple(found)


def _unknown(where: str, message: str) -> Refusal:
    return Refusal(
        "UnknownAxes", f"{where}.axes", message, "State model.geometry and engine.pages by hand, from its source"
    )


def _unsupported(field: str, message: str, remedy: str = "Use another attention backend") -> Refusal:
    return Refusal("UnsupportedCache", field, message, remedy)
