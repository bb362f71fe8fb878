"""Who may read, write and administer what of a store: one user's rights, asked for every request.

A namespace belongs to one user, or to a share that is declared with its readers and writers.
Whatever is refused here is refused in the same words whether or not it exists.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from warmkv.kvstore.store.index import Index, Namespace
from warmkv.kvstore.store.options import Share
from warmkv.schema.errors import AccessRefused


class Access:
    """Rights of user ``uid``. ``shares`` gives the declarations in force at the moment, which a
    reload may change under an open session; with ``every_share`` (a store opened in this process,
    whose files are the user's own) any name of a share may be used."""

    def __init__(self, uid: int, shares: Callable[[], Mapping[str, Share]], *, every_share: bool = False) -> None:
        self.uid = uid
        self.every_share = every_share
        self._shares = shares

    def reads(self, namespace: Namespace) -> bool:
        """Whether the user may know of a namespace at all."""
        return self.reads_share(namespace.share) if namespace.share else namespace.owner_uid == self.uid

    def writes(self, namespace: Namespace) -> bool:
        """Whether the user may add to it and drop from it."""
        return self.writes_share(namespace.share) if namespace.share else namespace.owner_uid == self.uid

    def readable(self, index: Index) -> list[Namespace]:
        """What the user may read of what is stored; the index lock is held."""
        return [namespace for namespace in index.namespaces.values() if self.reads(namespace)]

    def reads_share(self, name: str) -> bool:
        share = self._shares().get(name)
        return self.every_share or (share is not None and self.uid in share.readers | share.writers)

    def writes_share(self, name: str) -> bool:
        share = self._shares().get(name)
        return self.every_share or (share is not None and self.uid in share.writers)

    def require_readable_share(self, name: str) -> None:
        """AccessRefused where the user may not read the share; one that nobody declared is no other case."""
        if name and not self.reads_share(name):
            raise AccessRefused(f"uid {self.uid} may use no share {name!r}")

    def require_writable_share(self, name: str) -> None:
        """AccessRefused where the user may not write the share."""
        self.require_readable_share(name)
        if name and not self.writes_share(name):
            raise AccessRefused(f"uid {self.uid} may read share {name!r}, not write it")


def administers(uid: int) -> bool:
    """Whether a user runs the store: the one its process runs as, and root."""
    return uid in (os.geteuid(), 0)


def require_administrator(uid: int, what: str) -> None:
    """AccessRefused for everybody but who runs the store."""
    if not administers(uid):
        raise AccessRefused(f"{what} is for the user the daemon runs as, and for root; uid {uid} is neither")
