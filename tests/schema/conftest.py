"""Lets the test modules of this folder import the golden samples by name.

Hypothesis runs without its deadline: how long an example takes on a busy machine proves nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

from hypothesis import settings

settings.register_profile("warmkv", deadline=None)
settings.load_profile("warmkv")

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
if str(GOLDEN) not in sys.path:
    sys.path.append(str(GOLDEN))
