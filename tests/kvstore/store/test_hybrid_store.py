"""What only a store can do to layers with windows and states: evict, forget, restart, promote.

The minimal forms of what random histories found (test_properties.py) live here.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from warmkv.kvstore.restored import Restored
from warmkv.kvstore.store import Store
from warmkv.kvstore.store.cold import ColdTier
from warmkv.kvstore.store.index import Cold, Record
from warmkv.kvstore.testing import assert_rows, assert_states, check_restore, save
from warmkv.kvstore.testing.bounds import bounded
from warmkv.kvstore.testing.mirrored import StoreTwin
from warmkv.kvstore.testing.samples import (
    CONV,
    FULL,
    IMAGE,
    NYSTROM,
    OPAQUE,
    OTHER_IMAGE,
    RECURRENT,
    RING,
    TOKENS,
    chunked,
    hybrid,
    mixed_identity,
    model_logits,
    model_rows,
    model_states,
    random_prompt,
    records_at,
    sink_window,
    sliding,
)
from warmkv.schema.errors import Busy, ColdFull, FormatError, OfferAgain, StoreError, TooLarge, UnsupportedError, WarmKVError
from warmkv.schema.identity import Identity, LayerSpec, PlaneFormat, PlaneRole, PlaneSpec
from warmkv.schema.records import Anchor, AnchorKind, Attachment

OpenStore = Callable[..., Store]
KIB = 1024
LONG = list(range(100, 140))
HYBRIDS = {
    "states beside rows": (FULL, RECURRENT, NYSTROM), "windows": (FULL, sliding(4)), "windows and states": (sliding(4), CONV),
    "hybrid": (hybrid(3),), "blobs": (OPAQUE, FULL), "chunks": (chunked(3), RING), "sinks": (sink_window(2, 3), FULL),
}  # fmt: skip
by_hybrid = pytest.mark.parametrize("layers", HYBRIDS.values(), ids=HYBRIDS.keys())


def records(store: Store, *, states: bool | None = None, ends: int | None = None) -> list[Record]:
    found = store.engine.index.records.values()
    return [r for r in found if (states is None or r.is_state == states) and (ends is None or r.end == ends)]


def evict(store: Store, *found: Record) -> None:
    twin = StoreTwin(store)
    removal: Any = store.engine.removal
    for record in found:
        with store.engine.index.changed:
            removal._drop(record)
        removal._finish([record])
    twin.check()


def demote(store: Store) -> None:
    """Leave everything in the cold tier alone."""
    assert store.flush(30)
    with store.engine.index.changed:
        for record in records(store):
            if record.warm:
                store.engine.warm.evict(record)
    store.engine.warm.reap()


# -- rows and states apart -----------------------------------------------------------------


def test_a_state_may_go_while_its_rows_stay(open_store_with: OpenStore) -> None:
    store, identity = open_store_with(), mixed_identity(FULL, RECURRENT)
    for length in (12, 24, 36):
        save(store, identity, LONG[:length])
    evict(store, *records(store, states=True, ends=36))
    check_restore(store, identity, [*LONG[:36], 7], 24)
    assert store.match(identity, [*LONG[:36], 7]).matched == 36
    again = save(store, identity, LONG[:36])
    assert not again.duplicate and again.start == 36
    check_restore(store, identity, [*LONG[:36], 7], 36)


def test_states_go_before_the_rows_they_lie_on(open_store_with: OpenStore) -> None:
    """Under pressure what is given up first is the state nobody comes back to."""
    store, identity = open_store_with(warm_bytes=100 * KIB), mixed_identity(FULL, RECURRENT)
    for length in range(5, 41, 5):
        save(store, identity, LONG[:length])
    assert store.engine.warm.evictions and len(records(store, states=False)) == 8
    check_restore(store, identity, [*LONG, 7], 40)
    check_restore(store, identity, LONG[:5], 0)


@by_hybrid
def test_saving_the_same_again_stores_nothing(open_store_with: OpenStore, layers: tuple[LayerSpec, ...]) -> None:
    store, identity = open_store_with(), mixed_identity(*layers)
    for length in (5, 20, 40, 12):
        save(store, identity, LONG[:length], logits=model_logits(identity, LONG[:length]))
    before = len(records(store)), store.engine.warm.ledger.resident_bytes
    for length in (5, 20, 40, 12):
        saved = save(store, identity, LONG[:length], logits=model_logits(identity, LONG[:length]))
        assert (saved.duplicate, saved.sent_bytes) == (True, 0)
    assert (len(records(store)), store.engine.warm.ledger.resident_bytes) == before


def test_clients_that_save_the_same_at_once_store_it_once(open_store_with: OpenStore) -> None:
    store, identity = open_store_with(), mixed_identity(FULL, sliding(4), RECURRENT, OPAQUE)
    alone = open_store_with()
    for length in (20, 40):
        save(alone, identity, LONG[:length])
    barrier = threading.Barrier(6)

    def run() -> None:
        barrier.wait()
        for length in (20, 40):
            save(store, identity, LONG[:length])

    threads = [threading.Thread(target=run) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {record.id for record in records(store)} == {record.id for record in records(alone)}
    check_restore(store, identity, [*LONG, 7], 40)


def test_holes_end_what_is_usable_before_them(open_store_with: OpenStore) -> None:
    store, identity = open_store_with(), mixed_identity(sliding(4))
    save(store, identity, LONG[:8], spare=40)
    save(store, identity, LONG[:20])  # rows 17, 18, 19; 8..16 are a hole
    for length, usable in ((8, 7), (9, 8), (12, 8), (20, 8), (21, 20)):
        check_restore(store, identity, LONG[:length], usable)


def test_importance_comes_back_with_a_state_and_is_refused_without_one(open_store_with: OpenStore) -> None:
    """What a layer is said to keep is kept, or the model is refused: never dropped unsaid."""
    store = open_store_with()
    spec = PlaneSpec(PlaneRole.IMPORTANCE, PlaneFormat.F32, (5,))
    both, rows = (mixed_identity(replace(layer, planes=(*layer.planes, spec))) for layer in (hybrid(), FULL))
    save(store, both, TOKENS)
    check_restore(store, both, [*TOKENS, 1], 9)
    with pytest.raises(UnsupportedError, match="layer 0: IMPORTANCE"):
        save(store, rows, TOKENS)


# -- restarts and promotion ------------------------------------------------------------------


@by_hybrid
def test_everything_survives_a_restart(open_store_with: OpenStore, layers: tuple[LayerSpec, ...]) -> None:
    identity, image = mixed_identity(*layers), [Attachment(3, 4, IMAGE)]
    store = open_store_with(True)
    for length in (512, 1024, 1500):
        ids = [number % 83 for number in range(length)]
        save(store, identity, ids, anchors=[Anchor(length, AnchorKind.TURN)])
    save(store, identity, TOKENS, attachments=image, logits=model_logits(identity, TOKENS, image), ack="disk")
    before = {record.id for record in records(store)}
    store.close()
    store = open_store_with(True)
    assert {record.id for record in records(store)} == before
    query = [number % 83 for number in range(1100)] + [90, 91, 92]
    anywhere = layers == HYBRIDS["blobs"]
    assert store.match(identity, query).matched == 1100
    check_restore(store, identity, query, 1100 if anywhere else 1024, verify=True)
    check_restore(store, identity, TOKENS, 9, attachments=image, logits=True)
    for length in (1024, 1500):
        ids = [number % 83 for number in range(length)]
        assert store.match(identity, [*ids, 90]).anchors[-1] == Anchor(length, AnchorKind.TURN)
        check_restore(store, identity, [*ids, 90], length, at="anchor")


@by_hybrid
def test_a_disk_acknowledgement_covers_windows_and_states(open_store_with: OpenStore, layers: tuple[LayerSpec, ...]) -> None:
    store, identity = open_store_with(True), mixed_identity(*layers)
    save(store, identity, LONG)
    for length in (20, 33, 40):
        assert save(store, identity, LONG[:length], ack="disk").durable
        assert all(record.cold == Cold.STORED for record in records(store))


@by_hybrid
def test_all_of_it_is_promoted_together(open_store_with: OpenStore, layers: tuple[LayerSpec, ...]) -> None:
    store, identity = open_store_with(True), mixed_identity(*layers)
    for length in (5, 20, 40):
        save(store, identity, LONG[:length])
    for length in (5, 20, 40):
        demote(store)
        assert store.match(identity, [*LONG[:length], 7]).tier == "cold"
        check_restore(store, identity, [*LONG[:length], 7], length, verify=True)
    assert store.match(identity, [*LONG, 7]).tier == "warm"


@by_hybrid
def test_what_cannot_be_loaded_is_passed_over_and_ends(
    open_store_with: OpenStore, layers: tuple[LayerSpec, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fails for single records: the answer is shorter, it is right, and it comes."""
    store, identity = open_store_with(True), mixed_identity(*layers)
    for length in (5, 20, 40):
        save(store, identity, LONG[:length])
    load = ColdTier.load
    broken: set[bytes] = set()

    def failing(tier: ColdTier, id_: Any, total_bytes: int) -> int:
        if id_ in broken:
            raise StoreError("the disk is asleep")
        return load(tier, id_, total_bytes)

    monkeypatch.setattr(ColdTier, "load", failing)
    everything = [record.id for record in records(store)]
    for bad in [[], *([id_] for id_ in everything), everything]:
        broken = set(bad)
        for query in ([*LONG, 7], LONG[:30], [*LONG[:20], 1], LONG[:3]):
            demote(store)
            with bounded(20), store.restore(identity, query) as restored:
                assert restored.usable <= store.match(identity, query).usable
                assert restored.usable == store.match(identity, query).usable or bad
                usable = restored.usable
            if usable:
                check_restore(store, identity, [*query[:usable], 99], usable)
    assert store.engine.warm.ledger.leased_bytes == 0


