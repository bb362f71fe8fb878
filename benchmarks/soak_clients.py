"""The clients of the soak, each a process: what they do, and how they know what is right.

Every row and state is a function of all tokens up to it, so whatever comes back is compared bit
for bit with what the tokens say, whoever saved it. `Board` is memory the processes share, a row of
counters a client, so that nothing is lost with a client that is killed.
"""

from __future__ import annotations

import itertools
import os
import random
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.sharedctypes import RawArray
from pathlib import Path

import numpy as np
import numpy.typing as npt

import warmkv
from warmkv import Anchor, AnchorKind, Identity, PlaneRole, PlaneSpec
from warmkv.kvstore.restored import Restored, RestoredPlane
from warmkv.kvstore.rows import LayerRows, LayerState, PlaneRows, stored_shape
from warmkv.kvstore.testing.samples import FULL, RECURRENT, mixed_identity, random_identity, sliding
from warmkv.schema import messages as m
from warmkv.schema.errors import (
    Busy,
    ColdFull,
    DaemonTimeout,
    DaemonUnavailable,
    DescriptorLimit,
    OfferAgain,
    TooLarge,
    WarmKVError,
)  # fmt: skip
from warmkv.schema.frame import LENGTH, frame

Ids = npt.NDArray[np.uint32]
Records = list[LayerRows | LayerState]
#: Full attention of 2 KiB a token; full, windowed and recurrent layers; 64 KiB a token.
PLAIN, MIXED, BIG = (
    random_identity(4, 2, 32), mixed_identity(FULL, sliding(32), RECURRENT), random_identity(8, 8, 128, seed=1)
)  # fmt: skip
VOCABULARY = 32_000
SYSTEM_PROMPTS, SYSTEM_TOKENS, TURN_TOKENS, TURNS = 4, 96, (8, 64), 12
LIBRARY, LIBRARY_TOKENS = 24, 200
BIG_TOKENS = (16, 96)
HELD = 6
CALL_TIMEOUT_S = 60.0
#: Errors that a small, busy or restarting store may answer, and what the others mean here.
PLANNED: dict[type[WarmKVError], str] = {
    Busy: "busy", OfferAgain: "offer again", TooLarge: "too large", ColdFull: "disk full", DescriptorLimit: "descriptors",
}  # fmt: skip
COUNTERS = (
    "steps", "restores", "hits", "misses", "verified bytes", "saves", "durable", "held again", "vanished", "half frames",
    "refused", *PLANNED.values(), "outage", "killed", "wrong", "unexpected",
)  # fmt: skip
_ONE, _TWO, _THREE, _FOUR = (
    np.uint64(odd) for odd in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93)
)


class Board:
    """Counters of all clients. **Threading:** each process adds to its own row only."""

    def __init__(self, clients: int) -> None:
        self._raw = RawArray("q", clients * len(COUNTERS))
        self.rows = np.frombuffer(self._raw, np.int64).reshape(clients, len(COUNTERS))
        self._flags = RawArray("q", 3)

    def add(self, client: int, name: str, count: int = 1) -> None:
        self.rows[client, COUNTERS.index(name)] += count

    def total(self, name: str, clients: list[int]) -> int:
        return int(self.rows[clients, COUNTERS.index(name)].sum())

    @property
    def stopping(self) -> bool:
        return bool(self._flags[0])

    def stop(self) -> None:
        self._flags[0] = 1

    @property
    def outages(self) -> tuple[int, int]:
        """Outages that began, and those that are over."""
        return int(self._flags[1]), int(self._flags[2])

    def outage(self, *, over: bool) -> None:
        self._flags[2 if over else 1] += 1


# -- what is right ------------------------------------------------------------------------------


def digest_chain(ids: Ids) -> npt.NDArray[np.uint64]:
    """A number for every token that stands for it and all before it."""
    with np.errstate(over="ignore"):
        powers = np.cumprod(np.full(len(ids), _ONE, np.uint64))
        chain: npt.NDArray[np.uint64] = np.cumsum((ids.astype(np.uint64) + np.uint64(1)) * powers, dtype=np.uint64)
    return chain


def expected(chain: npt.NDArray[np.uint64], layer: int, spec: PlaneSpec) -> npt.NDArray[np.generic]:
    """The rows of a plane behind these numbers, one each, as random as their bits."""
    dtype, shape = stored_shape(spec)
    width = int(np.prod(shape))
    with np.errstate(over="ignore"):
        mixed = (chain * _TWO + np.uint64(layer * 64 + int(spec.role)) * _THREE)[:, None] + np.arange(
            width, dtype=np.uint64
        ) * _FOUR
        mixed ^= mixed >> np.uint64(29)
        mixed *= _TWO
    bits = np.uint64(64 - 8 * dtype.itemsize)
    return (mixed >> bits).astype(f"<u{dtype.itemsize}").view(dtype).reshape(len(chain), *shape)


