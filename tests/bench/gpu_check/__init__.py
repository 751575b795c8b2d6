"""The check of the CUDA engine."""
