"""`edgespec bench specbench`: every policy and peer on the same questions, one run in one folder."""
