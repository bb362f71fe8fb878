"""Images behind the same placeholder tokens are other prefixes."""

from __future__ import annotations

from dataclasses import replace

from warmkv.kvstore.testing.opened import Opened, check_restore, save
from warmkv.kvstore.testing.samples import (
    IMAGE,
    LATE_IMAGE,
    NEAR_IMAGE,
    OTHER_IMAGE,
    TOKENS,
)
from warmkv.kvstore.verbs import Verbs
from warmkv.schema.identity import Identity
from warmkv.schema.records import Attachment


class AttachmentContract(Opened):
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
