"""A bad wire in user space, for kernels without `tc netem`: carries every frame between two interfaces, late or never.

    python wire.py p1 r1 DELAY_MS LOSS_PERCENT

Both directions get the delay and the loss. Prints one line when it carries.
"""

import random
import selectors
import socket
import sys
import time
from collections import deque

# linux/if_packet.h; Python's socket module does not name them.
SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING, ETH_P_ALL = 263, 15, 23, 3
SO_RCVBUFFORCE = 33
LONGEST_FRAME = 10 + 14 + 65536
QUEUE = 1000  # frames under way in one direction, netem's default; what comes beyond is lost


def tap(interface: str) -> socket.socket:
    """Return a socket for whole frames behind a 10-byte header, also large offloaded ones and open checksums."""
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    sock.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    sock.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    sock.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 64 << 20)
    sock.bind((interface, ETH_P_ALL))
    return sock


def carry(left: socket.socket, right: socket.socket, delay_s: float, loss: float) -> None:
    """Carry frames until killed; a frame that the other side cannot take is lost, as on a wire."""
    chance, ready, under_way = random.Random(7), selectors.DefaultSelector(), {}
    for here, there in (left, right), (right, left):
        under_way[here] = deque()
        ready.register(here, selectors.EVENT_READ, there)
    while True:
        due = min((queue[0][0] for queue in under_way.values() if queue), default=None)
        for key, _ in ready.select(None if due is None else max(0.0, due - time.monotonic())):
            frame = key.fileobj.recv(LONGEST_FRAME)
            if chance.random() >= loss and len(under_way[key.fileobj]) < QUEUE:
                under_way[key.fileobj].append((time.monotonic() + delay_s, frame, key.data))
        now = time.monotonic()
        for queue in under_way.values():
            while queue and queue[0][0] <= now:
                _, frame, there = queue.popleft()
                try:
                    there.send(frame)
                except OSError as error:
                    print(f"lost a frame of {len(frame)} bytes: {error}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    ends = tap(sys.argv[1]), tap(sys.argv[2])
    print("carrying", flush=True)
    carry(*ends, float(sys.argv[3]) / 1000, float(sys.argv[4]) / 100)
