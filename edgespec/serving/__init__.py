"""Several requests at once on one engine: a queue, one thread that owns the rounds, batches of all that run."""
