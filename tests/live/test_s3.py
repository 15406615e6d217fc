"""Goal: checkpoints on S3 as on a disk: written, listed, read, deleted; and an endpoint that fails or hangs is an
error in bounded time, never a wait without end nor an empty list.

Method: moto's S3 behind a real HTTP socket, spoken to through s3:// URLs with s3fs. A small proxy in front of it
answers with errors for a while, or not at all. What must hold for whole processes (the variable that fsspec reads when
it is imported, the exit while a call hangs) is tried in whole processes.
"""

from __future__ import annotations

import http.client
import http.server
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import checkpoint_runs as runs
import numpy as np
import pytest
from save_worlds import OWNER, Server, find
from save_worlds import load as load_saves

from regrow.checkpoint import storage
from regrow.checkpoint.chunks import Chunk, Rows, read_chunk, write_chunk
from regrow.checkpoint.load import verify
from regrow.checkpoint.manifest import MANIFEST, Cut, Manifest, TableInfo, chunk_name
from regrow.checkpoint.saves_write import delete_run, list_owners, read_saves
from regrow.checkpoint.staging import Stager
from regrow.checkpoint.storage import Known, Storage
from regrow.cli import main as cli
from regrow.core.names import cut_id, piece_name
from regrow.errors import StorageError

moto_server = pytest.importorskip("moto.server")
pytest.importorskip("s3fs")

pytestmark = pytest.mark.live

TABLE = TableInfo(name="t", rows=1000, dim=16, states=(("momentum1", 1),), init_bound=0.1, index=0)
CUTS = [cut_id(step, "s3") for step in range(3)]
FULL, DELTA = piece_name(None, CUTS[0]), piece_name(CUTS[0], CUTS[1])


