"""`edgespec bench load`: many requests at once on one engine, measured or simulated."""
