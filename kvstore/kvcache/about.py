"""What a `.kvcache` file does not say of its model, as a small TOML table: beside one file, or for a folder.

The files name a model by a fingerprint of its id and shape. This says whose weights it was (a namespace
that is stored, or an identity in a file) and repeats what else the fingerprint was made of.
"""

from __future__ import annotations

import os
import stat
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from warmkv.schema.errors import FormatError, RecordError
from warmkv.schema.identity import MAX_IDENTITY_BYTES, Identity
from warmkv.schema.pack_file import MAGIC, PackReader

MAX_BYTES = 64 << 10
#: The file of an identity's canonical bytes, as `warmkv export --format identity` writes it.
IDENTITY_SUFFIX = ".identity"
_REQUIRED: dict[str, type] = {"model_id": str, "architecture": str, "hidden_size": int, "n_heads": int}
_TYPES = {"namespace": str, "identity": str, **_REQUIRED}


@dataclass(frozen=True, slots=True)
class About:
    """``model_id`` as cera has it: the backend's prefix ("cpu:", "wgpu:", "metal:") and the id. Its tag for
    the way rows are stored may stand between them; it follows from the layers and is compared.

    Exactly one of ``namespace``, the beginning of a key in hex, and ``identity``, a path, is given."""

    namespace: str
    model_id: str
    architecture: str
    hidden_size: int
    n_heads: int
    identity: str = ""


def parse(text: str, where: str = "the sidecar") -> About:
    """Raises FormatError for anything but these keys, of these types."""
    if len(text) > MAX_BYTES:
        raise FormatError(f"{where} has more than {MAX_BYTES} bytes")
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as exc:  # no TOML, an integer or nesting without end
        raise FormatError(f"{where} is not TOML: {exc}") from exc
    one = len({"namespace", "identity"} & set(table)) == 1
    if not one or set(table) - {"namespace", "identity"} != set(_REQUIRED):
        wanted = ", ".join(f"{name} ({kind.__name__})" for name, kind in _REQUIRED.items())
        raise FormatError(f"{where} has {sorted(table)}, expected namespace (str) or identity (str), and {wanted}")
    for name, value in table.items():
        if type(value) is not _TYPES[name]:
            raise FormatError(f"{where}: {name} is {type(value).__name__}, expected {_TYPES[name].__name__}")
    found = About(**{"namespace": "", **table})
    if "namespace" in table and (not 4 <= len(found.namespace) <= 32 or set(found.namespace.lower()) - set("0123456789abcdef")):
        raise FormatError(f"{where}: namespace is {found.namespace!r:.40}, expected 4 to 32 hex digits")
    if not (0 <= found.hidden_size < 2**63 and 0 <= found.n_heads < 2**63):
        raise FormatError(f"{where}: hidden_size or n_heads is no size")
    return found


def read(path: Path) -> About:
    """The table in the file ``path``. Raises RecordError where there is none, FormatError."""
    return parse(text(path), path.name)


def text(path: Path) -> str:
    """What the file ``path`` says, at most `MAX_BYTES`. Raises RecordError where there is none, FormatError."""
    with _opened(path) as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise FormatError(f"{path.name} has more than {MAX_BYTES} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError as exc:
        raise FormatError(f"{path.name} is not UTF-8") from exc


def identity_in(path: Path) -> Identity:
    """The identity in a file of its canonical bytes, or at the head of a snapshot pack. Raises RecordError,
    FormatError, DigestError."""
    with _opened(path) as file:
        begin = file.read(len(MAGIC))
        file.seek(0)
        if begin == MAGIC:
            return Identity.from_canonical(PackReader(file.read, os.fstat(file.fileno()).st_size).identity)
        data = file.read(MAX_IDENTITY_BYTES + 1)
    return Identity.from_canonical(data)


def _opened(path: Path) -> BinaryIO:
    """A plain file; a pipe would keep the reader waiting."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as exc:
        raise RecordError(f"{path} cannot be read: {exc.strerror}") from exc
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        raise RecordError(f"{path} is {stat.filemode(mode)}, expected a plain file")
    return open(fd, "rb")
