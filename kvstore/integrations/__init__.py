"""Adapters between model runtimes and the verbs; each module imports the runtime it serves."""
