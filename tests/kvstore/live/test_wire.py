"""Layers over the layer wire: the answers are the oracle, and a refused record leaves no trace."""

from __future__ import annotations

import random
import struct
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import wire_bytes as by_hand
from dumps import dump

from warmkv.kernels.dispatch import REFERENCE
from warmkv.kernels.formats import RowFormat
from warmkv.kvstore.live.layers.attention import AttentionLayer
from warmkv.kvstore.live.layers.bounded import BoundedLayer
from warmkv.kvstore.live.layers.nystrom import NystromLayer
from warmkv.kvstore.live.layers.recurrent import RecurrentLayer
from warmkv.kvstore.live.model import Layer, make_layer
from warmkv.kvstore.live.plan import LayerPlan, NystromPlan, RingPlan
from warmkv.kvstore.live.rows.allocation import allocate
from warmkv.kvstore.live.wire import export_layer, import_layer, record_of
from warmkv.schema.errors import FormatError, OutOfMemory, RecordError, UnsupportedError, WarmKVError
from warmkv.schema.identity import LayerKind

F32 = npt.NDArray[np.float32]
FULL = LayerPlan(LayerKind.FULL, heads=4, kv_heads=2, key_size=4, value_size=4, wire_identity=0xC0FFEE)
DEAD = replace(FULL, alive=(False, True))
SLIDING = replace(FULL, kind=LayerKind.SLIDING, window=6)
RING = LayerPlan(LayerKind.RING, 4, 2, 4, 4, ring=RingPlan(window=8), wire_identity=5)
LINEAR = LayerPlan(LayerKind.RECURRENT, kv_heads=1, key_size=4, state_size=4, wire_identity=0xC0FFEE)
NYSTROM = LayerPlan(LayerKind.NYSTROM, 4, 2, 4, 4, nystrom=NystromPlan(4, 8, 2))


def source_row(position: int, count: int, salt: int) -> F32:
    """The source's deterministic rows in [-1, 1)."""
    numbers = [(position * 7919 + i * 104_729 + salt * 1_299_709) % 2003 / 1001.5 - 1.0 for i in range(count)]
    return np.asarray(numbers, np.float32)


def feed(layer: AttentionLayer, upto: int, *, trim: bool = False) -> None:
    for position in range(layer.position, upto):
        keys, values = (source_row(position, 8, salt).reshape(1, 2, 4) for salt in (1, 2))
        layer.append(keys, values)
        if trim:
            layer.trim_window(2, 4)


def layer_of(plan: LayerPlan, index: int = 0) -> Layer:
    return make_layer(plan, index, REFERENCE, 1, allocate)


def attention(plan: LayerPlan = FULL, rows: int = 0, *, trim: bool = False) -> AttentionLayer:
    layer = AttentionLayer(plan, kernels=REFERENCE)
    feed(layer, rows, trim=trim)
    return layer


def query(seed: int = 99) -> F32:
    return source_row(seed, 16, 3).reshape(4, 4)


def ring(rows: int) -> BoundedLayer:
    layer = BoundedLayer(RING, kernels=REFERENCE)
    row = (np.arange(8, dtype=np.float32) * 0.125).reshape(2, 4)
    for _ in range(rows):
        layer.step(query(), row, row)
    return layer


def linear(numbers: tuple[float, ...] = (0.5, -0.25, 1.0, 3.5), position: int = 9) -> RecurrentLayer:
    layer = RecurrentLayer(LINEAR)
    layer.update(np.asarray(numbers, np.float32), position)
    return layer


# -- what the source's tests assert ---------------------------------------------------------


def test_a_round_trip_answers_alike() -> None:
    """Five rows of the source's own test; output and probabilities bit for bit."""
    there, back = attention(), attention(rows=3)
    for p in range(5):
        keys = np.asarray([(p * 10 + i) * 0.031 for i in range(8)], np.float32).reshape(1, 2, 4)
        there.append(keys, np.asarray([(p * 7 + i) * -0.017 for i in range(8)], np.float32).reshape(1, 2, 4))
    there.attend(query())
    import_layer(back, export_layer(there))
    assert (back.rows, back.position, back.base, back.gapless) == (5, 5, 0, True)
    assert there.importance is not None and back.importance is not None
    assert back.importance.tobytes() == there.importance.tobytes()
    q = np.asarray([0.1, 0.2, 0.3, 0.4], np.float32)
    for head in range(4):
        for one, other in zip(there.attend_head(q, head), back.attend_head(q, head), strict=True):
            assert one.tobytes() == other.tobytes()


def test_an_import_drops_what_was_tentative() -> None:
    layer = linear()
    layer.speculate(np.ones(4, np.float32))
    import_layer(layer, export_layer(linear()))
    assert layer.scratch is None and layer.position == 9


