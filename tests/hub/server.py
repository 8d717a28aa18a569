"""The stand-in's HTTP: the routes for buckets that huggingface_hub calls, and the faults on the way."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from urllib.parse import urlencode

from aiohttp import web

from tests.hub.buckets import HubBucket, Json
from tests.hub.cas import BadUpload, Cas
from tests.hub.cas_routes import CasRoutes
from tests.hub.faults import Fault

PAGE = 1000
BODY_BYTES_MAX = 1 << 30

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
FAULT = web.RequestKey("fault", Fault)


class Refused(Exception):
    """An answer that ends a request."""

    def __init__(self, status: int, message: str, code: str = "") -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


@dataclass
class HubServer:
    """The state of a Hub with its routes. Tests change it from outside between requests."""

    tokens: dict[str, str] = field(default_factory=lambda: {"hf_alice": "alice", "hf_bob": "bob"})
    """User by token. Take one out and it has expired."""
    read_only: set[str] = field(default_factory=set)
    """Tokens without the right to write."""
    buckets: dict[str, HubBucket] = field(default_factory=dict)
    cas: Cas = field(default_factory=Cas)
    faults: list[Fault] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    """``METHOD /path status``, in order; the status is ``stalled`` or ``cut`` where nothing was answered."""
    page: int = PAGE
    """Entries of one page of a listing."""
    url: str = ""

    def app(self) -> web.Application:
        """The application, to be served at ``url``."""
        app = web.Application(middlewares=[self._faulty], client_max_size=BODY_BYTES_MAX)
        bucket = "/api/buckets/{owner}/{name}"
        app.add_routes(
            [
                web.get("/api/whoami-v2", self.whoami),
                web.post(bucket, self.create),
                web.get(bucket, self.info),
                web.get(f"{bucket}/tree", self.tree),
                web.get(f"{bucket}/tree/{{prefix:.*}}", self.tree),
                web.post(f"{bucket}/paths-info", self.paths_info),
                web.post(f"{bucket}/batch", self.batch),
                web.get(f"{bucket}/xet-{{scope:read|write}}-token", self.token),
                web.head("/buckets/{owner}/{name}/resolve/{path:.*}", self.resolve),
            ]
        )
        app.add_routes(CasRoutes(self.cas, lambda: self.url).routes())
        return app

    async def whoami(self, request: web.Request) -> web.Response:
        user = self._user(request)
        return web.json_response({"type": "user", "id": user, "name": user, "orgs": []})

    async def create(self, request: web.Request) -> web.Response:
        user, wanted = self._user(request), self._id(request)
        if wanted.partition("/")[0] != user or self._token(request) in self.read_only:
            raise Refused(403, f"You don't have the rights to create a bucket under {wanted}")
        url = f"{self.url}/buckets/{wanted}"
        if wanted in self.buckets:
            return web.json_response({"error": "You already created this bucket", "url": url}, status=409)
        settings: Json = await request.json()
        self.buckets[wanted] = HubBucket(wanted, private=settings.get("visibility") == "private")
        return web.json_response({"url": url})

    async def info(self, request: web.Request) -> web.Response:
        return web.json_response(self._bucket(request).info)

    async def tree(self, request: web.Request) -> web.Response:
        bucket, prefix = self._bucket(request), request.match_info.get("prefix", "")
        items = bucket.listed(prefix, recursive=request.query.get("recursive", "").lower() == "true")
        start = int(request.query.get("cursor", 0))
        headers = {}
        if start + self.page < len(items):
            query = urlencode({**request.query, "cursor": start + self.page})
            headers["Link"] = f'<{self.url}{request.rel_url.raw_path}?{query}>; rel="next"'
        return web.json_response(items[start : start + self.page], headers=headers)

    async def paths_info(self, request: web.Request) -> web.Response:
        files = self._bucket(request).files
        paths: Iterable[str] = (await request.json())["paths"]
        return web.json_response([files[path].described(path) for path in paths if path in files])

    async def batch(self, request: web.Request) -> web.Response:
        """Not a transaction: others may look between two operations, and some may fail."""
        bucket, fault = self._bucket(request, write=True), request.get(FAULT)
        operations: list[Json] = [json.loads(line) for line in (await request.text()).splitlines()]
        failed = []
        for number, operation in enumerate(operations):
            if fault is not None and fault.torn == number:
                raise asyncio.CancelledError
            refused = fault is not None and fault.partial is not None and number >= fault.partial
            wrong = "injected" if refused else bucket.apply(operation, self.cas)
            if wrong is not None:
                failed.append({"path": operation["path"], "error": wrong})
            await asyncio.sleep(0)
        done = len(operations) - len(failed)
        report = {"success": not failed, "processed": len(operations), "succeeded": done, "failed": failed}
        return web.json_response(report, status=200 if done else 422)

    async def token(self, request: web.Request) -> web.Response:
        scope = request.match_info["scope"]
        self._bucket(request, write=scope == "write")
        return web.json_response(CasRoutes.access(self.url, scope))

    async def resolve(self, request: web.Request) -> web.Response:
        bucket = self._bucket(request)
        file = bucket.files.get(request.match_info["path"])
        if file is None:
            raise Refused(404, "Entry not found", "EntryNotFound")
        headers = {
            "X-Xet-Hash": file.xet_hash,
            "X-Linked-Size": str(file.size),
            "ETag": f'"{file.xet_hash}"',
            "Link": f'<{self.url}/api/buckets/{bucket.id}/xet-read-token>; rel="xet-auth"',
        }
        return web.Response(headers=headers)

    @web.middleware
    async def _faulty(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        line = f"{request.method} {request.path}"
        fault = next((fault for fault in list(self.faults) if fault.takes(line)), None)
        status: object = "cut"
        try:
            answer = await self._answer(request, handler, fault)
            status = answer.status
            return answer
        except web.HTTPException as exc:
            status = exc.status
            raise
        except (asyncio.CancelledError, ConnectionResetError):
            if request.transport is not None:
                request.transport.close()
            raise
        finally:
            self.requests.append(f"{line} {status}")

    async def _answer(
        self, request: web.Request, handler: Handler, fault: Fault | None
    ) -> web.StreamResponse:
        if fault is not None:
            request[FAULT] = fault
            if fault.stall:
                await asyncio.Event().wait()
            if fault.status is not None:
                return _refusal(Refused(fault.status, fault.message), fault)
        try:
            answer = await handler(request)
        except Refused as refused:
            answer = _refusal(refused)
        except BadUpload as bad:
            answer = _refusal(Refused(400, str(bad)))
        if fault is not None and fault.lost:
            raise ConnectionResetError
        if fault is not None and fault.hidden:
            return web.json_response([])
        if fault is not None and fault.short is not None and isinstance(answer, web.Response):
            assert isinstance(answer.body, bytes)
            return web.Response(body=answer.body[: -fault.short], status=answer.status)
        return answer

    def _token(self, request: web.Request) -> str:
        return request.headers.get("Authorization", "").removeprefix("Bearer ")

    def _user(self, request: web.Request) -> str:
        if (user := self.tokens.get(self._token(request))) is not None:
            return user
        known = "Invalid credentials in Authorization header"
        raise Refused(401, known if self._token(request) else "Invalid username or password.")

    def _id(self, request: web.Request) -> str:
        return f"{request.match_info['owner']}/{request.match_info['name']}"

    def _bucket(self, request: web.Request, *, write: bool = False) -> HubBucket:
        """The bucket that a request names; a private one does not exist for others."""
        bucket = self.buckets.get(self._id(request))
        anonymous = not self._token(request)
        if bucket is not None and not bucket.private and anonymous and not write:
            return bucket
        user = self._user(request)
        if bucket is None or (bucket.private and user != bucket.owner):
            raise Refused(404, "Repository not found", "RepoNotFound")
        if write and (user != bucket.owner or self._token(request) in self.read_only):
            raise Refused(403, "You don't have the required permissions")
        return bucket


def _refusal(refused: Refused, fault: Fault | None = None) -> web.Response:
    headers = {"X-Error-Message": refused.message, **(fault.headers if fault is not None else {})}
    if refused.code:
        headers["X-Error-Code"] = refused.code
    return web.json_response({"error": refused.message}, status=refused.status, headers=headers)
