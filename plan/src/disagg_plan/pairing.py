"""Which page and sub-block of the source pairs with which of the destination, for one request.

Pairs are made by token position, never by count from an end of a list: a decode rank that holds a prefix already,
or a prefill rank that allocated spare blocks, then changes nothing for the positions in between.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from disagg_plan.errors import RequestError

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Pairs:
    """Sub-block pairs of one block table, all arrays of shape `(n,)`, ascending by source page and sub-block."""

    src_page: Ints
    src_sub: Ints
    dst_page: Ints
    dst_sub: Ints

    def __len__(self) -> int:
        return len(self.src_page)


def blocks_for(tokens: int, block_tokens: int) -> int:
    """Blocks that hold `tokens` tokens."""
    return -(-tokens // block_tokens)


def check_blocks(ids: ArrayLike, tokens: int, block_tokens: int, pages: int, what: str, unique: bool) -> Ints:
    """Judge a request's block ids before anything is moved by them.

    Args:
        ids: block ids in order of token position, starting at position 0 of the span.
        tokens: tokens of the span that they must hold.
        pages: number of pages of the pool that they index.
        what: how messages name the list, e.g. `prefill rank 1 table attention`.
        unique: refuse a repeated id (a page written twice would hold the later tokens only).

    Returns:
        The ids that hold the span; spare ones at the end are dropped.

    Raises:
        RequestError: `PageOutOfRange`, `TooFewPages`, `RepeatedPage` or `BadPages`.
    """
    try:
        array = np.asarray(ids)
    except ValueError:  # lists of unequal length inside
        array = np.asarray(None)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise RequestError("BadPages", f"{what}: page ids are not a list of whole numbers")
    needed = blocks_for(tokens, block_tokens)
    if array.size < needed:
        raise RequestError(
            "TooFewPages",
            f"{what}: {array.size} blocks of {block_tokens} tokens cannot hold {tokens} tokens, {needed} are needed",
        )
    used = array[:needed]
    if used.size and (int(used.min()) < 0 or int(used.max()) >= pages):
        wrong = int(used.min()) if int(used.min()) < 0 else int(used.max())
        raise RequestError("PageOutOfRange", f"{what}: page id {wrong} is outside the pool of {pages} pages")
    if unique and len(np.unique(used)) != len(used):
        raise RequestError("RepeatedPage", f"{what}: a page id stands twice in one request")
    return used.astype(np.int64)


def page_pairs(
    sub_tokens: int,
    src_ids: Ints,
    src_block: int,
    dst_ids: Ints,
    dst_block: int,
    start: int,
    end: int,
) -> Pairs:
    """Pair the sub-blocks that hold token positions `[start, end)`.

    Args:
        sub_tokens: tokens of a sub-block; divides both block sizes.
        src_ids: source block ids; the first one holds position 0.
        dst_ids: destination block ids; the first one holds position `start`.
        start: first position to move; must begin a destination block (a prefix hit is whole blocks).
        end: one past the last position.

    Raises:
        RequestError: `UnalignedStart` if `start` lies inside a destination block.
    """
    if start % dst_block:
        raise RequestError(
            "UnalignedStart",
            f"position {start} is not the start of a decode block of {dst_block} tokens: only whole blocks can be held "
            "already",
        )
    position = np.arange(start // sub_tokens, blocks_for(end, sub_tokens), dtype=np.int64) * sub_tokens
    src_page = src_ids[position // src_block]
    src_sub = position % src_block // sub_tokens
    dst_page = dst_ids[(position - start) // dst_block]
    dst_sub = position % dst_block // sub_tokens
    # NIXL joins neighbouring descriptors only where both index lists run on, so pairs go in source order.
    order = np.lexsort((src_sub, src_page))
    return Pairs(src_page[order], src_sub[order], dst_page[order], dst_sub[order])
