"""Model files to tensors: GGUF and safetensors, floats and quantised forms, one tensor at a time."""