def test_damaged_states_are_left_out_and_the_rest_is_given(open_store_with: OpenStore) -> None:
    store, identity = open_store_with(True), mixed_identity(FULL, RECURRENT)
    for length in (20, 40):
        save(store, identity, LONG[:length])
    demote(store)
    (state,) = records(store, states=True, ends=40)
    cold: Any = store.engine.cold
    with cold._env.begin(write=True) as txn:
        (key,) = [key for key, _ in txn.cursor(cold._env.db[b"chunks"]) if key.startswith(state.id)]
        chunk = bytearray(txn.get(key, db=cold._env.db[b"chunks"]))
        chunk[3] ^= 1
        txn.put(key, bytes(chunk), db=cold._env.db[b"chunks"])
    with store.restore(identity, [*LONG, 7]) as restored:
        assert restored.usable == 20
    check_restore(store, identity, [*LONG, 7], 20)
    save(store, identity, LONG)
    check_restore(store, identity, [*LONG, 7], 40, verify=True)


# -- forgetting ------------------------------------------------------------------------------


def test_forget_keeps_a_shorter_prompt_on_another_branch(open_store_with: OpenStore) -> None:
    store, identity = open_store_with(), mixed_identity(FULL)
    first, second = [*TOKENS[:4], 1, 2, 3], [*TOKENS[:4], *range(50, 60)]
    save(store, identity, first)
    save(store, identity, second)
    store.forget(identity, second)
    check_restore(store, identity, [*first, 7], 7)
    check_restore(store, identity, second, 4)


