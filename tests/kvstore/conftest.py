"""Lets the helper modules of live caches be imported by name."""

from __future__ import annotations

import sys
from pathlib import Path

LIVE = str(Path(__file__).resolve().parent / "live")
if LIVE not in sys.path:
    sys.path.append(LIVE)
