"""What a document may contain, and what `decode` refuses."""

from __future__ import annotations

import copy
import json

import pytest

from disagg_plan import canonical, wire
from disagg_plan.errors import FormatError


@pytest.fixture(scope="module")
def plan(build):
    return build.deployment(build.latent(), 2, 3, {}, {"block": 32}).plan()


@pytest.fixture
def document(plan):
    return copy.deepcopy(wire.document(plan))


def at(document, path):
    for key in path:
        document = document[key]
    return document


def put(document, path, value):
    at(document, path[:-1])[path[-1]] = value


def refusal_of(data):
    with pytest.raises(FormatError) as refused:
        wire.decode(data)
    return refused.value


def test_round_trip(plan):
    data = wire.encode(plan)
    assert wire.decode(data) == plan
    assert wire.encode(wire.decode(data)) == data
    assert wire.decode(data.decode()) == plan


def test_a_published_document_is_canonical(plan):
    data = wire.encode(plan)
    assert data == json.dumps(json.loads(data), sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def test_spaces_and_order_of_keys_do_not_matter(plan, document):
    backwards = {key: document[key] for key in sorted(document, reverse=True)}
    assert wire.decode(json.dumps(backwards, indent=2)) == plan


def test_digest_is_over_everything_else(plan, document):
    said = document.pop("digest")
    assert said == canonical.digest(document) == plan.digest


def test_keys_of_a_document(document):
    assert sorted(document) == [
        "compat",
        "completions",
        "destination",
        "digest",
        "edges",
        "groups",
        "schema",
        "shapes",
        "source",
        "summary",
        "warnings",
    ]
    assert document["schema"] == "disagg.dev/transfer-plan/v1"
    assert sorted(document["edges"][0]) == ["from", "shape", "to"]
    assert document["groups"][0] == {
        "name": "mla",
        "kind": "paged",
        "layers": "0-3",
        "table": "mla",
        "tokens": {"rule": "all"},
        "parts": [{"name": "latent", "units": 1, "sharding": "replicated"}],
        "subTokens": 16,
    }
    assert document["source"]["parallelism"] == {"tensor": 2, "pipeline": 1, "decodeContext": 1, "interleave": 1}
    assert document["source"]["ranks"][0] == {"pages": {"mla": 0}, "layers": {"mla": "0-3"}}
    assert sorted(document["shapes"][0][0]) == [
        "bytes",
        "dst",
        "dstSub",
        "group",
        "layers",
        "part",
        "repeat",
        "src",
        "srcSub",
    ]


OBJECTS = [
    (),
    ("compat",),
    ("source",),
    ("source", "parallelism"),
    ("source", "pages", 0),
    ("source", "pages", 0, "regions", 0),
    ("source", "pages", 0, "parts", 0),
    ("destination", "ranks", 0),
    ("groups", 0),
    ("groups", 0, "tokens"),
    ("groups", 0, "parts", 0),
    ("shapes", 0, 0),
    ("edges", 0),
    ("summary",),
]


@pytest.mark.parametrize("path", OBJECTS)
def test_unknown_key(document, reseal, path):
    put(document, (*path, "extra"), 1)
    refusal = refusal_of(reseal(document))
    assert refusal.code == "BadSchema"
    assert "extra" in refusal.message


@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        (("source", "parallelism"), "decodeContext", "decode_context"),
        (("source", "pages", 0), "blockTokens", "block_tokens"),
        (("edges", 0), "from", "source"),
        ((), "schema", "schema_"),
        (("groups", 0), "subTokens", "sub_tokens"),
    ],
)
def test_key_under_another_name(document, reseal, path, old, new):
    found = at(document, path)
    found[new] = found.pop(old)
    assert refusal_of(reseal(document)).code == "BadSchema"


@pytest.mark.parametrize("key", ["schema", "compat", "source", "groups", "edges", "completions", "summary", "warnings"])
def test_missing_key(document, reseal, key):
    del document[key]
    refusal = refusal_of(reseal(document))
    assert refusal.code == "BadSchema"
    assert key in refusal.message


def test_missing_digest(document):
    del document["digest"]
    refusal = refusal_of(canonical.dumps(document))
    assert refusal.code == "BadSchema"
    assert "digest" in refusal.message


