"""Attention of the query heads of one KV head over stored rows, block by block."""
