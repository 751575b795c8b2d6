"""Making and judging rankers: traces to samples, a fit in torch, an ONNX file, and figures. See docs/predictor.md."""
