"""The CPU engine: graphs for ONNX Runtime, their buffers, and the pool of keys and values that they read."""
