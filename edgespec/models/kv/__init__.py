"""Keys and values: what every cache counts, who has which block, and the pool of engines that map nothing."""
