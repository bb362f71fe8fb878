"""The store: both tiers, the index and the verbs over them, in one process."""

from warmkv.kvstore.store.options import StoreOptions
from warmkv.kvstore.store.prefix_cache import PrefixCache
from warmkv.kvstore.store.store import Store, open_store

__all__ = ["PrefixCache", "Store", "StoreOptions", "open_store"]
