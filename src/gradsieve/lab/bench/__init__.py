"""Measurements: what an op, a step, a link costs. Ratios come from one interleaved run, with their spread."""
