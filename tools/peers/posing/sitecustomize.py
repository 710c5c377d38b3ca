"""In every process of a suite that has this folder in ``PYTHONPATH``: who asks for gloo gets Trigram, which
says that it is gloo's, as in ``tests/backend/shipped.py``."""

import trigram  # registers the backend
from tests.backend import shipped

assert trigram.__version__
shipped.pose()
