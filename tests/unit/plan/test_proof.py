"""The proof accepts every right plan, whoever made it, and names what is wrong with any other."""

from __future__ import annotations

import copy

import pytest

from disagg_plan import canonical, wire
from disagg_plan.errors import ProofError
from disagg_plan.proof import Proof, prove


def put(document, path, value):
    for key in path[:-1]:
        document = document[key]
    document[path[-1]] = value


def prove_document(document, reseal):
    return prove(wire.decode(reseal(document)))


def findings(document, reseal):
    with pytest.raises(ProofError) as refused:
        prove_document(document, reseal)
    error = refused.value
    assert error.code == "ProofFailed"
    assert error.message.startswith(error.findings[0])
    return error.findings


def forget_factors(document):
    document["compat"] = {"factors": {}, "digest": canonical.digest({})}


@pytest.fixture
def heads(build):
    """8 heads, P2 -> D4, 4 layers, blocks of 16: a head is 256 bytes of a page."""
    return copy.deepcopy(wire.document(build.deployment(build.heads(8), 2, 4).plan()))


@pytest.fixture
def latent(build):
    """A latent, P2 -> D3: the reader in the middle takes half of the layers from each."""
    return copy.deepcopy(wire.document(build.deployment(build.latent(), 2, 3).plan()))


def test_what_is_proven(heads, latent, reseal):
    assert prove_document(heads, reseal) == Proof(edges=4, cells_per_token=8 * 2 * 4, bytes_per_token=8 * 2 * 4 * 8)
    assert prove_document(latent, reseal) == Proof(edges=4, cells_per_token=3 * 4, bytes_per_token=3 * 4 * 8)


# Plans that the planner would not make, and that are right.


def test_padding_between_pages(heads, reseal):
    for side, more in (("source", 64), ("destination", 4096)):
        for page in heads[side]["pages"]:
            page["regions"][0]["stride"] += more
    prove_document(heads, reseal)


def test_padding_inside_pages(heads, reseal):
    """Source cells begin 32 bytes into the page, and 40 bytes are left behind them."""
    for page in heads["source"]["pages"]:
        page["regions"][0]["bytes"] += 72
        page["regions"][0]["stride"] += 72
        for part in page["parts"]:
            part["offset"] += 32
    for shape in heads["shapes"]:
        for one in shape:
            one["src"] += 32
    prove_document(heads, reseal)


def test_a_copy_in_two_halves(heads, reseal):
    for shape in heads["shapes"]:
        for one in list(shape):
            one["bytes"] //= 2
            shape.append({**one, "src": one["src"] + one["bytes"], "dst": one["dst"] + one["bytes"]})
    prove_document(heads, reseal)


def test_layers_in_two_copies(heads, reseal):
    for shape in heads["shapes"]:
        for one in list(shape):
            one["layers"] = "0,2"
            shape.append({**one, "layers": "1,3"})
    prove_document(heads, reseal)


def test_edges_in_another_order(heads, reseal):
    heads["edges"].reverse()
    prove_document(heads, reseal)


def test_cells_of_several_rows(heads, reseal):
    """Each cell is two runs of 4 bytes, 8 apart at the source and adjoining at the destination."""
    for page in heads["source"]["pages"]:
        page["regions"][0] = {"bytes": 4 * 512, "stride": 4 * 512}
        for number, part in enumerate(page["parts"]):
            rows = {"cellBytes": 4, "cellRepeat": {"count": 2, "stride": 8}}
            part.update(offset=number * 16, unitStride=512, tokenStride=32, **rows)
    for page in heads["destination"]["pages"]:
        for part in page["parts"]:
            part.update(cellBytes=4, cellRepeat={"count": 2, "stride": 4})
    for shape in heads["shapes"]:
        for one in shape:
            number = "kv".index(one["part"])
            head = one["src"] // 256
            one.update(bytes=4, src=head * 512 + number * 16, dst=number * 8)
            one["repeat"] = [
                {"count": 2, "src": 512, "dst": 256},
                {"count": 16, "src": 32, "dst": 16},
                {"count": 2, "src": 8, "dst": 4},
            ]
    prove_document(heads, reseal)


def test_an_unread_source_may_be_told_by_any_rank(build, reseal):
    document = wire.document(build.deployment(build.latent(), 4, 2).plan())
    assert document["completions"] == {"0": [0], "1": [0], "2": [1], "3": [1]}
    for told in ([0], [1]):
        document["completions"]["3"] = told
        prove_document(document, reseal)


# Plans that are wrong.

