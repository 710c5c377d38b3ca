"""The algebra of algorithms: names, WHO/WHAT/WHEN, graphs of gossip, robust aggregation.

Everything here is a value or arithmetic; nothing communicates. Uses: errors, codecs.
"""
