"""The divided state of an optimizer in elastic jobs.

What lives here: the recovery from copies, and how parts move between ranks. Uses: ``sharded`` around it, and
what that may use.
"""
