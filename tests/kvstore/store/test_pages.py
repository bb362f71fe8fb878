"""The page check calls no healthy file damaged, whatever was written and deleted."""

from __future__ import annotations

import random
from pathlib import Path

import lmdb
import pytest

from warmkv.kvstore.store.pages import check_pages
from warmkv.schema.errors import FormatError

VALUES = (0, 8, 40, 500, 2000, 2030, 5000, 100_000, 400_000)


def churn(path: Path, seed: int, rounds: int) -> None:
    """Random transactions over five tables; the file is checked after each."""
    rng = random.Random(seed)
    env = lmdb.open(str(path), map_size=48 << 20, max_dbs=8)
    tables = [env.open_db(b"table %d" % index) for index in range(5)]
    keys: list[tuple[int, bytes]] = []
    for _ in range(rounds):
        try:
            with env.begin(write=True) as txn:
                for _ in range(rng.randrange(1, 30)):
                    if keys and rng.random() < 0.45:
                        table, key = keys.pop(rng.randrange(len(keys)))
                        txn.delete(key, db=tables[table])
                    else:
                        table, key = rng.randrange(5), rng.randbytes(rng.choice((16, 20, 25)))
                        if keys and rng.random() < 0.3:  # written anew, in another size mostly
                            table, key = rng.choice(keys)
                        else:
                            keys.append((table, key))
                        txn.put(key, rng.randbytes(rng.choice(VALUES) if rng.random() < 0.4 else 48), db=tables[table])
        except lmdb.MapFullError:
            keys = keys[: len(keys) // 2]
        check_pages(path / "data.mdb")
    env.close()


@pytest.mark.parametrize("seed", range(4))
def test_no_healthy_file_is_called_damaged(tmp_path: Path, seed: int) -> None:
    churn(tmp_path, seed, 150)


def test_a_file_cut_anywhere_is_refused_or_whole_where_it_is_needed(tmp_path: Path) -> None:
    churn(tmp_path, 9, 40)
    data = tmp_path / "data.mdb"
    whole = data.read_bytes()
    refused = 0
    for pages in range(2, len(whole) // 4096, 7):
        data.write_bytes(whole[: pages * 4096])
        try:
            check_pages(data)
        except FormatError:
            refused += 1
    assert refused > len(whole) // 4096 // 14


def test_a_value_of_another_size_than_its_room_is_refused(tmp_path: Path) -> None:
    """LMDB would read it, and tear its neighbours when it deletes it."""
    env = lmdb.open(str(tmp_path), map_size=1 << 20)
    with env.begin(write=True) as txn:
        for number in range(20):
            txn.put(b"key %02d" % number, b"value" * 10)
    env.close()
    data = tmp_path / "data.mdb"
    whole = data.read_bytes()
    node = (50).to_bytes(2, "little") + bytes(4) + (6).to_bytes(2, "little") + b"key 07"
    at = whole.rfind(node)
    assert at > 0
    check_pages(data)
    for size in (48, 51, 18, 54):
        data.write_bytes(whole[:at] + size.to_bytes(2, "little") + whole[at + 2 :])
        with pytest.raises(FormatError, match="overlap, or room"):
            check_pages(data)
    data.write_bytes(whole[:at] + (49).to_bytes(2, "little") + whole[at + 2 :])
    check_pages(data)  # rounded up to even it takes the same room
