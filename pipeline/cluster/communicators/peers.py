"""TCP connections from one rank to every other: authenticated by a shared secret, and no wait hangs.

Every wait also notices the loss of any other rank: the kernel closes a killed process's sockets at once, and a host
that vanishes fails its keep-alives within seconds. Like NCCL's, the traffic is not encrypted: keep it on a private
network.
"""

from __future__ import annotations

import errno
import hmac
import os
import secrets
import select
import socket
import struct
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pipeline.cluster.communicators.base import Deadline
from pipeline.errors import Aborted, ClusterError, CommunicatorError, RankLost

Endpoint = tuple[str, int]

_NONCE_BYTES = 32
_PROOF_BYTES = 32
_HELLO = struct.Struct(f"<8sI{_NONCE_BYTES}s")
_MAGIC = b"millrank"
# How long a stranger that connects and sends nothing can delay the ranks.
_HANDSHAKE_SECONDS = 2.0
_SLICE_SECONDS = 0.05
_KEEP_ALIVE = {socket.TCP_KEEPIDLE: 2, socket.TCP_KEEPINTVL: 1, socket.TCP_KEEPCNT: 5}
_UNSENT_MS = 7000


@dataclass(frozen=True, kw_only=True)
class Membership:
    """The members of an epoch, as the cluster sends it to every rank.

    endpoints : where each rank listens, by rank
    secret    : valid for this epoch only
    """

    rank: int
    epoch: int
    endpoints: tuple[Endpoint, ...]
    secret: bytes


def listen(host: str) -> socket.socket:
    """A listening socket to which the higher ranks connect, even before this rank accepts."""
    listener = socket.socket(_family(host), socket.SOCK_STREAM)
    try:
        listener.bind((host, 0))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise ClusterError(f"cannot listen on {host} for a gang's other ranks: {error.strerror}") from error
    return listener


class Peers:
    """A rank's connections to its peers, by rank."""

    def __init__(self, peers: Mapping[int, socket.socket]) -> None:
        self._sockets = peers
        self._rank_of = {peer.fileno(): rank for rank, peer in peers.items()}
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = threading.Lock()
        self._closed = False
        self._poll = select.poll()
        self._poll.register(self._wake, select.POLLIN)
        for peer in peers.values():
            self._poll.register(peer, select.POLLRDHUP)

    def send(self, rank: int, view: Any, deadline: Deadline, what: str) -> None:
        """Send all of a flat uint8 array or bytes to one rank."""
        peer, sent = self._sockets[rank], 0
        while sent < len(view):
            try:
                sent += peer.send(view[sent:], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                self._wait(rank, select.POLLOUT, deadline, what)
            except OSError as error:
                raise _lost(rank, error) from error

    def receive(self, rank: int, view: Any, deadline: Deadline, what: str) -> None:
        """Fill a flat uint8 array or bytearray from one rank."""
        peer, received = self._sockets[rank], 0
        view = memoryview(view)
        while received < len(view):
            try:
                count = peer.recv_into(view[received:], 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                self._wait(rank, select.POLLIN, deadline, what)
                continue
            except OSError as error:
                raise _lost(rank, error) from error
            if count == 0:
                raise _lost(rank)
            received += count

    def check(self) -> None:
        """Raise RankLost or Aborted if a connection has ended; never waits."""
        self._poll_once(0.0, None, 0)

    def abort(self) -> None:
        """End every wait, here and on the other ranks. Callable from any thread."""
        with self._closing:
            if self._closed:
                return
            os.eventfd_write(self._wake, 1)
            for peer in self._sockets.values():
                with suppress(OSError):
                    peer.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with self._closing:
            if self._closed:
                return
            self._closed = True
            os.close(self._wake)
            for peer in self._sockets.values():
                peer.close()

    def _wait(self, rank: int, event: int, deadline: Deadline, what: str) -> None:
        """Wait until a connection is ready; the end of any other connection also ends the wait."""
        peer = self._sockets[rank]
        self._poll.modify(peer, event | select.POLLRDHUP)
        try:
            while not self._poll_once(deadline.left_s, rank, event):
                deadline.check(f"{what}: rank {rank}")
        finally:
            if not self._closed:
                self._poll.modify(peer, select.POLLRDHUP)

    def _poll_once(self, timeout_s: float, rank: int | None, event: int) -> bool:
        """Whether the connection to `rank` is ready. Data sent before its end is read first."""
        found = dict(self._poll.poll(timeout_s * 1000))
        if self._wake in found:
            raise Aborted("given up on this rank")
        ready = False
        for number, events in found.items():
            if self._rank_of[number] == rank and events & event & select.POLLIN:
                ready = True
            elif events & ~select.POLLOUT:
                raise _lost(self._rank_of[number])
            else:
                ready = True
        return ready


def connect(listener: socket.socket, member: Membership, deadline: Deadline, given_up: threading.Event) -> Peers:
    """Connect to the lower ranks of an epoch and accept the higher ones. The caller keeps the listener.

    Raises RankLost, DeadlineExceeded, or Aborted as soon as `given_up` is set.
    """
    peers: dict[int, socket.socket] = {}
    try:
        for rank in range(member.rank):
            peers[rank] = _connect_to(member, rank, deadline, given_up)
        higher = set(range(member.rank + 1, len(member.endpoints)))
        while not higher <= peers.keys():
            connection = _accept(listener, higher - peers.keys(), deadline, given_up)
            admitted = _authenticate(connection, member, higher - peers.keys())
            if admitted is None:
                connection.close()
            else:
                peers[admitted] = connection
        for peer in peers.values():
            _keep_alive(peer)
        return Peers(peers)
    except BaseException:
        for peer in peers.values():
            peer.close()
        raise


def _connect_to(member: Membership, rank: int, deadline: Deadline, given_up: threading.Event) -> socket.socket:
    try:
        peer = _dial(member.endpoints[rank], rank, deadline, given_up)
    except OSError as error:
        raise _lost(rank, error) from error
    try:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        peer.sendall(_HELLO.pack(_MAGIC, member.rank, nonce))
        answer = _read(peer, _NONCE_BYTES + _PROOF_BYTES, deadline, given_up)
        theirs, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
        if not hmac.compare_digest(proof, _proof(member, rank, member.rank, nonce + theirs)):
            raise RankLost(f"what listens for rank {rank} does not know the secret of epoch {member.epoch}")
        peer.sendall(_proof(member, member.rank, rank, nonce + theirs))
        return peer
    except OSError as error:
        peer.close()
        raise _lost(rank, error) from error
    except BaseException:
        peer.close()
        raise


def _dial(endpoint: Endpoint, rank: int, deadline: Deadline, given_up: threading.Event) -> socket.socket:
    """Open a connection, polling `given_up` while the host does not answer."""
    peer = socket.socket(_family(endpoint[0]), socket.SOCK_STREAM)
    try:
        peer.setblocking(False)
        error = peer.connect_ex(endpoint)
        poll = select.poll()
        poll.register(peer, select.POLLOUT)
        while error == errno.EINPROGRESS:
            _check_given_up(given_up)
            deadline.check(f"a connection to rank {rank}")
            if poll.poll(_SLICE_SECONDS * 1000):
                error = peer.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error))
        return peer
    except BaseException:
        peer.close()
        raise


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _accept(listener: socket.socket, missing: set[int], deadline: Deadline, given_up: threading.Event) -> socket.socket:
    listener.settimeout(_SLICE_SECONDS)
    while True:
        _check_given_up(given_up)
        deadline.check(f"the connection of rank {', '.join(map(str, sorted(missing)))}")
        try:
            return listener.accept()[0]
        except TimeoutError:
            continue
        except OSError as error:
            raise Aborted(f"the listening socket is gone: {error}") from error


