"""The engine of CUDA devices."""
