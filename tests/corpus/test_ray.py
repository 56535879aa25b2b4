"""Corpora on Ray: the same files as without it, whatever is killed. Run by make test-ray."""

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

import attnflow as af
from attnflow.corpus.job import CorpusJob, StoredJob
from attnflow.corpus.local import WorkerPlan
from attnflow.corpus.manifest import Manifest, ShardRecord
from attnflow.corpus.on_ray import compute_on_ray
from attnflow.corpus.rows import CorpusRow, InputFiles, PendingShards
from attnflow.corpus.status import verify_corpus
from tests.corpora import sentences

pytestmark = pytest.mark.ray
SHARD_ROWS, SHARDS = 40, 40
OPTIONS = ["--shard-rows", str(SHARD_ROWS), "--importance", "blank_out"]
OPTIONS += ["--edges", "attention,contribution"]
# a node that does not answer is given up after about three seconds
HEALTH = {
    "initial_delay_ms": "1000",
    "period_ms": "1000",
    "failure_threshold": "3",
    "timeout_ms": "2000",
}
PATIENCE = 120.0


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows for all shards; two are no texts, and a folder is called as the bundled model."""
    folder = tmp_path_factory.mktemp("input")
    (folder / "verb-number").mkdir()
    lines = [
        json.dumps({"text": text}).encode() for text in [*sentences(SHARD_ROWS * SHARDS - 2), ""]
    ]
    lines.append(
        b'{"text": "two halves: \\ud83d\x80"}'
    )  # lone surrogates, which must not be joined on the way
    (folder / "texts.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    return folder / "texts.jsonl"


@pytest.fixture(scope="module")
def unbroken(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """What the local engine makes of them."""
    options: dict[str, Any] = {"importance": "blank_out", "edges": ["attention", "contribution"]}
    return af.explain_corpus(
        texts, tmp_path_factory.mktemp("local"), shard_rows=SHARD_ROWS, **options
    )


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """Of every process of a cluster: its token, in a folder with a name short enough for sockets."""
    folder = Path(tempfile.mkdtemp(prefix="af"))
    token = folder / "token"
    token.write_text(secrets.token_hex(16))
    token.chmod(0o600)
    health = {f"RAY_health_check_{name}": value for name, value in HEALTH.items()}
    outside = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    yield {
        **outside,
        **health,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_TMPDIR": str(folder),
    }
    shutil.rmtree(folder, ignore_errors=True)


class Cluster:
    """Nodes of Ray on this machine, one core each."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        self.nodes: list[subprocess.Popen[bytes]] = []
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"

    def add(self) -> None:
        """Start one more node, the head first."""
        where = [f"--address={self.address}"]
        if not self.nodes:
            where = [
                "--head",
                f"--port={self.port}",
                f"--temp-dir={self.environment['RAY_TMPDIR']}/ray",
                "--include-dashboard=false",
            ]
        command = [
            sys.executable,
            "-m",
            "ray.scripts.scripts",
            "start",
            *where,
            "--node-ip-address=127.0.0.1",
            "--num-cpus=1",
        ]
        options: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.nodes.append(
            subprocess.Popen(
                [*command, "--object-store-memory=200000000", "--block"],
                env=self.environment,
                **options,
            )
        )

    def size(self) -> int:
        """How many nodes have joined."""
        command = [
            sys.executable,
            "-m",
            "ray.scripts.scripts",
            "status",
            f"--address={self.address}",
        ]
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True
        ).stdout.count(" 1 node_")

    def kill(self, node: subprocess.Popen[bytes]) -> None:
        """Everything that a node has started, at once."""
        for pid in [node.pid, *descendants(node.pid)]:
            kill(pid)
        node.wait()


@pytest.fixture
def cluster(environment: dict[str, str]) -> Iterator[Cluster]:
    made = Cluster(environment)
    try:
        made.add()
        wait_for(lambda: is_open(made.port), "the head")
        made.add()
        wait_for(lambda: made.size() == 2, "the second node")
        yield made
    finally:
        for node in made.nodes:
            made.kill(node)


