"""CUDA: sources, what compiles them, and what launches them."""
