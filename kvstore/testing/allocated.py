"""What an object of ours has really allocated: every array it can reach, each once.

Walks attributes, not methods, so that it can be held against what the object reports about itself.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]


def arrays_of(thing: object) -> list[Array]:
    """The arrays that own their memory below ``thing``: attributes of our own objects, items of
    containers, the bases of views. Arrays over memory that numpy does not own (maps, bytes) are left out."""
    found: dict[int, Array] = {}
    seen: set[int] = set()
    left: list[object] = [thing]
    while left:
        item = left.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, np.ndarray):
            owner: object = item
            while isinstance(owner, np.ndarray) and owner.base is not None:
                owner = owner.base
            if isinstance(owner, np.ndarray):
                found[id(owner)] = owner
        else:
            left.extend(_parts(item))
    return list(found.values())


def allocated_bytes(thing: object) -> int:
    """Bytes of `arrays_of`."""
    return sum(array.nbytes for array in arrays_of(thing))


def _parts(item: object) -> Iterator[object]:
    if isinstance(item, dict):
        yield from item.values()
    elif isinstance(item, list | tuple | set | frozenset):
        yield from item
    elif type(item).__module__.startswith("warmkv."):
        yield from getattr(item, "__dict__", {}).values()
        for cls in type(item).__mro__:
            slots = cls.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if hasattr(item, name):
                    yield getattr(item, name)
