"""The whole contract: every promise the verbs make, tried over whatever answers them."""

from __future__ import annotations

from warmkv.kvstore.testing.anchors import AnchorContract
from warmkv.kvstore.testing.attachments import AttachmentContract
from warmkv.kvstore.testing.hybrids import HybridContract
from warmkv.kvstore.testing.keeping import KeepingContract
from warmkv.kvstore.testing.matching import MatchingContract
from warmkv.kvstore.testing.numbers import NumberContract
from warmkv.kvstore.testing.refusals import RefusalContract
from warmkv.kvstore.testing.saving import SavingContract


class StoreContract(
    MatchingContract, HybridContract, SavingContract, AttachmentContract, AnchorContract, NumberContract, RefusalContract,
    KeepingContract,
):  # fmt: skip
    """What every store and every client promises. Subclass it and override the fixture
    ``opened``; the parts may be taken one by one as well."""
