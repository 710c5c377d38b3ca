"""The divided state of an optimizer in elastic jobs.

What lives here: the step hooks, and how parts move between ranks. Uses: ``sharded`` around it, and what that
may use.
"""
