"""From checkpoints to a bundle: read, quantize, write graphs, verify."""
