"""From graphs to plans: what TensorRT and TensorRT-RTX compile. Needs no onnx and no checkpoint."""
