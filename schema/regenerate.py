"""Regenerate the committed FlatBuffers readers from ``schema/fbs``.

Run with any Python that has no further needs; ``flatc`` must be on PATH (Debian:
``flatbuffers-compiler``). ``generated/VERSION`` records the compiler and a digest of the
sources, which a test compares with the tree: edited sources without new output fail it.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def source_digest() -> str:
    """SHA-256 over names and bytes of the ``.fbs`` sources, in name order."""
    digest = hashlib.sha256()
    for source in sorted((HERE / "fbs").glob("*.fbs")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()


def main() -> int:
    out = HERE / "generated"
    for source in sorted((HERE / "fbs").glob("*.fbs")):
        subprocess.run(["flatc", "--python", "--gen-onefile", "-o", str(out), str(source)], check=True)
    version = subprocess.run(["flatc", "--version"], check=True, capture_output=True, text=True).stdout.strip()
    (out / "VERSION").write_text(f"{version}\nsources sha256 {source_digest()}\n")
    (out / "__init__.py").write_text('"""Output of flatc; see VERSION. Never edited by hand."""\n')
    return 0


if __name__ == "__main__":
    sys.exit(main())