@by_hybrid
def test_forget_keeps_what_other_prompts_pass(open_store_with: OpenStore, layers: tuple[LayerSpec, ...]) -> None:
    """The system prompt's window and state stay as its rows do."""
    store, identity = open_store_with(), mixed_identity(*layers)
    system, users = LONG[:20], [[*LONG[:20], *[user] * 7] for user in range(3)]
    for ids in (system, *users):
        save(store, identity, ids)
    store.forget(identity, users[0])
    check_restore(store, identity, [*system, 99], 20)
    for user in users[1:]:
        check_restore(store, identity, [*user, 99], 27)
    store.forget(identity, system)
    check_restore(store, identity, [*system, 99], 20)
    for user in users[1:]:
        store.forget(identity, user)
    assert records(store) == []


def test_forgetting_a_longer_prompt_leaves_the_windows_of_a_branch(open_store_with: OpenStore) -> None:
    for layer in (chunked(4), sliding(4), sink_window(2, 3)):
        store, identity = open_store_with(), mixed_identity(layer)
        branch = [*LONG[:1], 1, 2, 3]
        save(store, identity, LONG[:19])
        save(store, identity, branch)
        check_restore(store, identity, [*branch, 9], 4)
        store.forget(identity, LONG[:19])
        check_restore(store, identity, [*branch, 9], 4)