@pytest.mark.parametrize("f16", [False, True])
def test_a_recurrent_vector_comes_back_whole(f16: bool) -> None:
    data = export_layer(linear((0.1, 1e30, -0.2, 3.5)), f16=f16)
    assert data == by_hand.header(1, 9, half=int(f16), identity=0xC0FFEE) + by_hand.linear_body(1, 4, (0.1, 1e30, -0.2, 3.5))
    layer = RecurrentLayer(LINEAR)
    import_layer(layer, data)
    assert layer.state.tolist() == np.asarray((0.1, 1e30, -0.2, 3.5), np.float32).tolist() and layer.position == 9
    with pytest.raises(FormatError, match="operator identity"):
        import_layer(RecurrentLayer(replace(LINEAR, wire_identity=0)), data)


@pytest.mark.parametrize("f16", [False, True])
@pytest.mark.parametrize("rows", [0, 3, 8, 11])
def test_a_ring_comes_back_bit_for_bit(rows: int, f16: bool) -> None:
    """Eighths are exact in either width. There is nothing to undo afterwards."""
    there, back = ring(rows), ring(4)
    import_layer(back, export_layer(there, f16=f16))
    assert back.position == rows and back.undo_rows == 0
    assert back.keys.tobytes() == there.keys.tobytes() and back.values.tobytes() == there.values.tobytes()
    row = np.ones((2, 4), np.float32)
    assert there.step(query(1), row, row).tobytes() == back.step(query(1), row, row).tobytes()
    with pytest.raises(FormatError, match="ring of 8 rows, this layer's has 16"):
        import_layer(BoundedLayer(replace(RING, ring=RingPlan(window=16)), kernels=REFERENCE), export_layer(there))


def test_geometry_is_checked() -> None:
    wrong = AttentionLayer(replace(FULL, key_size=8, value_size=8), kernels=REFERENCE)
    with pytest.raises(FormatError, match="2x4 numbers a position, this layer has 2x8"):
        import_layer(wrong, export_layer(attention()))


@pytest.mark.parametrize("f16", [False, True])
def test_a_trimmed_window_travels_as_its_tail(f16: bool) -> None:
    """Untrimmed it is a whole record; trimmed it says where it starts, and answers the same there."""
    there = attention(SLIDING, 5, trim=True)
    plain = export_layer(there)
    assert plain[20] == by_hand.FULL and plain[24:32] == struct.pack("<Q", 5)
    feed(there, 40, trim=True)
    assert there.base > 0
    data = export_layer(there, f16=f16)
    assert data[20] == by_hand.TAIL and data[24:32] == struct.pack("<Q", 40)
    assert data[32:40] == struct.pack("<Q", there.base)
    back = AttentionLayer(SLIDING, kernels=REFERENCE)
    import_layer(back, data)
    assert (back.base, back.rows, back.position, back.gapless) == (there.base, there.rows, 40, True)
    if not f16:
        assert there.attend(query()).tobytes() == back.attend(query()).tobytes()
        assert there.importance is not None and back.importance is not None
        assert there.importance.tobytes() == back.importance.tobytes()
    import_layer(back, plain)
    assert (back.base, back.position) == (0, 5)
    wrong = data[:24] + struct.pack("<Q", 41) + data[32:]
    with pytest.raises(FormatError, match="its header says position 41"):
        import_layer(back, wrong)
    with pytest.raises(FormatError, match="does not match"):
        import_layer(ring(3), data[:8] + struct.pack("<Q", 5) + data[16:])


def test_sinks_survive_an_import() -> None:
    layer = attention()
    layer.sinks = np.asarray([0.5, -0.5, 1.0, 2.0], np.float32)
    layer.append(np.ones((1, 2, 4), np.float32), np.full((1, 2, 4), 2, np.float32))
    data = export_layer(layer)
    layer.clear()
    import_layer(layer, data)
    assert layer.sinks is not None and layer.sinks.tolist() == [0.5, -0.5, 1.0, 2.0] and layer.rows == 1


def test_an_import_is_new_storage() -> None:
    there, back = attention(rows=3), attention(rows=3)
    before = back.generation
    import_layer(back, export_layer(there))
    assert back.generation not in (before, there.generation)
    for layer in (ring(3), linear()):
        before = layer.generation
        import_layer(layer, export_layer(layer))
        assert layer.generation != before


# -- bytes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("f16", [False, True])
def test_rows_are_written_as_assembled_by_hand(f16: bool) -> None:
    layer = attention(DEAD)
    keys = np.asarray([[[9, 9, 9, 9], [1, -2, 0.5, 4]], [[9, 9, 9, 9], [0.25, 8, -16, 3]]], np.float32)
    layer.append(keys, -keys)
    layer.accumulate(np.asarray([0.1, 0.7], np.float32))
    alive = [float(number) for number in keys[:, 1].reshape(-1)]
    planes = ((), (), alive, [-number for number in alive])
    body = by_hand.full_body(2, 4, planes, half=int(f16), importance=(0.1, 0.7))
    assert export_layer(layer, f16=f16) == by_hand.header(0, 2, half=int(f16), identity=0xC0FFEE) + body
    back = attention(DEAD, 5)
    import_layer(back, body)
    assert back.rows == 2 and back.attend(query()).tobytes() == layer.attend(query()).tobytes()


