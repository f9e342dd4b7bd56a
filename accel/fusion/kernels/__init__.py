"""Triton kernels, one site a file, each with its rounding order beside its reference."""
