"""The stand-in's HTTP for hf_xet: tokens, uploads of xorbs and shards, plans of files, ranges of xorbs."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from aiohttp import web

from tests.hub.buckets import Json
from tests.hub.cas import Cas, Term

TOKEN_LIFE_S = 3600
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")
_TOKEN = re.compile(r"Bearer xet-(read|write)-(\d+)")


class CasRoutes:
    """The routes over one storage."""

    def __init__(self, cas: Cas, url: Callable[[], str]) -> None:
        self._cas = cas
        self._url = url

    def routes(self) -> list[web.RouteDef]:
        """To be added to an application."""
        return [
            web.post("/cas/v1/xorbs/{prefix}/{hash}", self.put_xorb),
            web.post("/cas/v1/shards", self.put_shard),
            web.get("/cas/v2/reconstructions/{hash}", self.plan),
            web.get("/cas/xorbs/{hash}", self.read_xorb),
            web.post("/v1/telemetry", self.telemetry),
        ]

    @staticmethod
    def access(url: str, scope: str) -> Json:
        """What the Hub gives out for an hour: a token for the storage, and where that is."""
        expires = int(time.time()) + TOKEN_LIFE_S
        return {"accessToken": f"xet-{scope}-{expires}", "exp": expires, "casUrl": f"{url}/cas"}

    async def put_xorb(self, request: web.Request) -> web.Response:
        _check(request, "write")
        new = self._cas.put_xorb(request.match_info["hash"], await request.read())
        return web.json_response({"was_inserted": new})

    async def put_shard(self, request: web.Request) -> web.Response:
        _check(request, "write")
        self._cas.put_shard(await request.read())
        return web.json_response({"result": 1})

    async def plan(self, request: web.Request) -> web.Response:
        """How to put a file, or a range of it, together."""
        _check(request, "read")
        name = request.match_info["hash"]
        size = self._cas.size(name)
        if size is None:
            raise web.HTTPNotFound
        wanted = _RANGE.fullmatch(request.headers.get("Range", ""))
        first, end = (int(wanted[1]), min(size, int(wanted[2]) + 1)) if wanted else (0, size)
        if first >= end:
            raise web.HTTPRequestRangeNotSatisfiable
        skip, terms = self._cas.cut(name, first, end)
        sources: dict[str, list[Json]] = {}
        for term in terms:
            source = self._source(term)
            if source not in sources.setdefault(term.xorb, []):
                sources[term.xorb].append(source)
        described = [
            {
                "hash": term.xorb,
                "unpacked_length": term.size,
                "range": {"start": term.start, "end": term.end},
            }
            for term in terms
        ]
        return web.json_response({"offset_into_first_range": skip, "terms": described, "xorbs": sources})

    async def read_xorb(self, request: web.Request) -> web.Response:
        """A range of a xorb; the address itself is the right to read it."""
        xorb = self._cas.xorbs.get(request.match_info["hash"])
        wanted = _RANGE.fullmatch(request.headers.get("Range", ""))
        if xorb is None or wanted is None:
            raise web.HTTPNotFound
        return web.Response(status=206, body=xorb.data[int(wanted[1]) : int(wanted[2]) + 1])

    async def telemetry(self, request: web.Request) -> web.Response:
        await request.read()
        return web.Response()

    def _source(self, term: Term) -> Json:
        starts = self._cas.xorbs[term.xorb].starts
        chunks = {"start": term.start, "end": term.end}
        span = {"start": starts[term.start], "end": starts[term.end] - 1}
        url = f"{self._url()}/cas/xorbs/{term.xorb}"
        return {"url": url, "ranges": [{"chunks": chunks, "bytes": span}]}


def _check(request: web.Request, scope: str) -> None:
    token = _TOKEN.fullmatch(request.headers.get("Authorization", ""))
    if token is None or int(token[2]) < time.time():
        raise web.HTTPUnauthorized
    if scope == "write" and token[1] != "write":
        raise web.HTTPForbidden