def test_half_precision_rounds_rows_and_spares_importance() -> None:
    there = attention(rows=4)
    there.accumulate(np.asarray([0.1, 0.2, 0.3, 1e6], np.float32))
    back = attention()
    import_layer(back, export_layer(there, f16=True))
    for one, other in ((there.keys, back.keys), (there.values, back.values)):
        for head in range(2):
            rounded = np.asarray(one.blocks(head)[0].codes, np.float16).astype(np.float32)
            assert rounded.tobytes() == other.blocks(head)[0].codes.tobytes()
            assert rounded.tobytes() != one.blocks(head)[0].codes.tobytes()
    assert back.importance is not None and back.importance.tolist() == np.asarray([0.1, 0.2, 0.3, 1e6], np.float32).tolist()


def test_a_layer_with_gaps_keeps_its_position_and_its_answers() -> None:
    """As a tail of as many rows; whoever takes it knows that its rows are not known to be consecutive."""
    there = attention(rows=12)
    there.keep([0, 3, 6, 11])
    data = export_layer(there)
    assert data[20] == by_hand.TAIL and data[32:40] == struct.pack("<Q", 8)
    back = attention(rows=2)
    import_layer(back, data)
    assert (back.rows, back.position, back.gapless) == (4, 12, False)
    assert there.attend(query()).tobytes() == back.attend(query()).tobytes()
    assert export_layer(back)[:40] == data[:40]


def test_a_layer_of_which_nothing_was_kept_still_knows_its_position() -> None:
    there, back = attention(rows=12), attention()
    there.keep([])
    import_layer(back, export_layer(there))
    assert (back.rows, back.position) == (0, 12)


def test_numbers_no_format_forbids_travel_bit_for_bit() -> None:
    there, back = attention(), attention()
    keys = np.asarray([np.nan, np.inf, -np.inf, -0.0, 1e-45, 3e38, 0, 1], np.float32).reshape(1, 2, 4)
    there.append(keys, keys[:, ::-1].copy())
    import_layer(back, export_layer(there))
    assert dump(back)[5:] == dump(there)[5:]
    there.append(np.full((1, 2, 4), 65520.0, np.float32), keys)
    with pytest.raises(RecordError, match="65520.0 in row 1 has no finite f16"):
        export_layer(there, f16=True)
    edge = attention()
    edge.append(np.full((1, 2, 4), 65519.0, np.float32), np.full((1, 2, 4), -np.inf, np.float32))
    import_layer(back, export_layer(edge, f16=True))
    assert back.abs_max() == (65504.0, float("inf"))


def test_importance_is_needed_where_it_is_counted_and_dropped_where_it_is_not() -> None:
    counting, plain = attention(rows=3), attention(replace(FULL, importance=False), 3)
    bare = export_layer(plain)
    with pytest.raises(FormatError, match="3 rows without their importance"):
        import_layer(counting, bare)
    import_layer(plain, export_layer(counting))
    assert plain.importance is None and plain.rows == 3 and export_layer(plain) == bare


# -- what the wire cannot tell ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (replace(FULL, key_format=RowFormat.Q8_2F, value_format=RowFormat.Q8_2F), "keys are q8_2f"),
        (replace(FULL, value_format=RowFormat.Q8_2F), "values are q8_2f"),
        (replace(FULL, key_format=RowFormat.F16), "keys are f16"),
        (replace(FULL, value_format=RowFormat.BF16), "values are bf16"),
        (replace(FULL, key_size=32, value_size=32, key_format=RowFormat.Q8_0), "keys are q8_0"),
        (replace(FULL, value_format=RowFormat.FP8), "values are fp8"),
        (replace(FULL, value_size=5), "keys of 4 and values of 5"), (NYSTROM, "no record of this kind"),
    ],
)  # fmt: skip
def test_what_the_wire_cannot_tell_is_refused_both_ways(plan: LayerPlan, said: str) -> None:
    layer = layer_of(plan)
    assert isinstance(layer, (AttentionLayer, NystromLayer))
    keys, values = np.ones((3, 2, plan.key_size), np.float32), np.ones((3, 2, plan.value_size), np.float32)
    layer.append(keys, values)
    before = dump(layer)
    with pytest.raises(UnsupportedError, match=said):
        export_layer(layer)
    with pytest.raises(UnsupportedError, match=said):
        import_layer(layer, export_layer(attention(rows=3)))
    assert dump(layer) == before


