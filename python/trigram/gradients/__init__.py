"""What a backward pass does with a model's gradients: buckets, what they pass, averages.

What lives here: the synchronization of gradients (``gradient_sync``), one pass (``gradient_pass``), buckets
and their order, filters, compressors; and in ``updating`` who updates the weights. Uses: ``steps``,
``optimizers`` and what is below them.
"""