def records_of(model: Identity, ids: Ids) -> Records:
    """What a runtime would hand in after these tokens."""
    chain = digest_chain(ids)
    made: Records = []
    for index, layer in enumerate(model.layers):
        first = max(0, len(ids) - layer.window) if layer.window else 0
        rows = tuple(PlaneRows(spec.role, spec.format, expected(chain[first:], index, spec)) for spec in layer.row_planes)
        state = tuple(PlaneRows(spec.role, spec.format, expected(chain[-1:], index, spec)) for spec in layer.state_planes)
        made += [LayerRows(index, rows, first)] if rows else []
        made += [LayerState(index, len(ids), state)] if state else []
    return made


def compare(found: Restored, ids: Ids) -> int:
    """Bytes that came back, each of which is right. Raises `Wrong`."""
    chain, total, usable = digest_chain(ids[: found.usable]), 0, found.usable
    if len(found.layers) != len(found.match.identity.layers):
        raise Wrong(f"{len(found.layers)} layers came")
    for layer in found.layers:
        spec = found.match.identity.layers[layer.layer]
        need = usable if not spec.window else min(usable, spec.window - 1)
        for plane_spec in spec.row_planes:
            plane = layer.planes[plane_spec.role]
            if sum(map(len, plane.blocks)) < need:
                raise Wrong(f"layer {layer.layer}: {sum(map(len, plane.blocks))} rows came of {need}")
            total += sum(_same(block, chain[at : at + len(block)], layer.layer, plane_spec) for at, block in _placed(plane))
        for plane_spec in spec.state_planes:
            (block,) = layer.states[plane_spec.role].blocks
            total += _same(block, chain[-1:], layer.layer, plane_spec)
    return total


def _placed(plane: RestoredPlane) -> Iterator[tuple[int, npt.NDArray[np.generic]]]:
    return zip(plane.starts, plane.blocks, strict=True)


def _same(block: npt.NDArray[np.generic], chain: npt.NDArray[np.uint64], layer: int, spec: PlaneSpec) -> int:
    if block.tobytes() != expected(chain, layer, spec).tobytes():
        raise Wrong(f"layer {layer}, {PlaneRole(spec.role).name}: {len(block)} rows are not those of their tokens")
    return block.nbytes


class Wrong(Exception):
    """The store handed out something that is not what was saved."""


# -- one client ---------------------------------------------------------------------------------


@dataclass
class Worker:
    """What every kind of client needs. ``number`` is its row of the board."""

    number: int
    path: Path
    board: Board
    seed: int
    errors: Path
    pause_s: float
    rng: random.Random = field(init=False)
    client: warmkv.Client = field(init=False)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def run(self, kind: Callable[[Worker], Iterator[None]]) -> None:
        """Take steps of a kind of client until the board says stop."""
        with self.connected():
            steps = kind(self)
            while not self.board.stopping:
                began = self.board.outages
                try:
                    next(steps)
                    self.count("steps")
                except StopIteration:
                    return
                except Exception as exc:  # noqa: BLE001 - sorted into planned, wrong and unexpected
                    self.sort(exc, began)
                    self.outage_over()
                    steps = kind(self)
                time.sleep(self.rng.random() * 2 * self.pause_s)

    @contextmanager
    def connected(self) -> Iterator[None]:
        self.client = self.connect()
        try:
            yield
        finally:
            self.client.close()

    def connect(self) -> warmkv.Client:
        """A client that raises; one that starts during an outage waits for its end."""
        while True:
            began = self.board.outages
            try:
                return warmkv.connect(str(self.path), timeout_s=CALL_TIMEOUT_S, strict=True)
            except WarmKVError as exc:
                self.sort(exc, began)
                if self.board.stopping:
                    raise
                time.sleep(0.05)
                self.outage_over()

    def outage_over(self) -> None:
        """Wait for the daemon that is being started again: asking it meanwhile takes its processor."""
        while len(set(self.board.outages)) > 1 and not self.board.stopping:
            time.sleep(0.1)

    def sort(self, exc: Exception, began: tuple[int, int]) -> None:
        """Count an error: planned, of an outage, wrong contents, or one that should not be."""
        name = next((name for kind, name in PLANNED.items() if isinstance(exc, kind)), "")
        if isinstance(exc, (DaemonUnavailable, DaemonTimeout)) and (began[0] != began[1] or self.board.outages != began):
            name = "outage"
        name = name or ("wrong" if isinstance(exc, Wrong) else "unexpected")
        self.count(name)
        if name != "outage":
            line = f"{name}: {type(exc).__name__}: {exc}\n".encode()
            with open(self.errors, "ab", buffering=0) as file:
                file.write(line)

    def count(self, name: str, by: int = 1) -> None:
        self.board.add(self.number, name, by)

    def restore(self, model: Identity, ids: Ids, wait_s: float = 0.0) -> Restored:
        """Restore and compare; the caller closes it."""
        found = self.client.restore(model, ids, wait_s=wait_s)
        self.count("restores")
        self.count("hits" if found else "misses")
        if found:
            self.count("verified bytes", compare(found, ids))
        return found

    def save(self, model: Identity, ids: Ids, *, disk: bool = False) -> None:
        anchors = (Anchor(len(ids), AnchorKind.TURN),)
        saved = self.client.save(model, ids, records_of(model, ids), ack="disk" if disk else "memory", anchors=anchors)
        self.count("saves")
        if disk:
            if not saved.durable:
                raise Wrong("a save was acknowledged as on disk and is not")
            self.count("durable")

    def tokens(self, low: int, high: int) -> Ids:
        return np.array([self.rng.randrange(VOCABULARY) for _ in range(self.rng.randint(low, high))], np.uint32)


