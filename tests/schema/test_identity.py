"""Identity: every change is another fingerprint, nothing is a wildcard, nothing is missing."""

from __future__ import annotations

import hashlib
import itertools
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from make_golden import IDENTITY, ROTATED_IDENTITY

from warmkv.schema import canonical, ids
from warmkv.schema import identity as identity_module
from warmkv.schema.errors import FormatError, IdentityError
from warmkv.schema.identity import (
    MAX_IDENTITY_BYTES,
    PATH_DEPENDENT_ROPE,
    ROPE_KINDS,
    ROTATED_BYTES,
    SINGLE,
    AdapterRef,
    Identity,
    LayerKind,
    LayerSpec,
    PlaneFormat,
    PlaneRole,
    PlaneSpec,
    RopeRegime,
    Topology,
    differing_fields,
    first_difference,
    rotation_seed,
    with_rotation,
    without_rotation,
)

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
D16, E16, D32 = b"\x11" * 16, b"\x22" * 16, b"\x33" * 32
K8 = PlaneSpec(PlaneRole.KEY, PlaneFormat.Q8_0, (2, 64), "group=32")
V8 = PlaneSpec(PlaneRole.VALUE, PlaneFormat.Q8_0, (2, 64), "group=32")
FULL = LayerSpec(LayerKind.FULL, (K8, V8))
BASE = Identity(
    architecture="LlamaForCausalLM",
    parameters=D32,
    settings=D16,
    adapters=(AdapterRef(D16, 1.0), AdapterRef(E16, 1.0)),
    layers=(
        FULL,
        LayerSpec(LayerKind.SLIDING, (K8, V8), window=128),
        LayerSpec(LayerKind.CHUNKED, (K8, V8), chunk=64),
        LayerSpec(LayerKind.SINK_WINDOW, (K8, V8), window=32, sinks=4),
        LayerSpec(LayerKind.SHARED, (), shared_with=0),
    ),
    compute_dtype="float32",
    attention="sdpa",
    layout="token-major",
    rope=RopeRegime("linear", 10000.0, 1.0, 64, 4096, D16),
    tokenizer=D32,
    runtime="llama.cpp",
    runtime_state_version="b5000 state 9",
    topology=SINGLE,
    tenant=b"none",
)


def altered(part: Any, **changes: Any) -> Any:
    """``replace`` for values that need not fit."""
    return replace(part, **changes)


def with_layer(index: int, **changes: Any) -> Identity:
    layers = list(BASE.layers)
    layers[index] = replace(layers[index], **changes)
    return replace(BASE, layers=tuple(layers))


def with_key(**changes: Any) -> Identity:
    return with_layer(0, planes=(replace(K8, **changes), V8))


def with_value(**changes: Any) -> Identity:
    return with_layer(0, planes=(K8, replace(V8, **changes)))


def with_rope(**changes: Any) -> Identity:
    return replace(BASE, rope=replace(BASE.rope, **changes))


