"""Sans-I/O framing: a little-endian u32 length, then that many bytes of message.

Descriptors travel with the first byte of a frame; anywhere else they are a violation.
"""

from __future__ import annotations

import struct

from warmkv.schema.errors import LocalProtocolError, RemoteProtocolError
from warmkv.schema.messages import MAX_BODY_BYTES

LENGTH = struct.Struct("<I")
MIN_BODY_BYTES = 16


def frame(body: bytes) -> bytes:
    """A frame around ``body``. Raises LocalProtocolError for a body outside the caps."""
    if not MIN_BODY_BYTES <= len(body) <= MAX_BODY_BYTES:
        raise LocalProtocolError(f"a body of {len(body)} bytes cannot be framed, the caps are {MIN_BODY_BYTES}..{MAX_BODY_BYTES}")
    return LENGTH.pack(len(body)) + body


def body_length(prefix: bytes, max_body_bytes: int = MAX_BODY_BYTES) -> int:
    """Length announced by the 4 bytes before a body; RemoteProtocolError outside the caps."""
    (length,) = LENGTH.unpack(prefix)
    if not MIN_BODY_BYTES <= length <= max_body_bytes:
        raise RemoteProtocolError(f"frame announces {length} bytes, the caps are {MIN_BODY_BYTES}..{max_body_bytes}")
    return int(length)
