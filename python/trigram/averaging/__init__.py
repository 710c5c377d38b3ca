"""Averages of one-dimensional tensors over ranks: in full, through codecs, PowerSGD, robust, in two levels.
Public: ``GradientAverage``, ``GradientBucket``, ``GradientFilter``.

What lives here: the process groups of a model (``groups.py``), the protocol of an average (``average.py``),
one file for each kind of average, sample weights, the non-finite check and sparse gradients. Uses: errors,
runtime, codecs, algorithms, gpu, collectives.
"""

from trigram.averaging.gradient_average import GradientAverage
from trigram.averaging.gradient_filter import GradientBucket, GradientFilter

__all__ = ["GradientAverage", "GradientBucket", "GradientFilter"]
