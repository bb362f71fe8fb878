"""Output of flatc; see VERSION. Never edited by hand."""
