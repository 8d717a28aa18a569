"""A TLS proxy as cloud providers have it: it demands a bearer token, then passes WebSockets on."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import trustme

HEAD_BYTES_MAX = 1 << 16


class Certificates:
    """A certificate for this machine, its key, and the authority to trust; files in ``directory``."""

    def __init__(self, directory: Path) -> None:
        authority = trustme.CA()
        made = authority.issue_cert("localhost", "127.0.0.1")
        self.ca, self.chain, self.key = (directory / name for name in ("ca.pem", "chain.pem", "key.pem"))
        authority.cert_pem.write_to_path(self.ca)
        made.private_key_pem.write_to_path(self.key)
        for pem in made.cert_chain_pems:
            pem.write_to_path(self.chain, append=True)

    def server(self) -> ssl.SSLContext:
        """For a server's side of TLS."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(self.chain, self.key)
        return context


class Proxy:
    """Passes connections to ``port`` on if they bring the token of the moment."""

    def __init__(self, port: int, token: str) -> None:
        self.token = token
        self.refused = 0
        self.passed = 0
        self.url = ""
        self._upstream = port
        self._writers: set[asyncio.StreamWriter] = set()

    @asynccontextmanager
    async def open(self, certificates: Certificates) -> AsyncIterator[Proxy]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=certificates.server())
        self.url = f"wss://localhost:{server.sockets[0].getsockname()[1]}/nats"
        try:
            yield self
        finally:
            server.close()
            self.cut()

    def cut(self) -> None:
        """Break every connection, as a proxy that is restarted does."""
        for writer in tuple(self._writers):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            with suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                head = await reader.readuntil(b"\r\n\r\n")
                if f"authorization: bearer {self.token}".encode() not in head.lower().splitlines():
                    self.refused += 1
                    writer.write(
                        b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
                    )
                    await writer.drain()
                    return
                self.passed += 1
                await self._pass_on(head, reader, writer)
        finally:
            self._writers.discard(writer)
            writer.transport.abort()

    async def _pass_on(self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._upstream)
        up_writer.write(head)
        ways = [
            asyncio.create_task(_copy(reader, up_writer)),
            asyncio.create_task(_copy(up_reader, writer)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            up_writer.transport.abort()
            for way in ways:
                way.cancel()
            await asyncio.wait(ways)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(HEAD_BYTES_MAX):
            writer.write(data)
            await writer.drain()
