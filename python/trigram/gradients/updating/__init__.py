"""Who updates the weights of a model whose gradients are averaged, and when.

What lives here: what step hooks call around passes and steps (``updates``), updates in backward
(``fused_updates``), and what an optimizer's groups hold and hide meanwhile. Uses:
``gradients`` around it, and what that may use.
"""
