"""What TCP costs the processors: a transfer through this machine's loopback interface, in processor time."""

from __future__ import annotations

import socket
import threading
import time

NBYTES = 64 << 20
CHUNK = 512 << 10
MESSAGES = 2000
PATIENCE_SECONDS = 20.0


def message() -> float:
    """Processor seconds for sending a short message and receiving it."""
    mine, theirs = socket.socketpair()
    with mine, theirs:
        before = time.process_time()
        for _ in range(MESSAGES):
            mine.sendall(b"trigram.")
            theirs.recv(8)
        return (time.process_time() - before) / MESSAGES


def measure() -> float:
    """Processor seconds for a byte that is sent and one that is received, as a rank does in an all-reduce.

    Real links cost more than loopback (interrupts, smaller segments) or less (offloading); a job that runs
    measures its own, see :mod:`trigram.plan.measuring`.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = threading.Thread(target=_send, args=(server.getsockname(),), daemon=True)
        server.settimeout(PATIENCE_SECONDS)
        before = time.process_time()
        sender.start()
        connection, _ = server.accept()
        with connection:
            connection.settimeout(PATIENCE_SECONDS)
            buffer = bytearray(CHUNK)
            received = 0
            while received < NBYTES and (count := connection.recv_into(buffer)):
                received += count
        sender.join(PATIENCE_SECONDS)
        return (time.process_time() - before) / NBYTES


def _send(address: tuple[str, int]) -> None:
    with socket.create_connection(address, PATIENCE_SECONDS) as connection:
        chunk = bytes(CHUNK)
        for _ in range(NBYTES // CHUNK):
            connection.sendall(chunk)
