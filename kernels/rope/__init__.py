"""Rotary position embedding: rotating rows, and moving stored keys to other positions."""
