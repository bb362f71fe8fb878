"""Attention whose state does not grow: an exact window and sinks, a Nyström estimate of the rest."""
