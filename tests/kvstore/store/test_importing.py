"""Snapshot packs in and out of stores: everything arrives, nothing damaged does."""

from __future__ import annotations

import os
import random
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from warmkv.kvstore.store import Store, StoreOptions
from warmkv.kvstore.store.access import Access
from warmkv.kvstore.store.exporting import ExportResult, export, new_file, of_prompt
from warmkv.kvstore.store.importing import ImportResult, import_file
from warmkv.kvstore.store.index import Cold, Namespace, Record
from warmkv.kvstore.store.options import Share
from warmkv.kvstore.testing import IMAGE, TOKENS, check_restore, random_identity, save
from warmkv.kvstore.testing.samples import (
    CONV,
    FULL,
    OPAQUE,
    mixed_identity,
    model_logits,
    random_mixture,
    random_prompt,
    sliding,
)
from warmkv.kvstore.verbs import Verbs
from warmkv.schema import ids, lmdb_records
from warmkv.schema.errors import AccessRefused, ColdFull, DigestError, FormatError, RecordError, StoreError, WarmKVError
from warmkv.schema.identity import Identity
from warmkv.schema.records import Anchor, AnchorKind, Attachment

OpenStore = Callable[..., Store]
UID = os.getuid()
OTHER = UID + 1
BRANCH = [*TOKENS[:5], 71, 72, 73]
ANCHORS = [Anchor(2, AnchorKind.SYSTEM_PROMPT), Anchor(5, AnchorKind.TURN, 3, 44)]
MIXED = mixed_identity(FULL, sliding(3), CONV, OPAQUE)
HYBRID = mixed_identity(FULL, CONV)


class Agent(Verbs):
    """The verbs of any user over an engine."""

    def __init__(self, store: Store, uid: int, share: str = "") -> None:
        super().__init__(store.engine.session(uid), share=share)

    def _failed(self, exc: WarmKVError) -> str:
        raise exc


def namespace_of(store: Store, identity: Identity, uid: int = UID) -> Namespace:
    return store.engine.index.namespaces[ids.namespace_key(uid, "", ids.fingerprint(identity))]


def write(store: Store, identity: Identity, path: Path, choose: Callable[[], list[Record]] | None = None) -> ExportResult:
    namespace = namespace_of(store, identity)
    with new_file(path) as fd:
        return export(store.engine, namespace, choose or (lambda: list(namespace.records)), fd)


def filled(store: Store, identity: Identity, **options: Any) -> None:
    """Two prompts that part in the middle, in several records, with states and anchors."""
    save(store, identity, TOKENS[:5], anchors=ANCHORS, **options)
    save(store, identity, TOKENS, logits=model_logits(identity, TOKENS), **options)
    save(store, identity, BRANCH, **options)


def contents(opened: Verbs, identity: Identity) -> None:
    """What `filled` saved is there, bit for bit."""
    check_restore(opened, identity, [*TOKENS, 1], len(TOKENS))
    check_restore(opened, identity, TOKENS, len(TOKENS), logits=True)
    check_restore(opened, identity, [*BRANCH, 1], len(BRANCH))
    check_restore(opened, identity, [*TOKENS[:5], 90], 5)
    assert list(opened.match(identity, TOKENS).anchors) == ANCHORS


@pytest.mark.parametrize("identity", [MIXED, random_identity()], ids=["mixed", "full"])
@pytest.mark.parametrize("disk", [True, False], ids=["disk", "memory"])
def test_a_namespace_goes_to_another_store_whole(
    open_store_with: OpenStore, tmp_path: Path, identity: Identity, disk: bool
) -> None:
    source, target = open_store_with(tmp_path / "a" if disk else None), open_store_with(tmp_path / "b")
    filled(source, identity)
    result = write(source, identity, tmp_path / "x.warmkv")
    count = len(source.engine.index.records)
    assert (result.records, result.skipped) == (count, 0)
    assert result.total_bytes == (tmp_path / "x.warmkv").stat().st_size
    done = import_file(target.engine, tmp_path / "x.warmkv", UID)
    assert (done.records, done.duplicates, done.refused, done.reasons) == (count, 0, 0, ())
    assert done.total_bytes == sum(record.total_bytes for record in target.engine.index.records.values())
    contents(target, identity)


