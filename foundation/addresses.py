"""What an address says of who can reach it."""

from __future__ import annotations

import ipaddress

PRIVATE_DOMAINS = ("localhost", "localdomain", "local", "lan", "internal", "home.arpa", "test")
"""Where nobody can register a name."""


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches that host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name: it may resolve to anything
        return False


def is_private_name(host: str) -> bool:
    """Whether no stranger can have that host stand for a machine of his choice: an address, a name without dots, or one that no
    public DNS knows.
    """
    name = host.removesuffix(".").lower()
    if "." not in name or name.endswith(tuple(f".{domain}" for domain in PRIVATE_DOMAINS)):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
