"""Decide who can reach a network address."""

from __future__ import annotations

import ipaddress

PRIVATE_DOMAINS = ("localhost", "localdomain", "local", "lan", "internal", "home.arpa", "test")
"""Domains in which nobody can register a name."""


def is_loopback(host: str) -> bool:
    """True if only this machine can reach the host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name: it may resolve to anything
        return False


def is_private_name(host: str) -> bool:
    """True if outsiders cannot redirect this host by DNS: it is an IP address, a name without dots, or in a private domain."""
    name = host.removesuffix(".").lower()
    if "." not in name or name.endswith(tuple(f".{domain}" for domain in PRIVATE_DOMAINS)):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
