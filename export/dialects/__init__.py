"""Dialects: the decoder's operations as ONNX nodes, one file for each engine family."""
