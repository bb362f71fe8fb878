"""What is warm outlives the process: kept by a service manager, and proven again when it comes back."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from warmkv import connect
from warmkv.daemon.activation import Inherited
from warmkv.daemon.adoption import namespace_name, record_name
from warmkv.daemon.fdstore import DescriptorStore
from warmkv.daemon.testing import DaemonProcess, ServedEngine, eventually
from warmkv.daemon.testing_manager import ServiceManager
from warmkv.kvstore import memfd
from warmkv.kvstore.rows import LayerRows
from warmkv.kvstore.store.engine import Engine
from warmkv.kvstore.store.options import StoreOptions
from warmkv.schema import segment
from warmkv.schema.errors import Busy
from warmkv.schema.identity import Identity

Rows = Callable[[int], list[LayerRows]]
Keeping = Callable[..., DescriptorStore]
Kept = dict[str, int]
Adopt = Callable[[list[tuple[str, int]]], int]
Save = Callable[..., None]
TOKENS = list(range(1, 65))
MIB = 1 << 20


def part(rows: list[LayerRows], end: int) -> list[LayerRows]:
    """The first ``end`` positions."""
    return [LayerRows.kv(item.layer, item.planes[0].rows[:end], item.planes[1].rows[:end]) for item in rows]


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[ServiceManager]:
    with ServiceManager(tmp_path / "notify") as listening:
        yield listening


@pytest.fixture
def keeping(manager: ServiceManager) -> Iterator[Keeping]:
    """Starts descriptor stores on engines; they are stopped after the test."""
    made: list[DescriptorStore] = []

    def start(engine: Engine, max_bytes: int = 64 * MIB, max_descriptors: int = 100) -> DescriptorStore:
        store = DescriptorStore(manager.address, engine.index, engine.warm.ledger, max_bytes, max_descriptors)
        engine.warm.listeners.append(store)
        store.start()
        made.append(store)
        return store

    yield start
    for store in made:
        store.stop()


def saved(engine: Engine, socket_path: Path, identity: Identity, rows: list[LayerRows], *lengths: int) -> None:
    with ServedEngine(socket_path, engine), connect(socket_path, strict=True) as client:
        for length in lengths:
            assert client.save(identity, TOKENS[:length], part(rows, length)).stored


@pytest.fixture
def save(engine: Engine, socket_path: Path, identity: Identity, rows: Rows) -> Save:
    """Saves prefixes of these lengths into the engine."""
    return lambda *lengths: saved(engine, socket_path, identity, rows(64), *lengths)


def records(names: set[str]) -> set[str]:
    return {name for name in names if not name.startswith("warmkv-ns-")}


# -- what is kept ------------------------------------------------------------------------------


def test_each_warm_record_and_its_namespace_are_kept_under_their_names(
    manager: ServiceManager, keeping: Keeping, engine: Engine, save: Save
) -> None:
    keeping(engine)
    save(32, 64)
    expected = {record_name(id_) for id_ in engine.index.records} | {namespace_name(key) for key in engine.index.namespaces}
    assert len(expected) == 3
    assert manager.keeps(lambda names: names == expected)
    stores = [message for message in manager.messages if "FDSTORE" in message]
    assert all(set(message) == {"FDSTORE", "FDPOLL", "FDNAME"} for message in stores) and len(stores) == 3
    assert stores[0]["FDNAME"].startswith("warmkv-ns-"), "whose it is comes before what it is"
    for record in engine.index.records.values():
        assert os.fstat(manager.kept[record_name(record.id)]).st_ino == os.fstat(record.fd).st_ino


def test_what_was_warm_before_the_start_is_kept_too(
    manager: ServiceManager, keeping: Keeping, engine: Engine, save: Save
) -> None:
    save(64)
    keeping(engine)
    assert manager.keeps(lambda names: len(names) == 2)


def test_what_is_evicted_is_let_go_of_with_its_namespace(
    manager: ServiceManager, keeping: Keeping, engine: Engine, save: Save
) -> None:
    store = keeping(engine)
    save(32, 64)
    assert manager.keeps(lambda names: len(names) == 3) and store.kept_bytes > 0
    with engine.index.changed:
        leaf = max(engine.index.warm_order, key=lambda record: record.start)
        engine.warm.evict(leaf)
    assert manager.keeps(lambda names: record_name(leaf.id) not in names and len(names) == 2)
    with engine.index.changed:
        engine.warm.evict(next(iter(engine.index.warm_order)))
    engine.warm.reap()
    assert manager.keeps(lambda names: not names)
    assert eventually(store.settled) and store.kept_bytes == 0


def test_what_went_just_before_the_end_is_let_go_of(
    manager: ServiceManager, keeping: Keeping, engine: Engine, save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next process would take back what was forgotten."""
    store = keeping(engine)
    save(32, 64)
    assert manager.keeps(lambda names: len(names) == 3) and eventually(store.settled)
    stopping, send = threading.Event(), store._send

    def late(text: str, fd: int = -1) -> None:
        assert stopping.wait(20)
        send(text, fd)

    monkeypatch.setattr(store, "_send", late)
    with engine.index.changed:
        for record in sorted(engine.index.warm_order, key=lambda item: -item.start):
            engine.warm.evict(record)
    monkeypatch.setattr(store._ended, "wait", lambda timeout: stopping.set() or threading.Event().wait(0.001))
    store.stop()
    engine.warm.reap()
    assert manager.keeps(lambda names: not names)