def variants() -> Iterator[tuple[str, Identity]]:
    """Identities that differ from BASE in exactly one thing, and each in another."""
    for name in ("architecture", "compute_dtype", "attention", "layout", "runtime", "runtime_state_version"):
        yield name, altered(BASE, **{name: getattr(BASE, name) + "x"})
        yield f"{name} none", altered(BASE, **{name: "none"})
        yield f"{name} case", altered(BASE, **{name: getattr(BASE, name).swapcase()})
    for name in ("parameters", "settings", "tokenizer", "tenant"):
        yield f"{name} last bit", altered(BASE, **{name: b"\x55" * 31 + b"\x01"})
        yield f"{name} longer", altered(BASE, **{name: b"\x55" * 31 + b"\x01\x00"})
        yield f"{name} shorter", altered(BASE, **{name: b"\x55" * 16})
    yield "settings none", replace(BASE, settings=b"none")
    yield "tokenizer none", replace(BASE, tokenizer=b"none")

    one, two = BASE.adapters
    yield "adapter swapped", replace(BASE, adapters=(two, one))
    yield "adapter first only", replace(BASE, adapters=(one,))
    yield "adapter second only", replace(BASE, adapters=(two,))
    yield "no adapter", replace(BASE, adapters=())
    yield "adapter twice", replace(BASE, adapters=(one, one, two))
    yield "adapter scale", replace(BASE, adapters=(replace(one, scale=0.5), two))
    yield "adapter scale by one ulp", replace(BASE, adapters=(replace(one, scale=1.0000000000000002), two))
    yield "adapter scale sign", replace(BASE, adapters=(replace(one, scale=-1.0), two))
    yield "adapter scale zero", replace(BASE, adapters=(replace(one, scale=0.0), two))
    yield "adapter digest", replace(BASE, adapters=(replace(one, digest=D32), two))

    yield "one layer fewer", replace(BASE, layers=BASE.layers[:-1])
    yield "one layer more", replace(BASE, layers=BASE.layers + (FULL,))
    yield "layers swapped", replace(BASE, layers=(BASE.layers[1], BASE.layers[0], *BASE.layers[2:]))
    yield "layer kind", with_layer(0, kind=LayerKind.RING)
    yield "layer kind opaque", with_layer(0, kind=LayerKind.OPAQUE)
    yield "window", with_layer(1, window=129)
    yield "window of full", with_layer(0, window=128)
    yield "chunk", with_layer(2, chunk=65)
    yield "sinks", with_layer(3, sinks=5)
    yield "no sinks", with_layer(3, sinks=0)
    yield "window of sinks", with_layer(3, window=33)
    yield "shared with", with_layer(4, shared_with=1)
    yield "planes fewer", with_layer(0, planes=(K8,))
    yield "planes swapped", with_layer(0, planes=(V8, K8))
    yield "plane role", with_key(role=PlaneRole.LATENT)
    for format_ in PlaneFormat:
        if format_ != K8.format:
            rotated = {"parameters": "rotation seed 7"} if format_ in ROTATED_BYTES else {}
            yield f"key format {format_.name}", with_key(format=format_, **rotated)
            yield f"value format {format_.name}", with_value(format=format_, **rotated)
    yield "rotation seed", with_key(format=PlaneFormat.TQ_KEY, parameters="rotation seed 8")
    yield "rotation seed of 64 bits", with_key(format=PlaneFormat.TQ_KEY, parameters=f"rotation seed {2**64 - 1}")
    yield "rotation seed and heads", with_key(format=PlaneFormat.TQ_KEY, parameters="KV heads 0 of 2; rotation seed 7")
    yield "one side rotated", with_key(format=PlaneFormat.TQ_KEY, parameters="rotation seed 9")
    yield "heads", with_key(row_shape=(1, 64))
    yield "head size", with_key(row_shape=(2, 32))
    yield "shape flattened", with_key(row_shape=(128,))
    yield "shape transposed", with_key(row_shape=(64, 2))
    yield "shape padded", with_key(row_shape=(2, 64, 1))
    yield "group size", with_key(parameters="group=64")
    yield "parameters none", with_key(parameters="none")
    yield "value group size", with_value(parameters="group=64")

    for kind in sorted(ROPE_KINDS - {BASE.rope.kind}):
        yield f"rope {kind}", with_rope(kind=kind)
    yield "rope base", with_rope(base=20000.0)
    yield "rope base by one ulp", with_rope(base=10000.000000000002)
    yield "rope scaling", with_rope(attention_scaling=2.0)
    yield "rope rotary", with_rope(rotary_dim=32)
    yield "rope length", with_rope(original_max_tokens=4097)
    yield "rope frequencies", with_rope(frequencies=E16)
    yield "rope frequencies none", with_rope(frequencies=b"none")

    yield "world", replace(BASE, topology=Topology(0, 2, 0, 1))
    yield "rank", replace(BASE, topology=Topology(1, 2, 0, 1))
    yield "stages", replace(BASE, topology=Topology(0, 1, 0, 2))
    yield "stage", replace(BASE, topology=Topology(0, 1, 1, 2))


VARIANTS = list(variants())


def test_every_single_change_is_another_fingerprint() -> None:
    everyone = [("base", BASE), *VARIANTS]
    prints = {name: ids.fingerprint(identity) for name, identity in everyone}
    assert len(prints) == len(everyone), "two variants have one name"
    for (one, print_one), (other, print_other) in itertools.combinations(prints.items(), 2):
        assert print_one != print_other, f"{one} and {other} share state"