def test_forget_keeps_the_rows_of_a_window_that_a_branch_looks_back_into(open_store_with: OpenStore) -> None:
    """The branch begins inside a window that lies in a segment of its own."""
    for layers in ((sink_window(2, 5), FULL), (sink_window(2, 5),), (sliding(5),), (chunked(6), FULL), (hybrid(5),)):
        store, identity = open_store_with(), mixed_identity(*layers)
        branch = [*LONG[:12], 1, 3]
        for ids in (LONG[:14], LONG[:16], LONG[:18], branch):
            save(store, identity, ids)
        store.forget(identity, LONG[:18])
        check_restore(store, identity, [*branch, 9], 14)
        for length in (16, 14):
            store.forget(identity, LONG[:length])
            check_restore(store, identity, [*branch, 9], 14)


def test_forget_drops_the_states_of_a_prompt_with_its_rows(open_store_with: OpenStore) -> None:
    store, identity = open_store_with(True), mixed_identity(FULL, RECURRENT, OPAQUE)
    save(store, identity, LONG, logits=model_logits(identity, LONG), ack="disk")
    assert store.forget(identity, LONG).records == 2
    assert records(store) == [] and not store.match(identity, LONG).matched


@pytest.mark.parametrize("layers", [(FULL,), (FULL, sliding(4), RECURRENT), (OPAQUE, FULL), (sink_window(2, 5), chunked(3))])
@pytest.mark.parametrize("cold", [False, True], ids=["warm", "cold"])
def test_a_long_chain_is_usable_to_its_end(open_store_with: OpenStore, layers: tuple[LayerSpec, ...], cold: bool) -> None:
    """One token a save: what the reply to one request can hold is no limit to what is usable."""
    store, identity = open_store_with(cold), mixed_identity(*layers)
    ids = [number % 61 for number in range(300)]
    for length in range(1, 301):
        save(store, identity, ids[:length])
    if cold:
        demote(store)
    check_restore(store, identity, [*ids, 99], 300)
    branch = [*ids[:150], 99, 98]
    save(store, identity, branch)
    for prompt in (ids, branch, ids[:1], ids[:64], ids[:129]):
        check_restore(store, identity, [*prompt, 97], len(prompt), verify=True)
    store.forget(identity, ids)
    check_restore(store, identity, [*branch, 97], 152)


# -- saves that are disturbed ----------------------------------------------------------------


def disturbed(store: Store, at: int, what: Callable[[], None]) -> None:
    """Do something while the container of this number is being taken in."""
    intake: Any = store.engine.intake
    take, number = intake._take, itertools.count()

    def disturbing(*about: Any, **how: Any) -> Any:
        if next(number) == at:
            what()
        return take(*about, **how)

    intake._take = disturbing


EVERYTHING = (FULL, sliding(4), sink_window(2, 3), chunked(5), RECURRENT, OPAQUE)


@pytest.mark.parametrize("at", range(5))
def test_a_save_succeeds_though_all_it_builds_on_goes_meanwhile(open_store_with: OpenStore, at: int) -> None:
    store, identity = open_store_with(), mixed_identity(*EVERYTHING)
    save(store, identity, LONG[:20])
    disturbed(store, at, lambda: store.clear() and None)
    save(store, identity, LONG, logits=model_logits(identity, LONG))
    if not store.match(identity, [*LONG, 7]).usable:  # cleared after the last rows were asked about: saved once more, whole
        assert not save(store, identity, LONG, logits=model_logits(identity, LONG)).duplicate
    check_restore(store, identity, LONG, 40, logits=True)
    check_restore(store, identity, [*LONG, 7], 40)
    assert store.engine.warm.ledger.reserved_bytes == 0


