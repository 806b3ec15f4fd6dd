"""The numbers that decisions rest on. So far: benchmarks."""
