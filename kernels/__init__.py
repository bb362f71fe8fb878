"""Numbers: pure functions over arrays. Imports nothing else of warmkv."""