def test_what_is_imported_durably_is_on_disk_or_the_import_says_why(open_store_with: OpenStore, tmp_path: Path) -> None:
    source = open_store_with()
    filled(source, MIXED)
    write(source, MIXED, tmp_path / "x.warmkv")
    target, small = open_store_with(tmp_path / "b"), open_store_with(tmp_path / "c", cold_bytes=1)
    done = import_file(target.engine, tmp_path / "x.warmkv", UID, durable=True)
    assert done.records == len(target.engine.index.records)
    assert all(record.cold == Cold.STORED for record in target.engine.index.records.values())
    for _ in range(2):  # entered the first time, a duplicate the second
        with pytest.raises(ColdFull):
            import_file(small.engine, tmp_path / "x.warmkv", UID, durable=True)
    memory = open_store_with()
    assert import_file(memory.engine, tmp_path / "x.warmkv", UID, durable=True).records == done.records


def test_what_is_on_disk_only_is_exported_from_there(open_store_with: OpenStore, tmp_path: Path) -> None:
    """No memory at all: a store that was opened to look into it."""
    with open_store_with(tmp_path / "a") as source:
        filled(source, MIXED, ack="disk")
    closed, target = open_store_with(tmp_path / "a", warm_bytes=0), open_store_with()
    assert write(closed, MIXED, tmp_path / "x.warmkv").skipped == 0
    import_file(target.engine, tmp_path / "x.warmkv", UID)
    contents(target, MIXED)


def test_a_prompt_takes_along_what_it_needs_and_no_more(open_store_with: OpenStore, tmp_path: Path) -> None:
    source, target = open_store_with(), open_store_with()
    filled(source, MIXED)
    index = source.engine.index
    last = next(record for record in index.records.values() if record.end == len(BRANCH) and not record.is_state)
    write(source, MIXED, tmp_path / "x.warmkv", lambda: of_prompt(index, last))
    import_file(target.engine, tmp_path / "x.warmkv", UID)
    check_restore(target, MIXED, [*BRANCH, 1], len(BRANCH))
    check_restore(target, MIXED, [*TOKENS[:5], 90], 5)
    assert target.match(MIXED, TOKENS).matched == 5


def test_attachments_and_lineages_arrive(open_store_with: OpenStore, tmp_path: Path) -> None:
    source, target, identity = open_store_with(), open_store_with(), random_identity()
    seen, line = [Attachment(2, 3, IMAGE)], ids.lineage_after(bytes(16), "evict", 7)  # type: ignore[arg-type]
    save(source, identity, TOKENS[:6], attachments=seen)
    save(source, identity, TOKENS, attachments=seen)
    save(source, identity, TOKENS, lineage=line)
    write(source, identity, tmp_path / "x.warmkv")
    import_file(target.engine, tmp_path / "x.warmkv", UID)
    check_restore(target, identity, [*TOKENS, 1], 9, attachments=seen)
    check_restore(target, identity, [*TOKENS, 1], 9, lineage=line)
    assert target.match(identity, [*TOKENS, 1]).usable == 2


def test_importing_again_changes_nothing(open_store_with: OpenStore, tmp_path: Path) -> None:
    source, target = open_store_with(), open_store_with()
    filled(source, MIXED)
    write(source, MIXED, tmp_path / "x.warmkv")
    first = import_file(target.engine, tmp_path / "x.warmkv", UID)
    before = target.stats()
    again = import_file(target.engine, tmp_path / "x.warmkv", UID)
    assert again == ImportResult(0, first.records, 0)
    assert target.stats()["entries"] == before["entries"] and target.stats()["warm"] == before["warm"]
    assert import_file(source.engine, tmp_path / "x.warmkv", UID).records == 0


def test_rows_that_are_there_under_other_ids_are_built_upon(open_store_with: OpenStore, tmp_path: Path) -> None:
    """What the other side saved in two pieces, this side has in one, and the rest hangs on that."""
    source, target, identity = open_store_with(), open_store_with(), random_identity()
    save(source, identity, TOKENS[:3])
    save(source, identity, TOKENS[:6])
    save(source, identity, TOKENS)
    save(target, identity, TOKENS[:6])
    write(source, identity, tmp_path / "x.warmkv")
    done = import_file(target.engine, tmp_path / "x.warmkv", UID)
    assert (done.records, done.duplicates, done.refused) == (1, 2, 0)
    check_restore(target, identity, [*TOKENS, 1], 9)