class Door(http.server.ThreadingHTTPServer):
    """In front of S3: passes requests on, refuses the next `errors` of them, or holds them until let go."""

    daemon_threads = True

    def __init__(self, behind: str) -> None:
        super().__init__(("127.0.0.1", 0), Visitor)
        self.behind = urlsplit(behind).netloc
        self.errors = 0
        self.requests = 0
        self.open = threading.Event()
        self.open.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Visitor(http.server.BaseHTTPRequestHandler):
    server: Door
    protocol_version = "HTTP/1.1"

    def handle_request(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.requests += 1
        self.server.open.wait()
        if self.server.errors > 0:
            self.server.errors -= 1
            return self.answer(503, [], b"")
        connection = http.client.HTTPConnection(self.server.behind, timeout=60)
        try:
            connection.request(self.command, self.path, body, dict(self.headers))
            reply = connection.getresponse()
            self.answer(reply.status, reply.getheaders(), reply.read())
        finally:
            connection.close()

    def answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers:
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        length = dict(headers).get("Content-Length", "0") if self.command == "HEAD" else str(len(body))
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = handle_request


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """The address of an S3 with one bucket."""
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    connection = http.client.HTTPConnection(host, port, timeout=60)
    connection.request("PUT", "/bucket", headers={"Host": f"{host}:{port}"})
    assert connection.getresponse().status == 200
    connection.close()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(autouse=True)
def environment(s3: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As a user sets it; and nothing of this machine's own accounts."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "FSSPEC_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # botocore's own, so that ours are seen
    monkeypatch.setattr(storage, "WAIT_SECONDS", 0.01)


@pytest.fixture
def door(s3: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Door]:
    with Door(s3) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.open.set()
        server.shutdown()
        thread.join()


@pytest.fixture
def url() -> str:
    return f"s3://bucket/{uuid.uuid4().hex}"


def rows(number: int) -> Chunk:
    ids = np.arange(number, 1000, 3, dtype=np.uint32)
    momentum = np.arange(len(ids), dtype=np.float32)[:, None]
    return {"t": Rows(ids, np.full((len(ids), 16), number, np.float32), {"momentum1": momentum})}


def write_piece(store: Storage, source: str | None, step: int) -> Manifest:
    target = Cut(id=CUTS[step], step=step, marks=(), created=0.0, job={}, extra={})
    name = piece_name(source, target.id)
    chunks = [
        write_chunk(store, name, chunk_name("s0of1", number, "zstd"), rows(number), encoding="zstd", shard="s0of1")
        for number in range(2)
    ]
    manifest = Manifest(
        source=source, target=target, tables=(TABLE,), seed=1, chunks=tuple(chunks), encoding="zstd", made_by="a test"
    )
    store.write_manifest(manifest)
    return manifest


def check(store: Storage, manifest: Manifest) -> None:
    for number, info in enumerate(manifest.chunks):
        found = read_chunk(store, manifest, info)["t"]
        assert np.array_equal(found.ids, rows(number)["t"].ids)
        assert np.array_equal(found.weight, rows(number)["t"].weight)


def test_pieces(url: str) -> None:
    store, other = Storage.open(url), Storage.open(f"{url}/")
    assert (other.pieces(), other.list_unfinished(), other.manifests()) == ([], [], ([], []))
    full, delta = write_piece(store, None, 0), write_piece(store, CUTS[0], 1)
    store.write(f"{piece_name(CUTS[1], CUTS[2])}/s0of1-00000.safetensors", b"half of something")
    assert other.pieces() == [FULL, DELTA]  # nothing of the first listing is remembered
    assert other.list_unfinished() == [piece_name(CUTS[1], CUTS[2])]
    assert other.manifests() == ([full, delta], [])
    assert other.names(FULL) == {
        MANIFEST: len(store.read(f"{FULL}/{MANIFEST}")),
        **{chunk.name: chunk.bytes for chunk in full.chunks},
    }
    check(other, full)
    store.delete_piece(FULL)
    store.delete_piece(FULL)
    assert (other.pieces(), other.names(FULL)) == ([DELTA], {})
    check(other, delta)
    with pytest.raises(StorageError, match="it is not there") as caught:
        other.read_manifest(FULL)
    assert caught.value.missing


def test_saves_of_one_server(url: str) -> None:
    """Saved, claimed, loaded, gone when a full makes them unneeded; and an endpoint that fails looks like no answer."""
    store = Storage.open(url)
    server = Server(store, np.random.default_rng(0), 0, {})
    for count in (40, 5, 5):
        server.update(count)
        server.save()
    second = Server(Storage.open(f"{url}/"), server.random, 1, server.durable)
    assert load_saves(store, second.writer.claim(find_marks=lambda: (0,))) == server.model
    server.update(5)
    server.save(full=True)
    second.update(5)
    second.save()
    assert load_saves(store, find(store)) == second.model
    second.save(full=True)
    assert [save.number for save in read_saves(store, OWNER).manifests] == [3]
    assert load_saves(store, find(store)) == second.model
    assert (store.pieces(), store.list_unfinished()) == ([], [])
    assert len(delete_run(store, "run")) == 1
    assert (list_owners(store), find(store)) == ([], None)


def test_saves_when_the_endpoint_fails(url: str, door: Door) -> None:
    store = Storage.open(url)
    server = Server(store, np.random.default_rng(0), 0, {})
    server.update(20)
    server.save()
    door.errors = 10**6
    with pytest.raises(StorageError):
        find(store)
    server.update(5)
    with pytest.raises(StorageError):
        server.save()
    door.errors = 0
    server.save()
    assert load_saves(store, find(store)) == server.model


def test_a_manifest_that_is_known_is_not_read_again(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store, known = Storage.open(url), Known()
    full, delta = write_piece(store, None, 0), write_piece(store, CUTS[0], 1)
    assert store.manifests(known) == ([full, delta], [])
    store.write(f"{DELTA}/{MANIFEST}", store.read(f"{FULL}/{MANIFEST}"))
    with monkeypatch.context() as patched:
        reads: list[str] = []
        really = store.read_manifest
        patched.setattr(store, "read_manifest", lambda name: (reads.append(name), really(name))[1])
        manifests, broken = store.manifests(known)
    assert manifests == [full] and [name for name, _ in broken] == [DELTA]
    assert reads == [DELTA], "the other one has not changed"


def test_a_manifest_of_another_piece(url: str) -> None:
    store = Storage.open(url)
    write_piece(store, None, 0)
    store.write(f"{DELTA}/{MANIFEST}", store.read(f"{FULL}/{MANIFEST}"))
    manifests, broken = store.manifests()
    assert [manifest.name for manifest in manifests] == [FULL]
    assert broken == [(DELTA, f"{DELTA}/{MANIFEST}: is the manifest of {FULL}")]


def test_a_whole_chunk_through_staging(url: str, tmp_path: Path) -> None:
    """16 MiB in one put."""
    store = Storage.open(url)
    count = (16 << 20) // (17 * 4 + 4)
    table = TableInfo(name="t", rows=count, dim=16, states=(("momentum1", 1),), init_bound=0.1, index=0)
    weight = np.random.default_rng(1).random((count, 16), np.float32)
    large = {"t": Rows(np.arange(count, dtype=np.uint32), weight, {"momentum1": weight[:, :1]})}
    with Stager(store, directory=tmp_path / "staging") as stager:
        for number in range(2):
            stager.submit(FULL, chunk_name("s0of1", number), large, shard="s0of1")
        infos = stager.finish(FULL)
    assert [info.bytes > 16 << 20 for info in infos] == [True] * 2
    target = Cut(id=CUTS[0], step=0, marks=(), created=0.0, job={}, extra={})
    manifest = Manifest(source=None, target=target, tables=(table,), seed=1, chunks=tuple(infos), made_by="a test")
    store.write_manifest(manifest)
    assert np.array_equal(read_chunk(store, manifest, infos[1])["t"].weight, weight)


def test_no_such_bucket() -> None:
    store = Storage.open("s3://no-such-bucket/run")
    with pytest.raises(StorageError, match="is the bucket or directory there"):
        store.write("x/y", b"z")


def test_no_credentials(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(StorageError, match="are credentials and permissions right"):
        Storage.open(url).write("x/y", b"z")


def test_errors_for_a_while_are_not_seen(door: Door, url: str) -> None:
    store = Storage.open(url)
    full = write_piece(store, None, 0)
    for use in (lambda: write_piece(store, CUTS[0], 1), lambda: check(store, full), lambda: store.delete_piece(DELTA)):
        door.errors = 2
        use()
        assert door.errors == 0
    assert store.pieces() == [FULL]


def test_errors_for_ever(door: Door, url: str, tmp_path: Path) -> None:
    store = Storage.open(url)
    full = write_piece(store, None, 0)
    door.errors = 10**6
    with pytest.raises(StorageError, match=f"cannot write {url}/"):
        write_piece(store, CUTS[0], 1)
    for ask in (store.pieces, store.manifests):
        with pytest.raises(StorageError, match=f"cannot list {url}"):
            ask()
    with Stager(store, directory=tmp_path / "staging") as stager:
        stager.submit(DELTA, chunk_name("s0of1", 0), rows(0), shard="s0of1")
        with pytest.raises(StorageError, match="cannot write"):
            stager.finish(DELTA)
        door.errors = 0
        stager.submit(DELTA, chunk_name("s0of1", 0), rows(0), shard="s0of1")
        assert len(stager.finish(DELTA)) == 1
    check(store, full)


def test_nobody_there(door: Door, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A port that nobody listens on."""
    with Door("http://nowhere") as gone:
        monkeypatch.setenv("AWS_ENDPOINT_URL", gone.url)
    with pytest.raises(StorageError, match="Could not connect"):
        Storage.open(url, attempts=1).read("x")


def test_a_hanging_endpoint(door: Door, url: str) -> None:
    """Each call ends on time; once the endpoint answers again, so do we."""
    store = Storage.open(url)
    full = write_piece(store, None, 0)
    door.open.clear()
    impatient = Storage.open(url, timeout_seconds=0.3)
    for ask in (impatient.pieces, lambda: impatient.read(f"{FULL}/{MANIFEST}"), lambda: impatient.write("x/y", b"z")):
        with pytest.raises(StorageError, match=r"no answer within 0.3 s"):
            ask()
    door.open.set()
    check(store, full)


CHILD = """if True:
    import sys
    from regrow.checkpoint.storage import Storage
    from regrow.errors import StorageError
    try:
        print(Storage.open(sys.argv[1], timeout_seconds=float(sys.argv[2])).pieces())
    except StorageError as error:
        print(error.message)
"""


def run_child(url: str, seconds: float, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", CHILD, url, str(seconds)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, **changes},
    )


def test_a_hanging_endpoint_does_not_keep_the_process(door: Door, url: str) -> None:
    door.open.clear()
    done = run_child(url, 1.0)
    assert done.stdout == f"cannot list {url}: no answer within 1 s\n"
    assert done.stderr == ""
    assert door.requests == 1


def test_both_variables_name_an_endpoint(door: Door, url: str, s3: str) -> None:
    """fsspec's own is the stronger one, but it is read when fsspec is imported and no later. All other tests use
    that of the AWS tools."""
    write_piece(Storage.open(url), None, 0)
    nowhere = "http://127.0.0.1:9"
    done = run_child(url, 60.0, AWS_ENDPOINT_URL=nowhere, FSSPEC_S3_ENDPOINT_URL=s3)
    assert (done.stdout, done.stderr) == (f"['{FULL}']\n", "")


def test_training(url: str, tmp_path: Path) -> None:
    """A server dies, and all begin again from S3; then another run, of other servers, goes on from an older cut."""
    plan = {"until": ["server 1 life 1"]}
    died = runs.run(tmp_path / "died", ckpt=url, steps=80, kill=("server:1@step:60",), plan=plan)
    cuts = runs.check(died)
    (restore,) = died.summary["restores"]
    assert restore["cut"] in [None, *(cut.id for cut in cuts)]
    options = {"protection": "none", "servers": 1, "steps": 80}
    resumed = runs.run(tmp_path / "resumed", resume=f"{url}@{cuts[0].id}", **options)
    assert resumed.summary["model_sha256"] == died.summary["model_sha256"]
    assert [problem for problem in verify(Storage.open(url)) if problem.harmful] == []


def test_ages_of_unfinished_pieces(url: str) -> None:
    store = Storage.open(url)
    store.write(f"{FULL}/s0of1-00000.safetensors", b"half of something")
    (found,) = store.look_at_unfinished()
    assert (found.name, found.bytes) == (FULL, 17)
    assert found.changed is not None
    assert found.seconds(time.time()) < 3600.0


def test_a_bucket_that_is_not_there_is_said_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    line = "train --model tiny --steps 3 --protect delta --ckpt s3://buckte/run"
    assert cli.run(line.split()) == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: --ckpt s3://buckte/run: there is no bucket buckte",
        "hint: make it, or name another place",
    ]
    assert list(tmp_path.iterdir()) == []
    assert Storage.open("s3://bucket/a/new/place").find_missing() is None


@pytest.mark.parametrize("command", ["ls", "verify", "show", "prune --dry-run"])
def test_a_bucket_or_prefix_that_is_not_there_is_no_empty_list(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["ckpt", *command.split(), "s3://buckte/run"]) == 2
    assert capsys.readouterr().err.startswith("error: s3://buckte/run: there is no bucket buckte\n")
    assert cli.run(["ckpt", *command.split(), f"s3://bucket/{uuid.uuid4().hex}"]) == 2
    assert capsys.readouterr().err.startswith("error: s3://bucket/")