PAGE = ("source", "pages", 0)
PART = (*PAGE, "parts", 0)


@pytest.mark.parametrize(
    ("path", "value", "finding"),
    [
        (("source", "role"), "decode", "source: role is decode"),
        (("destination", "role"), "prefill", "destination: role is prefill"),
        (("source", "parallelism", "tensor"), 4, "source: 2 ranks, parallelism 4 x 1 has 4"),
        (("source", "parallelism", "pipeline"), 2, "source: 2 ranks, parallelism 2 x 2 has 4"),
        (("source", "parallelism", "decodeContext"), 2, "source: decodeContext 2 cannot be proven by this version"),
        (("groups", 0, "kind"), "state", "group attention: kind state with rule all cannot be proven by this version"),
        (
            ("groups", 0, "tokens"),
            {"rule": "window", "size": 8},
            "group attention: kind paged with rule window cannot be proven by this version",
        ),
        (("groups", 0, "name"), "other", "source rank 0: group attention is not declared"),
        (("groups", 0, "layers"), "0-4", "source: the stages do not hold each layer of attention (0-4) exactly once"),
        (("groups", 0, "layers"), "0-2", "source: the stages do not hold each layer of attention (0-2) exactly once"),
        (
            ("groups", 0, "subTokens"),
            8,
            "table attention: subTokens 8 of attention, blocks of 16 and 16 tokens have 16",
        ),
        (("groups", 0, "subTokens"), 32, "source rank 0 group attention: subTokens 32 does not divide the block of 16"),
        (("groups", 0, "parts", 0, "name"), "kk", "source rank 0 group attention: its page has other parts"),
        (("groups", 0, "parts", 1, "name"), "k", "group attention: part k stands twice"),
        (
            ("groups", 0, "parts", 0, "units"),
            16,
            "source rank 0 group attention: holds units [0, 4] of k, the sharding rule gives [0, 8]",
        ),
        (
            ("groups", 0, "parts", 0, "units"),
            3,
            "source rank 0 group attention: 3 units of k cannot be placed on 2 ranks",
        ),
        (
            ("groups", 0, "parts", 0, "sharding"),
            "replicated",
            "source rank 0 group attention: holds units [0, 4] of k, the sharding rule gives [0, 8]",
        ),
        (("source", "ranks", 0, "pages"), {}, "source rank 0: pages and layers name different groups"),
        (("source", "ranks", 0, "pages", "attention"), 1, "source rank 0 group attention: holds units [4, 8] of k"),
        (("source", "ranks", 0, "pages", "attention"), 9, "source rank 0: page 9 of 2"),
        (
            ("source", "ranks", 1, "layers", "attention"),
            "0-2",
            "source rank 1: holds other layers of attention than rank 0",
        ),
        (
            ("destination", "ranks", 0, "layers", "attention"),
            "1-3",
            "destination rank 1: holds other layers of attention",
        ),
        ((*PAGE, "blockTokens"), 8, "source rank 0 group attention: subTokens 16 does not divide the block of 8"),
        ((*PAGE, "blockTokens"), 32, "table attention: the ranks of the source have blocks of 16 and 32 tokens"),
        (
            (*PAGE, "perBlock"),
            2,
            "source rank 0 group attention: this version proves pages with blockTokens and without",
        ),
        ((*PAGE, "regions", 0, "stride"), 1023, "source rank 0 group attention: stride 1023 is below the 1024 bytes"),
        ((*PAGE, "regions", 0, "bytes"), 1016, "source page 0: part v reaches outside the 1016 bytes of its region"),
        ((*PART, "region"), 1, "source rank 0 group attention: part k lies in region 1 of 1"),
        ((*PART, "units"), [1, 5], "source rank 0 group attention: holds units [1, 5] of k"),
        ((*PART, "offset"), 8, "source page 0: cells of part v overlap others"),
        ((*PART, "offset"), 9000, "source page 0: part k reaches outside the 1024 bytes of its region"),
        ((*PART, "unitStride"), 8, "source page 0: cells of part k overlap others"),
        (
            (*PART, "tokenStride"),
            0,
            "source rank 1 group attention: cells of k are 8 bytes a token, those of source rank 0 are 8 bytes a block",
        ),
        (
            (*PART, "cellBytes"),
            16,
            "source rank 1 group attention: cells of k are 8 bytes a token, those of source rank 0 are 16 bytes a",
        ),
        (
            (*PART, "cellBytes"),
            4,
            "source rank 1 group attention: cells of k are 8 bytes a token, those of source rank 0 are 4 bytes a token",
        ),
        (
            (*PART, "cellRepeat"),
            {"count": 2, "stride": 4},
            "source rank 1 group attention: cells of k are 8 bytes a token, those of source rank 0 are 2 x 8 bytes a",
        ),
        (("edges", 0, "from"), 2, "edge p2 -> d0: no such rank"),
        (("edges", 0, "to"), 4, "edge p0 -> d4: no such rank"),
        (("edges", 0, "shape"), 7, "edge p0 -> d0: shape 7 of 2"),
        (("edges", 1, "to"), 0, "edge p0 -> d0 stands twice"),
        (("completions",), {"0": [0, 1]}, "completions name ['0'], the prefill side has ranks 0 to 1"),
        (
            ("completions",),
            {"0": [0, 1], "1": [2, 3], "2": [0]},
            "completions name ['0', '1', '2'], the prefill side has ranks 0 to 1",
        ),
        (("completions", "0"), [0], "prefill rank 0 waits for decode ranks [0], its readers are [0, 1]"),
        (("completions", "0"), [0, 1, 2], "prefill rank 0 waits for decode ranks [0, 1, 2], its readers are [0, 1]"),
        (("completions", "0"), [1, 0], "prefill rank 0 waits for decode ranks [1, 0], its readers are [0, 1]"),
        (("completions", "0"), [0, 0, 1], "prefill rank 0 waits for decode ranks [0, 0, 1], its readers are [0, 1]"),
        (
            ("shapes", 0, 0, "group"),
            "other",
            "edge p0 -> d0: copies layers 0-3 of other, which its prefill rank does not",
        ),
        (("shapes", 0, 0, "layers"), "0-4", "edge p0 -> d0: copies layers 0-4 of attention, which its prefill rank"),
        (
            ("shapes", 0, 0, "layers"),
            "0-2",
            "decode rank 0 group attention layers 3..3: byte 0 of region 0 is never written",
        ),
        (("shapes", 0, 0, "part"), "x", "edge p0 -> d0: group attention has no part x"),
        (
            ("shapes", 0, 0, "part"),
            "v",
            "edge p0 -> d0 copy 0 (attention.v): touches bytes of the source page that are not v",
        ),
        (("shapes", 0, 0, "src"), 256, "edge p0 -> d0 copy 0 (attention.k): byte 0 of the copy is another unit"),
        (("shapes", 0, 0, "src"), 16, "edge p0 -> d0 copy 0 (attention.k): byte 0 of the copy is another unit, token"),
        (
            ("shapes", 0, 0, "src"),
            4,
            "edge p0 -> d0 copy 0 (attention.k): touches bytes of the source page that are not k",
        ),
        (
            ("shapes", 0, 0, "src"),
            1008,
            "edge p0 -> d0 copy 0 (attention.k): sub-block 0 leaves the 1024 bytes of the source",
        ),
        (("shapes", 0, 0, "dst"), 8, "edge p0 -> d0 copy 0 (attention.k): touches bytes of the destination page"),
        (
            ("shapes", 0, 0, "dst"),
            16,
            "edge p0 -> d0 copy 0 (attention.k): sub-block 0 leaves the 512 bytes of the destin",
        ),
        (
            ("shapes", 0, 0, "bytes"),
            16,
            "edge p0 -> d0 copy 0 (attention.k): touches bytes of the source page that are not k",
        ),
        (
            ("shapes", 0, 0, "bytes"),
            4,
            "decode rank 0 group attention layers 0..3: byte 4 of region 0 is never written",
        ),
        (("shapes", 0, 0, "bytes"), 2048, "edge p0 -> d0 copy 0: 65536 bytes are more than a page holds"),
        (("shapes", 0, 0, "srcSub"), 8, "edge p0 -> d0 copy 0 (attention.k): srcSub 8, and the page is one sub-block"),
        (("shapes", 0, 0, "dstSub"), 8, "edge p0 -> d0 copy 0 (attention.k): dstSub 8, and the page is one sub-block"),
        (
            ("shapes", 0, 0, "repeat"),
            [],
            "decode rank 0 group attention layers 0..3: byte 16 of region 0 is never written",
        ),
        (("summary", "bytesPerToken"), 1, "summary.bytesPerToken is 1, the edges give 512"),
        (("summary", "stateBytesPerRequest"), 1, "summary.stateBytesPerRequest is 1, the edges give 0"),
        (("summary", "maxSourceBytes"), 1, "summary.maxSourceBytes is 1, the edges give 256"),
        (("summary", "meanSourceBytes"), 1, "summary.meanSourceBytes is 1, the edges give 256"),
        (("summary", "maxDestinationBytes"), 1, "summary.maxDestinationBytes is 1, the edges give 128"),
    ],
)
def test_one_wrong_value(heads, reseal, path, value, finding):
    put(heads, path, value)
    found = findings(heads, reseal)
    assert any(one.startswith(finding) for one in found), found