def test_a_branch_hangs_on_the_piece_that_reaches_where_it_begins(open_store_with: OpenStore, tmp_path: Path) -> None:
    """Its parent over there is one segment; here the end of that lies in a piece behind the branch."""
    source, target, identity = open_store_with(), open_store_with(), random_identity()
    save(source, identity, TOKENS[:6])
    save(source, identity, [*TOKENS[:3], 81, 82, 83, 84])
    save(target, identity, TOKENS[:5])
    save(target, identity, TOKENS[:6])
    write(source, identity, tmp_path / "x.warmkv")
    done = import_file(target.engine, tmp_path / "x.warmkv", UID)
    assert (done.records, done.duplicates, done.refused) == (1, 1, 0)
    check_restore(target, identity, [*TOKENS[:3], 81, 82, 83, 84, 1], 7)


@pytest.mark.parametrize("identity", [MIXED, random_identity()], ids=["mixed", "full"])
@pytest.mark.parametrize("held", range(1, 9))
def test_a_shorter_prompt_that_is_here_does_not_keep_a_longer_one_out(
    open_store_with: OpenStore, tmp_path: Path, identity: Identity, held: int
) -> None:
    source, target = open_store_with(), open_store_with()
    save(source, identity, TOKENS)
    save(target, identity, TOKENS[:held])
    write(source, identity, tmp_path / "x.warmkv")
    done = import_file(target.engine, tmp_path / "x.warmkv", UID)
    assert (done.records, done.refused) == (len(source.engine.index.records), 0)
    check_restore(target, identity, [*TOKENS, 1], len(TOKENS))
    assert target.match(identity, [*TOKENS[:held], 90]).usable == held


def test_what_rows_cost_to_compute_arrives(open_store_with: OpenStore, tmp_path: Path) -> None:
    """Eviction weighs it."""
    source, target, identity = open_store_with(), open_store_with(), random_identity()
    save(source, identity, TOKENS, prefill_s=0.25)
    write(source, identity, tmp_path / "x.warmkv")
    import_file(target.engine, tmp_path / "x.warmkv", UID)
    costs = [[record.prefill_us for record in store.engine.index.records.values()] for store in (source, target)]
    assert costs[0] == costs[1] and costs[0][0] > 0


def test_packed_segments_go_out_as_what_they_were_made_of(open_store_with: OpenStore, tmp_path: Path) -> None:
    identity, prompt = random_identity(), list(range(500, 700))
    for disk in (True, False):
        source, target = open_store_with(tmp_path / "a" if disk else None), open_store_with()
        for end in range(2, len(prompt) + 1, 2):
            save(source, identity, prompt[:end])
        save(source, identity, [*prompt[:101], 7, 7, 7])
        source.flush()
        check_restore(source, identity, [*prompt, 1], len(prompt))
        originals = sum(not record.packed for record in source.engine.index.records.values())
        assert originals < len(source.engine.index.records)
        save(source, identity, [*prompt, 1, 2, 3])
        result = write(source, identity, tmp_path / "x.warmkv")
        assert result.records == originals + 1 or not disk
        done = import_file(target.engine, tmp_path / "x.warmkv", UID)
        assert done.refused == 0
        check_restore(target, identity, [*prompt[:101], 7, 7, 7, 8], 104)
        check_restore(target, identity, [*prompt, 1, 2, 3, 4], len(prompt) + 3)


def test_the_importing_user_owns_what_arrives(open_store_with: OpenStore, tmp_path: Path) -> None:
    source, target = open_store_with(), open_store_with()
    filled(source, MIXED)
    write(source, MIXED, tmp_path / "x.warmkv")
    import_file(target.engine, tmp_path / "x.warmkv", OTHER)
    contents(Agent(target, OTHER), MIXED)
    assert target.match(MIXED, TOKENS).matched == 0
    assert not set(source.engine.index.records) & set(target.engine.index.records)


def test_a_share_takes_packs_of_its_writers(open_store_with: OpenStore, tmp_path: Path) -> None:
    shares = {"team": Share(frozenset({OTHER, UID}), frozenset({UID}))}
    source, target = open_store_with(), open_store_with(shares=shares)
    filled(source, MIXED)
    write(source, MIXED, tmp_path / "x.warmkv")
    for share in ("team", "nobody's"):
        with pytest.raises(AccessRefused):
            import_file(target.engine, tmp_path / "x.warmkv", OTHER, share)
    import_file(target.engine, tmp_path / "x.warmkv", UID, "team")
    contents(Agent(target, OTHER, "team"), MIXED)
    assert Agent(target, OTHER).match(MIXED, TOKENS).matched == 0


