"""export and import: the file was opened by the asking user, so its rights are that user's."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, TypeVar

from warmkv.kvstore.store import exporting, importing, kvcache_import
from warmkv.kvstore.store.access import Access, administers
from warmkv.kvstore.store.index import Namespace, Record
from warmkv.kvstore.store.reports import arguments
from warmkv.schema.errors import OfferAgain, RecordError, UnknownNamespace

if TYPE_CHECKING:
    from warmkv.kvstore.store.engine import Engine

Given = dict[str, object]
Found = TypeVar("Found")


def export(engine: Engine, access: Access, given: Given, fd: int) -> Given:
    """Write one prompt, by the ``id`` of one of its records, or a whole ``namespace`` (each by its
    first hex digits) into the file. Raises UnknownNamespace for what the user may not read or is
    not there."""
    if exporting.in_memory(fd) and not administers(access.uid):
        raise RecordError("the file lies in memory, which would be charged to the daemon; export to a file on disk")
    wanted_id, wanted = arguments.text(given, "id"), arguments.text(given, "namespace")
    if bool(wanted_id) == bool(wanted) or len(wanted_id or wanted) < 4:
        raise RecordError("export wants the id of a record or a namespace, at least 4 hex digits of it")
    with engine.index.changed:
        readable = access.readable(engine.index)
        if wanted:
            namespace = _only([item for item in readable if item.key.hex().startswith(wanted)], wanted)
            done = _namespace(namespace)
        else:
            records = [record for item in readable for record in item.records if record.id.hex().startswith(wanted_id)]
            record = _only(records, wanted_id)
            namespace, done = record.namespace, _prompt(engine, record)
    return asdict(exporting.export(engine, namespace, done, fd))


def import_(engine: Engine, access: Access, given: Given, fd: int) -> Given:
    """Read a pack, or with ``sidecar`` (the text of it) a `.kvcache` file, into the user's own
    namespaces or a ``share``; what was entered is on disk when this returns."""
    sidecar, share = arguments.text(given, "sidecar"), arguments.text(given, "share")
    if sidecar:
        done = kvcache_import.import_kvcache(engine, access, fd, kvcache_import.parse_sidecar(sidecar))
        result = importing.ImportResult(done.records, done.duplicates, done.total_bytes)
    else:
        result = importing.import_pack(engine, access, fd, share)
    return {**asdict(result), "written": engine.flush(engine.options.durable_timeout_s)}


def _namespace(namespace: Namespace) -> exporting.Choose:
    return lambda: list(namespace.records)


def _prompt(engine: Engine, record: Record) -> exporting.Choose:
    def choose() -> list[Record]:
        if record.gone:
            raise OfferAgain("what was to be exported was evicted meanwhile")
        return exporting.of_prompt(engine.index, record)

    return choose


def _only(found: list[Found], digits: str) -> Found:
    if not found:
        raise UnknownNamespace(f"nothing that you may read begins with {digits}")
    if len(found) > 1:
        raise UnknownNamespace(f"{digits} is ambiguous: {len(found)} that you may read begin with it")
    return found[0]
