"""cera's `.kvcache` files as records, and records as such files: what goes between the two programs.

Reads and writes files and arrays only; whose store the records come from or go to is the caller's
business (`store.kvcache_import`, the command line).
"""
