"""What the tests of the wheel share: programs that must succeed, and what the kernels' folder and an archive hold."""

from __future__ import annotations

import json
import os
import subprocess
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
#: git as on a machine where nobody has set it up, and commits of one time.
GIT = {
    **{f"GIT_{who}_{what}": value for who in ("AUTHOR", "COMMITTER") for what, value in (("NAME", "a"), ("EMAIL", "a@example.org"))},
    **{f"GIT_{who}_DATE": "1700000000 +0000" for who in ("AUTHOR", "COMMITTER")},
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
}
COMMIT_TIME = 1700000000  # 2023-11-14 22:13:20 UTC

Records = dict[str, dict[str, bool]]


def run(*command: object, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name != "SOURCE_DATE_EPOCH"}
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False, env=clean | environment)


def successful(*command: object, **environment: str) -> str:
    result = run(*command, **environment)
    assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"
    return result.stdout


def git(folder: Path, *arguments: str) -> str:
    return successful("git", "-C", folder, *arguments, **GIT).strip()


def cubin_hashes(generated: Path) -> dict[str, str]:
    kernels = json.loads((generated / "manifest.json").read_text())["kernels"]
    return {k["cubin"]: k["sha256"] for k in kernels}


def write_records(generated: Path, records: Records) -> None:
    (generated / "gpu_checks.json").write_text(json.dumps({"cubins": records}))


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def info(wheel: Path) -> dict[str, bytes]:
    """Files of .dist-info/ by their name below it."""
    return {name.split(".dist-info/")[1]: data for name, data in contents(wheel).items() if ".dist-info/" in name}
