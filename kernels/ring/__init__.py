"""Attention over a ring of the last rows and a few learned sink rows (`swa_sink_v1`)."""
