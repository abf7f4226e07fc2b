"""State notifications for systemd (`Type=notify`): sd_notify(3), one datagram of lines NAME=value.

Without NOTIFY_SOCKET, outside systemd, nothing is sent.
"""

from __future__ import annotations

import logging
import os
import socket
import time

LOG = logging.getLogger("millrace.service")


def notify(**states: str) -> None:
    """Sends states named as in sd_notify(3): READY="1", STOPPING="1", WATCHDOG="1", STATUS="a line for people"."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):  # the abstract namespace
        address = "\0" + address[1:]
    message = "\n".join(f"{name}={' '.join(value.split())}" for name, value in states.items())
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC) as sender:
            sender.sendto(message.encode(), address)
    except OSError as error:  # not a reason to end the service
        LOG.warning("NOTIFY_SOCKET: %s", error.strerror)


class Watchdog:
    """Notifies systemd's watchdog (`WatchdogSec=`) twice in each period."""

    def __init__(self) -> None:
        # sd_watchdog_enabled(3): the period is for the process WATCHDOG_PID.
        microseconds = os.environ.get("WATCHDOG_USEC", "")
        ours = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self._every_s = int(microseconds) / 2e6 if ours and microseconds.isdecimal() else None
        self._told = float("-inf")

    def beat(self, status: str) -> None:
        """Call this often, from the loop that the watchdog supervises."""
        now = time.monotonic()
        if self._every_s is not None and now - self._told >= self._every_s:
            self._told = now
            notify(WATCHDOG="1", STATUS=status)
