"""Where something was measured, checked or built: GPU, driver, versions, date, commit. Imported without PyTorch by wheel builds."""

from __future__ import annotations

import datetime
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any, Optional


def _output(*command: str, cwd: Optional[Path] = None) -> Optional[str]:
    """First line that a program prints; None where it is missing or fails."""
    program = shutil.which(command[0])
    if program is None:
        return None
    done = subprocess.run([program, *command[1:]], capture_output=True, text=True, check=False, cwd=cwd)
    return None if done.returncode else (done.stdout.splitlines() or [""])[0].strip()


def commit_of(root: Path, given: Optional[str] = None, *, untracked: str = "no") -> tuple[Optional[str], Optional[bool]]:
    """Commit of a checkout and whether files differ from it, None outside of one.

    `given` is the answer where there is no git, as git describe --always --dirty prints it; `untracked` which untracked files
    count, as git status takes it: no, normal.
    """
    if given:
        return given.removesuffix("-dirty"), given.endswith("-dirty")
    commit = _output("git", "rev-parse", "HEAD", cwd=root)
    if not commit:
        return None, None
    return commit, bool(_output("git", "status", "--porcelain", f"--untracked-files={untracked}", cwd=root))


def commit_time(root: Path) -> Optional[int]:
    """Time of a checkout's last commit, in seconds since the epoch; None outside of one."""
    time = _output("git", "log", "-1", "--format=%ct", cwd=root)
    return int(time) if time else None


def environment(root: Path, given_commit: Optional[str] = None) -> dict[str, Any]:
    """GPU, driver, versions, date (UTC), commit (None outside a checkout) and whether tracked files differ from it."""
    import torch

    commit, dirty = commit_of(root, given_commit)
    index = torch.cuda.current_device()
    return {
        "gpu": torch.cuda.get_device_name(index),
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit,
        "dirty": dirty,
    }