@pytest.mark.parametrize("at", range(5))
@pytest.mark.parametrize("error", [Busy, TooLarge, ColdFull, FormatError])
def test_a_save_that_fails_halfway_leaves_nothing_behind_and_can_be_repeated(
    open_store_with: OpenStore, at: int, error: type[WarmKVError], descriptors: Callable[[], int]
) -> None:
    store, identity = open_store_with(), mixed_identity(*EVERYTHING)
    save(store, identity, LONG[:20])
    before, entries = descriptors(), len(records(store))

    def fail() -> None:
        raise error("this once")

    disturbed(store, at, fail)
    try:
        save(store, identity, LONG)
    except error:
        assert descriptors() == before + len(records(store)) - entries
        assert store.engine.warm.ledger.reserved_bytes == 0
        assert store.match(identity, [*LONG, 7]).usable in (20, 40)
        check_restore(store, identity, [*LONG[:20], 7], 20)
        save(store, identity, LONG)
    check_restore(store, identity, [*LONG, 7], 40)


# -- many at once ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["states beside rows", "windows and states", "blobs"])
@pytest.mark.parametrize("cold", [False, True], ids=["warm", "cold"])
def test_a_reader_never_sees_a_miss_while_a_chain_grows(open_store_with: OpenStore, kind: str, cold: bool) -> None:
    """200 saves, packed whenever they are asked for: what was held stays to be found."""
    store, identity = open_store_with(cold), mixed_identity(*HYBRIDS[kind])
    ids = [number % 61 for number in range(200)]
    saved, failures = [0], list[str]()
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            least = saved[0]
            with store.restore(identity, [*ids[:least], 99]) as restored:
                if restored.usable != least:
                    failures.append(f"{restored.usable} of {least}: {restored.reason}")
                elif least:
                    assert_rows_and_states(restored, identity, ids[:least])

    reader = threading.Thread(target=read)
    reader.start()
    for length in range(1, 201):
        save(store, identity, ids[:length])
        saved[0] = length
    stop.set()
    reader.join()
    assert failures == []
    check_restore(store, identity, [*ids, 99], 200, verify=True)


def test_threads_in_a_small_store_never_get_a_state_of_another_prompt(open_store_with: OpenStore) -> None:
    store = open_store_with(True, warm_bytes=150 * KIB, cold_bytes=2 << 20, busy_timeout_s=0.05)
    models = [mixed_identity(*layers) for layers in HYBRIDS.values()]
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(120):
                identity, (ids, images) = rng.choice(models), random_prompt(rng, (((1, 2) * 10, ()),), vocabulary=2)
                try:
                    if rng.random() < 0.4:
                        logits = model_logits(identity, ids, images) if rng.random() < 0.3 else None
                        store.save(identity, ids, records_at(identity, ids, images), attachments=images, logits=logits)
                    elif rng.random() < 0.1:
                        store.forget(identity, ids, attachments=images)
                    else:
                        with store.restore(identity, (*ids, 2), attachments=images, logits=True) as restored:
                            if restored:
                                assert_rows_and_states(restored, identity, (*ids, 2), images)
                except (Busy, TooLarge, OfferAgain, ColdFull):
                    continue
        except BaseException as exc:  # noqa: BLE001 - told by the main thread
            failures.append(exc)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def assert_rows_and_states(restored: Restored, identity: Identity, ids: Sequence[int], images: Sequence[Attachment] = ()) -> None:
    """What came back is what the model has after the first ``usable`` of these ids."""
    assert_rows(restored, model_rows(identity, ids, images))
    before = tuple(item for item in images if item.end <= restored.usable)
    assert_states(restored, model_states(identity, ids[: restored.usable], before))


# -- found by random histories ---------------------------------------------------------------