def test_the_variants_touch_every_field_of_every_part() -> None:
    """A field added later without a variant above fails here."""
    touched = {first_difference(BASE, identity) for _, identity in VARIANTS}
    assert touched == {item.name for item in fields(Identity)}

    def parts(identity: Identity) -> dict[str, set[object]]:
        found: dict[str, set[object]] = {}
        planes = [plane for layer in identity.layers for plane in layer.planes]
        everything: list[Any] = [*identity.layers, *planes, *identity.adapters, identity.rope, identity.topology]
        for part in everything:
            for item in fields(part):
                found.setdefault(f"{type(part).__name__}.{item.name}", set()).add(getattr(part, item.name))
        return found

    before = parts(BASE)
    changed = {name for _, identity in VARIANTS for name, values in parts(identity).items() if values - before[name]}
    assert changed == set(before)


@pytest.mark.parametrize(("name", "identity"), VARIANTS, ids=[name for name, _ in VARIANTS])
def test_canonical_bytes_give_the_identity_back(name: str, identity: Identity) -> None:
    assert Identity.from_canonical(identity.canonical()) == identity
    assert first_difference(identity, identity) is None
    assert first_difference(BASE, identity) == first_difference(identity, BASE)
    assert differing_fields(identity, identity) == ()
    assert differing_fields(BASE, identity) == ((first_difference(BASE, identity),) if identity != BASE else ())


@pytest.mark.parametrize(("name", "identity"), VARIANTS, ids=[name for name, _ in VARIANTS])
def test_equal_identities_are_one_key_and_others_are_not(name: str, identity: Identity) -> None:
    again = Identity.from_canonical(identity.canonical())
    assert again is not identity and hash(again) == hash(identity)
    assert {BASE: "base", identity: name}[again] == name and ({again: 1}.get(BASE) == 1) == (identity == BASE)


# -- bytes ------------------------------------------------------------------------------------


def test_all_fields_that_differ_are_named_in_order() -> None:
    other = replace(BASE, tenant=D16, rope=replace(BASE.rope, base=1.0), architecture="other", layers=BASE.layers[:1])
    assert differing_fields(BASE, other) == differing_fields(other, BASE) == ("architecture", "layers", "rope", "tenant")


def test_golden_identity() -> None:
    data = (GOLDEN / "identity.bin").read_bytes()
    assert IDENTITY.canonical() == data
    assert Identity.from_canonical(data) == IDENTITY


def test_golden_identity_of_rotated_rows() -> None:
    data = (GOLDEN / "identity_rotated.bin").read_bytes()
    assert ROTATED_IDENTITY.canonical() == data
    layers = (
        (1, ((1, 13, (1, 64), "rotation seed 42"), (2, 14, (1, 64), "rotation seed 42")), 0, 0, 0, -1),
        (2, ((1, 15, (2, 24), f"KV heads 0,2 of 4; rotation seed {2**64 - 1}"),), 9, 0, 0, -1),
        (6, ((5, 1, (2, 24), "none"),), 0, 0, 0, -1),
    )
    values = tuple((name, layers if name == "layers" else value) for name, value in GOLDEN_VALUES)
    assert data == spell(("identity", 1, values))
    assert Identity.from_canonical(data) == ROTATED_IDENTITY


def spell(value: object) -> bytes:
    """A second spelling of canonical bytes, written from the description alone."""
    if isinstance(value, tuple):
        kind, body = 6, b"".join(spell(part) for part in value)
    elif isinstance(value, bytes):
        kind, body = 5, value
    elif isinstance(value, str):
        kind, body = 4, value.encode()
    elif isinstance(value, float):
        kind, body = 3, struct.pack("<d", value)
    else:
        kind, body = 2, struct.pack("<q", value)
    return struct.pack("<BI", kind, len(body)) + body


