"""The same commit gives the same sdist and the same wheel, byte for byte, wherever, whenever and by whomever it is built."""

from __future__ import annotations

import os
import shutil
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

import pytest

from .helpers import COMMIT_TIME, contents, successful

OTHER = {"TZ": "Pacific/Kiritimati", "LC_ALL": "C", "LANG": "C", "PYTHONHASHSEED": "4711", "USER": "other", "LOGNAME": "other"}


@pytest.fixture
def other_umask() -> Iterator[None]:
    before = os.umask(0o077)
    yield
    os.umask(before)


def build(folder: Path, out: Path, **environment: str) -> dict[str, bytes]:
    successful(sys.executable, folder / "scripts" / "build_wheel.py", "--out", out, **environment)
    return {path.name: path.read_bytes() for path in out.iterdir()}


@pytest.mark.usefixtures("other_umask")
def test_another_folder_umask_zone_locale_hash_seed_user_and_time(checkout: Path, dist: Path, tmp_path: Path) -> None:
    copy = tmp_path / "another folder ü" / "deeper"
    shutil.copytree(checkout, copy, copy_function=shutil.copyfile)  # copyfile: permissions and times are new ones
    for path in copy.rglob("*"):
        if path.is_file() and ".git" not in path.parts:
            path.chmod(0o700 if os.access(checkout / path.relative_to(copy), os.X_OK) else 0o600)
            os.utime(path, (1e9, 1e9))
    (tmp_path / "home").mkdir()
    again = build(copy, tmp_path / "dist", HOME=str(tmp_path / "home"), **OTHER)
    assert again.keys() == {path.name for path in dist.iterdir()}
    for name, data in again.items():
        assert data == (dist / name).read_bytes(), name


def test_an_unpacked_sdist_gives_the_same_wheel_and_sdist(dist: Path, sdist: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    assert build(folder, tmp_path / "dist") == {path.name: path.read_bytes() for path in dist.iterdir()}


def test_the_archives_say_nothing_of_the_machine(checkout: Path, wheel: Path, sdist: Path) -> None:
    """All times are the commit's; owners are nobody's; no file names the folder."""
    with zipfile.ZipFile(wheel) as archive:
        times = {member.date_time for member in archive.infolist()}
    assert times == {tuple(datetime.fromtimestamp(COMMIT_TIME, timezone.utc).timetuple()[:6])}
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    assert {(m.mtime, m.uid, m.gid, m.uname, m.gname) for m in members} == {(COMMIT_TIME, 0, 0, "", "")}
    assert {m.mode for m in members} <= {0o644, 0o755}
    assert [name for name, data in contents(wheel).items() if str(checkout.parent).encode() in data] == []


def test_source_date_epoch_overrules_the_time_of_the_commit(checkout: Path, tmp_path: Path) -> None:
    successful(sys.executable, "-m", "build", "--sdist", "--outdir", tmp_path, checkout, SOURCE_DATE_EPOCH="1600000000")
    (sdist,) = tmp_path.iterdir()
    with tarfile.open(sdist) as archive:
        assert {m.mtime for m in archive.getmembers()} == {1600000000}
