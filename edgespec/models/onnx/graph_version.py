"""Kept apart from the graph builder, which imports onnx."""

GRAPH_VERSION = 1  # raise when the same weights would give another graph: cached graphs are then made again
