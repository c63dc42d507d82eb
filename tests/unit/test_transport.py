"""The connections to SGLang."""

import asyncio
import socket

from eagle3_ray.sglang.transport import open_session

HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n"  # the body never comes, so the connection stays the answer's


def test_a_connection_to_a_machine_that_is_gone_breaks_in_minutes_and_not_with_the_timeout_of_an_hour() -> None:
    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD)

    async def options() -> dict[str, int]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server, open_session(None, 3600) as session, session.get(url) as response:
            assert response.connection is not None
            assert response.connection.transport is not None
            held = response.connection.transport.get_extra_info("socket")
            names = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
            found = {name: held.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in names}
            return found | {"SO_KEEPALIVE": held.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)}

    found = asyncio.run(options())
    assert found["SO_KEEPALIVE"] == 1
    assert found["TCP_KEEPIDLE"] + found["TCP_KEEPINTVL"] * found["TCP_KEEPCNT"] <= 120  # nothing was sent: s
    assert 0 < found["TCP_USER_TIMEOUT"] <= 120_000  # something was sent and not acknowledged: ms