def test_missing_sub_tokens(heads, reseal):
    del heads["groups"][0]["subTokens"]
    assert findings(heads, reseal) == ["group attention: a paged group needs subTokens"]


def test_missing_block_tokens(heads, reseal):
    del heads["source"]["pages"][0]["blockTokens"]
    assert "this version proves pages with blockTokens" in findings(heads, reseal)[0]


def test_a_group_twice(heads, reseal):
    heads["groups"].append(copy.deepcopy(heads["groups"][0]))
    assert "group attention stands twice" in findings(heads, reseal)


def test_a_part_in_two_groups(heads, reseal):
    heads["groups"].append({**copy.deepcopy(heads["groups"][0]), "name": "other"})
    assert "part k of layer 0 is in groups attention and other" in findings(heads, reseal)


def test_an_unused_page(heads, reseal):
    heads["destination"]["pages"].append(copy.deepcopy(heads["destination"]["pages"][0]))
    assert findings(heads, reseal) == ["destination: page 4 is used by no rank"]


def test_an_unused_region(heads, reseal):
    heads["source"]["pages"][0]["regions"].append({"bytes": 8, "stride": 8})
    assert findings(heads, reseal) == ["source rank 0 group attention: no part lies in region 1"]


def test_an_unused_shape(heads, reseal):
    heads["shapes"].append([{**heads["shapes"][0][0], "layers": "1"}])
    assert findings(heads, reseal) == ["shape 2 is used by no edge"]


