"""Writing edgespec's own quantised folders from any model that can be read."""
