"""Benchmarks: speed beside the peers, and fidelity of the weight formats."""
