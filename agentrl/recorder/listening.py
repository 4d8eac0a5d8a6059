"""Sockets of our servers."""

import socket


def bound(host: str, port: int) -> socket.socket:
    """A socket that holds requests until they are answered; port 0 takes a free one. Raises OSError if the address is
    in use."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = host == "::" and socket.has_dualstack_ipv6()
    try:
        listening = socket.create_server((host, port), family=family, backlog=1024, dualstack_ipv6=both)
    except OSError as error:
        why = str(error.strerror or error).partition(" (while")[0]  # Python adds the address, which callers say too
        raise OSError(error.errno, why) from None
    # connections inherit it. asyncio sets it only on sockets that name their protocol; without it the body of an answer
    # waits up to 40 ms until the client has acknowledged the headers
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening
