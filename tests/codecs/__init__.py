"""Codecs: encoded bytes, error bounds, feedback, decoding of any bytes, GPU kernels against the CPU."""
