"""shardc: a sharding compiler for PyTorch."""
