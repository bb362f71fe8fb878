"""Bytes: what is on disk and on the wire. Imports nothing else of warmkv."""
