"""The warm budget's ledger against a plain account of who reserved what."""

from __future__ import annotations

import random

from warmkv.kvstore.store.ledger import CEILING_HOLD_S, CEILING_RISE_S, Ledger


def test_a_reservation_is_used_up_bit_by_bit() -> None:
    ledger = Ledger(1000, 10)
    first, second = ledger.reserve(100, 5.0), ledger.reserve(50, 5.0)
    ledger.use(first, 30)
    assert ledger.reserved_bytes == 120
    ledger.use(first, 100)  # more came than was announced
    assert ledger.reserved_bytes == 50
    ledger.use(first, 1)
    ledger.give_back(first)
    assert ledger.reserved_bytes == 50 and ledger.living({first, second}) == {second}
    ledger.use(second, 0)
    ledger.give_back(second)
    assert ledger.reserved_bytes == 0


def test_what_is_used_keeps_its_deadline() -> None:
    ledger = Ledger(1000, 10)
    early, late = ledger.reserve(100, 5.0), ledger.reserve(100, 9.0)
    for reservation in (early, late):
        ledger.use(reservation, 60)
    ledger.expire(5.0)
    assert ledger.reserved_bytes == 40 and ledger.living({early, late}) == {late}
    ledger.use(early, 10)
    ledger.give_back(early)
    assert ledger.reserved_bytes == 40
    ledger.expire(9.0)
    assert ledger.reserved_bytes == 0


def test_unknown_reservations_are_nothing() -> None:
    ledger = Ledger(1000, 10)
    for number in (0, 7, -1):
        ledger.use(number, 10)
        ledger.give_back(number)
    assert (ledger.reserved_bytes, ledger.used_bytes) == (0, 0)


def test_reservations_add_up_whatever_happens_to_them() -> None:
    rng = random.Random(4)
    for _ in range(200):
        ledger = Ledger(10_000, 10)
        account: dict[int, tuple[int, float]] = {}
        now, peak = 0.0, 0
        for _ in range(60):
            choice, known = rng.random(), rng.choice([*account, 999])
            if choice < 0.4:
                size, deadline = rng.randint(0, 100), now + rng.randint(1, 5)
                number = ledger.reserve(size, deadline)
                assert number not in account and number > 0
                account[number] = size, deadline
                peak = max(peak, sum(left for left, _ in account.values()))
            elif choice < 0.7:
                used = rng.randint(0, 60)
                ledger.use(known, used)
                if known in account:
                    left, deadline = account[known]
                    account[known] = max(0, left - used), deadline
            elif choice < 0.85:
                ledger.give_back(known)
                account.pop(known, None)
            else:
                now += 1
                ledger.expire(now)
                account = {number: item for number, item in account.items() if item[1] > now}
            assert ledger.reserved_bytes == sum(left for left, _ in account.values())
            assert ledger.living({*account, 999}) == set(account)
            assert ledger.excess_bytes(10_000) == ledger.reserved_bytes
        assert ledger.peak_bytes == peak


def test_a_ceiling_rises_however_often_it_is_asked() -> None:
    ledger = Ledger(1000, 10)
    ledger.cap(100, 0.0)
    for tenth in range(int(10 * (CEILING_HOLD_S + 2 * CEILING_RISE_S))):
        ledger.expire(tenth / 10)
    assert ledger.limit_bytes == 1000