INTEGERS = [
    (("edges", 0, "from"), 2**16),
    (("edges", 0, "to"), 2**16),
    (("source", "parallelism", "tensor"), 2**20),
    (("source", "pages", 0, "blockTokens"), 2**20),
    (("source", "pages", 0, "regions", 0, "bytes"), 2**40),
    (("source", "pages", 0, "regions", 0, "stride"), 2**40),
    (("source", "pages", 0, "parts", 0, "region"), 64),
    (("source", "pages", 0, "parts", 0, "units", 1), 2**40),
    (("source", "pages", 0, "parts", 0, "offset"), 2**40),
    (("source", "pages", 0, "parts", 0, "unitStride"), 2**40),
    (("source", "pages", 0, "parts", 0, "tokenStride"), 2**40),
    (("source", "pages", 0, "parts", 0, "cellBytes"), 2**40),
    (("groups", 0, "subTokens"), 2**20),
    (("groups", 0, "parts", 0, "units"), 2**20),
    (("shapes", 0, 0, "bytes"), 2**40),
    (("shapes", 0, 0, "src"), 2**40),
    (("shapes", 0, 0, "dst"), 2**40),
    (("shapes", 0, 0, "srcSub"), 2**40),
    (("shapes", 0, 0, "dstSub"), 2**40),
    (("summary", "bytesPerToken"), 2**40),
    (("summary", "copiesPerBlock"), 2**40),
]


@pytest.mark.parametrize(("path", "largest"), INTEGERS)
def test_integers_are_bounded(document, reseal, path, largest):
    put(document, path, largest)
    wire.decode(reseal(document))
    for value in (largest + 1, 10**4000, -1, True, "1", [1], {}):
        put(document, path, value)
        assert refusal_of(reseal(document)).code == "BadSchema"


@pytest.mark.parametrize(("path", "largest"), INTEGERS)
def test_floats_and_nulls(document, path, largest):
    for value in (1.0, None):
        put(document, path, value)
        assert refusal_of(json.dumps(document)).code == "NotCanonical"


def test_absent_is_not_null(document):
    for path in (("source", "pages", 0, "perBlock"), ("groups", 0, "tokens", "size")):
        changed = copy.deepcopy(document)
        put(changed, path, None)
        assert refusal_of(json.dumps(changed)).code == "NotCanonical"


def test_repeated_key(plan):
    data = wire.encode(plan).decode()
    twice = data.replace('"schema":', f'"schema":"{wire.SCHEMA}","schema":')
    refusal = refusal_of(twice)
    assert refusal.code == "NotJson"
    assert "key 'schema' stands twice" in refusal.message


@pytest.mark.parametrize("value", ["", "sha256:", "sha256:" + "0" * 63, "sha256:" + "A" * 64, "md5:" + "0" * 64, 7])
def test_digest_of_another_form(document, value):
    document["digest"] = value
    refusal = refusal_of(canonical.dumps(document))
    assert refusal.code == "BadSchema"
    assert refusal.message.startswith("digest: ")


def test_digest_of_another_document(plan, document):
    document["digest"] = "sha256:" + "0" * 64
    refusal = refusal_of(canonical.dumps(document))
    assert refusal.code == "BadDigest"
    assert refusal.message == f"the plan says digest sha256:{'0' * 64}, its content has {plan.digest}"


@pytest.mark.parametrize("path", [("summary", "copiesPerBlock"), ("edges", 0, "to"), ("compat", "factors", "protocol")])
def test_change_without_a_new_digest(document, path):
    put(document, path, at(document, path) + 1)
    assert refusal_of(canonical.dumps(document)).code == "BadDigest"


def test_compat_digest(plan, document, reseal):
    document["compat"]["digest"] = "sha256:" + "0" * 64
    refusal = refusal_of(reseal(document))
    assert refusal.code == "BadDigest"
    assert refusal.message == f"compat says digest sha256:{'0' * 64}, its factors have {plan.compat.digest}"


def test_compat_factors(document, reseal):
    document["compat"]["factors"]["model"] = "another"
    refusal = refusal_of(reseal(document))
    assert refusal.code == "BadDigest"
    assert refusal.message.startswith("compat says digest")
    document["compat"]["digest"] = canonical.digest(document["compat"]["factors"])
    assert wire.decode(reseal(document)).compat.factors["model"] == "another"


