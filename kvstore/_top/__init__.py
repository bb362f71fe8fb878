"""warmkv: a persistent prefix cache for local LLM agents.

The names below load on first use, so that ``import warmkv`` stays light: an inference process
pays only for what it calls.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from warmkv.kvstore.client import AsyncClient as AsyncClient
    from warmkv.kvstore.client import Client as Client
    from warmkv.kvstore.client import connect as connect
    from warmkv.kvstore.restored import Flight as Flight
    from warmkv.kvstore.restored import Restored as Restored
    from warmkv.kvstore.results import Match as Match
    from warmkv.kvstore.results import Offer as Offer
    from warmkv.kvstore.results import Saved as Saved
    from warmkv.kvstore.rows import LayerRows as LayerRows
    from warmkv.kvstore.rows import LayerState as LayerState
    from warmkv.kvstore.rows import PlaneRows as PlaneRows
    from warmkv.kvstore.store import PrefixCache as PrefixCache
    from warmkv.kvstore.store import Store as Store
    from warmkv.kvstore.store import open_store as open_store
    from warmkv.schema.errors import WarmKVError as WarmKVError
    from warmkv.schema.identity import SINGLE as SINGLE
    from warmkv.schema.identity import AdapterRef as AdapterRef
    from warmkv.schema.identity import Identity as Identity
    from warmkv.schema.identity import LayerKind as LayerKind
    from warmkv.schema.identity import LayerSpec as LayerSpec
    from warmkv.schema.identity import PlaneFormat as PlaneFormat
    from warmkv.schema.identity import PlaneRole as PlaneRole
    from warmkv.schema.identity import PlaneSpec as PlaneSpec
    from warmkv.schema.identity import RopeRegime as RopeRegime
    from warmkv.schema.identity import Topology as Topology
    from warmkv.schema.records import CLEAN as CLEAN
    from warmkv.schema.records import Anchor as Anchor
    from warmkv.schema.records import AnchorKind as AnchorKind
    from warmkv.schema.records import Attachment as Attachment

_HOMES = {
    "warmkv.kvstore.client": ["AsyncClient", "Client", "connect"],
    "warmkv.kvstore.results": ["Match", "Offer", "Saved"],
    "warmkv.kvstore.restored": ["Flight", "Restored"],
    "warmkv.kvstore.rows": ["LayerRows", "LayerState", "PlaneRows"],
    "warmkv.kvstore.store": ["PrefixCache", "Store", "open_store"],
    "warmkv.schema.errors": ["WarmKVError"],
    "warmkv.schema.identity": [
        "SINGLE", "AdapterRef", "Identity", "LayerKind", "LayerSpec", "PlaneFormat", "PlaneRole", "PlaneSpec", "RopeRegime",
        "Topology",
    ],
    "warmkv.schema.records": ["CLEAN", "Anchor", "AnchorKind", "Attachment"],
}  # fmt: skip
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__version__ = "0.1.0"
__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'warmkv' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
