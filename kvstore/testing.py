"""Contract suites others can run against their own store or client, and what they are made of.

Subclass `StoreContract`, override its fixture ``opened``, and every promise the verbs make is
tried. Rows come from `model_rows`, a stand-in for a causal model: each row is a function of all
tokens and attachments up to it, so an answer taken from another prefix can never look right.
`NaiveStore` is the twin to compare with: a dict, no tree, no eviction.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest

from warmkv.kvstore.restored import Restored
from warmkv.kvstore.results import Saved
from warmkv.kvstore.rows import DTYPES, LayerRows, PlaneRows
from warmkv.kvstore.verbs import Verbs
from warmkv.schema.errors import ClosedError, OfferAgain, RecordError, UnsupportedError
from warmkv.schema.identity import SINGLE, Identity, LayerKind, LayerSpec, PlaneFormat, PlaneRole, PlaneSpec, RopeRegime
from warmkv.schema.ids import lineage_after
from warmkv.schema.records import CLEAN, Anchor, AnchorKind, Attachment, Lineage, row_bytes

Rows = npt.NDArray[np.generic]

# -- identities and rows ---------------------------------------------------------------------


def random_identity(
    layers: int = 2, heads: int = 2, dim: int = 8, format: PlaneFormat = PlaneFormat.F32, seed: int = 0  # noqa: A002
) -> Identity:  # fmt: skip
    """A full-attention model; another seed is another model of the same geometry."""
    planes = tuple(PlaneSpec(role, format, (heads, dim)) for role in (PlaneRole.KEY, PlaneRole.VALUE))
    digest = hashlib.blake2b(f"weights {seed}".encode(), digest_size=32).digest()
    return Identity(
        architecture="test", parameters=digest, settings=b"none", adapters=(),
        layers=tuple(LayerSpec(LayerKind.FULL, planes) for _ in range(layers)), compute_dtype="float32", attention="eager",
        layout="token-major", rope=RopeRegime("default", 10000.0, 1.0, dim, 4096, b"none"), tokenizer=b"none", runtime="test",
        runtime_state_version="1", topology=SINGLE, tenant=b"none",
    )  # fmt: skip


def random_rows(identity: Identity, n: int, seed: int = 0) -> list[LayerRows]:
    """``n`` rows of random bits (NaN patterns among them) for every layer that has rows."""
    rng = np.random.default_rng(seed)
    return _rows(identity, lambda index, spec: rng.bytes(n * row_bytes(spec.format, spec.row_shape)))


def model_rows(
    identity: Identity, ids: Sequence[int], attachments: Sequence[Attachment] = (), lineage: Lineage = CLEAN
) -> list[LayerRows]:
    """What a causal model would compute: row i depends on everything at or before i."""
    seeds = np.empty(len(ids), np.uint64)
    begins = {item.start: item for item in attachments}
    digest = hashlib.blake2b(identity.canonical() + lineage, digest_size=8)
    for at, token in enumerate(ids):
        digest.update(int(token).to_bytes(4, "little"))
        if at in begins:
            digest.update(begins[at].digest + begins[at].length.to_bytes(8, "little"))
        seeds[at] = int.from_bytes(digest.copy().digest(), "little")

    def make(index: int, spec: PlaneSpec) -> bytes:
        size = row_bytes(spec.format, spec.row_shape)
        words = np.arange(-(-size // 8), dtype=np.uint64) + np.uint64((index * 16 + spec.role) << 32)
        return np.ascontiguousarray(_mix(seeds[:, None] ^ _mix(words)[None, :]).view(np.uint8)[:, :size]).tobytes()

    return _rows(identity, make)


def _mix(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finisher of splitmix64: neighbours become unrelated."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _rows(identity: Identity, make: Callable[[int, PlaneSpec], bytes]) -> list[LayerRows]:
    records = []
    for index, layer in enumerate(identity.layers):
        if layer.shared_with < 0:
            planes = tuple(
                PlaneRows(s.role, s.format, np.frombuffer(make(index, s), DTYPES[s.format]).reshape(-1, *s.row_shape))
                for s in layer.planes
            )
            records.append(LayerRows(index, planes))
    return records


def row_bits(rows: Rows, usable: int) -> bytes:
    """The bytes of the first ``usable`` rows: equal bits, not merely equal numbers."""
    return np.ascontiguousarray(rows[:usable]).tobytes()


def assert_rows(restored: Restored, expected: Sequence[LayerRows]) -> None:
    """Every restored layer holds exactly the first ``usable`` of the expected rows, bit for bit."""
    assert restored.layers
    by_layer = {record.layer: record for record in expected}
    for layer in restored.layers:
        spec = restored.match.identity.layers[layer.layer]
        record = by_layer[layer.layer if spec.shared_with < 0 else spec.shared_with]
        for plane in record.planes:
            got = layer.plane(plane.role)
            assert sum(len(block) for block in got.blocks) == restored.usable
            assert got.array().dtype == plane.rows.dtype and got.row_shape == plane.rows.shape[1:]
            assert row_bits(got.array(), restored.usable) == row_bits(plane.rows, restored.usable)


# -- the naive twin --------------------------------------------------------------------------


@dataclass(frozen=True)
class Expected:
    """What a store without any limits would answer."""

    matched: int
    usable: int
    records: tuple[LayerRows, ...]


class NaiveStore:
    """Every saved prefix whole, in a dict from tokens and attachments to rows."""

    def __init__(self) -> None:
        self._entries: dict[tuple[bytes, Lineage], dict[tuple[tuple[int, ...], tuple[Attachment, ...]], Sequence[LayerRows]]] = {}

    def save(
        self, identity: Identity, ids: Sequence[int], records: Sequence[LayerRows],
        attachments: Sequence[Attachment] = (), lineage: Lineage = CLEAN,
    ) -> None:  # fmt: skip
        entries = self._entries.setdefault((identity.canonical(), lineage), {})
        entries[tuple(ids), tuple(sorted(attachments, key=lambda item: item.start))] = records

    def find(
        self, identity: Identity, ids: Sequence[int], attachments: Sequence[Attachment] = (), lineage: Lineage = CLEAN
    ) -> Expected:
        """Longest prefix of ``ids`` shared with any entry, and its rows."""
        best, records = 0, ()  # type: tuple[int, Sequence[LayerRows]]
        for (tokens, theirs), rows in self._entries.get((identity.canonical(), lineage), {}).items():
            common = common_prefix(ids, attachments, tokens, theirs)
            if common > best:
                best, records = common, rows
        usable = min(best, len(ids) - 1)
        usable = next((item.start for item in attachments if item.start < usable < item.end), usable)
        return Expected(best, usable, tuple(records))

    def forget_everything(self) -> None:
        self._entries.clear()


def common_prefix(
    ids: Sequence[int], attachments: Sequence[Attachment], tokens: Sequence[int], theirs: Sequence[Attachment]
) -> int:
    """Tokens two prefixes share: equal ids, and equal attachments wherever one begins."""
    a, b = ({item.start: item for item in side} for side in (attachments, theirs))
    for at, (ours, other) in enumerate(zip(ids, tokens, strict=False)):
        if ours != other or a.get(at) != b.get(at):
            return at
    return min(len(ids), len(tokens))


# -- the contract ----------------------------------------------------------------------------

TOKENS = [11, 12, 13, 14, 15, 16, 17, 18, 19]
IMAGE = hashlib.blake2b(b"image", digest_size=32).digest()
OTHER_IMAGE = hashlib.blake2b(b"other", digest_size=32).digest()
#: Differs from IMAGE in its first byte only.
NEAR_IMAGE = bytes([IMAGE[0] ^ 1]) + IMAGE[1:]
#: Differs from IMAGE in its last byte only.
LATE_IMAGE = IMAGE[:-1] + bytes([IMAGE[-1] ^ 1])
FOLDED = lineage_after(CLEAN, "evicted", 3)


def save(opened: Verbs, identity: Identity, ids: Sequence[int], **options: Any) -> Saved:
    """Save the rows `model_rows` gives for these ids."""
    rows = model_rows(identity, ids, options.get("attachments", ()), options.get("lineage", CLEAN))
    return opened.save(identity, ids, rows, **options)


def check_restore(opened: Verbs, identity: Identity, ids: Sequence[int], usable: int, **options: Any) -> None:
    """Match and restore agree on ``usable``, and its rows are those of these ids."""
    rows = model_rows(identity, ids, options.get("attachments", ()), options.get("lineage", CLEAN))
    asked = {name: value for name, value in options.items() if name not in ("verify", "writable")}
    assert opened.match(identity, ids, **asked).usable == usable
    with opened.restore(identity, ids, **options) as restored:
        assert restored.usable == usable
        assert bool(restored) == (usable > 0)
        if usable:
            assert_rows(restored, rows)
        else:
            assert restored.layers == () and restored.reason


def entries(opened: Verbs) -> object:
    return opened.stats()["entries"]


class StoreContract:
    """What every store and every client promises. ``cold`` says whether disk acknowledgements
    are possible."""

    cold: ClassVar[bool] = True

    @pytest.fixture
    def opened(self) -> Iterator[Verbs]:
        """An empty store, closed afterwards. A client must be strict."""
        raise NotImplementedError("override the fixture `opened`")

    @pytest.fixture
    def identity(self) -> Identity:
        return random_identity()

    # -- matching

    def test_empty_store_is_a_miss_with_a_reason(self, opened: Verbs, identity: Identity) -> None:
        match = opened.match(identity, TOKENS)
        assert (match.matched, match.usable, match.tier, bool(match)) == (0, 0, None, False)
        assert match.reason
        check_restore(opened, identity, TOKENS, 0)

    @pytest.mark.parametrize(
        ("length", "matched", "usable"), [(1, 1, 0), (2, 2, 1), (8, 8, 7), (9, 9, 8), (10, 9, 9), (12, 9, 9)]
    )
    def test_one_token_is_left_to_feed(self, opened: Verbs, identity: Identity, length: int, matched: int, usable: int) -> None:
        save(opened, identity, TOKENS)
        ids = (TOKENS + [70, 71, 72])[:length]
        match = opened.match(identity, ids)
        assert (match.matched, match.usable) == (matched, usable)
        assert match.tier == ("warm" if usable else None)
        check_restore(opened, identity, ids, usable)

    def test_one_stored_token(self, opened: Verbs, identity: Identity) -> None:
        save(opened, identity, [5])
        check_restore(opened, identity, [5], 0)
        check_restore(opened, identity, [5, 6], 1)

    def test_longer_entry_serves_shorter_request_by_its_first_rows(self, opened: Verbs, identity: Identity) -> None:
        long = list(range(100, 300))
        save(opened, identity, long)
        for length in (2, 63, 64, 65, 199, 200):
            check_restore(opened, identity, long[:length], length - 1)

    def test_full_length_entry_does_not_shadow_shorter(self, opened: Verbs, identity: Identity) -> None:
        save(opened, identity, TOKENS[:5])
        save(opened, identity, TOKENS)
        check_restore(opened, identity, TOKENS, 8)
        check_restore(opened, identity, TOKENS[:5] + [99], 5)
        check_restore(opened, identity, TOKENS[:6] + [99], 6)

    def test_shorter_entry_saved_after_longer_is_a_duplicate(self, opened: Verbs, identity: Identity) -> None:
        save(opened, identity, TOKENS)
        shorter = save(opened, identity, TOKENS[:4])
        assert (shorter.duplicate, shorter.sent_bytes, shorter.held) == (True, 0, 4)
        assert entries(opened) == 1

    def test_branches_split_inside_segments(self, opened: Verbs, identity: Identity) -> None:
        left, right = TOKENS, TOKENS[:4] + [50, 51, 52]
        save(opened, identity, left)
        saved = save(opened, identity, right)
        assert saved.start == 4
        third = right[:6] + [60, 61]
        assert save(opened, identity, third).start == 6
        for ids in (left, right, third):
            check_restore(opened, identity, ids + [1], len(ids))
        check_restore(opened, identity, right[:5] + [9], 5)

    def test_first_difference_names_both_ids(self, opened: Verbs, identity: Identity) -> None:
        save(opened, identity, TOKENS)
        difference = opened.match(identity, TOKENS[:3] + [99, 15]).first_difference
        assert difference is not None
        assert (difference.position, difference.query, difference.stored) == (3, 99, 14)
        assert opened.match(identity, TOKENS + [1]).first_difference is None

    def test_ids_of_any_integer_type_are_the_same_ids(self, opened: Verbs, identity: Identity) -> None:
        save(opened, identity, [1, 2, 2**32 - 1, 4])
        for kind in (np.int64, np.uint32, np.uint64, ">u8"):
            assert opened.match(identity, np.array([1, 2, 2**32 - 1, 4, 5], kind)).usable == 4
        assert opened.match(identity, (1, 2, 2**32 - 1, 4, 5)).usable == 4
        assert opened.match(identity, np.array([1, 0, 2, 0, 2**32 - 1, 0, 4, 0, 5], np.uint32)[::2]).usable == 4

    def test_other_identity_is_a_miss(self, opened: Verbs, identity: Identity) -> None:
        save(opened, identity, TOKENS)
        kin = [
            random_identity(seed=1),
            random_identity(format=PlaneFormat.F16),
            replace(identity, tenant=b"t" * 16),
            replace(identity, attention="sdpa"),
            replace(identity, rope=replace(identity.rope, base=10001.0)),
            replace(identity, runtime_state_version="2"),
        ]
        for other in kin:
            check_restore(opened, other, TOKENS + [1], 0)
        check_restore(opened, identity, TOKENS + [1], 9)

    def test_lineages_never_mix(self, opened: Verbs, identity: Identity) -> None:
        save(opened, identity, TOKENS)
        check_restore(opened, identity, TOKENS, 0, lineage=FOLDED)
        save(opened, identity, TOKENS[:5], lineage=FOLDED)
        check_restore(opened, identity, TOKENS, 5, lineage=FOLDED)
        check_restore(opened, identity, TOKENS, 8)

    def test_restore_of_a_match_gives_no_more_than_was_matched(self, opened: Verbs, identity: Identity) -> None:
        save(opened, identity, TOKENS[:5])
        match = opened.match(identity, TOKENS)
        save(opened, identity, TOKENS)
        with opened.restore(match, TOKENS) as restored:
            assert restored.usable == 5
            assert_rows(restored, model_rows(identity, TOKENS))
        miss = opened.match(identity, [98, 99])
        assert not opened.restore(miss, [98, 99])

    def test_prefetch_answers_as_match_does(self, opened: Verbs, identity: Identity) -> None:
        save(opened, identity, TOKENS)
        assert opened.prefetch(identity, TOKENS + [1]).usable == 9
        assert opened.prefetch(identity, [7, 8]).usable == 0

    # -- saving

    def test_second_save_sends_only_new_rows(self, opened: Verbs, identity: Identity) -> None:
        first = list(range(1000, 1512))
        begun = save(opened, identity, first)
        grown = save(opened, identity, first + [1, 2, 3])
        assert (begun.start, begun.held, begun.duplicate) == (0, 512, False)
        assert (grown.start, grown.held) == (512, 515)
        assert grown.sent_bytes < begun.sent_bytes // 8
        check_restore(opened, identity, first + [1, 2, 3, 4], 515)

    def test_offer_says_what_is_held(self, opened: Verbs, identity: Identity) -> None:
        assert opened.offer(identity, TOKENS).held == 0
        save(opened, identity, TOKENS[:6])
        assert opened.offer(identity, TOKENS[:6]).held == 6
        assert opened.offer(identity, TOKENS).held == 6
        assert opened.offer(identity, TOKENS[:4] + [99]).held == 4
        assert opened.offer(identity, TOKENS, lineage=FOLDED).held == 0

    def test_rows_may_begin_at_what_is_held(self, opened: Verbs, identity: Identity) -> None:
        save(opened, identity, TOKENS[:6])
        tail = [
            LayerRows(r.layer, tuple(replace(p, rows=p.rows[6:]) for p in r.planes), first=6)
            for r in model_rows(identity, TOKENS)
        ]  # fmt: skip
        assert opened.save(identity, TOKENS, tail).start == 6
        check_restore(opened, identity, TOKENS + [1], 9)

    def test_rows_that_begin_behind_what_is_held_are_refused(self, opened: Verbs, identity: Identity) -> None:
        tail = [
            LayerRows(r.layer, tuple(replace(p, rows=p.rows[6:]) for p in r.planes), first=6)
            for r in model_rows(identity, TOKENS)
        ]  # fmt: skip
        with pytest.raises(OfferAgain, match="rows from 0 on are needed"):
            opened.save(identity, TOKENS, tail)
        warm: Any = opened.stats()["warm"]
        assert (entries(opened), warm["reserved_bytes"]) == (0, 0)

    def test_duplicates_are_stored_once(self, opened: Verbs, identity: Identity) -> None:
        first, again = save(opened, identity, TOKENS), save(opened, identity, TOKENS)
        assert (first.duplicate, again.duplicate, again.sent_bytes) == (False, True, 0)
        assert again.id == first.id and entries(opened) == 1

    def test_save_async_is_done_after_flush(self, opened: Verbs, identity: Identity) -> None:
        futures = [
            opened.save_async(identity, TOKENS[:n], model_rows(identity, TOKENS[:n])) for n in (3, 6, 9)
        ]  # fmt: skip
        assert opened.flush(60)
        assert [future.result(0).held for future in futures] == [3, 6, 9]
        check_restore(opened, identity, TOKENS, 8)

    def test_save_async_checks_its_input_at_once(self, opened: Verbs, identity: Identity) -> None:
        with pytest.raises(RecordError):
            opened.save_async(identity, TOKENS, model_rows(identity, TOKENS[:4]))

    def test_disk_acknowledgement(self, opened: Verbs, identity: Identity) -> None:
        if not self.cold:
            pytest.skip("no cold tier")
        assert save(opened, identity, TOKENS[:5]).stored
        assert save(opened, identity, TOKENS, ack="disk").durable
        assert save(opened, identity, TOKENS, ack="disk").durable
        assert save(opened, identity, TOKENS).durable

    # -- attachments

    def test_different_images_never_match_past_their_start(self, opened: Verbs, identity: Identity) -> None:
        image = Attachment(3, 4, IMAGE)
        save(opened, identity, TOKENS, attachments=[image])
        check_restore(opened, identity, TOKENS, 8, attachments=[image])
        for digest in (OTHER_IMAGE, NEAR_IMAGE, LATE_IMAGE):
            other = [Attachment(3, 4, digest)]
            assert opened.match(identity, TOKENS, attachments=other).matched == 3
            check_restore(opened, identity, TOKENS, 3, attachments=other)
        check_restore(opened, identity, TOKENS, 3)
        check_restore(opened, identity, TOKENS, 3, attachments=[Attachment(3, 5, IMAGE)])
        check_restore(opened, identity, TOKENS, 2, attachments=[Attachment(2, 4, IMAGE)])

    def test_text_does_not_match_into_an_image(self, opened: Verbs, identity: Identity) -> None:
        save(opened, identity, TOKENS)
        check_restore(opened, identity, TOKENS, 3, attachments=[Attachment(3, 4, IMAGE)])

    def test_both_images_are_kept_apart(self, opened: Verbs, identity: Identity) -> None:
        ours, other = [Attachment(3, 4, IMAGE)], [Attachment(3, 4, OTHER_IMAGE)]
        save(opened, identity, TOKENS, attachments=ours)
        assert save(opened, identity, TOKENS, attachments=other).start == 3
        assert save(opened, identity, TOKENS).start == 3
        for attachments in (ours, other, []):
            check_restore(opened, identity, TOKENS + [1], 9, attachments=attachments)

    def test_cut_inside_an_image_rounds_down_to_its_start(self, opened: Verbs, identity: Identity) -> None:
        image = [Attachment(3, 4, IMAGE)]
        save(opened, identity, TOKENS, attachments=image)
        changed = TOKENS[:5] + [99] + TOKENS[6:]
        match = opened.match(identity, changed, attachments=image)
        assert (match.matched, match.usable) == (5, 3)
        check_restore(opened, identity, changed, 3, attachments=image)
        check_restore(opened, identity, TOKENS[:7], 3, attachments=image)
        assert opened.offer(identity, changed, attachments=image).held == 3
        assert save(opened, identity, changed, attachments=image).start == 3
        check_restore(opened, identity, changed + [1], 9, attachments=image)

    def test_image_at_the_very_start_and_end(self, opened: Verbs, identity: Identity) -> None:
        both = [Attachment(0, 2, IMAGE), Attachment(7, 2, IMAGE)]
        save(opened, identity, TOKENS, attachments=both)
        check_restore(opened, identity, TOKENS, 7, attachments=both)
        check_restore(opened, identity, TOKENS + [1], 9, attachments=both)
        check_restore(opened, identity, TOKENS, 0, attachments=both[1:])
        check_restore(opened, identity, TOKENS, 7, attachments=both[:1])

    def test_same_image_at_another_offset(self, opened: Verbs, identity: Identity) -> None:
        placeholders = [7] * 8
        save(opened, identity, placeholders, attachments=[Attachment(2, 3, IMAGE)])
        shifted = [Attachment(3, 3, IMAGE)]
        check_restore(opened, identity, placeholders, 2, attachments=shifted)
        save(opened, identity, placeholders, attachments=shifted)
        for start in (2, 3):
            check_restore(opened, identity, placeholders + [1], 8, attachments=[Attachment(start, 3, IMAGE)])

    def test_attachments_of_a_turn_that_follows(self, opened: Verbs, identity: Identity) -> None:
        image = Attachment(1, 2, IMAGE)
        save(opened, identity, TOKENS[:5], attachments=[image])
        later = Attachment(6, 2, OTHER_IMAGE)
        assert save(opened, identity, TOKENS, attachments=[later, image]).start == 5
        check_restore(opened, identity, TOKENS + [1], 9, attachments=[image, later])
        check_restore(opened, identity, TOKENS + [1], 6, attachments=[image, replace(later, digest=IMAGE)])

    # -- anchors

    def test_anchors_are_stored_and_returned(self, opened: Verbs, identity: Identity) -> None:
        system = Anchor(3, AnchorKind.SYSTEM_PROMPT, depth=1, semantic_hash=2**64 - 1, shift_offset=-5)
        turn = Anchor(6, AnchorKind.TURN)
        save(opened, identity, TOKENS[:5], anchors=[system])
        save(opened, identity, TOKENS, anchors=[turn, replace(turn, kind=AnchorKind.THINKING)])
        anchors = opened.match(identity, TOKENS + [1]).anchors
        assert anchors == (system, turn, replace(turn, kind=AnchorKind.THINKING))
        assert opened.match(identity, TOKENS[:5] + [99, 98]).anchors == (system,)

    def test_restore_at_an_anchor(self, opened: Verbs, identity: Identity) -> None:
        save(opened, identity, TOKENS, anchors=[Anchor(3, AnchorKind.SYSTEM_PROMPT), Anchor(6, AnchorKind.TURN)])
        for ids, usable in ((TOKENS + [1], 6), (TOKENS[:6], 3), (TOKENS[:4] + [99, 98], 3)):
            assert opened.match(identity, ids, at="anchor").usable == usable
            with opened.restore(identity, ids, at="anchor") as restored:
                assert restored.usable == usable
                assert restored.anchor is not None and restored.anchor.position == usable
                assert_rows(restored, model_rows(identity, ids))

    def test_without_an_anchor_the_longest_is_given(self, opened: Verbs, identity: Identity) -> None:
        save(opened, identity, TOKENS, anchors=[Anchor(9)])
        with opened.restore(identity, TOKENS[:6], at="anchor") as restored:
            assert restored.usable == 5 and restored.anchor is None

    def test_anchors_can_be_added_to_what_is_held(self, opened: Verbs, identity: Identity) -> None:
        save(opened, identity, TOKENS)
        assert save(opened, identity, TOKENS[:6], anchors=[Anchor(6, AnchorKind.TURN)]).sent_bytes == 0
        assert opened.match(identity, TOKENS, at="anchor").usable == 6

    def test_anchors_stay_on_their_own_branch(self, opened: Verbs, identity: Identity) -> None:
        branch = TOKENS[:4] + [50, 51, 52, 53]
        save(opened, identity, TOKENS)
        save(opened, identity, branch, anchors=[Anchor(6, AnchorKind.TURN), Anchor(2, AnchorKind.SYSTEM_PROMPT)])
        assert [anchor.position for anchor in opened.match(identity, branch).anchors] == [2, 6]
        assert [anchor.position for anchor in opened.match(identity, TOKENS).anchors] == [2]

    # -- numbers

    @pytest.mark.parametrize("format_", [PlaneFormat.F32, PlaneFormat.F16, PlaneFormat.BF16, PlaneFormat.RAW])
    @pytest.mark.parametrize(("heads", "dim"), [(1, 1), (3, 5), (2, 64), (1, 127)])
    def test_rows_come_back_bit_for_bit(self, opened: Verbs, format_: PlaneFormat, heads: int, dim: int) -> None:
        identity = random_identity(3, heads, dim, format_)
        ids = list(range(40))
        rows = random_rows(identity, 40, seed=heads * dim)
        opened.save(identity, ids, rows)
        for verify in (False, True):
            with opened.restore(identity, ids + [1], verify=verify) as restored:
                assert restored.usable == 40
                assert_rows(restored, rows)

    @pytest.mark.parametrize("strided", ["head-major", "every second", "reversed", "broadcast", "read-only", "fortran"])
    def test_rows_as_they_lie(self, opened: Verbs, strided: str) -> None:
        identity = random_identity(1, 3, 5)
        rng = np.random.default_rng(3)
        big = rng.random((3, 200, 10), np.float32)
        make: dict[str, Callable[[], npt.NDArray[np.float32]]] = {
            "head-major": lambda: big[:, :100, :5].transpose(1, 0, 2),
            "every second": lambda: big[:, ::2, ::2].transpose(1, 0, 2),
            "reversed": lambda: big[::-1, 99::-1, 4::-1].transpose(1, 0, 2),
            "broadcast": lambda: np.broadcast_to(big[:, :1, :5].transpose(1, 0, 2), (100, 3, 5)),
            "read-only": lambda: np.frombuffer(rng.bytes(100 * 3 * 5 * 4), np.float32).reshape(100, 3, 5),
            "fortran": lambda: np.asfortranarray(big[:, :100, :5].transpose(1, 0, 2)),
        }
        keys, values = make[strided](), make[strided]()
        assert keys.shape == (100, 3, 5)
        ids = list(range(100))
        opened.save(identity, ids[:50], [LayerRows.kv(0, keys[:50], values[:50])])
        opened.save(identity, ids, [LayerRows.kv(0, keys, values)])
        with opened.restore(identity, ids + [1], verify=True) as restored:
            assert_rows(restored, [LayerRows.kv(0, keys, values)])

    def test_rows_larger_than_a_digest_chunk(self, opened: Verbs) -> None:
        identity = random_identity(2, 8, 64)
        ids = list(range(1100))  # 2 layers x 2 planes x 2.25 MB: planes cross 4 MiB boundaries
        rows = random_rows(identity, len(ids), seed=9)
        opened.save(identity, ids, rows)
        with opened.restore(identity, ids + [1], verify=True) as restored:
            assert_rows(restored, rows)

    def test_shared_layers_show_the_rows_they_share(self, opened: Verbs) -> None:
        plain = random_identity(3)
        shared = LayerSpec(LayerKind.SHARED, (), shared_with=0)
        identity = replace(plain, layers=(plain.layers[0], shared, plain.layers[2]))
        save(opened, identity, TOKENS)
        check_restore(opened, identity, TOKENS, 8)
        with opened.restore(identity, TOKENS) as restored:
            assert [layer.layer for layer in restored.layers] == [0, 1, 2]
            assert np.shares_memory(restored.layers[0].keys, restored.layers[1].keys)

    def test_views_are_read_only(self, opened: Verbs, identity: Identity) -> None:
        save(opened, identity, TOKENS)
        with opened.restore(identity, TOKENS) as restored:
            keys = restored.layers[0].keys
            assert not keys.flags.writeable
            with pytest.raises(ValueError, match="read-only"):
                keys[0] = 0
            with pytest.raises(ValueError, match="WRITEABLE"):
                keys.flags.writeable = True

    def test_writable_views_are_private(self, opened: Verbs, identity: Identity) -> None:
        save(opened, identity, TOKENS)
        with opened.restore(identity, TOKENS, writable=True) as one, opened.restore(identity, TOKENS, writable=True) as other:
            one.layers[0].keys[:] = 0
            assert_rows(other, model_rows(identity, TOKENS))
        check_restore(opened, identity, TOKENS, 8, verify=True)

    def test_views_outlive_close(self, opened: Verbs, identity: Identity) -> None:
        save(opened, identity, TOKENS)
        restored = opened.restore(identity, TOKENS)
        keys = restored.layers[0].keys
        restored.close()
        restored.close()
        opened.clear()
        opened.close()
        assert row_bits(keys, 8) == row_bits(model_rows(identity, TOKENS)[0].planes[0].rows, 8)
        with pytest.raises(ClosedError):
            restored.__enter__()

    # -- bad input

    def test_bad_ids_are_refused(self, opened: Verbs, identity: Identity) -> None:
        rows = random_rows(identity, 3)
        bad: list[Any] = [
            [], [[1, 2, 3]], [-1, 2, 3], [1, 2, 2**32], [1.0, 2.0, 3.0], [True, False, True], ["1", "2", "3"], [[1, 2], [3]],
            np.zeros((1, 3), np.uint32), np.zeros(0, np.uint32), np.uint32(3), [1, 2, 2**70], [None, 1, 2],
        ]  # fmt: skip
        for ids in bad:
            for call in (opened.match, opened.restore, opened.prefetch, opened.offer, opened.forget, opened.unpin):
                with pytest.raises(RecordError):
                    call(identity, ids)
            with pytest.raises(RecordError):
                opened.save(identity, ids, rows)
        assert entries(opened) == 0

    def test_bad_records_are_refused_and_nothing_is_stored(self, opened: Verbs, identity: Identity) -> None:
        ids = TOKENS[:4]
        good = random_rows(identity, 4)
        key, value = good[0].planes
        first = replace

        def with_key(rows: Any, **changes: Any) -> list[LayerRows]:
            return [first(good[0], planes=(replace(key, rows=rows, **changes), value)), good[1]]

        bad: dict[str, list[LayerRows]] = {
            "no layers": [],
            "a layer missing": good[:1],
            "a layer twice": [good[0], good[0]],
            "an unknown layer": [*good, replace(good[1], layer=2)],
            "a negative layer": [good[0], replace(good[1], layer=-1)],
            "no planes": [replace(good[0], planes=()), good[1]],
            "a plane missing": [replace(good[0], planes=(key,)), good[1]],
            "a plane twice": [replace(good[0], planes=(key, key)), good[1]],
            "an unknown plane": [replace(good[0], planes=(key, replace(value, role=PlaneRole.LATENT))), good[1]],
            "too few rows": with_key(key.rows[:3]),
            "too many rows": with_key(np.concatenate([key.rows, key.rows[:1]])),
            "no rows": with_key(key.rows[:0]),
            "another dtype": with_key(key.rows.astype(np.float64)),
            "another byte order": with_key(key.rows.astype(">f4")),
            "another format": with_key(key.rows, format=PlaneFormat.F16),
            "another head size": with_key(key.rows[:, :, :-1]),
            "another rank": with_key(key.rows[:, 0]),
            "heads last": with_key(key.rows.transpose(0, 2, 1)),
            "a list": with_key([1, 2, 3, 4]),
            "a scalar": with_key(np.float32(1)),
            "a negative first row": [replace(item, first=-1) for item in good],
            "a wrong first row": [replace(item, first=1) for item in good],
        }
        for name, records in bad.items():
            for call in (opened.save, opened.save_async):
                with pytest.raises(RecordError):
                    call(identity, ids, records)
                    pytest.fail(f"{name} was accepted")
        assert entries(opened) == 0
        assert opened.match(identity, ids).matched == 0

    def test_bad_attachments_are_refused(self, opened: Verbs, identity: Identity) -> None:
        bad = [
            [Attachment(0, 0, IMAGE)],
            [Attachment(-1, 2, IMAGE)],
            [Attachment(8, 2, IMAGE)],
            [Attachment(9, 1, IMAGE)],
            [Attachment(2, 3, IMAGE), Attachment(4, 2, IMAGE)],
            [Attachment(2, 3, IMAGE), Attachment(2, 3, IMAGE)],
            [Attachment(2, 3, IMAGE[:16])],
            [Attachment(2, 3, b"")],
        ]
        for attachments in bad:
            with pytest.raises(RecordError):
                opened.match(identity, TOKENS, attachments=attachments)
            with pytest.raises(RecordError):
                opened.save(identity, TOKENS, random_rows(identity, 9), attachments=attachments)
        assert entries(opened) == 0

    def test_bad_anchors_are_refused(self, opened: Verbs, identity: Identity) -> None:
        rows, image = random_rows(identity, 9), [Attachment(3, 4, IMAGE)]
        bad = [Anchor(0), Anchor(-1), Anchor(10), Anchor(4), Anchor(6), Anchor(2, depth=-1), Anchor(2, semantic_hash=2**64)]
        for anchor in bad:
            with pytest.raises(RecordError):
                opened.save(identity, TOKENS, rows, anchors=[anchor], attachments=image)
        assert entries(opened) == 0
        assert opened.save(identity, TOKENS, rows, anchors=[Anchor(3), Anchor(7), Anchor(9)], attachments=image).stored

    def test_bad_arguments_are_refused(self, opened: Verbs, identity: Identity) -> None:
        wrong: Any = "eventually"
        rows = random_rows(identity, 9)
        with pytest.raises(RecordError):
            opened.save(identity, TOKENS, rows, ack=wrong)
        with pytest.raises(RecordError):
            opened.match(identity, TOKENS, at=wrong)
        with pytest.raises(RecordError):
            opened.restore(identity, TOKENS, at=wrong)
        for lineage in (b"", b"short", bytes(17)):
            with pytest.raises(RecordError):
                opened.save(identity, TOKENS, rows, lineage=Lineage(lineage))
        for ttl in (0, -1, float("nan"), 2.0**50):
            with pytest.raises(RecordError):
                opened.pin(identity, TOKENS, ttl)
        with pytest.raises(RecordError):
            opened.offer(identity, TOKENS, fields=[b"short"])
        assert entries(opened) == 0

    def test_layer_kinds_without_rows_are_refused(self, opened: Verbs, identity: Identity) -> None:
        sliding = replace(identity, layers=(identity.layers[0], replace(identity.layers[1], kind=LayerKind.SLIDING, window=4)))
        with pytest.raises(UnsupportedError):
            opened.save(sliding, TOKENS, random_rows(sliding, 9))
        assert entries(opened) == 0

    # -- keeping and dropping

    def test_forget_drops_what_nothing_else_needs(self, opened: Verbs, identity: Identity) -> None:
        save(opened, identity, TOKENS[:4])
        save(opened, identity, TOKENS)
        save(opened, identity, TOKENS[:4] + [50, 51])
        assert opened.forget(identity, TOKENS).records == 1
        check_restore(opened, identity, TOKENS, 4)
        check_restore(opened, identity, TOKENS[:4] + [50, 51, 1], 6)
        assert opened.forget(identity, TOKENS[:4] + [50, 51]).records == 2
        assert entries(opened) == 0
        assert opened.forget(identity, TOKENS).records == 0

    def test_forget_keeps_longer_entries(self, opened: Verbs, identity: Identity) -> None:
        save(opened, identity, TOKENS)
        assert opened.forget(identity, TOKENS[:5]).records == 0
        check_restore(opened, identity, TOKENS, 8)

    def test_what_was_forgotten_can_be_saved_again(self, opened: Verbs, identity: Identity) -> None:
        ack = "disk" if self.cold else "memory"
        for _ in range(5):
            assert not save(opened, identity, TOKENS, ack=ack).duplicate
            check_restore(opened, identity, TOKENS, 8, verify=True)
            dropped = opened.forget(identity, TOKENS)
            assert dropped.records == 1 and dropped.total_bytes > 0
            check_restore(opened, identity, TOKENS, 0)

    def test_restored_state_survives_forget(self, opened: Verbs, identity: Identity) -> None:
        save(opened, identity, TOKENS)
        with opened.restore(identity, TOKENS) as restored:
            opened.forget(identity, TOKENS)
            save(opened, identity, list(range(50)))
            assert_rows(restored, model_rows(identity, TOKENS))

    def test_clear_of_one_identity_leaves_the_others(self, opened: Verbs, identity: Identity) -> None:
        other = random_identity(seed=1)
        save(opened, identity, TOKENS)
        save(opened, identity, TOKENS, lineage=FOLDED)
        save(opened, other, TOKENS)
        assert opened.clear(identity).records == 2
        check_restore(opened, identity, TOKENS, 0)
        check_restore(opened, other, TOKENS, 8)
        assert opened.clear().records == 1
        assert entries(opened) == 0
        assert save(opened, identity, TOKENS).stored

    def test_pin_counts_what_is_held(self, opened: Verbs, identity: Identity) -> None:
        assert opened.pin(identity, TOKENS, 60) == 0
        save(opened, identity, TOKENS[:6])
        assert opened.pin(identity, TOKENS, 60) == 6
        assert opened.unpin(identity, TOKENS) == 6

    def test_stats_count(self, opened: Verbs, identity: Identity) -> None:
        save(opened, identity, TOKENS)
        opened.restore(identity, TOKENS).close()
        opened.restore(identity, [99]).close()
        stats = opened.stats()
        assert (stats["entries"], stats["hits"], stats["misses"], stats["saves"], stats["leases"]) == (1, 1, 1, 1, 0)

    def test_no_verb_works_after_close(self, opened: Verbs, identity: Identity) -> None:
        save(opened, identity, TOKENS)
        opened.close()
        opened.close()
        rows = random_rows(identity, 9)
        calls: list[Callable[[], object]] = [
            lambda: opened.match(identity, TOKENS), lambda: opened.restore(identity, TOKENS), lambda: opened.stats(),
            lambda: opened.prefetch(identity, TOKENS), lambda: opened.offer(identity, TOKENS), lambda: opened.clear(),
            lambda: opened.save(identity, TOKENS, rows), lambda: opened.save_async(identity, TOKENS, rows),
            lambda: opened.pin(identity, TOKENS, 1), lambda: opened.forget(identity, TOKENS),
        ]  # fmt: skip
        for call in calls:
            with pytest.raises(ClosedError):
                call()
