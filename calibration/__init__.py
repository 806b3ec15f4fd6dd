"""The numbers that decisions rest on: probes, thresholds, benchmarks. Nothing of it is built yet."""