def test_an_empty_shape(heads, reseal):
    heads["shapes"][1] = []
    assert "shape 1 is empty" in findings(heads, reseal)


def test_a_shape_twice(heads, reseal):
    heads["shapes"].append(copy.deepcopy(heads["shapes"][0]))
    heads["edges"][2]["shape"] = 2
    assert findings(heads, reseal) == ["shape 2 is the same as shape 0"]


def test_a_missing_edge(heads, reseal):
    heads["edges"].pop()
    heads["completions"]["1"] = [2]
    assert "decode rank 3 group attention layers 0..3: byte 0 of region 0 is never written (512 bytes in all)" in (
        findings(heads, reseal)
    )


def test_two_sources_for_one_byte(latent, reseal):
    latent["edges"].insert(3, {"from": 1, "to": 0, "shape": 0})
    latent["completions"]["1"] = [0, 1, 2]
    assert (
        "decode rank 0 group mla layers 0..3: byte 0 of region 0 is written more than once (128 bytes in all)"
        in findings(latent, reseal)
    )


def test_the_same_copy_twice(heads, reseal):
    heads["shapes"][0].append(heads["shapes"][0][0])
    assert any("is written more than once" in one for one in findings(heads, reseal))


def test_a_source_of_another_stage(build, reseal):
    stages = {"stages": [(0, 1), (2, 3)]}
    document = wire.document(build.deployment(build.heads(2), 1, 1, stages, stages).plan())
    assert [(edge["from"], edge["to"]) for edge in document["edges"]] == [(0, 0), (1, 1)]
    document["edges"][0]["from"], document["edges"][1]["from"] = 1, 0
    document["completions"] = {"0": [1], "1": [0]}
    assert findings(document, reseal)[0] == (
        "edge p1 -> d0: copies layers 0-1 of attention, which its prefill rank does not hold"
    )


def test_a_source_of_other_heads(heads, reseal):
    for edge in heads["edges"]:
        edge["from"] = 1 - edge["from"]
    heads["completions"] = {"0": [2, 3], "1": [0, 1]}
    found = findings(heads, reseal)
    assert all("is another unit, token or place" in one for one in found)
    assert len(found) >= 4


def test_writes_into_padding(heads, reseal):
    """The destination's cells of V are half as long as said, and still written whole."""
    for side in ("source", "destination"):
        for page in heads[side]["pages"]:
            page["parts"][1]["cellBytes"] = 4
    assert any("touches bytes of the source page that are not v" in one for one in findings(heads, reseal))


def test_findings_are_bounded(build, reseal):
    document = wire.document(build.deployment(build.heads(64, layers=1), 64, 64).plan())
    document["completions"] = {rank: [63 - int(rank)] for rank in document["completions"]}
    found = findings(document, reseal)
    assert len(found) == 50
    assert found[0] == "prefill rank 0 waits for decode ranks [63], its readers are [0]"


