"""Kernels of general graphs: operators as index expressions, fused into C loop nests."""