def is_open(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


def kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    """Processes that a process has started, and that those have."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(status.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):  # it has ended
            continue
        if parent == pid:
            found += [int(status.parent.name), *descendants(int(status.parent.name))]
    return found


def processes(pid: int, name: str) -> list[int]:
    """Those among the descendants that Ray calls so."""
    return [each for each in descendants(pid) if name in command_of(each)]


def command_of(pid: int) -> str:
    """What a process is called; nothing if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def wait_for(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"waited too long for {what}"
        time.sleep(0.05)


running: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Runs of a test that failed end with it."""
    yield
    while running:
        process = running.pop()
        if process.poll() is None:
            for pid in [process.pid, *descendants(process.pid)]:
                kill(pid)
            process.communicate()


def run(
    texts: Path, out: Path, environment: dict[str, str], *options: str
) -> subprocess.Popen[str]:
    """The command, as a user runs it."""
    command = [
        sys.executable,
        "-m",
        "attnflow",
        "corpus",
        "run",
        texts.name,
        "--out",
        str(out),
        *OPTIONS,
        "--engine",
        "ray",
        *options,
    ]
    process = subprocess.Popen(
        command,
        env=environment,
        cwd=texts.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    running.append(process)
    return process


def shards_done(out: Path) -> int:
    return len(Manifest.read(out).shards) if (out / "manifest.json").exists() else 0


def ended(process: subprocess.Popen[str], out: Path) -> Manifest:
    """What a run made that has ended well, with a whole folder."""
    printed, complaints = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, complaints
    assert f"{SHARD_ROWS * SHARDS - 2:,} texts in {SHARDS} shards; 2 errors" in printed
    assert verify_corpus(out) == []
    return Manifest.read(out)


def files(manifest: Manifest) -> tuple[dict[int, ShardRecord], str | None]:
    """The checksums of all files: where they are the same, the files are, byte for byte."""
    return manifest.shards, manifest.errors_sha256


def test_a_local_ray_writes_the_same_files(
    texts: Path, tmp_path: Path, environment: dict[str, str], unbroken: Manifest
) -> None:
    assert files(ended(run(texts, tmp_path / "out", environment), tmp_path / "out")) == files(
        unbroken
    )


def test_a_node_that_is_killed_costs_no_row(
    texts: Path, tmp_path: Path, cluster: Cluster, unbroken: Manifest
) -> None:
    out = tmp_path / "out"
    process = run(texts, out, cluster.environment, "--address", cluster.address)
    _, second = cluster.nodes
    wait_for(
        lambda: shards_done(out) >= 6 and processes(second.pid, "Explainer"),
        "the first shards, and an actor on the second node",
    )
    cluster.kill(second)
    assert shards_done(out) < SHARDS - 6
    assert files(ended(process, out)) == files(unbroken)


def test_any_process_that_is_killed_costs_no_row(
    texts: Path, tmp_path: Path, cluster: Cluster, unbroken: Manifest
) -> None:
    out = tmp_path / "out"
    process = run(texts, out, cluster.environment, "--address", cluster.address)
    head, second = cluster.nodes
    for node, name in (
        (head, "ray::ShardWriter"),
        (head, "ray::ReadShards"),
        (head, "Explainer"),
        (second, "Explainer"),
    ):
        before = shards_done(out)
        wait_for(
            lambda: shards_done(out) >= before + 3 and processes(node.pid, name),  # noqa: B023
            f"shards, and {name}",
        )
        for pid in processes(node.pid, name):
            kill(pid)
    assert files(ended(process, out)) == files(unbroken)


def test_a_run_that_is_killed_goes_on_with_either_engine(
    texts: Path, tmp_path: Path, environment: dict[str, str], unbroken: Manifest
) -> None:
    out = tmp_path / "out"
    process = run(texts, out, environment)
    wait_for(lambda: shards_done(out) >= 3, "the first shards")
    actors = [
        pid for name in ("Explainer", "ray::ShardWriter") for pid in processes(process.pid, name)
    ]
    kill(process.pid)
    process.communicate()
    wait_for(
        lambda: not any(command_of(pid) for pid in actors),
        "the end of the actors of a run that was killed",
    )
    assert shards_done(out) < SHARDS
    af.explain_corpus(texts, out, shard_rows=SHARD_ROWS, importance=["blank_out"])
    (out / "shard-00004.parquet").unlink()
    assert files(ended(run(texts, out, environment), out)) == files(unbroken)
    again = run(
        texts, out, environment, "--address", "auto"
    )  # nothing is left to do, so no cluster is needed
    assert files(ended(again, out)) == files(unbroken)


def test_ctrl_c_says_how_far_it_came_and_what_resumes(
    texts: Path, tmp_path: Path, environment: dict[str, str], unbroken: Manifest
) -> None:
    out = tmp_path / "out"
    process = run(texts, out, environment)
    wait_for(lambda: shards_done(out) >= 1, "the first shard")
    process.send_signal(signal.SIGINT)
    printed, complaints = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert "Traceback" not in printed + complaints
    rows = f"{shards_done(out) * SHARD_ROWS:,} of {SHARD_ROWS * SHARDS:,} rows"
    assert f"attnflow: interrupted after {rows}; the same command resumes the run" in complaints
    assert files(ended(run(texts, out, environment), out)) == files(unbroken)


def test_an_input_that_is_removed_is_one_line(
    texts: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    copy, out = tmp_path / "copy.jsonl", tmp_path / "out"
    copy.write_bytes(texts.read_bytes())
    process = run(copy, out, environment)
    wait_for(lambda: shards_done(out) >= 1, "the first shard")
    copy.unlink()
    printed, complaints = process.communicate(timeout=PATIENCE)
    assert process.returncode != 0
    assert "Traceback" not in printed + complaints
    assert "copy.jsonl changed while it was read" in complaints
    assert 1 <= shards_done(out) < SHARDS


@pytest.mark.parametrize(
    ("address", "line"),
    [
        ("127.0.0.1:9", "cannot connect to Ray at 127.0.0.1:9: Connection refused"),
        (
            "ray://127.0.0.1:10001",
            "address must be HOST:PORT of the cluster, or auto, on one of its machines;"
            " got ray://127.0.0.1:10001",
        ),
        ("[::1]:9", "cannot connect to Ray at [::1]:9: "),
        (
            "auto",
            "no Ray cluster was found at auto: start one (ray start --head), or give its address",
        ),
        ("a..b:6379", "cannot connect to Ray at a..b:6379: "),
        (
            "somewhere",
            "address must be HOST:PORT of the cluster, or auto, on one of its machines;"
            " got somewhere",
        ),
    ],
)
def test_a_cluster_that_is_not_there_is_one_line(
    address: str, line: str, texts: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    process = run(texts, tmp_path / "out", environment, "--address", address)
    printed, complaints = process.communicate(timeout=PATIENCE)
    assert process.returncode != 0
    assert "Traceback" not in printed + complaints
    assert line in " ".join(complaints.split())


def test_an_error_of_the_reader_is_one_line(
    tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_TMPDIR"):
        monkeypatch.setenv(name, environment[name])

    class Broken(PendingShards):
        def __iter__(self) -> Iterator[tuple[int, list[CorpusRow]]]:
            raise af.FileError("cannot read it")

    job = CorpusJob(StoredJob(("raw",), {}, "focal", "sum", (), 1), 1, 1, False)
    with pytest.raises(af.FileError, match=r"^cannot read it$"):
        list(
            compute_on_ray(
                WorkerPlan("verb-number", "", job, tmp_path),
                Broken(InputFiles(()), 1, frozenset([0])),
                1,
                None,
            )
        )


def test_what_is_not_ray_is_told_from_it(
    texts: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{server.server_port}"
        _, complaints = run(texts, tmp_path / "out", environment, "--address", address).communicate(
            timeout=PATIENCE
        )
        server.shutdown()
    assert f"cannot connect to Ray at {address}: what answers there is not Ray" in complaints