def test_bytes_are_bounded_until_they_are_let_go_of(
    manager: ServiceManager, keeping: Keeping, engine: Engine, save: Save
) -> None:
    save(16, 32, 48, 64)
    sizes = {record_name(record.id): record.total_bytes for record in engine.index.records.values()}
    store = keeping(engine, max_bytes=sum(sizes.values()) - 1)
    assert eventually(store.settled) and manager.keeps(lambda names: len(records(names)) == 3)
    assert store.kept_bytes == sum(os.fstat(fd).st_size for fd in manager.kept.values()) < sum(sizes.values())
    (left_out,) = sizes.keys() - manager.kept.keys()
    with engine.index.changed:
        leaf = max((item for item in engine.index.warm_order if record_name(item.id) != left_out), key=lambda item: item.start)
        engine.warm.evict(leaf)
    engine.warm.reap()
    expected = {name for name in sizes if name != record_name(leaf.id)}
    assert manager.keeps(lambda names: records(names) == expected), "what did not fit before takes the room"


def test_descriptors_are_bounded(manager: ServiceManager, keeping: Keeping, engine: Engine, save: Save) -> None:
    save(16, 32, 48, 64)
    store = keeping(engine, max_descriptors=3)
    assert eventually(store.settled) and manager.keeps(lambda names: len(names) == 3)
    assert len(store.kept) == 3


