"""Triton kernels, each beside a torch reference that says what it computes.

`edgespec.kernels.ops` is the face: it takes the kernel or the reference, whichever can run. Importing this package
imports neither torch nor Triton; Triton is imported only when a kernel is about to run.
"""
