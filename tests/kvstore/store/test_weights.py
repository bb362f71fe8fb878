"""Weight files: another content retires a namespace, anything else does not."""

from __future__ import annotations

import itertools
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from warmkv.kvstore.store import Store, weight_file, weights
from warmkv.kvstore.store.access import Access
from warmkv.kvstore.store.index import Namespace
from warmkv.kvstore.store.options import Share
from warmkv.kvstore.store.weights import Weights, watch
from warmkv.kvstore.testing import TOKENS, random_identity, save
from warmkv.schema import ids
from warmkv.schema.errors import RecordError, WarmKVError
from warmkv.schema.identity import Identity
from warmkv.schema.records import NamespaceKey

OpenStore = Callable[..., Store]
UID = os.geteuid()


def key_of(identity: Identity, uid: int = UID, share: str = "") -> NamespaceKey:
    return ids.namespace_key(uid, share, ids.fingerprint(identity))


def retired(store: Store) -> list[tuple[NamespaceKey, str, int]]:
    return [(item.namespace, item.path, item.records) for item in store.engine.weights.look()]


class Reads:
    """Counts how often the content of a file is read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.paths: list[str] = []
        real = weight_file.read

        def counted(path: str, uid: int, keep_on: Callable[[], bool]) -> weight_file.WeightFile | None:
            self.paths.append(path)
            return real(path, uid, keep_on)

        monkeypatch.setattr(weights, "read", counted)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    return Reads(monkeypatch)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"weights of a model" * 1000)
    return path


@pytest.fixture
def store(open_store_with: OpenStore, identity: Identity) -> Store:
    """With something saved for ``identity``, in both tiers."""
    store = open_store_with(True)
    save(store, identity, TOKENS, ack="disk")
    return store


def test_changed_content_retires_the_namespace_and_the_entry(store: Store, identity: Identity, model: Path) -> None:
    other = random_identity(seed=1)
    save(store, other, TOKENS)
    key = key_of(identity)
    assert store.engine.weights.register(UID, key, [str(model)]) == 1
    assert retired(store) == []
    model.write_bytes(b"other weights" * 1000)
    records = len(store.engine.index.namespaces[key].records)
    assert retired(store) == [(key, str(model), records)]
    assert store.match(identity, TOKENS).matched == 0
    assert store.match(other, TOKENS).matched == len(TOKENS)
    assert store.engine.weights.registered(UID) == {} and store.engine.weights.retired == 1
    assert retired(store) == []


def test_what_was_retired_does_not_come_back_from_disk(
    open_store_with: OpenStore, store: Store, identity: Identity, model: Path
) -> None:
    store.engine.weights.register(UID, key_of(identity), [str(model)])
    store.engine.weights.look()
    model.write_bytes(b"other")
    assert retired(store)
    store.close()
    assert open_store_with(True).match(identity, TOKENS).matched == 0


def touched(path: Path) -> None:
    os.utime(path, ns=(1, 2))


def replaced_by_a_copy(path: Path) -> None:
    beside = path.with_suffix(".copy")
    beside.write_bytes(path.read_bytes())
    os.replace(beside, path)


def chmodded(path: Path) -> None:
    path.chmod(0o400)


@pytest.mark.parametrize("change", [touched, replaced_by_a_copy, chmodded])
def test_the_same_content_is_read_once_more_and_retires_nothing(
    store: Store, identity: Identity, model: Path, reads: Reads, change: Callable[[Path], None]
) -> None:
    store.engine.weights.register(UID, key_of(identity), [str(model)])
    assert reads.paths == []
    for _ in range(3):
        assert retired(store) == []
    assert reads.paths == [str(model)]
    change(model)
    for _ in range(3):
        assert retired(store) == []
    assert reads.paths == [str(model)] * 2
    assert store.match(identity, TOKENS).matched == len(TOKENS)


def test_the_same_size_and_time_do_not_hide_other_content(store: Store, identity: Identity, model: Path) -> None:
    """As a copy that keeps times makes it."""
    store.engine.weights.register(UID, key_of(identity), [str(model)])
    store.engine.weights.look()
    before = model.stat()
    beside = model.with_suffix(".new")
    beside.write_bytes(bytes(before.st_size))
    os.utime(beside, ns=(before.st_atime_ns, before.st_mtime_ns))
    os.replace(beside, model)
    assert len(retired(store)) == 1


def test_a_vanished_file_retires_only_when_it_is_back_with_other_content(store: Store, identity: Identity, model: Path) -> None:
    store.engine.weights.register(UID, key_of(identity), [str(model)])
    store.engine.weights.look()
    away = model.rename(model.with_suffix(".away"))
    assert retired(store) == []
    model.mkdir()
    assert retired(store) == []
    model.rmdir()
    away.rename(model)
    assert retired(store) == []
    assert store.match(identity, TOKENS).matched == len(TOKENS)
    model.unlink()
    assert retired(store) == []
    model.write_bytes(b"back, but different")
    assert len(retired(store)) == 1
    assert store.match(identity, TOKENS).matched == 0


def test_one_of_several_files_is_enough(store: Store, identity: Identity, tmp_path: Path) -> None:
    shards = [tmp_path / f"shard-{number}" for number in range(3)]
    for shard in shards:
        shard.write_bytes(shard.name.encode())
    assert store.engine.weights.register(UID, key_of(identity), map(str, shards)) == 3
    store.engine.weights.look()
    shards[1].write_bytes(b"other")
    assert [path for _, path, _ in retired(store)] == [str(shards[1])]


def test_a_file_that_changed_before_it_was_read_first_proves_nothing(store: Store, identity: Identity, model: Path) -> None:
    store.engine.weights.register(UID, key_of(identity), [str(model)])
    model.write_bytes(b"in between")
    assert len(retired(store)) == 1


def test_registering_again_does_not_take_the_new_content_for_the_old(store: Store, identity: Identity, model: Path) -> None:
    store.engine.weights.register(UID, key_of(identity), [str(model)])
    store.engine.weights.look()
    model.write_bytes(b"other")
    assert store.engine.weights.register(UID, key_of(identity), [str(model)]) == 1
    assert len(retired(store)) == 1


def test_a_file_of_several_namespaces_is_read_once_and_retires_all(
    store: Store, identity: Identity, model: Path, reads: Reads
) -> None:
    keys = {key_of(identity), *(key_of(random_identity(seed=seed)) for seed in (1, 2, 3))}
    for key in keys:
        store.engine.weights.register(UID, key, [str(model)])
    store.engine.weights.look()
    assert reads.paths == [str(model)]
    model.write_bytes(b"other")
    assert {key for key, _, _ in retired(store)} == keys
    assert reads.paths == [str(model)] * 2


def test_reading_that_is_given_up_goes_on_at_the_next_look(store: Store, identity: Identity, model: Path) -> None:
    store.engine.weights.register(UID, key_of(identity), [str(model)])
    asked: list[int] = []

    def twice() -> bool:
        asked.append(1)
        return len(asked) < 3

    model.write_bytes(bytes(3 * weight_file.SLICE_BYTES))
    assert store.engine.weights.look(twice) == [] and len(asked) == 3
    assert len(store.engine.weights.look()) == 1


def test_a_file_that_changes_while_it_is_read_is_read_again_later(store: Store, identity: Identity, model: Path) -> None:
    """Half of the old content and half of the new are no content at all."""
    store.engine.weights.register(UID, key_of(identity), [str(model)])
    store.engine.weights.look()
    content = model.read_bytes()
    model.write_bytes(b"under way")
    calls = itertools.count(1)

    def after_the_first_part() -> bool:
        return next(calls) != 3 or model.write_bytes(content) > 0

    assert store.engine.weights.look(after_the_first_part) == [] and next(calls) > 3
    os.utime(model, ns=(3, 4))
    assert retired(store) == []
    assert store.match(identity, TOKENS).matched == len(TOKENS)


def test_entries_outlive_the_process_and_a_change_in_between_is_seen(
    open_store_with: OpenStore, store: Store, identity: Identity, model: Path, reads: Reads
) -> None:
    store.engine.weights.register(UID, key_of(identity), [str(model)])
    store.engine.weights.look()
    known = store.engine.weights.registered(UID)
    store.close()
    again = open_store_with(True)
    assert again.engine.weights.registered(UID) == known
    assert retired(again) == [] and len(reads.paths) == 1
    again.close()
    model.write_bytes(b"other")
    assert len(retired(open_store_with(True))) == 1


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"[]", b"null", b'{"version": 2, "namespaces": []}', b'{"version": 1}', b'{"version": 1, "namespaces": 7}',
        b'{"version": 1, "namespaces": [{"uid": 0, "namespace": "00", "files": []}]}', b"\xff\xfe", b"[" * 100_000,
        b'{"version": 1, "namespaces": [{"uid": 0, "namespace": "%s", "files": [{"path": "/x", "signature": {}, "digest": ""}]}]}'
        % (b"00" * 16),
        b'{"version": 1, "namespaces": [{"uid": 0, "namespace": "%s", "files": [{"path": "x"}]}]}' % (b"00" * 16),
    ],
)  # fmt: skip
def test_a_damaged_list_is_set_aside_and_the_store_opens(
    open_store_with: OpenStore, tmp_path: Path, model: Path, data: bytes
) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "weights.json").write_bytes(data)
    store = open_store_with(True)
    assert store.engine.weights.registered(UID) == {}
    assert (tmp_path / "store" / "weights.json.unreadable").read_bytes() == data
    assert store.engine.weights.register(UID, NamespaceKey(bytes(16)), [str(model)]) == 1
    assert json.loads((tmp_path / "store" / "weights.json").read_bytes())["version"] == 1


def test_a_full_disk_loses_no_entry_of_this_process(
    store: Store, identity: Identity, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(weights.atomic, "write", full)
        store.engine.weights.register(UID, key_of(identity), [str(model)])
        store.engine.weights.look()
    store.engine.weights.look()
    written = json.loads((store.engine.weights._path or Path()).read_bytes())
    assert [row["namespace"] for row in written["namespaces"]] == [key_of(identity).hex()]


def test_without_a_disk_entries_are_kept_in_memory(open_store_with: OpenStore, identity: Identity, model: Path) -> None:
    store = open_store_with()
    save(store, identity, TOKENS)
    store.engine.weights.register(UID, key_of(identity), [str(model)])
    store.engine.weights.look()
    model.write_bytes(b"other")
    assert len(retired(store)) == 1 and store.stats()["entries"] == 0


# -- who may, and what -------------------------------------------------------------------------


REFUSED: dict[str, Callable[[Path], object]] = {
    "relative": lambda folder: "file",
    "zero byte": lambda folder: f"{folder}/fi\0le",
    "dots": lambda folder: f"{folder}/../{folder.name}/file",
    "doubled": lambda folder: f"{folder}//file",
    "link": lambda folder: str(folder / "link"),
    "pipe": lambda folder: str(folder / "pipe"),
    "folder": str,
    "device": lambda folder: "/dev/zero",
    "absent": lambda folder: str(folder / "absent"),
    "long": lambda folder: "/" + "x" * 4096,
    "empty": lambda folder: "",
    "number": lambda folder: 7,
    "none": lambda folder: None,
    "unnameable": lambda folder: "/\ud800",
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_regular_file_by_an_absolute_path_is_refused(store: Store, tmp_path: Path, case: str) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RecordError):
        store.engine.weights.register(UID, NamespaceKey(bytes(16)), [REFUSED[case](tmp_path)])
    assert store.engine.weights.registered(UID) == {}


OTHER = 54321


@pytest.fixture
def reachable(tmp_path: Path) -> Path:
    """A folder that everybody may pass through; skips where one above it is closed all the same."""
    for folder in (tmp_path, *tmp_path.parents):
        if Path(tempfile.gettempdir()) in folder.parents and folder.stat().st_uid == UID:
            folder.chmod(0o711)
    if not all(folder.stat().st_mode & 0o001 for folder in tmp_path.parents):
        pytest.skip("tests run below a folder that others may not pass through")
    return tmp_path


def test_another_user_needs_to_be_able_to_read_the_file(reachable: Path, model: Path) -> None:
    model.chmod(0o644)
    assert weight_file.first_look(str(model), OTHER) == weight_file.first_look(str(model), UID)
    for file_mode, folder_mode in ((0o640, 0o711), (0o604, 0o700)):
        model.chmod(file_mode)
        reachable.chmod(folder_mode)
        with pytest.raises(RecordError, match="no regular file that uid 54321 may read"):
            weight_file.first_look(str(model), OTHER)
    for missing in (reachable / "model.safetensor", reachable / "none" / "x"):
        with pytest.raises(RecordError, match="no regular file that uid 54321 may read"):
            weight_file.first_look(str(missing), OTHER)


def test_a_link_leads_another_user_nowhere_that_user_may_not_go(reachable: Path) -> None:
    """The last folder is open to everybody, the one above it is not; the path names neither."""
    secret = reachable / "private" / "models" / "secret"
    secret.parent.mkdir(parents=True)
    secret.write_bytes(b"x")
    secret.chmod(0o644)
    (reachable / "private").chmod(0o700)
    (reachable / "link").symlink_to(secret.parent)
    with pytest.raises(RecordError, match="may read"):
        weight_file.first_look(str(reachable / "link" / "secret"), OTHER)
    (reachable / "private").chmod(0o711)
    assert weight_file.first_look(str(reachable / "link" / "secret"), OTHER).signature.size == 1


@pytest.mark.parametrize("secret", [b"guessed", b"another"])
def test_a_folder_replaced_after_the_first_look_tells_nothing_of_files_of_others(
    reachable: Path, store: Store, identity: Identity, secret: bytes
) -> None:
    """Neither what is in such a file nor that there is one: the entry stays as it was."""
    private, own = reachable / "private", reachable / "own"
    for folder, data in ((private, secret), (own, b"guessed")):
        folder.mkdir(mode=0o755)
        (folder / "file").write_bytes(data)
        (folder / "file").chmod(0o644)
    private.chmod(0o700)
    registry, key = store.engine.weights, key_of(identity, OTHER)
    registry.register(OTHER, key, [str(own / "file")])
    assert registry.look() == []
    before = registry.registered(OTHER)
    own.rename(reachable / "aside")
    own.symlink_to(private)
    assert registry.look() == [] and registry.registered(OTHER) == before
    private.chmod(0o711)  # now it may be known
    assert len(registry.look()) == (secret != b"guessed")


def test_a_file_that_no_model_can_be_is_not_read(tmp_path: Path) -> None:
    holes = tmp_path / "holes"
    holes.touch()
    os.truncate(holes, weight_file.MAX_FILE_BYTES + 1)
    with pytest.raises(RecordError):
        weight_file.first_look(str(holes), UID)
    assert weight_file.read(str(holes), UID, lambda: True) is None


@pytest.mark.parametrize(
    ("mode", "uid", "allowed"),
    [
        (0o400, 7, True), (0o077, 7, False), (0o040, 8, True), (0o407, 8, False), (0o004, 9, True), (0o770, 9, False),
        (0o444, 9, True), (0o000, 7, False),
    ],
)  # fmt: skip
def test_the_class_a_user_falls_into_decides_even_where_another_may_more(mode: int, uid: int, allowed: bool) -> None:
    """Owner before group before others, as the kernel looks at it; 7 owns, 8 is of the group."""
    found = os.stat_result((mode, 1, 1, 1, 7, 70, 0, 0, 0, 0))
    assert weight_file._allows(found, uid, {70} if uid == 8 else {90}, 4) is allowed


def test_an_entry_for_somebody_elses_namespace_does_nothing(
    store: Store, identity: Identity, reachable: Path, model: Path
) -> None:
    model.chmod(0o644)
    registry = Weights(store.engine.index, store.engine.removal, None, lambda uid, namespace: namespace.owner_uid == uid)
    registry._entries[OTHER, key_of(identity)] = {str(model): weight_file.first_look(str(model), UID)}
    model.write_bytes(b"other")
    assert [item.records for item in registry.look()] == [0]
    assert store.match(identity, TOKENS).matched == len(TOKENS)


def test_who_may_write_a_namespace_may_have_it_retired(store: Store, identity: Identity) -> None:
    engine = store.engine
    private, shared = (Namespace(key_of(identity), 7, share, identity, 0) for share in ("", "team"))
    engine.options = replace(engine.options, shares={"team": Share(frozenset({9}), frozenset({8}))})
    told = {uid: (engine._may_write(uid, private), engine._may_write(uid, shared)) for uid in (7, 8, 9, UID)}
    assert told == {7: (True, False), 8: (False, True), 9: (False, False), UID: (True, True)}


def test_numbers_are_bounded(store: Store, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "MAX_FILES", 2)
    monkeypatch.setattr(weights, "MAX_NAMESPACES_OF_A_UID", 3)
    monkeypatch.setattr(weights, "MAX_NAMESPACES", 4)
    names = [str(model.with_name(f"file-{number}")) for number in range(3)]
    for name in names:
        Path(name).write_bytes(b"x")
    registry = store.engine.weights
    keys = [NamespaceKey(bytes([number]) * 16) for number in range(6)]
    with pytest.raises(RecordError, match="at most 2"):
        registry.register(UID, keys[0], names)
    registry.register(UID, keys[0], names[:2])
    with pytest.raises(RecordError, match="at most 2"):
        registry.register(UID, keys[0], names[2:])
    registry.register(UID, keys[1], names[:1])
    registry.register(UID, keys[2], names[:1])
    with pytest.raises(RecordError, match="3 namespaces a user"):
        registry.register(UID, keys[3], names[:1])
    registry.register(UID, keys[1], names[1:2])
    registry._entries[54321, keys[4]] = dict(registry._entries[UID, keys[1]])
    registry.forget(UID, keys[0])
    registry.register(UID, keys[3], names[:1])
    with pytest.raises(RecordError, match="and 4 are watched"):
        registry.forget(UID, keys[1])
        registry._entries[54321, keys[5]] = dict(registry._entries[54321, keys[4]])
        registry.register(UID, keys[5], names[:1])


def test_bytes_of_paths_are_bounded(store: Store, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(os.fsencode(model)) + weights.FILE_BYTES
    registry = store.engine.weights
    keys = [NamespaceKey(bytes([number]) * 16) for number in range(3)]
    monkeypatch.setattr(weights, "MAX_BYTES_OF_A_UID", 2 * size)
    for key in keys[:2]:
        registry.register(UID, key, [str(model)])
        registry.register(UID, key, [str(model)])
    with pytest.raises(RecordError, match="bytes a user"):
        registry.register(UID, keys[2], [str(model)])
    monkeypatch.setattr(weights, "MAX_BYTES_OF_A_UID", 3 * size)
    monkeypatch.setattr(weights, "MAX_BYTES", 2 * size)
    with pytest.raises(RecordError, match="in all"):
        registry.register(UID, keys[2], [str(model)])
    assert set(registry.registered(UID)) == set(keys[:2])


def test_as_many_entries_as_there_may_be_can_be_read_again() -> None:
    longest = "/" + "\udcff" * (weight_file.MAX_PATH_BYTES - 1)
    signature = weight_file.Signature(2**64, 2**64, 2**63, 2**63, 2**63)
    item = {longest: weight_file.WeightFile(longest, signature, "f" * 32)}
    encoded = len(weights.weight_entries.encoded({(2**32, NamespaceKey(bytes(16))): item}))
    most = weights.MAX_BYTES // (weight_file.MAX_PATH_BYTES + weights.FILE_BYTES)
    assert encoded * most < weights.weight_entries.MAX_BYTES
    shortest = {"/x": weight_file.WeightFile("/x", signature, "f" * 32)}
    encoded = len(weights.weight_entries.encoded({(2**32, NamespaceKey(bytes(16))): shortest}))
    assert encoded * (weights.MAX_BYTES // weights.FILE_BYTES) < weights.weight_entries.MAX_BYTES


# -- the verb ----------------------------------------------------------------------------------


def ask(store: Store, **given: object) -> dict[str, Any]:
    return watch(store.engine, Access(UID, lambda: {}), given)


def test_the_verb_adds_lists_and_removes(store: Store, identity: Identity, model: Path) -> None:
    digits = key_of(identity).hex()
    told: list[int] = []
    store.engine.weights.on_registered = lambda: told.append(1)
    assert ask(store, action="add", namespace=digits[:8], paths=[str(model)]) == {"namespace": digits, "files": 1}
    assert told == [1]
    assert ask(store)["rows"] == [{"namespace": digits, "files": [{"path": str(model), "bytes": 18_000, "digest": ""}]}]
    store.engine.weights.look()
    digest = ask(store, action="ls")["rows"][0]["files"][0]["digest"]
    assert len(digest) == 32
    assert ask(store, action="rm", namespace=digits, paths=["/elsewhere"])["removed"] == 0
    assert ask(store, action="rm", namespace=digits.upper())["removed"] == 1
    assert ask(store)["total"] == 0


def test_a_namespace_that_is_not_stored_yet_is_named_in_full(store: Store, model: Path) -> None:
    assert ask(store, action="add", namespace="ab" * 16, paths=[str(model)])["files"] == 1
    assert ask(store, action="rm", namespace="abab")["removed"] == 1


@pytest.mark.parametrize(
    "given",
    [
        {"action": "drop"},
        {"action": 7},
        {"action": "add"},
        {"action": "add", "namespace": "ab", "paths": ["/x"]},
        {"action": "add", "namespace": "no hex!!", "paths": ["/x"]},
        {"action": "add", "namespace": 7, "paths": ["/x"]},
        {"action": "add", "namespace": "ab" * 17, "paths": ["/x"]},
        {"action": "add", "namespace": "abcd", "paths": ["/x"]},
        {"action": "add", "namespace": "ab" * 16},
        {"action": "add", "namespace": "ab" * 16, "paths": []},
        {"action": "add", "namespace": "ab" * 16, "paths": "/x"},
        {"action": "add", "namespace": "ab" * 16, "paths": {"a": 1}},
        {"action": "add", "namespace": "ab" * 16, "paths": ["/x"] * 1025},
        {"action": "rm", "namespace": "ab" * 16, "paths": [7]},
    ],
)
def test_arguments_of_a_peer_are_checked(store: Store, given: dict[str, object]) -> None:
    with pytest.raises(WarmKVError):
        ask(store, **given)


def test_another_user_sees_and_finds_nothing(store: Store, identity: Identity, model: Path) -> None:
    digits = key_of(identity).hex()
    ask(store, action="add", namespace=digits, paths=[str(model)])
    stranger = Access(54321, lambda: {})
    assert watch(store.engine, stranger, {})["total"] == 0
    assert watch(store.engine, stranger, {"action": "rm", "namespace": digits})["removed"] == 0
    with pytest.raises(RecordError, match="beginning of 0 namespaces"):
        watch(store.engine, stranger, {"action": "rm", "namespace": digits[:8]})
    assert ask(store)["total"] == 1


def test_nothing_stays_open(store: Store, model: Path, descriptors: Callable[[], int]) -> None:
    store.engine.weights.register(UID, NamespaceKey(bytes(16)), [str(model)])
    store.engine.weights.look()
    before = descriptors()
    for number in range(20):
        model.write_bytes(b"%d" % number)
        store.engine.weights.register(UID, NamespaceKey(bytes(16)), [str(model)])
        store.engine.weights.look()
        with pytest.raises(RecordError):
            store.engine.weights.register(UID, NamespaceKey(bytes(16)), ["/dev/zero"])
    assert descriptors() == before