def test_a_manager_that_does_not_read_holds_up_nobody(tmp_path: Path, engine: Engine, save: Save) -> None:
    """Its queue is full: saves go on, the index lock is free, and the daemon can stop."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as deaf, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as noise:
        deaf.bind(str(tmp_path / "deaf"))
        noise.setblocking(False)
        with pytest.raises(BlockingIOError):
            while True:
                noise.sendto(b"noise", str(tmp_path / "deaf"))
        store = DescriptorStore(str(tmp_path / "deaf"), engine.index, engine.warm.ledger, 64 * MIB, 100)
        engine.warm.listeners.append(store)
        store.start()
        save(16, 32, 48, 64)
        assert engine.index.changed.acquire(timeout=10)
        engine.index.changed.release()
        assert not store.settled() and store.kept_bytes == 0
        store.stop()


class Paused(socket.socket):
    """A manager that reads when a test says so."""

    def read(self) -> tuple[str, list[int]]:
        data, fds, _, _ = socket.recv_fds(self, 1000, 1)
        return data.decode(), fds


def test_evicted_bytes_count_until_the_manager_was_told(
    tmp_path: Path, socket_path: Path, identity: Identity, rows: Rows
) -> None:
    """While its queue is full, memory it still holds is not given away a second time."""
    engine = Engine.open(StoreOptions(warm_bytes=MIB, busy_timeout_s=0.05))
    ledger = engine.warm.ledger
    with Paused(socket.AF_UNIX, socket.SOCK_DGRAM) as manager, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as noise:
        manager.bind(str(tmp_path / "m"))
        store = DescriptorStore(str(tmp_path / "m"), engine.index, ledger, MIB, 100)
        engine.warm.listeners.append(store)
        store.start()
        saved(engine, socket_path, identity, rows(64), 64)
        (record,) = engine.index.records.values()
        held = [fd for _ in range(2) for fd in manager.read()[1]]
        assert eventually(store.settled)
        noise.setblocking(False)
        with pytest.raises(BlockingIOError):
            while True:
                noise.sendto(b"noise", str(tmp_path / "m"))
        with engine.index.changed:
            engine.warm.evict(record)
            assert ledger.used_bytes == 0 and ledger.parting_bytes == ledger.paged(record.total_bytes)
            with pytest.raises(Busy, match="kept elsewhere"):
                engine.warm.make_room(MIB)
            engine.warm.make_room(MIB - ledger.parting_bytes)
        manager.setblocking(False)
        assert eventually(lambda: drained(manager) and store.settled())
        with engine.index.changed:
            assert ledger.parting_bytes == 0
            engine.warm.make_room(MIB)
        store.stop()
        for fd in held:
            os.close(fd)
    engine.close()


def drained(manager: Paused) -> bool:
    """Read all there is."""
    try:
        while True:
            for fd in manager.read()[1]:
                os.close(fd)
    except BlockingIOError:
        return True


def test_a_manager_that_is_gone_keeps_nothing(
    tmp_path: Path, engine: Engine, save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("warmkv.daemon.fdstore.PAUSE_AFTER_ERROR_S", 0.01)
    with ServiceManager(tmp_path / "m") as manager:
        store = DescriptorStore(manager.address, engine.index, engine.warm.ledger, 64 * MIB, 100)
        engine.warm.listeners.append(store)
        store.start()
        save(32, 64)
        assert manager.keeps(lambda names: len(names) == 3) and eventually(store.settled)
    with engine.index.changed:
        engine.warm.evict(max(engine.index.warm_order, key=lambda record: record.start))
    assert eventually(lambda: not store.kept and engine.warm.ledger.parting_bytes == 0)
    (tmp_path / "m").unlink()
    with ServiceManager(tmp_path / "m") as again:
        assert again.keeps(lambda names: len(names) == 2), "one that comes back keeps what is warm now"
        store.stop()


def test_a_record_that_comes_back_as_another_file_is_kept_anew(
    manager: ServiceManager, keeping: Keeping, tmp_path: Path, socket_path: Path, identity: Identity, rows: Rows
) -> None:
    opened = Engine.open(StoreOptions(path=tmp_path / "store", warm_bytes=64 * MIB, cold_bytes=64 * MIB))
    try:
        keeping(opened)
        with ServedEngine(socket_path, opened), connect(socket_path, strict=True) as client:
            assert client.save(identity, TOKENS, rows(64), ack="disk").durable
            (record,) = opened.index.records.values()
            name = record_name(record.id)
            assert manager.keeps(lambda names: name in names)
            before = os.fstat(manager.kept[name]).st_ino
            with opened.index.changed:
                opened.warm.evict(record)
            opened.warm.reap()
            with client.restore(identity, [*TOKENS, 1]) as restored:
                assert restored.tier == "cold"
        assert eventually(lambda: name in manager.kept and os.fstat(manager.kept[name]).st_ino not in (-1, before))
        assert os.fstat(manager.kept[name]).st_ino == os.fstat(record.fd).st_ino
    finally:
        opened.close()


# -- what comes back ---------------------------------------------------------------------------


@pytest.mark.parametrize("cold", ["0", "64MiB"])
def test_a_killed_daemon_has_its_warm_records_back(
    tmp_path: Path, manager: ServiceManager, identity: Identity, rows: Rows, cold: str
) -> None:
    """With the cold tier off there is nothing else they could come from, the namespace included."""
    arguments = ("--cold-bytes", cold, "--warm-bytes", "64MiB")
    with DaemonProcess(tmp_path, *arguments, environ=manager.environ) as daemon:
        with connect(daemon.socket, strict=True) as client:
            for length in (16, 32, 64):
                assert client.save(identity, TOKENS[:length], part(rows(64), length)).stored
        assert manager.keeps(lambda names: len(names) == 4)
        daemon.kill()
        daemon.start(passed=list(manager.kept.items()))
        assert "3 of 4 descriptors" in daemon.log
        with connect(daemon.socket, strict=True) as client, client.restore(identity, [*TOKENS, 1], verify=True) as restored:
            assert (restored.usable, restored.tier) == (64, "warm")
            np.testing.assert_array_equal(restored.layers[1].keys, rows(64)[1].planes[0].rows)
        assert len(manager.kept) == 4 and not manager.told("FDSTOREREMOVE"), "what is kept already is not kept twice"


def test_a_clean_restart_keeps_what_was_warm(tmp_path: Path, manager: ServiceManager, identity: Identity, rows: Rows) -> None:
    with DaemonProcess(tmp_path, "--cold-bytes", "64MiB", "--warm-bytes", "64MiB", environ=manager.environ) as daemon:
        with connect(daemon.socket, strict=True) as client:
            assert client.save(identity, TOKENS, rows(64)).stored
        assert manager.keeps(lambda names: len(names) == 2)
        assert daemon.stop() == 0
        assert len(manager.kept) == 2
        daemon.start(passed=list(manager.kept.items()))
        with connect(daemon.socket, strict=True) as client, client.restore(identity, [*TOKENS, 1]) as restored:
            assert (restored.usable, restored.tier) == (64, "warm")


@pytest.fixture
def kept(manager: ServiceManager, keeping: Keeping, socket_path: Path, identity: Identity, rows: Rows) -> Kept:
    """Descriptors of a chain of three records and of its namespace, whose engine is closed."""
    gone = Engine.open(StoreOptions(warm_bytes=64 * MIB))
    store = keeping(gone)
    saved(gone, socket_path, identity, rows(64), 16, 32, 64)
    assert manager.keeps(lambda names: len(names) == 4)
    store.stop()
    gone.close()
    return dict(manager.kept)


@pytest.fixture
def adopt(manager: ServiceManager, engine: Engine, kept: Kept, descriptors: Callable[[], int]) -> Iterator[Adopt]:
    """Hands duplicates of descriptors to a store of a fresh engine; they are all closed by it."""
    before = descriptors()

    def take(passed: list[tuple[str, int]]) -> int:
        store = DescriptorStore(manager.address, engine.index, engine.warm.ledger, 64 * MIB, 100)
        return store.adopt(engine, [Inherited(os.dup(fd), name) for name, fd in passed])

    yield take
    assert eventually(lambda: descriptors() <= before + sum(record.warm for record in engine.index.records.values()))


def usable(engine: Engine, socket_path: Path, identity: Identity) -> int:
    with ServedEngine(socket_path, engine), connect(socket_path, strict=True) as client:
        return client.match(identity, [*TOKENS, 1]).usable


@pytest.mark.parametrize("order", ["as kept", "reversed", "namespace last"])
def test_the_order_in_which_descriptors_come_does_not_matter(
    adopt: Adopt, kept: Kept, engine: Engine, socket_path: Path, identity: Identity, order: str
) -> None:
    items = list(kept.items())
    if order == "reversed":
        items.reverse()
    if order == "namespace last":
        items.sort(key=lambda item: item[0].startswith("warmkv-ns-"))
    assert adopt(items) == 3
    assert usable(engine, socket_path, identity) == 64


def chain_of(kept: Kept) -> list[str]:
    """Names of the three records by where their rows begin."""

    def start(name: str) -> int:
        fd = kept[name]
        header = segment.decode_head(memoryview(os.pread(fd, os.fstat(fd).st_size, 0)), os.fstat(fd).st_size).header
        assert isinstance(header, segment.SegmentHeader)
        return header.start

    return sorted(records(set(kept)), key=start)


def tampered(fd: int, at: int, *, seals: bool = True) -> int:
    """A copy with one byte changed, counted from the end where ``at`` is negative."""
    total_bytes = os.fstat(fd).st_size
    copy = memfd.create("copy", total_bytes)
    data = bytearray(os.pread(fd, total_bytes, 0))
    data[at] ^= 1
    memfd.write(copy, bytes(data), 0)
    if seals:
        memfd.seal(copy)
    return copy


def unsealed(fd: int) -> int:
    copy = memfd.create("copy", os.fstat(fd).st_size)
    memfd.write(copy, os.pread(fd, os.fstat(fd).st_size, 0), 0)
    return copy


def sparse(fd: int) -> int:
    copy = memfd.create("copy", 1 << 30)
    memfd.write(copy, os.pread(fd, 4096, 0), 0)
    memfd.seal(copy)
    return copy


BAD: dict[str, Callable[[int], int]] = {
    "a byte of the rows changed": lambda fd: tampered(fd, -1),
    "a byte of the header changed": lambda fd: tampered(fd, 80),
    "a byte of the magic changed": lambda fd: tampered(fd, 0),
    "not sealed": unsealed,
    "sparse": sparse,
    "a pipe": lambda fd: os.pipe2(os.O_CLOEXEC)[0],
    "a file": lambda fd: os.open("/proc/self/exe", os.O_RDONLY | os.O_CLOEXEC),
    "a socket": lambda fd: socket.socket(socket.AF_UNIX).detach(),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_cannot_be_proven_is_let_go_of_and_so_is_what_builds_on_it(
    adopt: Adopt, manager: ServiceManager, kept: Kept, engine: Engine, socket_path: Path, identity: Identity, kind: str
) -> None:
    chain = chain_of(kept)
    bad = BAD[kind](kept[chain[1]])
    try:
        items = [(name, bad if name == chain[1] else fd) for name, fd in kept.items()]
        assert adopt(items) == 1
    finally:
        os.close(bad)
    assert manager.keeps(lambda names: records(names) == {chain[0]})
    assert usable(engine, socket_path, identity) == 16


def test_without_its_namespace_a_record_belongs_to_nobody(
    adopt: Adopt, manager: ServiceManager, kept: Kept, engine: Engine
) -> None:
    assert adopt([(name, fd) for name, fd in kept.items() if not name.startswith("warmkv-ns-")]) == 0
    assert not engine.index.records
    assert manager.keeps(lambda names: not records(names))


def test_names_that_lie_and_names_that_are_not_ours_are_let_go_of(
    adopt: Adopt, manager: ServiceManager, kept: Kept, engine: Engine
) -> None:
    first, second, third = chain_of(kept)
    (namespace,) = kept.keys() - {first, second, third}
    false = f"warmkv-ns-{bytes(16).hex()}"
    items = [(second, kept[first]), ("stored", kept[first]), ("", kept[first]), (false, kept[namespace])]
    items.append(("warmkv-" + "x" * 32, kept[third]))
    assert adopt([(namespace, kept[namespace]), (first, kept[first]), (first, kept[first]), *items]) == 1
    assert eventually(lambda: {second, "stored", false} <= set(manager.told("FDNAME")))
    assert [record_name(id_) for id_ in engine.index.records] == [first]


def test_a_budget_that_shrank_takes_back_what_fits(
    manager: ServiceManager, kept: Kept, socket_path: Path, identity: Identity
) -> None:
    chain = chain_of(kept)
    fits = sum(os.fstat(kept[name]).st_size for name in chain[:2])
    small = Engine.open(StoreOptions(warm_bytes=fits))
    try:
        store = DescriptorStore(manager.address, small.index, small.warm.ledger, 64 * MIB, 100)
        store.adopt(small, [Inherited(os.dup(fd), name) for name, fd in kept.items()])
        assert small.warm.ledger.used_bytes <= fits
        assert usable(small, socket_path, identity) in (16, 32)
    finally:
        small.close()


def test_what_came_back_and_was_evicted_before_the_start_is_let_go_of(
    manager: ServiceManager, kept: Kept, engine: Engine
) -> None:
    chain = chain_of(kept)
    store = DescriptorStore(manager.address, engine.index, engine.warm.ledger, 64 * MIB, 100)
    assert store.adopt(engine, [Inherited(os.dup(fd), name) for name, fd in kept.items()]) == 3
    with engine.index.changed:
        engine.warm.evict(max(engine.index.warm_order, key=lambda record: record.start))
    engine.warm.reap()
    store.start()
    assert manager.keeps(lambda names: records(names) == set(chain[:2]))
    store.stop()


@pytest.mark.parametrize(("max_bytes", "max_descriptors", "stay"), [(0, 100, 0), (64 * MIB, 2, 2)])
def test_where_less_may_be_kept_than_before_the_rest_is_let_go_of(
    manager: ServiceManager, kept: Kept, engine: Engine, max_bytes: int, max_descriptors: int, stay: int
) -> None:
    """It is warm all the same."""
    store = DescriptorStore(manager.address, engine.index, engine.warm.ledger, max_bytes, max_descriptors)
    assert store.adopt(engine, [Inherited(os.dup(fd), name) for name, fd in kept.items()]) == 3
    assert manager.keeps(lambda names: len(names) == stay) and len(store.kept) == stay
    assert store.kept_bytes <= max_bytes and sum(record.warm for record in engine.index.records.values()) == 3


def test_threads_and_descriptors_are_given_back(
    manager: ServiceManager, engine: Engine, save: Save, descriptors: Callable[[], int]
) -> None:
    save(16, 32, 64)
    before = descriptors(), threading.active_count()
    store = DescriptorStore(manager.address, engine.index, engine.warm.ledger, 64 * MIB, 100)
    store.start()
    assert manager.keeps(lambda names: len(names) == 4)
    store.stop()
    store.stop()
    assert (descriptors() - len(manager.kept), threading.active_count()) == before
