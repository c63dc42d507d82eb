"""HTTP to SGLang: a session, and GET and POST whose failures are told apart by what to do about them."""

import asyncio
import socket
from contextlib import AbstractAsyncContextManager
from typing import Any

import aiohttp

from eagle3_ray.sglang.protocol import Refused, Transient, Unauthorized

_IDLE_S = 3  # sglang 0.5.23 closes a connection that was idle for 5 s; a request sent just then would be lost
_SILENT_S = 90  # a machine that acknowledges nothing for so long is gone; one whose answer takes hours acknowledges


def open_session(api_key: str | None, timeout_s: float) -> aiohttp.ClientSession:
    """A session without a connection limit (the fleet decides what is in flight); call it inside a running loop."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S, socket_factory=_watched_socket),
        timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=10),
        headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
    )


def _watched_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """A socket whose connection breaks when the other machine has lost its power, of which no packet tells."""
    family, kind, protocol, _, _ = address
    watched = socket.socket(family, kind, protocol)
    watched.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6, "TCP_USER_TIMEOUT": _SILENT_S * 1000}
    for name, value in options.items():
        if hasattr(socket, name):  # all of them on Linux
            watched.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return watched


async def get(session: aiohttp.ClientSession, url: str, timeout_s: float = 20) -> Any:
    """The JSON behind a GET. Raises Transient, Refused or Unauthorized."""
    return await _send(session.get(url, timeout=aiohttp.ClientTimeout(total=timeout_s)))


async def post(session: aiohttp.ClientSession, url: str, body: Any) -> Any:
    """The JSON behind a POST. Raises Transient, Refused or Unauthorized."""
    return await _send(session.post(url, json=body))


def ask(url: str, body: Any = None, api_key: str | None = None, timeout_s: float = 20) -> Any:
    """The JSON behind one GET, or one POST of `body`, for callers without an event loop. Raises RequestFailed."""

    async def once() -> Any:
        async with open_session(api_key, timeout_s) as session:
            return await (get(session, url, timeout_s) if body is None else post(session, url, body))

    return asyncio.run(once())


async def _send(request: AbstractAsyncContextManager[aiohttp.ClientResponse]) -> Any:
    try:
        async with request as response:
            return await _json(response)
    except (aiohttp.ClientError, TimeoutError, asyncio.IncompleteReadError, OSError) as error:
        raise _lost(error) from None


async def _json(response: aiohttp.ClientResponse) -> Any:
    status = response.status
    if status == 200:
        try:
            return await response.json()
        except (ValueError, RecursionError) as error:
            raise Transient("not JSON", str(error)[:200]) from None
    detail = (await response.text(errors="replace"))[:500]
    if status == 429 or status == 408 or status >= 500:
        wish = response.headers.get("Retry-After", "")
        raise Transient(f"HTTP {status}", detail, float(wish) if wish.isdigit() else 0.0)
    if status in (400, 413, 422):
        raise Refused(f"HTTP {status}: {detail}")
    raise Unauthorized(status, detail)


def _lost(error: BaseException) -> Transient:
    if isinstance(error, TimeoutError):
        return Transient("timeout", "")
    if isinstance(error, aiohttp.ContentTypeError):
        return Transient("not JSON", error.message)
    return Transient("connection lost", f"{type(error).__name__} {error}".strip())
