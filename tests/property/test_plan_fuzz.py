"""Whatever is offered as a plan: a typed error, or a plan that can be used."""

from __future__ import annotations

import copy
import json

from hypothesis import given, settings
from hypothesis import strategies as st

from disagg_plan import canonical, wire
from disagg_plan.errors import FormatError, PlanError, ProofError
from disagg_plan.proof import prove
from disagg_plan.runs import edge_runs
from disagg_plan.summary import summarise

EXAMPLES = {"short": 300, "long": 20_000}[settings.get_current_profile_name()]

NUMBERS = st.sampled_from([0, 1, 2, 7, 64, 2**16, 2**20, 2**20 + 1, 2**32, 2**40, 2**40 + 1, 2**63, 2**64, 10**30, -1])
LEAVES = st.one_of(
    NUMBERS,
    st.integers(),
    st.booleans(),
    st.none(),
    st.floats(),
    st.sampled_from(["", "0", "0-3", "0-9999", "1,0", "k", "attention", "all", "state", "split", "sha256:" + "0" * 64]),
    st.text(max_size=5),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=5,
)


def nodes(value, path=()):
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield from nodes(item, (*path, key))


def use(data):
    """Read, prove and expand a plan, as everyone does who gets one."""
    plan = wire.decode(data)
    prove(plan)
    summarise(plan)
    for edge in plan.edges:
        assert edge_runs(plan, edge)


def sealed(document):
    """The document with both digests made anew where that is possible."""
    try:
        document["compat"]["digest"] = canonical.digest(document["compat"]["factors"])
        body = {key: value for key, value in document.items() if key != "digest"}
        return json.dumps({**body, "digest": canonical.digest(body)})
    except (FormatError, LookupError, TypeError, AttributeError):
        return json.dumps(document)


@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_changed_values(deployments, data):
    document = copy.deepcopy(wire.document(data.draw(deployments(most_layers=3, most_groups=2)).plan()))
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(list(nodes(document))))
        if not path:
            continue
        holder = document
        for key in path[:-1]:
            holder = holder[key]
        what = data.draw(st.sampled_from(["replace", "drop", "add"]))
        if what == "replace":
            holder[path[-1]] = data.draw(VALUES)
        elif what == "drop":
            del holder[path[-1]]
        elif isinstance(holder, dict):
            holder[data.draw(st.text(max_size=8))] = data.draw(VALUES)
        else:
            holder.insert(path[-1], data.draw(VALUES))
    try:
        use(sealed(document))
    except PlanError as error:
        kind = type(error)
    else:
        return
    assert kind in (FormatError, ProofError)


@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_changed_bytes(build, data):
    text = bytearray(wire.encode(build.deployment(build.latent(2), 2, 3).plan()))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text) - 1))
        what = data.draw(st.sampled_from(["set", "cut", "insert", "end", "twice"]))
        if what == "set":
            text[at] = data.draw(st.integers(0, 255))
        elif what == "cut":
            del text[at : at + data.draw(st.integers(1, 40))]
        elif what == "insert":
            text[at:at] = data.draw(st.binary(min_size=1, max_size=6))
        elif what == "end":
            del text[max(at, 1) :]
        else:
            text[at:at] = text[at : at + 30]
        text = text or bytearray(b"{")
    original = wire.encode(build.deployment(build.latent(2), 2, 3).plan())
    try:
        plan = wire.decode(bytes(text))
    except FormatError:
        return
    # Only the digest itself, spaces or the spelling of a string can have changed.
    assert wire.encode(plan) == original


@given(data=st.one_of(st.binary(max_size=60), st.text(max_size=60), VALUES.map(json.dumps)))
def test_anything(data):
    try:
        wire.decode(data)
    except FormatError as error:
        code = error.code
    else:
        code = "accepted"
    assert code in ("NotJson", "NotCanonical", "BadSchema")