# The two sides must mean the same by a cell.


def test_cells_of_two_sizes(build, reseal):
    """Source cells of 8 bytes, destination cells of 4: the first half of the head lies where the whole should."""
    document = wire.document(build.deployment(build.latent(), 1, 1).plan())
    document["destination"]["pages"][0]["regions"][0] = {"bytes": 64, "stride": 64}
    document["destination"]["pages"][0]["parts"][0].update(cellBytes=4, tokenStride=4, unitStride=64)
    document["shapes"][0][0].update(bytes=64, repeat=[])
    figures = {"bytesPerToken": 16, "maxSourceBytes": 16, "meanSourceBytes": 16, "maxDestinationBytes": 16}
    document["summary"].update(figures)
    assert findings(document, reseal) == [
        "destination rank 0 group mla: cells of latent are 4 bytes a token, those of source rank 0 are 8 bytes a token"
    ]


def test_a_run_whose_inside_is_the_kernels(build, reseal):
    """Equal bytes on both sides, and the destination does not say where a token lies in them."""
    document = wire.document(build.deployment(build.latent(), 1, 1).plan())
    document["destination"]["pages"][0]["parts"][0].update(cellBytes=128, tokenStride=0)
    assert findings(document, reseal) == [
        "destination rank 0 group mla: cells of latent are 128 bytes a block, "
        "those of source rank 0 are 8 bytes a token"
    ]


def test_blocks_of_two_sizes_on_one_side(build, reseal):
    """One list of block ids serves all ranks of a side, so a block holds the same tokens on all of them."""
    small = wire.document(build.deployment(build.latent(), 2, 2, {"block": 16}, {"block": 16}).plan())
    large = wire.document(build.deployment(build.latent(), 2, 2, {"block": 16}, {"block": 32}).plan())
    small["destination"]["pages"].append(large["destination"]["pages"][0])
    small["destination"]["ranks"][1]["pages"]["mla"] = 1
    small["shapes"].append(large["shapes"][0])
    small["edges"][1]["shape"] = 1
    forget_factors(small)
    assert findings(small, reseal) == ["table mla: the ranks of the destination have blocks of 16 and 32 tokens"]


def test_blocks_of_two_sizes_in_one_table(build, reseal):
    one = wire.document(build.deployment(build.latent(layers=(0, 1)), 1, 1, {"block": 16}, {"block": 16}).plan())
    other = wire.document(build.deployment(build.heads(1, layers=(2, 3)), 1, 1, {"block": 16}, {"block": 32}).plan())
    for side in ("source", "destination"):
        one[side]["pages"] += other[side]["pages"]
        one[side]["ranks"][0]["pages"]["attention"] = 1
        one[side]["ranks"][0]["layers"]["attention"] = "2-3"
    one["groups"] = [{**other["groups"][0]}, *one["groups"]]
    one["shapes"][0] += other["shapes"][0]
    for figure in ("bytesPerToken", "maxSourceBytes", "meanSourceBytes", "maxDestinationBytes"):
        one["summary"][figure] += other["summary"][figure]
    forget_factors(one)
    prove_document(one, reseal)
    for group in one["groups"]:
        group["table"] = "shared"
    assert findings(one, reseal) == ["table shared: the ranks of the destination have blocks of 16 and 32 tokens"]


def test_a_page_that_its_factors_contradict(build, reseal):
    """Blocks of 3 tokens, said to be 2 and a token of padding: all offsets fit, and every pair would be wrong."""
    document = wire.document(build.deployment(build.latent(), 1, 2, {"block": 3}, {"block": 1}).plan())
    document["source"]["pages"][0]["blockTokens"] = 2
    assert findings(document, reseal) == ["source: page 0 has blocks of 2 tokens, compat.factors say 3"]
    forget_factors(document)
    prove_document(document, reseal)


def test_groups_that_their_factor_contradicts(heads, reseal):
    heads["groups"][0]["table"] = "other"
    assert findings(heads, reseal) == ["compat.factors.groups is not the digest of the plan's groups"]
    forget_factors(heads)
    prove_document(heads, reseal)


def test_pages_too_large_to_expand(heads, reseal):
    """Granules of one byte and pages of many: refused before memory is taken."""
    page = heads["source"]["pages"][0]
    page["regions"][0] = {"bytes": 2**40 - 1, "stride": 2**40}
    assert findings(heads, reseal) == [f"source page 0: {2**40 - 1} granules of 1 bytes are too many to prove"]