def saved_and_found(store: Store, identity: Identity, ids: Sequence[int], images: Sequence[Attachment] = ()) -> None:
    save(store, identity, ids, attachments=images)
    check_restore(store, identity, [*ids, 7], len(ids), attachments=images)


def test_blobs_behind_the_query_are_proven_by_tokens_of_their_own(open_store_with: OpenStore) -> None:
    branches = [[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 9, 9], [1, 2, 8], [1, 2, 3, 9, 9, 9, 9, 9, 9, 9, 9], [2, 2]]
    rng = random.Random(3)
    for layers in ((OPAQUE,), (sliding(2), OPAQUE, FULL)):
        for order in (branches[::-1], rng.sample(branches, 5)):
            store, identity = open_store_with(), mixed_identity(*layers)
            twin = StoreTwin(store)
            for ids in order:
                twin.save(identity, (tuple(ids), ()), records_at(identity, ids))
                for query in branches:
                    for cut in range(1, len(query) + 1):
                        twin.ask(identity, (tuple(query[:cut]), ()))
                        twin.ask(identity, ((*query[:cut], 7), ()))
            for record in records(store, states=True):
                twin.evict(record)
                for query in branches:
                    twin.ask(identity, ((*query, 7), ()))


def test_a_blob_deep_in_a_node_does_not_answer_for_tokens_behind_it(open_store_with: OpenStore) -> None:
    store, identity = open_store_with(), mixed_identity(OPAQUE)
    save(store, identity, LONG[:8])
    save(store, identity, LONG[:3])
    evict(store, *records(store, states=True, ends=8))
    check_restore(store, identity, LONG[:8], 3)


@pytest.mark.parametrize(
    ("layers", "length", "image"),
    [
        ((sink_window(2, 2),), 5, Attachment(0, 4, IMAGE)),
        ((sink_window(2, 7), sink_window(1, 4)), 5, Attachment(0, 3, IMAGE)),
        ((sink_window(1, 3), sink_window(3, 4)), 20, Attachment(12, 4, IMAGE)),
        ((sink_window(3, 2),), 5, Attachment(1, 4, IMAGE)),
    ],
)
def test_sinks_are_kept_wherever_an_image_lies(
    open_store_with: OpenStore, layers: tuple[LayerSpec, ...], length: int, image: Attachment
) -> None:
    saved_and_found(open_store_with(), mixed_identity(*layers), LONG[:length], [image])


def test_sinks_that_went_are_sent_again(open_store_with: OpenStore) -> None:
    store, identity = open_store_with(), mixed_identity(sink_window(2, 5), RING)
    save(store, identity, LONG[:20])
    evict(store, *(record for record in records(store) if not record.children))
    evict(store, *(record for record in records(store) if not record.children and record.start == 0))
    for length in (22, 20, 30):
        saved_and_found(store, identity, LONG[:length])


def test_images_in_windows_do_not_hide_rows(open_store_with: OpenStore) -> None:
    images = [Attachment(2, 5, IMAGE), Attachment(9, 3, OTHER_IMAGE), Attachment(12, 1, IMAGE)]
    for layer in (sliding(4), chunked(5), sink_window(1, 4), hybrid(6)):
        for held in ((), (2,), (7, 20), (20, 9), (13, 12)):
            store, identity = open_store_with(), mixed_identity(layer)
            for length in held:
                save(store, identity, LONG[:length], attachments=[item for item in images if item.end <= length])
            for length in (7, 8, 9, 12, 13, 14, 20):
                saved_and_found(store, identity, LONG[:length], [item for item in images if item.end <= length])


def test_windows_of_one_row_need_no_segment_of_their_own(open_store_with: OpenStore) -> None:
    for layers in ((hybrid(), sink_window(1, 1)), (sink_window(3, 1), FULL), (sink_window(0, 1), FULL), (sliding(1), FULL)):
        for lengths in ((2,), (10,), (2, 4), (1, 2, 3, 4, 5, 6), (10, 2, 5)):
            store, identity = open_store_with(), mixed_identity(*layers)
            for length in lengths:
                saved_and_found(store, identity, LONG[:length])
