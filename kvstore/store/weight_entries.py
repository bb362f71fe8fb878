"""Who has which weight files watched for which namespace, as kept in a file beside the records."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from pathlib import Path

from warmkv.kvstore.store.weight_file import Signature, WeightFile, check_path
from warmkv.schema.errors import FormatError, RecordError
from warmkv.schema.records import NamespaceKey

log = logging.getLogger(__name__)

FILE_NAME = "weights.json"
VERSION = 1
KEY_BYTES = 16
#: More than `weights.MAX_BYTES` of paths can take, six characters a byte.
MAX_BYTES = 256 << 20

#: Whose registration of which namespace.
Entry = tuple[int, NamespaceKey]
#: Files by their path.
Files = dict[str, WeightFile]


def encoded(entries: dict[Entry, Files]) -> bytes:
    rows = [
        {"uid": uid, "namespace": key.hex(), "files": [asdict(item) for item in files.values()]}
        for (uid, key), files in entries.items()
    ]
    return json.dumps({"version": VERSION, "namespaces": rows}).encode()


def decoded(data: bytes) -> dict[Entry, Files]:
    """Raises FormatError for anything but what `encoded` wrote."""
    try:
        document = json.loads(data)
        if document["version"] != VERSION:
            raise FormatError(f"version {document['version']!r}, expected {VERSION}")
        return dict(_entry(row) for row in document["namespaces"])
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError, RecordError) as exc:
        raise FormatError(f"not a list of watched weight files: {type(exc).__name__}") from exc


def load(path: Path) -> dict[Entry, Files]:
    """Entries of an earlier life, none where there was none. A file that cannot be understood is
    kept under another name."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise FormatError(f"more than {MAX_BYTES} bytes")
        return decoded(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, FormatError) as exc:
        aside = path.with_name(path.name + ".unreadable")
        log.error("weight files are no longer watched: %s cannot be read (%s); see %s", path, exc, aside.name)
        try:
            path.rename(aside)
        except OSError as again:
            log.warning("%s could not be moved: %s", path, again.strerror)
        return {}


def _entry(row: dict[str, object]) -> tuple[Entry, Files]:
    uid, namespace, files = row["uid"], row["namespace"], row["files"]
    if not isinstance(uid, int) or not isinstance(namespace, str) or not isinstance(files, list):
        raise FormatError("an entry without user, namespace or files")
    key = NamespaceKey(bytes.fromhex(namespace))
    if len(key) != KEY_BYTES:
        raise FormatError(f"a namespace of {len(key)} bytes, expected {KEY_BYTES}")
    found = [WeightFile(check_path(item["path"]), _signature(item["signature"]), str(item["digest"])) for item in files]
    return (uid, key), {item.path: item for item in found}


def _signature(fields: dict[str, int]) -> Signature:
    if not all(isinstance(value, int) for value in fields.values()):
        raise FormatError("a signature of other than numbers")
    return Signature(**fields)
