"""What a layer refuses: the message says what was found and where, and nothing has changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from dumps import rows_of

from warmkv.kernels.dispatch import REFERENCE
from warmkv.kernels.formats import RowFormat
from warmkv.kvstore.live.layers.attention import AttentionLayer
from warmkv.kvstore.live.plan import LayerPlan, modes
from warmkv.kvstore.live.rows.growing import GrowingRows
from warmkv.schema.errors import RecordError
from warmkv.schema.identity import LayerKind

F32, Q8 = RowFormat.F32, RowFormat.Q8_2F
HEADS, KV_HEADS, KEY_SIZE, VALUE_SIZE = 4, 2, 8, 5


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


def layer(keys: RowFormat = F32, values: RowFormat = F32, *, window: int = 0, importance: bool = True) -> AttentionLayer:
    kind = LayerKind.SLIDING if window else LayerKind.FULL
    plan = LayerPlan(
        kind, HEADS, KV_HEADS, KEY_SIZE, VALUE_SIZE, keys, values, window=window, importance=importance, alive=(False, True)
    )  # fmt: skip
    found = AttentionLayer(plan, index=7, kernels=REFERENCE)
    found.append(ones(5, KV_HEADS, KEY_SIZE), ones(5, KV_HEADS, VALUE_SIZE))
    return found


def refused(found: AttentionLayer, message: str, act: Callable[[], object]) -> None:
    before = rows_of(found)
    with pytest.raises(RecordError, match=message) as caught:
        act()
    assert "layer 7" in str(caught.value)
    assert rows_of(found) == before


K, V, Q = ones(1, KV_HEADS, KEY_SIZE), ones(1, KV_HEADS, VALUE_SIZE), ones(HEADS, KEY_SIZE)


@pytest.mark.parametrize(
    "k, v, message",
    [
        (K[0], V, r"keys: float32 of shape \(2, 8\)"),
        (K, V[:, :1], r"values: float32 of shape \(1, 1, 5\), expected float32 \(n, 2, 5\)"),
        (V, K, "keys"),
        (K.astype(np.float64), V, "keys: float64"),
        (K, V.astype(np.float16), "values: float16"),
        (K.astype(">f4"), V, "keys: >f4"),
        (K.tolist(), V, "keys: list"),
        (None, V, "keys: NoneType"),
        (ones(2, KV_HEADS, KEY_SIZE), V, "2 rows of keys, 1 of values"),
    ],
)
def test_rows_of_another_kind(k: np.ndarray, v: np.ndarray, message: str) -> None:
    found = layer()
    refused(found, message, lambda: found.append(k, v))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("plane", ["keys", "values"])
@pytest.mark.parametrize("before", [5, 62, 66])
def test_quantised_rows_that_are_not_finite_name_layer_head_and_row(bad: float, plane: str, before: int) -> None:
    found = layer(Q8, Q8)
    found.append(ones(before - 5, KV_HEADS, KEY_SIZE), ones(before - 5, KV_HEADS, VALUE_SIZE))
    found.keep(range(1, before))
    k, v = ones(4, KV_HEADS, KEY_SIZE), ones(4, KV_HEADS, VALUE_SIZE)
    (k if plane == "keys" else v)[3, 1, 4] = bad
    row = rf"{plane}, KV head 1, row {before + 2} \(position {before + 3}\)"
    refused(found, row, lambda: found.append(k, v))


@pytest.mark.parametrize("keys, values, plane", [(Q8, F32, "values"), (F32, Q8, "keys"), (RowFormat.F16, RowFormat.BF16, "keys")])
def test_float_planes_store_what_is_not_finite_and_report_it(keys: RowFormat, values: RowFormat, plane: str) -> None:
    found = layer(keys, values)
    k, v = ones(1, KV_HEADS, KEY_SIZE), ones(1, KV_HEADS, VALUE_SIZE)
    (k if plane == "keys" else v)[0, 1, 2] = np.nan
    found.append(k, v)
    top = dict(zip(("keys", "values"), found.abs_max(), strict=True))
    assert top.pop(plane) == np.inf
    assert top.popitem()[1] == pytest.approx(1.0, abs=0.01)


def test_dead_heads_may_hold_anything() -> None:
    found = layer(Q8, Q8)
    k, v = K.copy(), V.copy()
    k[:, 0] = v[:, 0] = np.nan
    found.append(k, v)
    assert found.rows == 6 and np.isfinite(found.attend(Q)).all()


@pytest.mark.parametrize(
    "act, message",
    [
        (lambda found: found.attend(Q[:3]), r"queries: float32 of shape \(3, 8\)"),
        (lambda found: found.attend(Q.tolist()), "queries: list"),
        (lambda found: found.attend(Q, upto=6), "up to row 6, 5 rows"),
        (lambda found: found.attend(Q, upto=-1), "up to row -1"),
        (lambda found: found.attend_chunk(Q), "queries"),
        (lambda found: found.attend_chunk(ones(6, HEADS, KEY_SIZE)), "6 positions, 5 rows"),
        (lambda found: found.attend_head(Q[0], HEADS), "query head 4"),
        (lambda found: found.attend_head(Q[0], -1), "query head -1"),
        (lambda found: found.attend_head(Q, 0), "query"),
        (lambda found: found.accumulate(ones(4)), r"importance: float32 of shape \(4,\)"),
        (lambda found: found.accumulate(np.ones(5)), "importance: float64"),
        (lambda found: found.truncate_last(6), "expected 0 to 5"),
        (lambda found: found.truncate_last(-1), "-1 positions"),
        (lambda found: found.check_truncate(6), "expected 0 to 5"),
        (lambda found: found.keep([0, 5]), "ascend within 0 to 4"),
        (lambda found: found.keep([-1, 2]), "ascend"),
        (lambda found: found.keep([2, 1]), "ascend"),
        (lambda found: found.keep([1, 1]), "ascend"),
        (lambda found: found.keep([0.0, 1.0]), "float64"),
        (lambda found: found.keep([[0, 1]]), "shape"),
        (lambda found: found.trim_window(-1), "slack -1"),
        (lambda found: found.trim_window(0.5), "slack 0.5"),
        (lambda found: found.attend(Q, upto=2.5), "up to row 2.5"),
        (lambda found: found.trim_window(0, 0), "align 0"),
        (lambda found: found.trim_window(0, 1, -1), "anchor -1"),
    ],
)
def test_arguments_out_of_range(act: Callable[[AttentionLayer], object], message: str) -> None:
    found = layer()
    refused(found, message, lambda: act(found))


@pytest.mark.parametrize(
    "sinks, message",
    [
        (ones(3), r"sinks: float32 of shape \(3,\), expected float32 \(4\)"),
        (ones(2, 2), "sinks"),
        (np.ones(4), "sinks: float64"),
        ([1.0] * 4, "sinks: list"),
        (np.full(4, np.nan, np.float32), "NaN"),
        (np.full(4, np.inf, np.float32), "infinity"),
    ],
)
def test_sinks_that_do_not_fit(sinks: np.ndarray, message: str) -> None:
    found = layer()
    found.sinks = np.arange(4, dtype=np.float32)

    def act() -> None:
        found.sinks = sinks

    refused(found, message, act)


def test_importance_is_refused_where_the_plan_does_not_count_it() -> None:
    found = layer(importance=False)
    assert found.importance is None and found.memory().importance == 0
    refused(found, "not counted", lambda: found.accumulate(ones(5)))
    refused(found, "not counted", lambda: found.observe_queries(ones(1, HEADS, KEY_SIZE)))
    assert found.attend(Q).any()


def test_rows_of_a_window_are_not_chosen() -> None:
    found = layer(window=3)
    refused(found, "sliding window", lambda: found.keep([0, 1]))


def plane(count: int, *, keys: bool, format_: RowFormat = F32, heads: int = 1, frozen: bool = False) -> GrowingRows:
    made = GrowingRows(format_, heads, KEY_SIZE if keys else VALUE_SIZE, keys=keys)
    made.reserve(count)
    made.append(ones(count, heads, made.size))
    if frozen:
        made.freeze()
    return made


GOOD = {"position": 3, "base": 0, "importance": ones(3), "gapless": True}


@pytest.mark.parametrize(
    "keys, values, changed, message",
    [
        (plane(3, keys=True), plane(2, keys=False), {}, "3 rows of keys, 2 of values"),
        (plane(3, keys=False), plane(3, keys=False), {}, "keys: .*found|expected"),
        (plane(3, keys=True, heads=2), plane(3, keys=False), {}, r"\('f32', 2, 8, True\), expected \('f32', 1, 8, True\)"),
        (plane(3, keys=True, format_=RowFormat.F16), plane(3, keys=False), {}, "f16"),
        (plane(3, keys=True), ones(3, 1, VALUE_SIZE), {}, "both or none"),
        (ones(3, 1, KEY_SIZE), ones(2, 1, VALUE_SIZE), {}, "3 rows of keys, 2 of values"),
        (ones(3, 2, KEY_SIZE), ones(3, 1, VALUE_SIZE), {}, r"expected float32 \(n, 1, 8\)"),
        (plane(3, keys=True), plane(3, keys=False), {"importance": None}, "importance missing"),
        (plane(3, keys=True), plane(3, keys=False), {"importance": ones(4)}, "importance: float32"),
        (plane(3, keys=True), plane(3, keys=False), {"position": 4}, "3 gapless rows from 0 to position 4"),
        (plane(3, keys=True), plane(3, keys=False), {"base": -1, "position": 2}, "from -1"),
        (plane(3, keys=True), plane(3, keys=False), {"gapless": False, "position": 2}, "3 scattered rows"),
        (plane(3, keys=True), plane(3, keys=False), {"gapless": False, "base": 1, "position": 9}, "scattered"),
    ],
)
def test_rows_that_cannot_be_adopted(keys: object, values: object, changed: dict[str, object], message: str) -> None:
    found = layer()
    refused(found, message, lambda: found.adopt(keys, values, **{**GOOD, **changed}))


def test_planes_of_which_one_is_frozen_are_refused() -> None:
    found = layer(Q8, Q8)
    keys, values = plane(3, keys=True, format_=Q8, frozen=True), plane(3, keys=False, format_=Q8)
    refused(found, "frozen", lambda: found.adopt(keys, values, **GOOD))


@pytest.mark.parametrize(
    "window, position, base, gapless, fits",
    [
        (4, 3, 0, True, True),
        (4, 10, 7, True, True),
        (5, 10, 7, True, False),
        (4, 10, 0, False, False),
    ],
)
def test_a_window_adopts_all_rows_that_the_next_query_sees(
    window: int, position: int, base: int, gapless: bool, fits: bool
) -> None:
    found = layer(window=window)
    keys, values = plane(3, keys=True), plane(3, keys=False)

    def act() -> None:
        found.adopt(keys, values, position=position, base=base, importance=ones(3), gapless=gapless)

    if fits:
        act()
        assert (found.rows, found.position, found.base) == (3, position, base)
        found.append(K, V)
        assert found.attend(Q).any()
    else:
        refused(found, "window of|scattered", act)


def test_rows_given_at_the_start_are_taken_over() -> None:
    plan = LayerPlan(LayerKind.FULL, 4, 1, KEY_SIZE, VALUE_SIZE)
    keys, values = plane(3, keys=True), plane(3, keys=False)
    found = AttentionLayer(plan, kernels=REFERENCE, rows=(keys, values))
    assert (found.rows, found.position, found.base, found.gapless) == (3, 3, 0, True)
    assert found.keys is keys and found.importance.tolist() == [0.0, 0.0, 0.0]


def test_plan_that_is_none_of_an_attention_layer_is_refused() -> None:
    with pytest.raises(RecordError, match="layer 2"):
        AttentionLayer(LayerPlan(LayerKind.RECURRENT, state_size=4), index=2, kernels=REFERENCE)


@pytest.mark.parametrize(
    "changed", [{"scale": float("nan")}, {"scale": float("inf")}, {"softcap": -1.0}, {"softcap": float("nan")}]
)
def test_numbers_of_a_plan_no_logit_can_have_are_refused(changed: dict[str, float]) -> None:
    with pytest.raises(RecordError, match="layer 1 .FULL.: scale .*, soft cap "):
        AttentionLayer(replace(LayerPlan(LayerKind.FULL, 2, 1, 3, 3), **changed), index=1, kernels=REFERENCE)  # type: ignore[arg-type]


def test_no_thread_is_asked_for() -> None:
    with pytest.raises(RecordError, match="layer 1 .FULL.: 0 threads"):
        AttentionLayer(LayerPlan(LayerKind.FULL, 2, 1, 3, 3), index=1, kernels=REFERENCE, threads=0)


@pytest.mark.parametrize("name, keys, values", modes())
def test_every_mode_starts_empty(name: str, keys: RowFormat, values: RowFormat) -> None:
    found = AttentionLayer(LayerPlan(LayerKind.FULL, 2, 1, 3, 3, keys, values), kernels=REFERENCE)
    memory = found.memory()
    assert (found.rows, memory.total, memory.stored) == (0, 0, 0), name
