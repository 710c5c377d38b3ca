"""What sockets alone cost: processor time to send and receive as many bytes as a training step does.

    python benches/hosts.py --hosts 2 --rate 1gbit -- benches/wire_cost.py

Two ranks; each sends 43.74 MB to the other in pieces of 512 KiB and receives as much, in two threads that do
nothing else: no checksums, sums, framing or pacing. What remains is the kernel's, and bounds what a library
that uses sockets can take. Rank 0 prints processor and elapsed milliseconds, ten times. The bytes are
checked.
"""

from __future__ import annotations

import os
import socket
import threading
import time

import hosts

BYTES = 43_740_000  # the gradients of the model of steptime.py
PIECE = 512 << 10
PORT = 29_999


def connect(rank: int) -> socket.socket:
    """A connection of the two ranks."""
    if rank == 0:
        with socket.create_server((hosts.address(), PORT)) as server:
            return server.accept()[0]
    for _ in range(300):
        try:
            return socket.create_connection((os.environ["MASTER_ADDR"], PORT))
        except ConnectionRefusedError:
            time.sleep(0.1)
    raise SystemExit("rank 0 does not answer")


def main() -> None:
    """Measures in one of two ranks."""
    rank = int(os.environ["RANK"])
    mine, got = memoryview(bytes([rank + 1]) * PIECE), bytearray(PIECE)
    with connect(rank) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def send() -> None:
            for at in range(0, BYTES, PIECE):
                peer.sendall(mine[: min(PIECE, BYTES - at)])

        for _ in range(10):
            time.sleep(0.3)
            spent, began = time.process_time(), time.perf_counter()
            sender = threading.Thread(target=send)
            sender.start()
            for at in range(0, BYTES, PIECE):
                size = min(PIECE, BYTES - at)
                if peer.recv_into(got, size, socket.MSG_WAITALL) != size:
                    raise SystemExit(f"rank {rank}: the peer is gone")
            sender.join()
            spent, elapsed = time.process_time() - spent, time.perf_counter() - began
            if got != bytes([2 - rank]) * PIECE:
                raise SystemExit(f"rank {rank}: the bytes are wrong")
            if rank == 0:
                print(f"{1e3 * spent:.0f} ms of the processor in {1e3 * elapsed:.0f} ms", flush=True)


if __name__ == "__main__":
    main()