@pytest.mark.parametrize("seed", range(24))
def test_whatever_is_stored_answers_the_same_on_the_other_side(open_store_with: OpenStore, tmp_path: Path, seed: int) -> None:
    """Models of any layers, prompts with images that branch anywhere, some dropped again."""
    rng = random.Random(seed)
    source, target = open_store_with(tmp_path / "a" if seed % 2 else None), open_store_with()
    identity, prompts = mixed_identity(*random_mixture(rng)), [random_prompt(rng)]
    while len(prompts) < 8:
        prompts.append(random_prompt(rng, prompts))
    for tokens, images in prompts:
        save(source, identity, tokens, attachments=images, spare=rng.randint(0, 3))
    source.forget(identity, prompts[0][0], attachments=prompts[0][1])
    if seed % 3 == 0:
        save(target, identity, prompts[-1][0], attachments=prompts[-1][1])
    write(source, identity, tmp_path / "x.warmkv")
    assert import_file(target.engine, tmp_path / "x.warmkv", UID).refused == 0
    for tokens, images in prompts:
        for query in ([*tokens, 2], tokens):
            usable = source.match(identity, query, attachments=images).usable
            assert target.match(identity, query, attachments=images).usable >= usable
            if seed % 3:
                check_restore(target, identity, query, usable, attachments=images)


def small_pack(store: Store, path: Path) -> bytes:
    """A state, and a segment before and behind it; rows of a few bytes."""
    save(store, HYBRID, TOKENS[:2], anchors=[Anchor(1)])
    save(store, HYBRID, TOKENS[:3])
    write(store, HYBRID, path)
    return path.read_bytes()


def entered_before_the_error(store: Store, path: Path) -> int:
    """How many records a damaged file left in a store that held nothing."""
    with pytest.raises((FormatError, StoreError)) as raised:
        import_file(store.engine, path, UID)
    assert not isinstance(raised.value, StoreError)
    count = len(store.engine.index.records)
    store.clear()
    return count


def test_every_flipped_byte_raises_and_enters_nothing_from_there_on(open_store_with: OpenStore, tmp_path: Path) -> None:
    source, target, path = open_store_with(), open_store_with(), tmp_path / "x.warmkv"
    raw = small_pack(source, path)
    starts = [at for at in range(len(raw)) if raw.startswith(b"RECORD\r\n", at)]
    assert len(starts) == len(source.engine.index.records) >= 4
    with open(path, "r+b", buffering=0) as file:
        for at in sorted({*range(0, len(raw), 7), *range(starts[0]), *range(len(raw) - 64, len(raw)), *starts}):
            os.pwrite(file.fileno(), bytes([raw[at] ^ 0x41]), at)
            complete = sum(start <= at for start in starts)
            assert entered_before_the_error(target, path) <= max(0, complete if at >= len(raw) - 64 else complete - 1)
            os.pwrite(file.fileno(), raw[at : at + 1], at)
    import_file(target.engine, path, UID)
    check_restore(target, HYBRID, [*TOKENS[:3], 1], 3)


def test_every_cut_raises_and_enters_whole_records_only(open_store_with: OpenStore, tmp_path: Path) -> None:
    source, target, path = open_store_with(), open_store_with(), tmp_path / "x.warmkv"
    raw = small_pack(source, path)
    starts = [at for at in range(len(raw)) if raw.startswith(b"RECORD\r\n", at)] + [len(raw) - 64]
    for end in sorted({*range(0, len(raw), 61), *range(len(raw) - 64, len(raw)), *starts, *(at - 1 for at in starts)}):
        path.write_bytes(raw[:end])
        assert entered_before_the_error(target, path) == sum(start <= end for start in starts[1:])


def test_budgets_hold_and_what_was_refused_is_told(open_store_with: OpenStore, tmp_path: Path, wide: Identity) -> None:
    source, target = open_store_with(), open_store_with(warm_bytes=300_000)
    save(source, wide, range(100))  # about 200 KiB
    save(source, wide, range(400))
    save(source, wide, range(420))
    write(source, wide, tmp_path / "x.warmkv")
    done = import_file(target.engine, tmp_path / "x.warmkv", UID)
    assert (done.records, done.refused, len(done.reasons)) == (1, 2, 2)
    assert "budget" in done.reasons[0] and "refused" in done.reasons[1]
    ledger = target.engine.warm.ledger
    assert ledger.peak_bytes <= ledger.budget_bytes and ledger.reserved_bytes == 0
    check_restore(target, wide, [*range(100), 7], 100)


