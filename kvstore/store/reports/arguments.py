"""Reading the arguments of a report, which a peer wrote."""

from __future__ import annotations

from collections.abc import Mapping

from warmkv.schema.errors import RecordError


def text(given: Mapping[str, object], name: str, default: str = "") -> str:
    """Raises RecordError for anything but text."""
    value = given.get(name, default)
    if not isinstance(value, str):
        raise RecordError(f"argument {name} is {type(value).__name__}, expected text")
    return value


def flag(given: Mapping[str, object], name: str) -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise RecordError(f"argument {name} is {type(value).__name__}, expected true or false")
    return value


def number(given: Mapping[str, object], name: str) -> int | None:
    """A whole number of at least 0, None where there is none."""
    value = given.get(name)
    if value is not None and (type(value) is not int or value < 0):
        raise RecordError(f"argument {name} is {value!r:.40}, expected a whole number of at least 0")
    return value


def fraction(given: Mapping[str, object], name: str) -> float | None:
    """A number from 0 to 1, None where there is none."""
    value = given.get(name)
    if value is not None and (type(value) not in (int, float) or not 0 <= value <= 1):  # type: ignore[operator]
        raise RecordError(f"argument {name} is {value!r:.40}, expected a number from 0 to 1")
    return None if value is None else float(value)  # type: ignore[arg-type]


def one_of(given: Mapping[str, object], name: str, *words: str) -> str:
    """One of ``words``, the first of them where nothing is given."""
    value = text(given, name, words[0])
    if value not in words:
        raise RecordError(f"argument {name} is {value!r:.40}, expected one of {', '.join(words)}")
    return value


def texts(given: Mapping[str, object], name: str) -> list[str]:
    value = given.get(name, [])
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise RecordError(f"argument {name} is no list of texts")
    return value
