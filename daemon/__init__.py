"""The warmkv process: one store served over a Unix socket."""