#: IDENTITY of the golden samples, written out once more as bare values.
GOLDEN_VALUES: tuple[tuple[str, object], ...] = (
    ("architecture", "GoldenForCausalLM"),
    ("parameters", bytes(range(32))),
    ("settings", bytes(range(32, 48))),
    ("adapters", ((bytes(range(16)), 1.0), (bytes(range(16, 32)), 0.5))),
    (
        "layers",
        (
            (1, ((1, 1, (3, 64), "none"), (2, 6, (3, 64), "group=32")), 0, 0, 0, -1),
            (2, ((1, 3, (1, 8), "none"),), 128, 0, 0, -1),
            (3, ((1, 2, (1, 8), "none"),), 0, 512, 0, -1),
            (4, ((1, 2, (1, 8), "none"),), 64, 0, 4, -1),
            (11, (), 0, 0, 0, 0),
            (7, ((6, 1, (2, 4, 8), "none"),), 0, 0, 0, -1),
        ),
    ),
    ("compute_dtype", "bfloat16"),
    ("attention", "eager"),
    ("layout", "token-major"),
    ("rope", ("yarn", 1000000.0, 1.25, 64, 4096, bytes(range(16, 32)))),
    ("tokenizer", bytes(range(64, 96))),
    ("runtime", "golden"),
    ("runtime_state_version", "état 3"),
    ("topology", (1, 2, 0, 3)),
    ("tenant", b"none"),
)


def test_canonical_bytes_by_hand() -> None:
    assert IDENTITY.canonical() == spell(("identity", 1, GOLDEN_VALUES))


def test_fingerprint_by_hand() -> None:
    assert ids.fingerprint(IDENTITY) == hashlib.blake2b(IDENTITY.canonical(), digest_size=16).digest()


#: Logits belong to no layer.
ROLES = tuple(role for role in PlaneRole if role != PlaneRole.LOGITS)
TOKEN_ROLES = (PlaneRole.KEY, PlaneRole.VALUE, PlaneRole.LATENT, PlaneRole.INDEXER_KEY)
#: Which planes are rows of tokens, which the frozen field beside them, which state; by kind.
PARTS: dict[LayerKind, tuple[tuple[PlaneRole, ...], tuple[PlaneRole, ...], tuple[PlaneRole, ...]]] = {
    **{
        kind: (TOKEN_ROLES, (PlaneRole.FIELD,), ROLES[4:10])
        for kind in (LayerKind.FULL, LayerKind.SLIDING, LayerKind.CHUNKED, LayerKind.SINK_WINDOW, LayerKind.HYBRID)
    },
    **{
        kind: ((), (), ROLES)
        for kind in (
            LayerKind.RING, LayerKind.CONV, LayerKind.RECURRENT, LayerKind.NYSTROM, LayerKind.OPAQUE, LayerKind.ENCODER,
            LayerKind.SPARSE,
        )
    },
    LayerKind.SHARED: ((), (), ()),
}  # fmt: skip


@pytest.mark.parametrize("kind", LayerKind)
def test_planes_are_rows_fields_or_states_by_kind_and_role(kind: LayerKind) -> None:
    planes = tuple(PlaneSpec(role, PlaneFormat.F32, (1, 4)) for role in reversed(ROLES))
    layer = LayerSpec(kind, planes, window=4, chunk=4, sinks=1, shared_with=1 if kind == LayerKind.SHARED else -1)
    layer.validate(0)
    parts = (layer.row_planes, layer.field_planes, layer.state_planes)
    assert tuple(tuple(sorted(plane.role for plane in part)) for part in parts) == PARTS[kind]
    assert all(plane in planes for part in parts for plane in part)


def test_numbers_of_enumerations_are_final() -> None:
    assert [(kind.name, kind.value) for kind in LayerKind] == [
        ("FULL", 1), ("SLIDING", 2), ("CHUNKED", 3), ("SINK_WINDOW", 4), ("RING", 5), ("CONV", 6), ("RECURRENT", 7),
        ("NYSTROM", 8), ("OPAQUE", 9), ("ENCODER", 10), ("SHARED", 11), ("HYBRID", 12), ("SPARSE", 13),
    ]  # fmt: skip
    assert [(format_.name, format_.value) for format_ in PlaneFormat] == [
        ("F32", 1), ("F16", 2), ("BF16", 3), ("RAW", 4), ("Q8_2F", 5), ("Q8_0", 6), ("Q5_1", 7), ("Q4_0", 8),
        ("FP8_E4M3FN", 9), ("FP8_E4M3FNUZ", 10), ("FP8_E5M2", 11), ("FP8_E5M2FNUZ", 12), ("TQ_KEY", 13),
        ("TQ_VALUE", 14), ("TQ3", 15),
    ]  # fmt: skip
    assert [(role.name, role.value) for role in PlaneRole] == [
        ("KEY", 1), ("VALUE", 2), ("LATENT", 3), ("INDEXER_KEY", 4), ("CONV", 5), ("RECURRENT", 6), ("RING", 7),
        ("NYSTROM", 8), ("BLOB", 9), ("IMPORTANCE", 10), ("LOGITS", 11), ("FIELD", 12),
    ]  # fmt: skip


