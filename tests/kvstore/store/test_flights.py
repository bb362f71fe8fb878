"""Waiting for a twin: the first of many agents with one prompt computes, the others get what it
saved; whatever ends the first lets them go on, and nobody waits for what cannot come."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from warmkv.daemon.testing import PATIENCE_S, eventually
from warmkv.kvstore.channel import close_all
from warmkv.kvstore.restored import Restored
from warmkv.kvstore.store import Store, flights
from warmkv.kvstore.store.check import check
from warmkv.kvstore.store.flights import Flights
from warmkv.kvstore.store.index import Index
from warmkv.kvstore.testing import FOLDED, IMAGE, OTHER_IMAGE, assert_rows, model_rows, random_identity, save
from warmkv.kvstore.testing.bounds import Task
from warmkv.kvstore.testing.samples import FULL, RECURRENT, mixed_identity
from warmkv.schema import messages as m
from warmkv.schema.errors import ClosedError
from warmkv.schema.identity import Identity
from warmkv.schema.records import CLEAN, Anchor, Attachment, Lineage, NamespaceKey, as_tokens, pack_attachments

OpenStore = Callable[..., Store]
SYSTEM = list(range(100, 160))
PROMPT = [*SYSTEM, *range(200, 220)]
KEY, OTHER_KEY = NamespaceKey(b"k" * 16), NamespaceKey(b"o" * 16)
AGENTS = 20


def packed(tokens: Sequence[int]) -> bytes:
    return as_tokens(tokens).tobytes()


def waiting(store: Store, count: int) -> bool:
    """Whether so many are waiting, at last."""
    return eventually(lambda: store.engine.acquisition.flights.waiting == count)


def flying(store: Store) -> int:
    return len(store.engine.acquisition.flights)


def ask(store: Store, identity: Identity, ids: Sequence[int] = tuple(PROMPT), **options: Any) -> Restored:
    return store.restore(identity, ids, **{"wait_s": PATIENCE_S, **options})


def asking(store: Store, identity: Identity, count: int = AGENTS - 1, **options: Any) -> list[Task]:
    return [Task(lambda: ask(store, identity, **options)) for _ in range(count)]


@pytest.fixture
def store(open_store_with: OpenStore) -> Store:
    return open_store_with()


# -- one computes, all get it ----------------------------------------------------------------


def test_the_first_computes_and_all_others_get_it(store: Store, identity: Identity) -> None:
    first = ask(store, identity)
    assert not first and first.flight is not None and flying(store) == 1
    tasks = asking(store, identity)
    assert waiting(store, AGENTS - 1)
    assert all(task.is_alive() for task in tasks)
    save(store, identity, PROMPT)
    first.flight.close()
    for task in tasks:
        with task.outcome() as restored:
            assert restored.usable == len(PROMPT) - 1 and restored.flight is None
            assert_rows(restored, model_rows(identity, PROMPT))
    stats = store.stats()
    assert (stats["saves"], stats["flights"], stats["leases"], stats["waits"]) == (1, 0, 0, AGENTS - 1)
    assert check(store.engine) == []


def test_what_is_saved_is_enough_though_the_first_goes_on(store: Store, identity: Identity) -> None:
    """Nobody waits for the flight to be closed once all is there."""
    first = ask(store, identity)
    tasks = asking(store, identity, 5)
    assert waiting(store, 5)
    save(store, identity, PROMPT)
    for task in tasks:
        with task.outcome() as restored:
            assert restored.usable == len(PROMPT) - 1 and restored.flight is None
    assert flying(store) == 1 and first.flight is not None
    first.flight.close()
    assert flying(store) == 0


def test_agents_with_one_system_prompt_wait_for_that_only(store: Store) -> None:
    """Each has a question of its own; the first leaves a state where the system prompt ends."""
    identity = mixed_identity(FULL, RECURRENT)
    first = ask(store, identity, [*SYSTEM, 1, 1])
    prompts = [[*SYSTEM, agent, agent] for agent in range(2, AGENTS + 1)]
    tasks = [Task(lambda prompt=prompt: ask(store, identity, prompt)) for prompt in prompts]  # type: ignore[misc]
    assert waiting(store, len(tasks))
    save(store, identity, SYSTEM, anchors=[Anchor(len(SYSTEM))])
    outcomes = [task.outcome() for task in tasks]
    assert [restored.usable for restored in outcomes] == [len(SYSTEM)] * len(tasks)
    # What follows is each one's own to compute, and promised again.
    assert all(restored.flight is not None for restored in outcomes) and flying(store) == AGENTS
    assert store.engine.acquisition.flights.waiting == 0
    for restored in (first, *outcomes):
        restored.close()
        restored.flight.close()
    assert flying(store) == 0 and store.stats()["leases"] == 0


def test_what_is_there_already_is_not_waited_for(store: Store, identity: Identity) -> None:
    save(store, identity, PROMPT)
    with ask(store, identity) as restored:
        assert restored.usable == len(PROMPT) - 1 and restored.flight is None
    assert flying(store) == 0 and store.stats()["waits"] == 0


def test_who_does_not_ask_to_wait_neither_waits_nor_promises(store: Store, identity: Identity) -> None:
    assert store.restore(identity, PROMPT).flight is None
    first = ask(store, identity)
    assert store.restore(identity, PROMPT).flight is None
    assert flying(store) == 1 and store.stats()["waits"] == 0
    assert first.flight is not None
    first.flight.close()


def test_parked_logits_are_worth_the_last_token_only(store: Store, identity: Identity) -> None:
    """All but the last token usable is all there is to wait for."""
    save(store, identity, PROMPT)
    first = ask(store, identity, [*PROMPT, 7])
    assert first.usable == len(PROMPT) and first.flight is None
    with ask(store, identity, logits=True) as restored:
        assert restored.usable == len(PROMPT) - 1 and restored.flight is None


def test_who_asks_for_less_does_not_wait_for_more(store: Store, identity: Identity) -> None:
    """A match limits what is restored: what is computed behind it will never be handed out."""
    save(store, identity, SYSTEM)
    match = store.match(identity, PROMPT)
    assert match.usable == len(SYSTEM)
    first = ask(store, identity)
    assert first.flight is not None
    task = Task(lambda: store.restore(match, PROMPT, wait_s=PATIENCE_S))
    with task.outcome() as restored:
        assert restored.usable == len(SYSTEM)
    assert store.stats()["waits"] == 0
    first.flight.close()


# -- what ends a flight ----------------------------------------------------------------------


@pytest.mark.parametrize("end", ["closed", "forgotten", "its context", "its session", "its restored state"])
def test_the_end_of_the_first_lets_all_others_go_on_at_once(store: Store, identity: Identity, end: str) -> None:
    """It left nothing: they do not queue up to try one after the other."""
    leader = Store(store.engine)
    first: Any = ask(leader, identity)
    tasks = asking(store, identity)
    assert waiting(store, AGENTS - 1)
    if end == "closed":
        first.flight.close()
    elif end == "forgotten":
        first = None
        gc.collect()
    elif end == "its context":
        with first.flight:
            pass
    elif end == "its session":
        leader._session.close()
    else:
        flight, first = first.flight, None
        flight.close()
    outcomes = [task.outcome() for task in tasks]
    assert not any(outcomes) and all(restored.flight is not None for restored in outcomes)
    assert flying(store) == AGENTS - 1
    for restored in outcomes:
        restored.flight.close()
    assert flying(store) == 0 and store.stats()["leases"] == 0


def test_one_that_left_a_part_is_followed_by_one_more_round(store: Store, identity: Identity) -> None:
    """What it saved before it ended is kept, and worth asking who computes the rest."""
    first = ask(store, identity)
    tasks = asking(store, identity, 5)
    assert waiting(store, 5)
    save(store, identity, SYSTEM)
    assert first.flight is not None
    first.flight.close()
    # One of the five computes the rest, the other four wait for it.
    assert waiting(store, 4) and flying(store) == 1
    assert eventually(lambda: sum(not task.is_alive() for task in tasks) == 1)
    second = next(task for task in tasks if not task.is_alive())
    leader = second.outcome()
    assert leader.usable == len(SYSTEM) and leader.flight is not None
    save(store, identity, PROMPT)
    leader.flight.close()
    leader.close()
    for task in tasks:
        if task is not second:
            with task.outcome() as restored:
                assert restored.usable == len(PROMPT) - 1 and restored.flight is None
    assert flying(store) == 0 and store.stats()["leases"] == 0


def test_an_error_after_waiting_leaves_no_promise(store: Store, identity: Identity, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patched:
        patched.setattr(store.engine.acquisition, "_acquire", broken)
        with pytest.raises(ZeroDivisionError):
            ask(store, identity)
    assert flying(store) == 0
    assert ask(store, identity).flight is not None


def test_a_session_closed_while_it_waits_promises_nothing(store: Store, identity: Identity) -> None:
    first, other = ask(store, identity), Store(store.engine)
    task = Task(lambda: ask(other, identity))
    assert waiting(store, 1)
    other._session.close()
    assert first.flight is not None
    first.flight.close()
    with pytest.raises(ClosedError):
        task.outcome()
    assert flying(store) == 0 and store.stats()["leases"] == 0


def test_closing_the_store_lets_everybody_go(
    open_store_with: OpenStore, identity: Identity, descriptors: Callable[[], int]
) -> None:
    before = descriptors()
    store = open_store_with(True)
    first = ask(store, identity)
    tasks = asking(store, identity, 5)
    assert waiting(store, 5)
    store.close()
    for task in tasks:
        try:
            restored = task.outcome()
            assert not restored and restored.flight is None
        except ClosedError:
            pass
    assert first.flight is not None
    first.flight.close()
    assert descriptors() == before


def test_nobody_begins_to_wait_in_a_store_that_is_closed(store: Store, identity: Identity) -> None:
    """Who passed the door just before it was shut: nobody would ever wake it."""
    first = ask(store, identity)
    key = store._session.open(identity.canonical(), "")
    store.engine.close()
    request = m.Acquire(key, CLEAN, as_tokens(PROMPT), wait_ms=int(PATIENCE_S * 1000))
    try:
        reply, fds = Task(lambda: store.engine.acquisition.acquire(request)).outcome()
        assert (reply.usable, fds) == (0, ())
    except ClosedError:
        pass
    assert first.flight is not None
    first.flight.close()


def test_lengths_of_waits_are_told(store: Store, identity: Identity) -> None:
    first = ask(store, identity)
    key = store._session.open(identity.canonical(), "")
    grant = store._session.acquire(m.Acquire(key, CLEAN, as_tokens(PROMPT), wait_ms=20))
    # Its patience is over before the other's flight: now it computes, too.
    assert grant.reply.waited_ms >= 20 and grant.reply.flight and flying(store) == 2
    grant.release_flight()
    assert flying(store) == 1 and first.flight is not None
    first.flight.close()


# -- whom to wait for, one by one ------------------------------------------------------------


class Board:
    """Flights over an index of nothing, with what is usable set by hand."""

    def __init__(self, ttl_s: float = PATIENCE_S, clock: Callable[[], float] = time.monotonic) -> None:
        self.index = Index()
        self.flights = Flights(self.index, ttl_s, clock)
        self.usable = 0
        self._numbers = iter(range(1, 1000))

    def join(
        self, tokens: Sequence[int], wait_s: float = PATIENCE_S, *, key: NamespaceKey = KEY, lineage: Lineage = CLEAN,
        attachments: Sequence[Attachment] = (),
    ) -> tuple[int, bool, float]:  # fmt: skip
        with self.index.changed:
            number = next(self._numbers)
            entered, waited_s = self.flights.join(number, key, lineage, packed(tokens), attachments, wait_s, lambda: self.usable)
        return number, entered, waited_s

    def end(self, number: int) -> None:
        with self.index.changed:
            self.flights.end(number)
            self.index.changed.notify_all()

    def computed(self, tokens: int) -> None:
        with self.index.changed:
            self.usable = tokens
            self.index.changed.notify_all()

    def waits(self, *arguments: Any, **options: Any) -> bool:
        """Whether such a request finds somebody to wait for: with no patience it promises at once."""
        before = self.flights.waits
        task = Task(lambda: self.join(*arguments, **options))
        assert eventually(lambda: self.flights.waiting == 1 or not task.is_alive())
        waited = self.flights.waits > before
        if waited:
            self.flights.interrupt()
            assert task.outcome()[1] is False
        else:
            number, entered, _ = task.outcome()
            assert entered
            self.end(number)
        return waited


def test_only_those_who_compute_the_same_are_waited_for() -> None:
    board = Board()
    board.join(PROMPT)
    image = [Attachment(0, 2, IMAGE)]
    assert board.waits(PROMPT)
    assert board.waits([*PROMPT, 7, 8, 9])
    assert board.waits(PROMPT[:3])
    assert board.waits([*PROMPT[:1], 9, 9, 9])
    assert not board.waits([9, *PROMPT[1:]])
    assert not board.waits(PROMPT, key=OTHER_KEY)
    assert not board.waits(PROMPT, lineage=FOLDED)
    assert not board.waits(PROMPT, attachments=image)


def test_images_are_part_of_what_is_shared() -> None:
    image, other, late = Attachment(4, 3, IMAGE), Attachment(4, 3, OTHER_IMAGE), Attachment(70, 2, IMAGE)
    board = Board()
    board.join(PROMPT, attachments=[image])
    for usable, ours, waits in (
        (0, [image], True), (0, [other], True), (0, [], True), (3, [other], True), (4, [other], False), (4, [], False),
        (4, [image], True), (69, [image, late], True), (70, [image, late], False), (4, [Attachment(4, 2, IMAGE)], False),
    ):  # fmt: skip
        board.usable = usable
        assert board.waits(PROMPT, attachments=ours) == waits, (usable, ours)


def test_one_who_has_as_much_as_is_shared_does_not_wait() -> None:
    board = Board()
    board.join([*SYSTEM, 1, 2, 3])
    for usable, waits in ((0, True), (len(SYSTEM) - 1, True), (len(SYSTEM), False), (len(SYSTEM) + 5, False)):
        board.usable = usable
        assert board.waits([*SYSTEM, *range(10)]) == waits


def test_the_one_who_computes_most_of_a_prompt_is_waited_for() -> None:
    board = Board()
    short, _, _ = board.join([*SYSTEM[:5], 1])
    board.computed(5)
    long, _, _ = board.join([*SYSTEM[:30], 2])
    board.computed(0)
    task = Task(lambda: board.join(SYSTEM))
    assert eventually(lambda: board.flights.waiting == 1)
    board.end(short)
    board.computed(29)
    assert task.is_alive()
    board.computed(30)
    number, entered, _ = task.outcome()
    assert entered and len(board.flights) == 2 and board.flights.waits == 1
    board.end(number)
    board.end(long)
    assert len(board.flights) == 0


def test_a_longer_twin_is_waited_for_after_a_shorter_one() -> None:
    """What the first leaves is less than what another still computes."""
    board = Board()
    first, _, _ = board.join(SYSTEM[:30])
    task = Task(lambda: board.join(SYSTEM))
    assert eventually(lambda: board.flights.waiting == 1)
    with board.index.changed:
        board.usable = 30
        second, entered, _ = board.join([*SYSTEM[:50], 1])
        assert entered
        board.index.changed.notify_all()
    assert eventually(lambda: board.flights.waits == 2)
    board.computed(50)
    number, entered, _ = task.outcome()
    assert entered
    for flight in (first, second, number):
        board.end(flight)


def test_a_twin_that_left_nothing_is_not_followed_by_another() -> None:
    board = Board()
    first, _, _ = board.join(PROMPT)
    tasks = [Task(lambda: board.join(PROMPT)) for _ in range(6)]
    assert eventually(lambda: board.flights.waiting == 6)
    board.end(first)
    assert all(task.outcome()[1] for task in tasks)
    assert (len(board.flights), board.flights.waits) == (6, 6)


def test_patience_is_bounded_by_the_callers_word_and_by_the_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    board = Board()
    board.join(PROMPT)
    number, entered, waited_s = board.join(PROMPT, 0.01)
    assert entered and waited_s >= 0.01
    monkeypatch.setattr(flights, "MAX_WAIT_S", 0.01)
    _, entered, waited_s = board.join(PROMPT, 1e9)
    assert entered and waited_s >= 0.01
    assert len(board.flights) == 3


def test_a_flight_whose_time_is_over_is_no_more_waited_for() -> None:
    board = Board(ttl_s=0.01)
    board.join(PROMPT)
    _, entered, _ = board.join(PROMPT)
    assert entered and len(board.flights) == 1


def test_nothing_is_promised_where_all_but_one_token_is_there() -> None:
    board = Board()
    for usable, promised in ((len(PROMPT), False), (len(PROMPT) - 1, False), (len(PROMPT) - 2, True)):
        board.usable = usable
        assert board.join(PROMPT)[1] == promised
    board.usable = 0
    assert board.join([5])[1] is False
    assert len(board.flights) == 1


def test_the_number_of_promises_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flights, "MAX_FLIGHTS", 3)
    board = Board()
    numbers = [board.join([at] * 10) for at in range(4)]
    assert [entered for _, entered, _ in numbers] == [True, True, True, False]
    board.end(numbers[0][0])
    assert board.join([9] * 10)[1]
    assert len(board.flights) == 3 and board.flights.started == 4


def test_the_tokens_of_all_promises_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flights, "MAX_FLIGHT_BYTES", 4 * 25)
    board = Board()
    first, entered, _ = board.join([1] * 10)
    assert entered and board.join([2] * 10)[1]
    assert not board.join([3] * 6)[1]
    assert board.join([3] * 5)[1]
    board.end(first)
    assert board.join([4] * 10)[1]


def test_promises_whose_time_is_over_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flights, "MAX_FLIGHTS", 2)
    now = [1000.0]
    board = Board(ttl_s=60.0, clock=lambda: now[0])
    assert board.join([1] * 10)[1] and board.join([2] * 10)[1] and not board.join([3] * 10)[1]
    now[0] += 59
    assert not board.join([3] * 10)[1]
    now[0] += 1
    assert board.join([3] * 10)[1]
    assert len(board.flights) == 1


def test_unknown_ends_are_nothing() -> None:
    board = Board()
    board.end(77)
    number, _, _ = board.join(PROMPT)
    board.end(number)
    board.end(number)
    assert len(board.flights) == 0


def test_without_room_for_a_promise_a_prompt_is_computed_untold(
    store: Store, identity: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flights, "MAX_FLIGHTS", 0)
    restored = ask(store, identity)
    assert not restored and restored.flight is None
    assert flying(store) == 0 and store.stats()["leases"] == 0


def test_an_image_in_the_prompt_is_told_to_the_others(store: Store) -> None:
    """Through the verbs: the same tokens around another image are another prompt from there on."""
    identity = random_identity()
    image, other = [Attachment(10, 4, IMAGE)], [Attachment(10, 4, OTHER_IMAGE)]
    first = ask(store, identity, attachments=image)
    tasks = [Task(lambda: ask(store, identity, attachments=image)), Task(lambda: ask(store, identity, attachments=other))]
    assert waiting(store, 2)
    save(store, identity, PROMPT, attachments=image)
    outcomes = [task.outcome() for task in tasks]
    assert [restored.usable for restored in outcomes] == [len(PROMPT) - 1, 10]
    assert outcomes[1].flight is not None and first.flight is not None
    key = store._session.open(identity.canonical(), "")
    request = m.Acquire(key, CLEAN, as_tokens(PROMPT), pack_attachments(other), wait_ms=1)
    grant = store._session.acquire(request)
    assert grant.reply.usable == 10 and grant.reply.flight
    close_all(grant.fds)
    grant.release()
    grant.release_flight()
    for restored in (first, *outcomes):
        restored.close()
        if restored.flight is not None:
            restored.flight.close()
    assert flying(store) == 0 and store.stats()["leases"] == 0