def test_an_identity_beyond_64_bits_is_refused() -> None:
    for identity in (-1, 1 << 64):
        with pytest.raises(RecordError, match="unsigned 64-bit"):
            export_layer(attention(replace(FULL, wire_identity=identity)))


def test_the_unversioned_body_is_refused_where_the_plan_says_so() -> None:
    layer = attention(replace(FULL, untagged_wire=False), 3)
    data = export_layer(layer)
    assert data[:4] == b"CMFS"
    with pytest.raises(FormatError, match="operator identity"):
        import_layer(layer, bytes(4))
    import_layer(layer, data)
    with pytest.raises(FormatError, match="no ring"):
        import_layer(ring(3), bytes(24))


def test_a_tail_too_short_for_its_window_is_refused() -> None:
    layer = attention(SLIDING, 7)
    planes = ([1.0] * 16,) * 4
    head = by_hand.header(3, 9, identity=0xC0FFEE) + struct.pack("<Q", 5)
    with pytest.raises(FormatError, match="a tail of 4 rows, expected the 5"):
        import_layer(layer, head + by_hand.full_body(4, 4, planes))
    planes = ([1.0] * 20,) * 4
    import_layer(layer, by_hand.header(3, 10, identity=0xC0FFEE) + struct.pack("<Q", 5) + by_hand.full_body(5, 4, planes))
    assert (layer.base, layer.position) == (5, 10)


# -- nothing is touched before all is checked -------------------------------------------------


def target(name: str) -> tuple[Layer, bytes]:
    """A layer that holds something else, and a good record for it."""
    layer, data = {
        "full": lambda: (attention(rows=9), export_layer(attention(rows=5))),
        "full-f16": lambda: (attention(rows=9), export_layer(attention(rows=5), f16=True)),
        "dead": lambda: (attention(DEAD, 9), export_layer(attention(DEAD, 5))),
        "tail": lambda: (attention(SLIDING, 20, trim=True), export_layer(attention(SLIDING, 40, trim=True))),
        "linear": lambda: (linear((1.0, 2.0, 3.0, 4.0), 3), export_layer(linear())),
        "ring": lambda: (ring(5), export_layer(ring(11))),
        "legacy": lambda: (attention(rows=9), export_layer(attention(rows=5))[32:]),
        "legacy-linear": lambda: (linear(position=3), by_hand.full_body(9, 4, ((), ()), state=(1, 2, 3, 4), importance=())),
    }[name]()
    if isinstance(layer, RecurrentLayer):
        layer.speculate(np.full(4, 7, np.float32))
    return layer, data


TARGETS = ("full", "full-f16", "dead", "tail", "linear", "ring", "legacy", "legacy-linear")


@pytest.mark.parametrize("name", TARGETS)
def test_no_beginning_of_a_record_touches_the_layer(name: str) -> None:
    layer, data = target(name)
    before = dump(layer)
    for length in range(len(data)):
        with pytest.raises(FormatError):
            import_layer(layer, data[:length])
        assert dump(layer) == before
    with pytest.raises(FormatError):
        import_layer(layer, data + b"\0")
    assert dump(layer) == before


@pytest.mark.parametrize("name", TARGETS)
def test_flips_are_refused_without_a_trace_or_are_what_the_layer_says_then(name: str) -> None:
    layer, data = target(name)
    chance, refused = random.Random(name), 0
    for number in range(300):
        flipped = bytearray(data)
        for _ in range(1 + number % 3):
            flipped[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        before = dump(layer)
        try:
            import_layer(layer, bytes(flipped))
        except WarmKVError:
            refused += 1
            assert dump(layer) == before
        else:
            said = export_layer(layer, f16=name == "full-f16")
            told = bytes(flipped)
            if name == "legacy-linear":
                said, told = said[-16:], told[24:40]
            if name == "full-f16" and any(np.isnan(rows).any() for rows in record_of(layer).keys + record_of(layer).values):
                continue  # Quiet and signalling NaN are not told apart when they are widened.
            assert said[-len(told) :] == told
    assert 0 < refused < 300


def test_memory_that_cannot_be_had_leaves_the_layer_as_it_was() -> None:
    refuse = False

    def choosy(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> npt.NDArray[np.generic]:
        if refuse:
            raise OutOfMemory("no more", int(np.prod(shape)) * dtype.itemsize)
        return np.empty(shape, dtype)

    layer = AttentionLayer(FULL, kernels=REFERENCE, allocate=choosy)
    feed(layer, 9)
    before, refuse = dump(layer), True
    with pytest.raises(OutOfMemory) as caught:
        import_layer(layer, export_layer(attention(rows=5)))
    assert caught.value.requested_bytes > 0 and dump(layer) == before