@pytest.mark.parametrize("format_", sorted(ROTATED_BYTES))
def test_rotated_rows_need_their_seed_and_whole_bytes(format_: PlaneFormat) -> None:
    good = altered(K8, format=format_, parameters="rotation seed 0")
    for size in (8, 24, 64, 65528):
        with_layer(0, planes=(altered(good, row_shape=(2, size)), V8))
    for size in (1, 4, 63, 65, 2**32 - 1):
        with pytest.raises(IdentityError, match=f"KEY .{format_.name}.: heads of {size} channels, expected a multiple of 8"):
            with_layer(0, planes=(altered(good, row_shape=(2, size)), V8))
    for text in (
        "none", "rotation seed", "rotation seed ", "rotation seed -1", "rotation seed 07", "rotation seed x", "Rotation seed 7",
        "seed 7", f"rotation seed {2**64}", "rotation seed 7; KV heads 0 of 2", "rotation seed 7 ", "rotation seed 7\n",
        "rotation seed \u0667",
    ):  # fmt: skip
        with pytest.raises(IdentityError, match="name no seed"):
            with_layer(0, planes=(altered(good, parameters=text), V8))


def test_seeds_are_read_as_they_were_written() -> None:
    for seed in (0, 1, 42, 2**63, 2**64 - 1):
        assert with_rotation(seed) == f"rotation seed {seed}"
        assert with_rotation(seed, "KV heads 0,2 of 4") == f"KV heads 0,2 of 4; rotation seed {seed}"
        assert rotation_seed(with_rotation(seed)) == rotation_seed(with_rotation(seed, "KV heads 0,2 of 4")) == seed
    for text in ("none", "KV heads 0,2 of 4", "a; b"):
        assert without_rotation(with_rotation(5, text)) == without_rotation(text) == text
    wrong: tuple[Any, ...] = (-1, 2**64, 1.0, True, None, "7")
    for seed in wrong:
        with pytest.raises(IdentityError, match="rotation seed"):
            with_rotation(seed)
    assert rotation_seed("none") is None and rotation_seed("group=32") is None


@pytest.mark.parametrize(
    ("kind", "roles", "optional"),
    [
        (LayerKind.FULL, (PlaneRole.KEY,), set()),
        (LayerKind.HYBRID, (PlaneRole.KEY, PlaneRole.IMPORTANCE), set()),
        (LayerKind.HYBRID, (PlaneRole.KEY, PlaneRole.CONV, PlaneRole.IMPORTANCE), {PlaneRole.IMPORTANCE}),
        (LayerKind.NYSTROM, (PlaneRole.NYSTROM, PlaneRole.IMPORTANCE), {PlaneRole.IMPORTANCE}),
        (LayerKind.SPARSE, (PlaneRole.KEY, PlaneRole.CONV, PlaneRole.IMPORTANCE), set()),
    ],
)
def test_importance_is_optional_only_where_other_state_stands_beside_it(
    kind: LayerKind, roles: tuple[PlaneRole, ...], optional: set[PlaneRole]
) -> None:
    layer = LayerSpec(kind, tuple(PlaneSpec(role, PlaneFormat.F32, (1, 4)) for role in roles))
    present = {plane.role for plane in layer.state_planes}
    assert layer.optional_planes & present == optional


def test_a_layer_of_an_unknown_kind_is_refused_by_name() -> None:
    """As an older program meets the kinds of a newer one."""
    data = with_layer(0, kind=LayerKind.SPARSE).canonical()
    assert Identity.from_canonical(data).layers[0].kind == LayerKind.SPARSE
    number = canonical.encode(int(LayerKind.SPARSE))
    at = data.index(number + canonical.encode((K8.canonical(), V8.canonical())))
    unknown = data[:at] + canonical.encode(int(max(LayerKind)) + 1) + data[at + len(number) :]
    with pytest.raises(FormatError, match="14 is not a valid LayerKind"):
        Identity.from_canonical(unknown)