def _authenticate(connection: socket.socket, member: Membership, missing: set[int]) -> int | None:
    """The rank that has connected; None if it does not prove to be one of the missing ranks."""
    deadline = Deadline(_HANDSHAKE_SECONDS)
    never = threading.Event()
    try:
        magic, rank, theirs = _HELLO.unpack(_read(connection, _HELLO.size, deadline, never))
        if magic != _MAGIC or rank not in missing:
            return None
        nonce = secrets.token_bytes(_NONCE_BYTES)
        connection.sendall(nonce + _proof(member, member.rank, rank, theirs + nonce))
        proof = _read(connection, _PROOF_BYTES, deadline, never)
    except (OSError, CommunicatorError):
        return None
    return rank if hmac.compare_digest(proof, _proof(member, rank, member.rank, theirs + nonce)) else None


def _proof(member: Membership, speaker: int, listener: int, nonces: bytes) -> bytes:
    return hmac.digest(member.secret, struct.pack("<III", member.epoch, speaker, listener) + nonces, "sha256")


def _read(peer: socket.socket, count: int, deadline: Deadline, given_up: threading.Event) -> bytes:
    peer.settimeout(_SLICE_SECONDS)
    read = b""
    while len(read) < count:
        _check_given_up(given_up)
        deadline.check("the handshake")
        try:
            part = peer.recv(count - len(read))
        except TimeoutError:
            continue
        if not part:
            raise ConnectionResetError("closed during the handshake")
        read += part
    return read


def _check_given_up(given_up: threading.Event) -> None:
    if given_up.is_set():
        raise Aborted("given up before the ranks were connected")


def _keep_alive(peer: socket.socket) -> None:
    peer.setblocking(False)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE.items():
        peer.setsockopt(socket.IPPROTO_TCP, option, value)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNSENT_MS)


def _lost(rank: int, error: OSError | None = None) -> RankLost:
    return RankLost(f"rank {rank} is gone: {error.strerror or error if error else 'its connection has ended'}")
