"""The torch engine on the CPU: float32, what all others are compared with."""
