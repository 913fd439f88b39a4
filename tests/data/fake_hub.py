"""A Hub on this machine that serves one folder as a model, and fails as told.

    python tests/data/fake_hub.py FOLDER LOG STATUS TIMES

Each request that it gets is a line of LOG: status, method, path.
TIMES: how often each path is answered with STATUS first; -1: always. Prints its port.
"""

import hashlib
import json
import sys
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Handler(BaseHTTPRequestHandler):
    folder, log, status, times = None, None, 503, 0
    failed, lock = Counter(), Lock()

    def log_message(self, *_):
        """Say nothing on stderr."""

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        path = self.path.partition("?")[0]
        with self.lock:
            fails = self.times < 0 or self.failed[path] < self.times
            self.failed[path] += 1
            status, headers, content = (self.status, {"Retry-After": "0"}, b"{}") if fails else self.found(path)
            with self.log.open("a") as log:
                log.write(f"{status} {self.command} {path}\n")
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)

    def found(self, path: str) -> tuple[int, dict, bytes]:
        files = {file.name: file.read_bytes() for file in self.folder.iterdir() if file.is_file()}
        if "/revision/" in path or path == "/api/models/some/model":
            return 200, {"Content-Type": "application/json"}, json.dumps({"id": "some/model", "sha": COMMIT}).encode()
        if "/tree/" in path:
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in files.items()
            ]
            return 200, {"Content-Type": "application/json"}, json.dumps(entries).encode()
        name = path.rpartition("/")[2]
        if "/resolve/" in path and name in files:
            etag = hashlib.sha1(files[name]).hexdigest()
            return 200, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}, files[name]
        return 404, {"X-Error-Code": "EntryNotFound" if "/resolve/" in path else "RepoNotFound"}, b"{}"


def main() -> None:
    folder, log, status, times = sys.argv[1:]
    Handler.folder, Handler.log, Handler.status, Handler.times = Path(folder), Path(log), int(status), int(times)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
