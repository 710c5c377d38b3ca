"""Which algorithms there are: names, WHO/WHAT/WHEN and options, gossip topologies, robust aggregation.

What lives here: the trigram and the resolved algorithm (``trigram.py``), the table of names (``names.py``),
parsing and checking (``parse.py``), topologies (``graphs.py``), the arithmetic of robust aggregation
(``robust.py``). Nothing here communicates. Uses: errors, codecs.
"""
