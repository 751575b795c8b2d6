"""Models: weights on disk to logits and hidden states."""
