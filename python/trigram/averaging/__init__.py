"""A flat tensor becomes its mean over the ranks: full, through codecs, by PowerSGD, robust, in two levels.

What lives here: the groups that a model talks in (``groups.py``), what an average is (``average.py``), one file
for each kind of average, sample weights, the non-finite check, sparse gradients. Uses: errors, runtime,
codecs, algorithms, gpu, collectives.
"""