@pytest.mark.parametrize("seed", ["0", "1", "4294967295"])
def test_fingerprint_is_the_same_in_another_process(seed: str) -> None:
    program = (
        "import sys; sys.path[:0] = sys.argv[1:]\n"
        "from make_golden import IDENTITY\n"
        "from warmkv.schema import ids\n"
        "print(ids.fingerprint(IDENTITY).hex())"
    )
    home = str(Path(identity_module.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", program, home, str(GOLDEN)],
        env={**os.environ, "PYTHONHASHSEED": seed, "LC_ALL": "C"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == ids.fingerprint(IDENTITY).hex()


def test_a_number_has_one_spelling_however_it_was_written() -> None:
    whole = replace(
        BASE,
        adapters=tuple(AdapterRef(adapter.digest, 1) for adapter in BASE.adapters),
        rope=replace(BASE.rope, base=10000, attention_scaling=1),
    )
    assert whole == BASE
    assert ids.fingerprint(whole) == ids.fingerprint(BASE)


# -- refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [item.name for item in fields(Identity)])
def test_no_field_has_a_default(name: str) -> None:
    values = {item.name: getattr(BASE, item.name) for item in fields(Identity) if item.name != name}
    with pytest.raises(TypeError):
        Identity(**values)


@pytest.mark.parametrize("name", [item.name for item in fields(Identity)])
@pytest.mark.parametrize("value", [None, "", b"", 0, 1.5, [], {}, object(), True])
def test_an_empty_or_foreign_value_is_refused(name: str, value: Any) -> None:
    with pytest.raises(IdentityError):
        altered(BASE, **{name: value})


@pytest.mark.parametrize("kind", sorted(PATH_DEPENDENT_ROPE))
def test_rope_whose_rows_depend_on_the_path_is_refused(kind: str) -> None:
    with pytest.raises(IdentityError, match="depend"):
        with_rope(kind=kind)


@pytest.mark.parametrize("kind", ["", "Default", "ntk", "unknown", None, ["default"], b"default"])
def test_unknown_rope_is_refused(kind: Any) -> None:
    with pytest.raises(IdentityError):
        with_rope(kind=kind)


BAD_NUMBERS = [None, "1", b"1", float("nan"), float("inf"), float("-inf"), True, 10**400, 1j]


@pytest.mark.parametrize("value", BAD_NUMBERS)
def test_numbers_that_are_none_are_refused(value: Any) -> None:
    builds: tuple[Callable[[], object], ...] = (
        lambda: with_rope(base=value),
        lambda: with_rope(attention_scaling=value),
        lambda: replace(BASE, adapters=(AdapterRef(D16, value),)),
    )
    for build in builds:
        with pytest.raises(IdentityError):
            build()


BAD_COUNTS = [None, "4", b"4", 1.0, 1.5, True, -2, 2**63, float("nan")]


@pytest.mark.parametrize("value", BAD_COUNTS)
def test_counts_that_are_none_are_refused(value: Any) -> None:
    builds: tuple[Callable[[], object], ...] = (
        lambda: with_layer(0, window=value),
        lambda: with_layer(1, window=value),
        lambda: with_layer(2, chunk=value),
        lambda: with_layer(3, sinks=value),
        lambda: with_layer(4, shared_with=value),
        lambda: with_key(row_shape=(2, value)),
        lambda: with_rope(rotary_dim=value),
        lambda: with_rope(original_max_tokens=value),
        lambda: replace(BASE, topology=Topology(0, value, 0, 1)),
        lambda: replace(BASE, topology=Topology(value, 2**62, 0, 1)),
        lambda: replace(BASE, topology=Topology(0, 1, value, 2**62)),
        lambda: replace(BASE, topology=Topology(0, 1, 0, value)),
    )
    for build in builds:
        with pytest.raises(IdentityError):
            build()


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": 1},
        {"kind": "FULL"},
        {"kind": None},
        {"planes": ()},
        {"planes": None},
        {"planes": [K8, V8]},
        {"planes": (K8, K8)},
        {"planes": (K8, None)},
        {"planes": ((1, 6, (2, 64), "none"),)},
        {"planes": (altered(K8, role=1),)},
        {"planes": (altered(K8, format=6),)},
        {"planes": (altered(K8, row_shape=()),)},
        {"planes": (altered(K8, row_shape=(1, 1, 1, 1, 1)),)},
        {"planes": (altered(K8, row_shape=(0,)),)},
        {"planes": (altered(K8, row_shape=(2**32,)),)},
        {"planes": (altered(K8, row_shape=[2, 64]),)},
        {"planes": (altered(K8, row_shape=None),)},
        {"planes": (altered(K8, row_shape=64),)},
        {"planes": (altered(K8, parameters=""),)},
        {"planes": (altered(K8, parameters=None),)},
        {"planes": (altered(K8, parameters="\udc80"),)},
        {"kind": LayerKind.SLIDING},
        {"kind": LayerKind.CHUNKED},
        {"kind": LayerKind.SINK_WINDOW, "sinks": 4},
        {"kind": LayerKind.SHARED},
        {"kind": LayerKind.SHARED, "shared_with": 0},
        {"kind": LayerKind.SHARED, "shared_with": 5},
        {"shared_with": 1},
        {"planes": (K8, V8, altered(K8, role=PlaneRole.LOGITS))},
        {"kind": LayerKind.HYBRID},
        {"kind": LayerKind.HYBRID, "planes": (altered(K8, role=PlaneRole.CONV),)},
        {"kind": LayerKind.HYBRID, "planes": (altered(K8, role=PlaneRole.FIELD), altered(K8, role=PlaneRole.CONV))},
    ],
)
def test_impossible_layers_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(IdentityError):
        with_layer(0, **changes)


@pytest.mark.parametrize("topology", [(1, 1, 0, 1), (0, 1, 1, 1), (-1, 1, 0, 1), (0, 0, 0, 1), (0, 1, 0, 0), (2, 2, 0, 1)])
def test_impossible_topologies_are_refused(topology: tuple[int, int, int, int]) -> None:
    with pytest.raises(IdentityError):
        replace(BASE, topology=Topology(*topology))


@pytest.mark.parametrize("name", ["parameters", "settings", "tokenizer", "tenant"])
@pytest.mark.parametrize("value", [bytes(15), bytes(65), "none", bytearray(16), memoryview(bytes(16)), b"None"])
def test_digests_of_other_lengths_or_types_are_refused(name: str, value: Any) -> None:
    with pytest.raises(IdentityError):
        altered(BASE, **{name: value})


def test_what_must_be_digested_cannot_be_none() -> None:
    with pytest.raises(IdentityError):
        replace(BASE, parameters=b"none")
    with pytest.raises(IdentityError):
        replace(BASE, adapters=(AdapterRef(b"none", 1.0),))


@pytest.mark.parametrize(
    "adapters",
    [(None,), ((D16, 1.0),), (AdapterRef(b"", 1.0),), (altered(BASE.adapters[0], scale=None),), list(BASE.adapters)],
)
def test_malformed_adapters_are_refused(adapters: Any) -> None:
    with pytest.raises(IdentityError):
        replace(BASE, adapters=adapters)


def test_text_without_utf8_spelling_is_refused() -> None:
    with pytest.raises(IdentityError):
        replace(BASE, runtime="llama \udcff")


def test_an_identity_beyond_the_cap_is_refused_on_both_sides() -> None:
    huge = replace(BASE, layout="x" * MAX_IDENTITY_BYTES)
    with pytest.raises(IdentityError):
        huge.canonical()
    with pytest.raises(FormatError):
        Identity.from_canonical(bytes(MAX_IDENTITY_BYTES + 1))


# -- foreign bytes ----------------------------------------------------------------------------


def body_of(identity: Identity) -> list[tuple[str, canonical.Value]]:
    return list(identity.fields().items())


def encoded(body: Any, tag: Any = "identity", version: Any = 1) -> bytes:
    return canonical.encode((tag, version, tuple(body)))


def refused(data: bytes) -> None:
    with pytest.raises((FormatError, IdentityError)):
        Identity.from_canonical(data)


def test_missing_unknown_doubled_and_reordered_fields_are_refused() -> None:
    body = body_of(BASE)
    assert Identity.from_canonical(encoded(body)) == BASE
    for index in range(len(body)):
        refused(encoded(body[:index] + body[index + 1 :]))
        refused(encoded([*body[: index + 1], *body[index:]]))
    refused(encoded([*body, ("novelty", "none")]))
    refused(encoded(reversed(body)))
    refused(encoded([("Architecture", body[0][1]), *body[1:]]))


@pytest.mark.parametrize(
    ("tag", "version"),
    [("identity", 0), ("identity", 2), ("identity", True), ("identity", 1.0), ("Identity", 1), (b"identity", 1)],
)
def test_other_tags_and_versions_are_refused(tag: Any, version: Any) -> None:
    refused(encoded(body_of(BASE), tag, version))


@pytest.mark.parametrize(
    "value",
    [True, 0, -1, 1.5, "", "none", "xy", b"", b"none", b"x" * 16, (), ((),), (1, 2, 3, 4), ("a", "b", "c", "d", "e", "f")],
)
@pytest.mark.parametrize("name", [item.name for item in fields(Identity)])
def test_a_field_of_another_type_is_refused_or_itself(name: str, value: canonical.Value) -> None:
    data = encoded([(key, value if key == name else old) for key, old in body_of(BASE)])
    try:
        identity = Identity.from_canonical(data)
    except (FormatError, IdentityError):
        return
    assert identity.canonical() == data
    assert first_difference(BASE, identity) == (None if value == getattr(BASE, name) else name)


LAYER: Any = (1, ((1, 6, (2, 64), "none"),), 0, 0, 0, -1)
ROPE: Any = ("default", 1.0, 1.0, 64, 0, b"none")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("layers", (LAYER[:5],)),
        ("layers", (LAYER + (0,),)),
        ("layers", ((99, *LAYER[1:]),)),
        ("layers", ((True, *LAYER[1:]),)),
        ("layers", ((1.0, *LAYER[1:]),)),
        ("layers", ((1, ((1, 6, 5, "none"),), 0, 0, 0, -1),)),
        ("layers", ((1, ((1, 6, b"ab", "none"),), 0, 0, 0, -1),)),
        ("layers", ((1, ((1, 6, (2.0, 64), "none"),), 0, 0, 0, -1),)),
        ("layers", ((1, ((1, 6, (True, 64), "none"),), 0, 0, 0, -1),)),
        ("layers", ((1, ((1, 6, (2, 64), b"none"),), 0, 0, 0, -1),)),
        ("layers", ((1, ((0, 6, (2, 64), "none"),), 0, 0, 0, -1),)),
        ("layers", ((1, ((1, 0, (2, 64), "none"),), 0, 0, 0, -1),)),
        ("layers", ((1, LAYER[1], "wide", 0, 0, -1),)),
        ("layers", ((4, LAYER[1], 8, 0, "four", -1),)),
        ("layers", ((2, LAYER[1], 8.5, 0, 0, -1),)),
        ("layers", ((11, (), 0, 0, 0, 7),)),
        ("rope", ROPE[:5]),
        ("rope", ("dynamic", *ROPE[1:])),
        ("rope", ((), *ROPE[1:])),
        ("rope", ("default", 1, *ROPE[2:])),
        ("rope", ("default", "1", *ROPE[2:])),
        ("adapters", ((D16, 1),)),
        ("adapters", ((D16, "1"),)),
        ("adapters", ((D16, 1.0, 2),)),
        ("topology", (0, 1, 0)),
        ("topology", (0.0, 1, 0, 1)),
        ("topology", (False, 1, 0, 1)),
        ("parameters", b"none"),
    ],
)
def test_wrong_inner_structure_is_refused(name: str, value: canonical.Value) -> None:
    refused(encoded([(key, value if key == name else old) for key, old in body_of(BASE)]))


def test_every_byte_flip_is_refused_or_another_identity() -> None:
    data = BASE.canonical()
    for at in range(len(data)):
        for mask in (1, 0x80, 0xFF):
            broken = bytearray(data)
            broken[at] ^= mask
            try:
                identity = Identity.from_canonical(bytes(broken))
            except (FormatError, IdentityError):
                continue
            assert identity != BASE
            assert identity.canonical() == bytes(broken)


def test_every_truncation_is_refused() -> None:
    data = BASE.canonical()
    for end in range(len(data)):
        refused(data[:end])


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data: bytes) -> None:
    refused(data)
