"""Who has which block of keys and values: the books of every pool, and the pool of engines that map nothing."""
