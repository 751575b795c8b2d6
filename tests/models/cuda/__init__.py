"""Tests of the CUDA engine, run on the CPU through the kernels' torch references."""
