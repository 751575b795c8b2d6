"""What proves the CUDA engine on a real device, in minutes and without downloads: `scripts/gpu_check.sh`.

Models have the shapes of real ones and random weights, so speeds are theirs and texts are nonsense. Every part also
runs on the CPU with tiny shapes (`--device cpu --tiny`), which proves nothing but that it would run.
"""