def test_a_pack_larger_than_memory_goes_to_disk_on_the_way(open_store_with: OpenStore, tmp_path: Path, wide: Identity) -> None:
    source, target = open_store_with(), open_store_with(tmp_path / "b", warm_bytes=600_000)
    for end in range(100, 1001, 100):
        save(source, wide, range(end))
    write(source, wide, tmp_path / "x.warmkv")
    done = import_file(target.engine, tmp_path / "x.warmkv", UID)
    assert (done.records, done.refused) == (10, 0)
    assert target.flush(60)
    assert target.match(wide, [*range(1000), 1]).usable == 1000


def test_a_damaged_record_is_left_out_of_an_export(open_store_with: OpenStore, tmp_path: Path) -> None:
    with open_store_with(tmp_path / "a") as source:
        filled(source, HYBRID, ack="disk")
    store, target = open_store_with(tmp_path / "a", warm_bytes=0), open_store_with()
    bad = next(r for r in store.engine.index.records.values() if r.end == len(BRANCH) and not r.is_state)
    assert store.engine.cold is not None
    env = store.engine.cold._env
    with env.begin(write=True) as txn:
        key = lmdb_records.chunk_key(bad.id, 0)
        value = bytearray(txn.get(key, db=env.db[b"chunks"]) or b"")
        value[1] ^= 1
        txn.put(key, bytes(value), db=env.db[b"chunks"])
    result = write(store, HYBRID, tmp_path / "x.warmkv")
    assert result.skipped == 2 and store.stats()["quarantines"] == 1  # with the state that hung on it
    import_file(target.engine, tmp_path / "x.warmkv", UID)
    check_restore(target, HYBRID, [*TOKENS, 1], len(TOKENS))
    assert target.match(HYBRID, BRANCH).matched == 5


def test_what_is_dropped_meanwhile_is_left_out_with_what_builds_on_it(open_store_with: OpenStore, tmp_path: Path) -> None:
    source, target = open_store_with(), open_store_with()
    filled(source, HYBRID)
    namespace = namespace_of(source, HYBRID)
    chosen = list(namespace.records)
    source.forget(HYBRID, TOKENS)
    result = write(source, HYBRID, tmp_path / "x.warmkv", lambda: chosen)
    assert (result.records, result.records + result.skipped) == (len(namespace.records), len(chosen))
    import_file(target.engine, tmp_path / "x.warmkv", UID)
    check_restore(target, HYBRID, [*BRANCH, 1], len(BRANCH))


def test_a_longer_file_is_cut_to_what_was_written(open_store_with: OpenStore, tmp_path: Path) -> None:
    source, target, path = open_store_with(), open_store_with(), tmp_path / "x.warmkv"
    filled(source, HYBRID)
    path.write_bytes(b"x" * (1 << 20))
    with open(path, "r+b") as file:
        result = export(
            source.engine, namespace_of(source, HYBRID), lambda: list(source.engine.index.records.values()), file.fileno()
        )
    assert path.stat().st_size == result.total_bytes < 1 << 20
    assert import_file(target.engine, path, UID).records == result.records


def test_nothing_goes_out_without_what_it_builds_on(open_store_with: OpenStore, tmp_path: Path) -> None:
    """A segment may be packed away, and what built on it live on, between listing and writing."""
    source, target = open_store_with(), open_store_with()
    filled(source, HYBRID)
    namespace = namespace_of(source, HYBRID)
    (root,) = [record for record in namespace.records if not record.start and not record.is_state]
    root.gone = True
    try:
        result = write(source, HYBRID, tmp_path / "x.warmkv")
    finally:
        root.gone = False
    assert (result.records, result.skipped) == (0, len(namespace.records))
    assert import_file(target.engine, tmp_path / "x.warmkv", UID) == ImportResult(0, 0, 0)


def test_what_is_being_written_is_not_evicted_under_the_reader(open_store_with: OpenStore, tmp_path: Path) -> None:
    """Its memory counts as long as it is read, like that of any other reader."""
    source = open_store_with()
    save(source, HYBRID, TOKENS)
    seen: list[int] = []
    namespace, real = namespace_of(source, HYBRID), os.pwrite

    def slow(fd: int, data: Any, at: int) -> int:
        if at:  # behind the preamble, inside a record
            source.engine.eviction.evict("warm", 0)
            seen.append(source.engine.warm.ledger.resident_bytes)
        return real(fd, data, at)

    with pytest.MonkeyPatch.context() as patch, new_file(tmp_path / "x.warmkv") as fd:
        patch.setattr(os, "pwrite", slow)
        result = export(source.engine, namespace, lambda: list(namespace.records), fd)
    assert seen[0] and (result.records, result.skipped) == (1, 1)
    source.engine.eviction.evict("warm", 0)
    assert not source.engine.index.records and source.engine.warm.ledger.leased_bytes == 0


