"""A hub on loopback: repositories at one commit, their files in ranges, uploads and commits, and faults on request."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

LARGE = 4096  # bytes from which a file is kept apart, as in LFS
TOKEN = "hf_of_this_test"


@dataclass
class Repo:
    files: dict[str, bytes]
    card: Mapping[str, object] = field(default_factory=dict)
    gated: bool = False
    private: bool = False

    @property
    def commit(self) -> str:
        named = "".join(f"{name}:{sha256(self.files[name])}\n" for name in sorted(self.files))
        return hashlib.sha1(named.encode()).hexdigest()


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    range: str | None
    authorization: str | None


@dataclass
class Fault:
    """What happens to requests whose path contains `path`: a status, or a connection that is cut after `cut` bytes, or
    with `hangs` brings no more until the client closes it, or a `page` in place of the answer.
    """

    path: str
    status: int = 0
    cut: int = -1
    hangs: bool = False
    page: bytes = b""
    times: int = 1


class FakeHub:
    """`repos` by kind and name, such as "models/org/name". Files of LARGE bytes come from another host, `cdn`."""

    def __init__(self, port: int) -> None:
        self.url, self.cdn = f"http://127.0.0.1:{port}", f"http://localhost:{port}"
        self.repos: dict[str, Repo] = {}
        self.contents: dict[str, bytes] = {}  # uploaded, by sha256
        self.faults: list[Fault] = []
        self.requests: list[Request] = []
        self.read_only = False

    def add(self, name: str, files: Mapping[str, bytes], kind: str = "models", **settings: object) -> Repo:
        self.repos[f"{kind}/{name}"] = Repo(dict(files), **settings)  # pyright: ignore[reportArgumentType]
        return self.repos[f"{kind}/{name}"]

    def fault(self, path: str) -> Fault | None:
        for found in self.faults:
            if found.path in path and found.times:
                found.times -= 1
                return found
        return None

    def asked(self, part: str) -> list[Request]:
        return [request for request in self.requests if part in request.path]


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """Runs the hub as long as the context lasts."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.hub = FakeHub(server.server_address[1])  # pyright: ignore[reportAttributeAccessIssue]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server.hub  # pyright: ignore[reportAttributeAccessIssue]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, format: str, *arguments: object) -> None:
        pass

    @property
    def hub(self) -> FakeHub:
        return self.server.hub  # pyright: ignore[reportAttributeAccessIssue]

    def do_GET(self) -> None:
        self._handle()

    do_HEAD = do_POST = do_PUT = do_GET

    def _handle(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self._body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.hub.requests.append(
            Request(self.command, path, self.headers.get("Range"), self.headers.get("Authorization"))
        )
        fault = self.hub.fault(path)
        if fault is not None and fault.status:
            return self._send(fault.status, {"error": "as the test wants it"})
        if fault is not None and fault.page:
            self.send_response(200)
            if len(fault.page) < LARGE:  # a longer one is sent without its length
                self.send_header("Content-Length", str(len(fault.page)))
            self.end_headers()
            self.wfile.write(fault.page)
            return
        self._fault = fault or Fault(path)
        parts = path.strip("/").split("/")
        if parts[0] == "cdn":
            return self._send_content(self.hub.contents[parts[1]])
        if parts[0] == "upload":
            self.hub.contents[parts[1]] = self._body
            return self._send(200, {})
        if parts[:2] == ["api", "validate-yaml"]:
            return self._send(200, {"errors": [], "warnings": []})
        if parts[:3] == ["api", "repos", "create"]:
            return self._create()
        kind = next((part for part in parts if part in ("datasets", "models")), "models")
        parts = [part for part in parts if part not in ("api", kind)]
        name = "/".join(parts[:2]).removesuffix(".git")
        repo = self.hub.repos.get(f"{kind}/{name}")
        if repo is None or (repo.private and not self._has_token()):
            return self._send(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        match parts[2:]:
            case [] | ["revision", _]:
                return self._info(name, repo, parts[3] if parts[2:] else "main")
            case ["resolve", _, *file]:
                return self._resolve(repo, "/".join(file))
            case ["preupload", _]:
                return self._preupload()
            case ["info", "lfs", "objects", "batch"]:
                return self._batch()
            case ["commit", _]:
                return self._commit(name, repo)
        return self._send(404, {"error": "not a path of this hub"})

    def _has_token(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _info(self, name: str, repo: Repo, revision: str) -> None:
        if revision not in ("main", repo.commit):
            return self._send(404, {"error": "Invalid rev"}, {"X-Error-Code": "RevisionNotFound"})
        files = []
        for file, content in repo.files.items():
            blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            entry: dict[str, object] = {"rfilename": file, "size": len(content), "blobId": blob}
            if len(content) >= LARGE:
                entry["lfs"] = {"sha256": sha256(content), "size": len(content), "pointerSize": 100}
            files.append(entry)
        self._send(
            200, {"id": name, "sha": repo.commit, "siblings": files, "cardData": repo.card, "private": repo.private}
        )

    def _resolve(self, repo: Repo, file: str) -> None:
        if repo.gated and not self._has_token():
            return self._send(403, {"error": "Access is restricted"}, {"X-Error-Code": "GatedRepo"})
        if file not in repo.files:
            return self._send(404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"})
        content = repo.files[file]
        if len(content) >= LARGE:
            self.hub.contents[sha256(content)] = content
            self.send_response(302)
            self.send_header("Location", f"{self.hub.cdn}/cdn/{sha256(content)}")
            self.send_header("Content-Length", "0")
            return self.end_headers()
        return self._send_content(content)

    def _send_content(self, content: bytes) -> None:
        asked = self.headers.get("Range")
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(len(content) - start))
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        if self._fault.cut >= 0:
            self.wfile.write(content[start : start + self._fault.cut])
            self.close_connection = True
            if self._fault.hangs:
                self.connection.recv(1)
            return
        self.wfile.write(content[start:])

    def _create(self) -> None:
        asked = json.loads(self._body)
        name = f"{asked['organization']}/{asked['name']}"
        if not self._has_token():
            return self._send(401, {"error": "Invalid username or password."})
        if self.hub.read_only:
            return self._send(403, {"error": "You don't have the rights to create a model here"})
        existed = f"models/{name}" in self.hub.repos
        if not existed:
            self.hub.add(name, {".gitattributes": b""}, private=asked.get("visibility") == "private")
        self._send(409 if existed else 200, {"url": f"{self.hub.url}/{name}", "error": "exists"})

    def _preupload(self) -> None:
        if not self._has_token():
            return self._send(401, {"error": "Invalid username or password."})
        if self.hub.read_only:
            return self._send(403, {"error": "no write access"})
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["size"] >= LARGE else "regular",
                "shouldIgnore": False,
                "oid": None,
            }
            for file in json.loads(self._body)["files"]
        ]
        return self._send(200, {"files": files})

    def _batch(self) -> None:
        objects = [
            {**one, "actions": {"upload": {"href": f"{self.hub.cdn}/upload/{one['oid']}"}}}
            for one in json.loads(self._body)["objects"]
        ]
        self._send(200, {"transfer": "basic", "objects": objects})

    def _commit(self, name: str, repo: Repo) -> None:
        for line in self._body.splitlines():
            value = json.loads(line)["value"]
            match json.loads(line)["key"]:
                case "file":
                    repo.files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    repo.files[value["path"]] = self.hub.contents[value["oid"]]
        url = f"{self.hub.url}/{name}/commit/{repo.commit}"
        self._send(200, {"commitUrl": url, "commitOid": repo.commit, "success": True})

    def _send(self, status: int, content: object, headers: Mapping[str, str] | None = None) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
