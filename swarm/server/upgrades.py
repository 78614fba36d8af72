"""HTTP/1.1 for clients that offer another protocol beside it: they are answered as if they had not.

`curl --http2` and Java's HttpClient offer h2c with each first request. uvicorn's parser takes the offer for the end of the request, loses its
body, and reads it as the next request.
"""

from __future__ import annotations

import re

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_BEGINS = re.compile(rb"[A-Z]+ \S+ HTTP/1\.[01]\r\n")
_OFFER = re.compile(rb"(\r\n)upgrade(?=[ \t]*:)", re.IGNORECASE)


def declined(data: bytes) -> bytes:
    """A request without its offer: the header goes by a name that no parser knows, and all else stays where it was.

    Only in a head that lies in `data` whole, which is how both clients send it.
    """
    end = data.find(b"\r\n\r\n")
    if end < 0 or not _BEGINS.match(data):
        return data
    return _OFFER.sub(rb"\1x-offer", data[:end]) + data[end:]


class StraightHttp(HttpToolsProtocol):
    """uvicorn's own, which speaks nothing else on a connection."""

    def data_received(self, data: bytes) -> None:
        super().data_received(declined(data))
