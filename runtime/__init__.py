"""The embedded decoder: numpy and one backend, nothing of torch, onnx or transformers."""
