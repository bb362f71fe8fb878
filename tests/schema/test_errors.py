"""Errors: codes are unique, final, and bring the same class back at the other end."""

from __future__ import annotations

import importlib
import json
import pickle
import pkgutil
from pathlib import Path

import pytest
from make_golden import error_table

import warmkv.schema
from warmkv.schema import errors
from warmkv.schema.errors import BY_CODE, WarmKVError, error_from_code

GOLDEN = Path(__file__).resolve().parent.parent / "golden"


def family(root: type[WarmKVError]) -> list[type[WarmKVError]]:
    return [root, *(cls for child in root.__subclasses__() for cls in family(child))]


def declared() -> list[type[WarmKVError]]:
    """Every class written in the module, in its order."""
    found = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, WarmKVError)]
    assert set(found) <= set(family(WarmKVError))
    return found


def test_codes_are_unique() -> None:
    codes = [cls.code for cls in declared()]
    assert len(set(codes)) == len(codes)
    assert [BY_CODE[cls.code] for cls in declared()] == declared()
    assert len(BY_CODE) == len(codes)


def test_every_class_states_its_own_code() -> None:
    assert [cls.__name__ for cls in declared() if "code" not in vars(cls)] == []


def test_golden_table() -> None:
    """Codes travel between versions: one that is given out keeps its name and its meaning."""
    assert error_table() == json.loads((GOLDEN / "errors.json").read_text())


def test_no_other_module_of_the_schema_declares_an_error() -> None:
    for module in pkgutil.iter_modules(warmkv.schema.__path__):
        importlib.import_module(f"warmkv.schema.{module.name}")
    assert {cls for cls in family(WarmKVError) if cls.__module__.startswith("warmkv.schema.")} == set(declared())


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("FormatError", 100, 109),
        ("ProtocolError", 200, 299),
        ("StoreError", 300, 399),
        ("ClientError", 400, 499),
        ("DaemonError", 500, 599),
        ("LiveError", 600, 699),
    ],
)
def test_codes_lie_in_the_range_of_their_family(name: str, low: int, high: int) -> None:
    root = getattr(errors, name)
    assert root.code == low
    for cls in declared():
        assert issubclass(cls, root) == (low <= cls.code <= high), cls


@pytest.mark.parametrize("cls", declared(), ids=lambda cls: cls.__name__)
def test_an_error_comes_back_as_itself(cls: type[WarmKVError]) -> None:
    back = error_from_code(cls.code, "what happened")
    assert type(back) is cls
    assert str(back) == "what happened"
    assert (back.code, back.retryable) == (cls.code, cls.retryable)
    copy = pickle.loads(pickle.dumps(back))
    assert (type(copy), str(copy)) == (cls, str(back))


@pytest.mark.parametrize("code", [0, 2, 99, 777, 2**32 - 1, -1])
def test_an_unknown_code_is_kept(code: int) -> None:
    back = error_from_code(code, "what happened")
    assert type(back) is WarmKVError
    assert back.code == code
    assert not back.retryable
    assert str(code) in str(back) and "what happened" in str(back)
    assert WarmKVError.code == 1


def test_errors_say_what_they_mean() -> None:
    for cls in declared():
        assert cls.__doc__ and cls.__doc__.strip(), cls


def test_no_error_hides_among_those_of_python() -> None:
    """`except ValueError` around user code must never swallow one of ours."""
    for cls in declared():
        assert [base for base in cls.__mro__ if not issubclass(base, WarmKVError)] == [Exception, BaseException, object]
