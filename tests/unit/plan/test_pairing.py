from __future__ import annotations

import numpy as np
import pytest

from disagg_plan.errors import RequestError
from disagg_plan.pairing import blocks_for, check_blocks, page_pairs


def pairs(*args):
    found = page_pairs(*args)
    columns = (found.src_page, found.src_sub, found.dst_page, found.dst_sub)
    rows = list(zip(*(column.tolist() for column in columns), strict=True))
    assert len(found) == len(rows)
    return rows


@pytest.mark.parametrize(
    ("tokens", "block", "blocks"), [(0, 16, 0), (1, 16, 1), (16, 16, 1), (17, 16, 2), (1024, 128, 8), (5, 1, 5)]
)
def test_blocks_for(tokens, block, blocks):
    assert blocks_for(tokens, block) == blocks


def test_equal_blocks():
    src, dst = np.array([7, 3, 9]), np.array([0, 5, 2])
    assert pairs(16, src, 16, dst, 16, 0, 48) == [(3, 0, 5, 0), (7, 0, 0, 0), (9, 0, 2, 0)]


def test_ragged_tail_moves_its_whole_sub_block():
    src, dst = np.array([7, 3, 9]), np.array([0, 5, 2])
    assert pairs(16, src, 16, dst, 16, 0, 33) == pairs(16, src, 16, dst, 16, 0, 48)
    assert pairs(16, src, 16, dst, 16, 0, 32) == [(3, 0, 5, 0), (7, 0, 0, 0)]
    # Blocks of 32 and 48 cut at 16: position 17 is in the second sub-block, nothing after it moves.
    assert pairs(16, np.array([4]), 32, np.array([1]), 48, 0, 17) == [(4, 0, 1, 0), (4, 1, 1, 1)]


def test_larger_source_blocks():
    src, dst = np.array([4, 1]), np.array([8, 6, 3])
    assert pairs(16, src, 32, dst, 16, 0, 48) == [(1, 0, 3, 0), (4, 0, 8, 0), (4, 1, 6, 0)]


def test_larger_destination_blocks():
    src, dst = np.array([4, 1, 2]), np.array([8, 6])
    assert pairs(16, src, 16, dst, 32, 0, 48) == [(1, 0, 8, 1), (2, 0, 6, 0), (4, 0, 8, 0)]


def test_blocks_that_do_not_divide():
    # 32 and 48 tokens share sub-blocks of 16.
    src, dst = np.array([10, 11, 12]), np.array([20, 21])
    assert pairs(16, src, 32, dst, 48, 0, 96) == [
        (10, 0, 20, 0),
        (10, 1, 20, 1),
        (11, 0, 20, 2),
        (11, 1, 21, 0),
        (12, 0, 21, 1),
        (12, 1, 21, 2),
    ]


def test_prefix_hit_pairs_by_position_not_from_an_end():
    # Decode holds positions 0 to 31: its list starts at position 32, the source's at 0, with a spare block behind.
    src, dst = np.array([5, 6, 7, 8]), np.array([2])
    assert pairs(16, src, 16, dst, 16, 32, 48) == [(7, 0, 2, 0)]
    # A decode block of 48 starts in the second half of a source block of 32.
    assert pairs(16, np.array([5, 6, 7]), 32, np.array([2]), 48, 48, 96) == [(6, 1, 2, 0), (7, 0, 2, 1), (7, 1, 2, 2)]


@pytest.mark.parametrize(("start", "end"), [(0, 0), (32, 32), (32, 16)])
def test_nothing_to_move(start, end):
    assert pairs(16, np.array([5, 6]), 16, np.array([2]), 16, start, end) == []


@pytest.mark.parametrize(("start", "block"), [(1, 16), (8, 16), (16, 48), (47, 48)])
def test_start_inside_a_block(start, block):
    with pytest.raises(RequestError) as refused:
        page_pairs(8, np.arange(9), 16, np.arange(9), block, start, 96)
    assert refused.value.code == "UnalignedStart"
    assert f"position {start} is not the start of a decode block of {block} tokens" in refused.value.message


def test_checked_blocks_drop_the_spare():
    found = check_blocks([3, 0, 9, 4], 33, 16, 10, "list", unique=True)
    assert found.tolist() == [3, 0, 9]
    assert found.dtype == np.int64
    assert check_blocks([], 0, 16, 10, "list", unique=True).tolist() == []
    assert check_blocks(np.array([1, 2], dtype=np.uint8), 32, 16, 3, "list", unique=True).tolist() == [1, 2]
    # The spare ones are not judged: they are never used.
    assert check_blocks([1, 99, 1], 16, 16, 10, "list", unique=True).tolist() == [1]


@pytest.mark.parametrize(
    ("ids", "tokens", "code", "message"),
    [
        ([], 1, "TooFewPages", "0 blocks of 16 tokens cannot hold 1 tokens, 1 are needed"),
        ([1, 2], 33, "TooFewPages", "2 blocks of 16 tokens cannot hold 33 tokens, 3 are needed"),
        ([1, 10], 32, "PageOutOfRange", "page id 10 is outside the pool of 10 pages"),
        ([-1, 10], 32, "PageOutOfRange", "page id -1 is outside the pool of 10 pages"),
        ([2**63 - 1], 16, "PageOutOfRange", f"page id {2**63 - 1} is outside the pool of 10 pages"),
        ([2**64 - 1], 16, "PageOutOfRange", f"page id {2**64 - 1} is outside the pool of 10 pages"),
        ([3, 4, 3], 48, "RepeatedPage", "a page id stands twice in one request"),
        ([1.0, 2.0], 32, "BadPages", "page ids are not a list of whole numbers"),
        (["1"], 16, "BadPages", "page ids are not a list of whole numbers"),
        ([True, False], 32, "BadPages", "page ids are not a list of whole numbers"),
        ([[1, 2]], 32, "BadPages", "page ids are not a list of whole numbers"),
        ([[1], [2, 3]], 32, "BadPages", "page ids are not a list of whole numbers"),
        ([2**70], 16, "BadPages", "page ids are not a list of whole numbers"),
        ([None], 16, "BadPages", "page ids are not a list of whole numbers"),
        (None, 16, "BadPages", "page ids are not a list of whole numbers"),
        ({"a": 1}, 16, "BadPages", "page ids are not a list of whole numbers"),
        (3, 16, "BadPages", "page ids are not a list of whole numbers"),
    ],
)
def test_blocks_that_are_refused(ids, tokens, code, message):
    with pytest.raises(RequestError) as refused:
        check_blocks(ids, tokens, 16, 10, "decode rank 1 table attention", unique=True)
    assert refused.value.code == code
    assert refused.value.message == f"decode rank 1 table attention: {message}"


def test_a_source_page_may_stand_twice():
    assert check_blocks([3, 3], 32, 16, 10, "list", unique=False).tolist() == [3, 3]