def test_a_file_that_takes_its_time_keeps_nobody_waiting(open_store_with: OpenStore, tmp_path: Path) -> None:
    """It is the peer's, who may never let a write end: the disk is not being read then."""
    with open_store_with(tmp_path / "a") as source:
        filled(source, MIXED, ack="disk")
    closed, target = open_store_with(tmp_path / "a", warm_bytes=0), open_store_with()
    cold, real, compacted = closed.engine.cold, os.pwrite, []
    assert cold is not None

    def slow(fd: int, data: Any, at: int) -> int:
        if at and len(compacted) < 9:
            compacted.append(cold.compact())  # waits for all that read
        return real(fd, data, at)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", slow)
        assert write(closed, MIXED, tmp_path / "x.warmkv").skipped == 0
    assert len(compacted) == 9
    import_file(target.engine, tmp_path / "x.warmkv", UID)
    contents(target, MIXED)


def test_the_file_is_private_and_whole_or_not_there(open_store_with: OpenStore, tmp_path: Path) -> None:
    source, path = open_store_with(), tmp_path / "x.warmkv"
    filled(source, HYBRID)
    path.write_bytes(b"before")
    with pytest.raises(ZeroDivisionError), new_file(path) as fd:
        os.write(fd, b"half")
        raise ZeroDivisionError
    assert path.read_bytes() == b"before" and os.listdir(tmp_path) == ["x.warmkv"]
    before = os.umask(0)
    try:
        write(source, HYBRID, path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and os.listdir(tmp_path) == ["x.warmkv"]
    with pytest.raises(StoreError, match="cannot be written"), new_file(tmp_path / "no" / "x"):
        pass


def test_only_regular_files_are_read_and_written(
    open_store_with: OpenStore, tmp_path: Path, descriptors: Callable[[], int]
) -> None:
    store = open_store_with()
    filled(store, HYBRID)
    write(store, HYBRID, tmp_path / "x.warmkv")
    os.mkfifo(tmp_path / "pipe")
    before = descriptors()
    for path in (tmp_path / "pipe", tmp_path, tmp_path / "pipe.kvcache"):
        with pytest.raises((RecordError, StoreError)):
            import_file(store.engine, path, UID)
    namespace = namespace_of(store, HYBRID)
    for name, mode in (("x.warmkv", os.O_RDONLY), ("pipe", os.O_RDWR)):
        fd = os.open(tmp_path / name, mode)
        with pytest.raises(RecordError, match="open for writing"):
            export(store.engine, namespace, lambda: [], fd)
        os.close(fd)
    fd = os.open(tmp_path / "x.warmkv", os.O_WRONLY | os.O_APPEND)
    with pytest.raises(RecordError, match="appending"):
        export(store.engine, namespace, lambda: [], fd)
    os.close(fd)
    assert descriptors() == before


def test_another_tenants_pack_is_another_namespace(open_store_with: OpenStore, tmp_path: Path) -> None:
    source, target = open_store_with(), open_store_with()
    filled(source, replace(HYBRID, tenant=b"t" * 16))
    write(source, replace(HYBRID, tenant=b"t" * 16), tmp_path / "x.warmkv")
    import_file(target.engine, tmp_path / "x.warmkv", UID)
    assert target.match(HYBRID, TOKENS).matched == 0
    contents(target, replace(HYBRID, tenant=b"t" * 16))


def test_a_pack_of_a_model_nobody_serves_is_refused(open_store_with: OpenStore, tmp_path: Path) -> None:
    """The identity in a pack is believed no more than one a client announces."""
    source, target = open_store_with(), open_store_with()
    filled(source, HYBRID)
    write(source, HYBRID, tmp_path / "x.warmkv")
    raw = (tmp_path / "x.warmkv").read_bytes()
    assert raw.count(b"token-major") == 1
    (tmp_path / "x.warmkv").write_bytes(raw.replace(b"token-major", b"token-minor"))
    with pytest.raises(DigestError):
        import_file(target.engine, tmp_path / "x.warmkv", UID)
    assert not target.engine.index.records and Access(UID, dict).readable(target.engine.index) == []
    assert StoreOptions().shares == {}
