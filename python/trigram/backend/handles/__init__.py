"""What a call returns: its handle (``work.py``), the handle's future (``futures.py``), the thread on which
callbacks of futures run (``callbacks.py``), and timeouts (``timeouts.py``)."""
