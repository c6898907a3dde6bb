"""Real servers on the loopback: plain HTTP that counts what it is asked, and S3."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


@dataclass
class Web:
    """A folder on a web server. `moods`: name -> how its requests are answered, the first one first."""

    folder: Path
    address: str = ""
    asked: Counter[str] = field(default_factory=Counter)  # GETs by name
    moods: dict[str, list[str]] = field(default_factory=dict)  # "500", "403", "cut", "silent"

    def of(self, name: str) -> str:
        return f"{self.address}/{name}"


@contextmanager
def web(folder: Path) -> Iterator[Web]:
    served = Web(folder)

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            served.asked[self.path.strip("/")] += 1
            self._answer(body=True)

        def _answer(self, *, body: bool) -> None:
            name = self.path.strip("/")
            path = served.folder / name
            moods = served.moods.get(name, [])
            mood = moods.pop(0) if moods and body else ""
            if mood == "silent":
                time.sleep(3)
                return
            code = int(mood) if mood.isdigit() else 200 if path.is_file() else 404
            data = path.read_bytes() if code == 200 else b""
            self.send_response(code)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if body:
                self.wfile.write(data[: len(data) // 2] if mood == "cut" else data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