def shared_tokens(number: int, length: int) -> Ids:
    """Tokens that every client knows by number."""
    return np.random.default_rng(number).integers(0, VOCABULARY, length, np.uint32)


def agent(worker: Worker) -> Iterator[None]:
    """Chats that grow turn by turn over one of a few system prompts, some of which part."""
    rng = worker.rng
    while True:
        model = rng.choice((PLAIN, PLAIN, MIXED))
        chat = shared_tokens(rng.randrange(SYSTEM_PROMPTS), SYSTEM_TOKENS)
        for _ in range(rng.randint(2, TURNS)):
            chat = np.concatenate([chat, worker.tokens(*TURN_TOKENS)])
            with worker.restore(model, chat, rng.choice((0.0, 0.0, 0.2))) as found:
                worker.save(model, chat, disk=rng.random() < 0.1)
                if found.flight is not None:
                    found.flight.close()
            if rng.random() < 0.05:
                worker.client.pin(model, chat, 2.0)
            if rng.random() < 0.1:
                chat = chat[: rng.randint(SYSTEM_TOKENS, len(chat))]
            yield
        if rng.random() < 0.2:
            worker.client.forget(model, chat)


def saver(worker: Worker) -> Iterator[None]:
    """Big records acknowledged on disk, read again at once and once more later."""
    known: deque[Ids] = deque(maxlen=4)
    while True:
        ids = worker.tokens(*BIG_TOKENS)
        worker.save(BIG, ids, disk=True)
        known.append(ids)
        for asked in (ids, worker.rng.choice(list(known))):
            worker.restore(BIG, np.append(asked, np.uint32(1))).close()
        yield


def reader(worker: Worker) -> Iterator[None]:
    """Prompts that all readers know, held for longer than a lease lasts, let go of by a close, by
    dropping the connection, or with the process."""
    held: deque[tuple[Restored, Ids]] = deque()
    for number in itertools.count():
        model, ids = worker.rng.choice((PLAIN, MIXED)), shared_tokens(1000 + worker.rng.randrange(LIBRARY), LIBRARY_TOKENS)
        asked = np.append(ids, np.uint32(1))
        found = worker.restore(model, asked)
        if found.usable < LIBRARY_TOKENS:
            worker.save(model, ids)
        if found:
            held.append((found, asked))
        if len(held) > HELD or (held and number % 3 == 0):
            old, before = held.popleft()
            compare(old, before)
            worker.count("held again")
            if worker.rng.random() < 0.5:
                old.close()
        chance = worker.rng.random()
        if chance < 0.02:
            worker.count("vanished")
            worker.client.close()
            worker.client = worker.connect()
            held.clear()
        elif chance < 0.03:
            worker.count("vanished")
            os._exit(0)
        yield


def breaker(worker: Worker) -> Iterator[None]:
    """Half frames, wrong lengths, uploads announced and never made, connections that say nothing;
    and between them a chat, in the middle of which such a client is killed."""
    hello = frame(m.encode(m.Hello(1, 1, "soak", os.getpid()), 1))
    chat = agent(worker)
    while True:
        way = worker.rng.randrange(8)
        if way < 4:
            next(chat)
        elif way == 4:
            worker.client.offer(PLAIN, worker.tokens(*TURN_TOKENS))
        else:
            said = [
                hello[: worker.rng.randrange(1, len(hello))],
                LENGTH.pack(2**31) + b"x" * 16,
                b"",
                hello + LENGTH.pack(64) + b"half",
            ]
            _say(worker, said[worker.rng.randrange(len(said))])
        yield


def _say(worker: Worker, data: bytes) -> None:
    """Send bytes on a connection of their own and hang up, sometimes by a reset."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(CALL_TIMEOUT_S)
        try:
            sock.connect(str(worker.path))
            sock.sendall(data)
            worker.count("half frames")
            if worker.rng.random() < 0.5:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if worker.rng.random() < 0.3:
                time.sleep(0.2)
        except OSError:
            worker.count("refused")


KINDS: dict[str, Callable[[Worker], Iterator[None]]] = {"agents": agent, "savers": saver, "readers": reader, "breakers": breaker}
