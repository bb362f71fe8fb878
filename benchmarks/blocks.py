"""The baseline of what finds prefixes: a dict of chained block hashes, as serving engines keep one."""

from __future__ import annotations


class BlockHashes:
    """Number of each block of tokens by a hash chained to that of the block before it. Python's own
    hash: no digest would be cheaper."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.blocks: dict[int, int] = {}

    def enter(self, tokens: bytes) -> None:
        """Add the whole blocks of a prompt, its ids little-endian uint32."""
        before, width = 0, 4 * self.block_tokens
        for at in range(0, len(tokens) - width + 1, width):
            before = hash((before, tokens[at : at + width]))
            self.blocks.setdefault(before, len(self.blocks))

    def find(self, tokens: bytes) -> list[int]:
        """The blocks of the longest prefix that is stored."""
        before, width, known = 0, 4 * self.block_tokens, self.blocks
        found: list[int] = []
        for at in range(0, len(tokens) - width + 1, width):
            before = hash((before, tokens[at : at + width]))
            block = known.get(before)
            if block is None:
                break
            found.append(block)
        return found
