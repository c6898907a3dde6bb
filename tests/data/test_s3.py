"""S3, against moto's server: a real HTTP server on the loopback that speaks S3's protocol."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
import requests

from clipscale.data.assign import Order
from clipscale.data.index import ShardIndex
from clipscale.data.index_file import build_index, load_index
from clipscale.data.loader import TrainLoader
from clipscale.data.locations import expand_shards
from clipscale.data.mixture import Mixture
from clipscale.data.store import Store
from clipscale.errors import DataError

from .shard_files import PLAIN, tokenize, write_shards

# Of botocore, on this Python; not ours to mend.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")

SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """Killed at the end, and gone with this process."""
    command = [sys.executable, "-W", "ignore", "-c", SERVER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


@pytest.fixture
def bucket(endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, list[str]]]:
    """A bucket with three shards, and the same shards on the disk."""
    for name, value in {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": "/nowhere",
    }.items():
        monkeypatch.setenv(name, value)
    paths = write_shards(tmp_path, [20, 20, 20])
    client = boto3.client("s3", endpoint_url=endpoint)
    name = f"bucket-{time.monotonic_ns()}"
    client.create_bucket(Bucket=name)
    for path in paths:
        client.upload_file(path, name, f"train/{Path(path).name}")
    client.close()
    yield name, paths
    requests.post(f"{endpoint}/moto-api/reset", timeout=10)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "cache"), timeout_s=5.0, attempts=2, wait_s=0.02)


def keys(index: ShardIndex, epochs: int) -> list[list[str]]:
    mixture = Mixture.of(index, Order(index.counts, 0, 4, 5), PLAIN, 20)
    with TrainLoader(mixture, tokenize, workers=1) as loader:
        return [next(loader).keys for _ in range(3 * epochs)]


def test_folders_globs_and_braces_of_a_bucket(bucket: tuple[str, list[str]], store: Store) -> None:
    name, paths = bucket
    addresses = tuple(f"s3://{name}/train/{Path(path).name}" for path in paths)
    assert expand_shards(f"s3://{name}/train/", store) == addresses
    assert expand_shards(f"s3://{name}/train/s-00[12].tar", store) == addresses[1:]
    assert expand_shards(f"s3://{name}/train/s-{{000..001}}.tar::{paths[2]}", store) == (*addresses[:2], paths[2])
    with pytest.raises(DataError, match="val/: holds no"):
        expand_shards(f"s3://{name}/val/", store)


def test_the_second_epoch_reads_nothing_remote(
    bucket: tuple[str, list[str]], store: Store, endpoint: str, tmp_path: Path
) -> None:
    name, paths = bucket
    addresses = expand_shards(f"s3://{name}/train/", store)
    built, walked = build_index(addresses, tmp_path / "index.jsonl", store=store, threads=2)
    assert (built.counts, walked) == ((20, 20, 20), 3)
    index = load_index(tmp_path / "index.jsonl", addresses, store)
    requests.post(f"{endpoint}/moto-api/reset", timeout=10)  # the bucket is gone
    assert keys(index, 2) == keys(ShardIndex.scan(paths), 2)


def test_a_shard_written_anew_is_noticed_by_its_tag(
    bucket: tuple[str, list[str]], store: Store, endpoint: str, tmp_path: Path
) -> None:
    name, paths = bucket
    addresses = expand_shards(f"s3://{name}/train/", store)
    build_index(addresses, tmp_path / "index.jsonl", store=store, threads=2)
    data = bytearray(Path(paths[1]).read_bytes())
    data[600] ^= 1  # the same size
    client = boto3.client("s3", endpoint_url=endpoint)
    client.put_object(Bucket=name, Key="train/s-001.tar", Body=bytes(data))
    client.close()
    with pytest.raises(DataError, match=r"no longer describes the shards(.|\n)*s-001.tar: has changed"):
        load_index(tmp_path / "index.jsonl", addresses, store)


def test_what_is_missing_or_forbidden_is_said(
    bucket: tuple[str, list[str]], store: Store, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, _ = bucket
    with pytest.raises(
        DataError, match=r"2 of 2(.|\n)*train/absent\.tar: nothing there(.|\n)*no-bucket/a\.tar: nothing"
    ):
        ShardIndex.scan([f"s3://{name}/train/absent.tar", "s3://no-bucket/a.tar"], store=store)
    requests.post(f"{endpoint}/moto-api/reset-auth", data=b"0", timeout=10)  # from now on, keys are looked at
    try:
        with pytest.raises(DataError, match=r"access denied .*check the credentials"):
            ShardIndex.scan([f"s3://{name}/train/s-000.tar"], store=store)
    finally:
        requests.post(f"{endpoint}/moto-api/reset-auth", data=b"inf", timeout=10)
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(variable)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(DataError, match=r"access denied .*credentials"):
        ShardIndex.scan([f"s3://{name}/train/s-000.tar"], store=Store(store.folder, timeout_s=4.0))