@pytest.mark.parametrize(
    "path", [("groups", 0, "layers"), ("source", "ranks", 0, "layers", "mla"), ("shapes", 0, 0, "layers")]
)
@pytest.mark.parametrize("text", ["0,1,2,3", "3,0-2", "0-2,3", "0-3,3", "00-3", "0-3 ", "0-10000", "x"])
def test_layer_range_in_another_spelling(document, reseal, path, text):
    put(document, path, text)
    refusal = refusal_of(reseal(document))
    assert refusal.code == "BadLayerRange"
    assert repr(text) in refusal.message


@pytest.mark.parametrize("text", ["", "0," * 2048 + "0"])
def test_layer_range_of_another_length(document, reseal, text):
    put(document, ("groups", 0, "layers"), text)
    assert refusal_of(reseal(document)).code == "BadSchema"


@pytest.mark.parametrize("name", ["", "A", "-a", "a-", "a b", "a" * 64, "ä", "a\n"])
def test_names(document, reseal, name):
    put(document, ("groups", 0, "table"), name)
    refusal = refusal_of(reseal(document))
    assert refusal.code == "BadSchema"
    assert refusal.message.startswith("groups.0.table: ")


@pytest.mark.parametrize("name", ["a", "0", "a" * 63, "a.b_c-d"])
def test_good_names(document, reseal, name):
    put(document, ("groups", 0, "table"), name)
    assert wire.decode(reseal(document)).tables == (name,)


@pytest.mark.parametrize(
    ("tokens", "good"),
    [
        ({"rule": "all"}, True),
        ({"rule": "state"}, True),
        ({"rule": "window", "size": 1024}, True),
        ({"rule": "chunk", "size": 8192}, True),
        ({"rule": "all", "size": 1}, False),
        ({"rule": "state", "size": 1}, False),
        ({"rule": "window"}, False),
        ({"rule": "chunk"}, False),
        ({"rule": "window", "size": 0}, False),
        ({"rule": "last"}, False),
        ({}, False),
    ],
)
def test_token_rules(document, reseal, tokens, good):
    document["groups"][0]["tokens"] = tokens
    if good:
        assert wire.decode(reseal(document)).groups[0].tokens.rule == tokens["rule"]
    else:
        assert refusal_of(reseal(document)).code == "BadSchema"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("schema",), "disagg.dev/transfer-plan/v2"),
        (("source", "role"), "router"),
        (("groups", 0, "kind"), "window"),
        (("groups", 0, "parts", 0, "sharding"), "shared"),
        (("groups",), []),
        (("groups", 0, "parts"), []),
        (("source", "pages"), []),
        (("source", "ranks"), []),
        (("source", "pages", 0, "regions"), []),
        (("source", "pages", 0, "parts"), []),
        (("source", "pages", 0, "parts", 0, "units"), [0]),
        (("source", "pages", 0, "parts", 0, "units"), [0, 1, 2]),
        (("source", "pages", 0, "parts", 0, "units"), [0, 0]),
        (("shapes", 0, 0, "repeat"), [{"count": 1, "src": 0, "dst": 0}] * 9),
        (("completions",), {"0": 1}),
        (("completions",), []),
        (("edges",), {}),
    ],
)
def test_other_values(document, reseal, path, value):
    put(document, path, value)
    refusal = refusal_of(reseal(document))
    assert refusal.code == "BadSchema"
    assert str(path[0]) in refusal.message


@pytest.mark.parametrize(("data", "name"), [("[]", "list"), ('"x"', "str"), ("7", "int"), ("true", "bool")])
def test_a_plan_is_an_object(data, name):
    refusal = refusal_of(data)
    assert (refusal.code, refusal.message) == ("BadSchema", f"a plan is an object, this is {name}")


def test_several_faults_are_counted(document, reseal):
    document["edges"][0]["from"] = -1
    document["edges"][1]["to"] = -1
    refusal = refusal_of(reseal(document))
    assert refusal.message.startswith("edges.0.from: ")
    assert refusal.message.endswith("(and 1 more)")


def test_seal_replaces_the_digest(plan, document):
    document["digest"] = "sha256:" + "0" * 64
    assert wire.seal(document) == plan
    del document["digest"]
    assert wire.seal(document) == plan


def test_group_by_name(plan):
    assert plan.group("mla") is plan.groups[0]
    with pytest.raises(KeyError):
        plan.group("attention")
