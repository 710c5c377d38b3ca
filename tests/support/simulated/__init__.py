"""Elastic jobs in virtual time: the real code in Python, over an engine and a store that are simulated.

Ranks are threads of which one runs at a time (`scheduler`). What they wait for is in `network`, which loses
ranks, delays what others learn of it, and has calls end on some ranks and fail on others, as the engine may.
`script` is what each rank runs, and what must hold in the end. The same seed gives the same run.
"""
