"""Real servers for tests of remotes: SSH, HTTP with ranges, S3, and a proxy that delays, cuts, repeats and corrupts."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def in_background(serve: Callable[[], Any]) -> None:
    """A thread that serves until the process ends."""
    threading.Thread(target=serve, daemon=True).start()


async def _serve_ssh() -> None:
    """An SSH server with files, which asks for no password."""
    import asyncssh

    class Open(asyncssh.SSHServer):
        def begin_auth(self, username: str) -> bool:
            return False

    key = asyncssh.generate_private_key("ssh-ed25519")
    server = await asyncssh.listen("127.0.0.1", 0, server_factory=Open, server_host_keys=[key], sftp_factory=True)
    print(server.get_port(), flush=True)
    await server.wait_closed()


class RangeHandler(http.server.SimpleHTTPRequestHandler):
    """Files and listings of a folder, with range requests."""

    def do_GET(self) -> None:
        """A whole file, a listing, or the bytes that were asked for."""
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        path = self.translate_path(self.path)
        if asked is None or not os.path.isfile(path):
            return super().do_GET()
        data = Path(path).read_bytes()
        start, end = int(asked[1]), min(int(asked[2] or len(data)) + 1, len(data))
        if start >= len(data):
            self.send_error(416)
            return None
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(data)}")
        self.send_header("Content-Length", str(end - start))
        self.end_headers()
        self.wfile.write(data[start:end])
        return None

    def log_message(self, *args: Any) -> None:
        """Says nothing."""


def _serve_http(folder: str) -> None:
    """A folder behind an HTTP server."""

    def handler(*args: Any) -> RangeHandler:
        return RangeHandler(*args, directory=folder)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    print(server.server_port, flush=True)
    server.serve_forever()


def _serve_s3() -> None:
    """An S3 server that keeps everything in memory."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    print(server.get_host_and_port()[1], flush=True)
    threading.Event().wait()


@contextlib.contextmanager
def server(kind: str, folder: Path | str = "") -> Iterator[int]:
    """The port of a server that runs in a process of its own: `ssh`, `http` (of a folder) or `s3`."""
    command = [sys.executable, "-W", "ignore", __file__, kind, str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def s3_settings(port: int) -> dict[str, str]:
    """The variables with which the driver finds a server."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "tests",
        "AWS_SECRET_ACCESS_KEY": "tests",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def make_bucket(name: str) -> None:
    """A bucket at the endpoint of the variables."""
    import botocore.session

    botocore.session.get_session().create_client("s3").create_bucket(Bucket=name)


class Proxy:
    """A proxy in front of a port; a test sets what becomes of each piece that the server sends."""

    def __init__(self, port: int) -> None:
        self.to = port
        # Called with the number of the connection and a piece of the answer; None ends the connection.
        self.answer: Callable[[int, bytes], bytes | None] = lambda number, piece: piece
        self.refuses = False
        self.connections = 0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        in_background(self._serve)

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                self.connections += 1
                in_background(lambda client=client, number=self.connections: self._connect(client, number))

    def _connect(self, client: socket.socket, number: int) -> None:
        if self.refuses:
            client.close()
            return
        with contextlib.suppress(OSError), client, socket.create_connection(("127.0.0.1", self.to)) as server:
            in_background(lambda: _copy(client, server, lambda piece: piece))
            _copy(server, client, lambda piece: self.answer(number, piece))

    def close(self) -> None:
        """Takes no more connections."""
        self._listening.close()


def _copy(source: socket.socket, to: socket.socket, change: Callable[[bytes], bytes | None]) -> None:
    with contextlib.suppress(OSError):
        while piece := source.recv(1 << 16):
            changed = change(piece)
            if changed is None:
                break
            to.sendall(changed)
    for end in (source, to):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":
    asked, place = sys.argv[1:]
    if asked == "ssh":
        asyncio.run(_serve_ssh())
    elif asked == "s3":
        _serve_s3()
    else:
        _serve_http(place)
