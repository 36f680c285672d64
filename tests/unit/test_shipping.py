"""What may be shipped, and where a source tree comes from: git, or what an sdist carries."""

from __future__ import annotations

import json
import os
import shutil
import subprocess

import pytest

from cutlass_ops import InstallationError
from cutlass_ops.codegen.shipping import complaints, origin, stage, unverified
from cutlass_ops.manifest import Manifest

from .records import write_folder

TIME = 1700000000


def git(folder, *arguments):
    environment = os.environ | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "GIT_COMMITTER_DATE": f"{TIME} +0000"}
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    done = subprocess.run(
        [shutil.which("git"), "-C", folder, *identity, *arguments], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture(autouse=True)
def no_given_time(monkeypatch):
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)


@pytest.fixture
def tree(tmp_path):
    """A source tree without git, with kernels."""
    root = tmp_path / "tree"
    write_folder(root / "kernels", "op")
    (root / "file").write_text("1")
    (root / ".gitignore").write_text("/ignored\n")
    return root


@pytest.fixture
def checkout(tree):
    git(tree, "init", "-q")
    git(tree, "add", "-A")
    git(tree, "commit", "-q", "-m", "all")
    return tree


def edit(path, change):
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


# ---- origin ------------------------------------------------------------------------------------------------------


def test_a_clean_checkout_is_its_commit(checkout):
    (checkout / "ignored").touch()
    assert origin(checkout, checkout / "kernels") == {
        "commit": git(checkout, "rev-parse", "HEAD"),
        "dirty": False,
        "source_date_epoch": TIME,
    }


@pytest.mark.parametrize("change", [lambda root: (root / "file").write_text("2"), lambda root: (root / "new").touch()])
def test_changed_and_untracked_files_make_it_dirty(checkout, change):
    change(checkout)
    found = origin(checkout, checkout / "kernels")
    assert (found["commit"], found["dirty"]) == (git(checkout, "rev-parse", "HEAD"), True)


def test_elsewhere_the_manifest_says_what_it_carries(tree):
    carried = {"commit": "c" * 40, "dirty": True, "source_date_epoch": 5}
    edit(tree / "kernels" / "manifest.json", lambda data: data["provenance"].update(carried))
    assert origin(tree, tree / "kernels") == carried


def test_a_tree_inside_another_projects_checkout_is_not_of_its_commit(tree):
    git(tree.parent, "init", "-q")
    git(tree.parent, "commit", "-q", "--allow-empty", "-m", "other")
    assert origin(tree, tree / "kernels") == {"commit": None, "dirty": None, "source_date_epoch": 1580601600}


def test_source_date_epoch_overrules(checkout, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "7")
    assert origin(checkout, checkout / "kernels")["source_date_epoch"] == 7


@pytest.mark.parametrize("value", ["now", "-1", "1.5"])
def test_a_source_date_epoch_that_is_no_number_is_refused(checkout, monkeypatch, value):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", value)
    with pytest.raises(InstallationError, match=f"expected SOURCE_DATE_EPOCH in seconds since 1970, got '{value}'; set it"):
        origin(checkout, checkout / "kernels")


# ---- complaints --------------------------------------------------------------------------------------------------


def test_verified_kernels_of_a_clean_checkout_may_be_shipped(checkout):
    assert complaints(checkout, checkout / "kernels") == {}


def cubin(kernels):
    return min((kernels / "cubins").iterdir())


SPOILT = {
    "missing": (lambda k: cubin(k).unlink(), "kernels", r"expected the cubin .*, could not read it"),
    "other bytes": (lambda k: cubin(k).write_bytes(b"other"), "kernels", r"with sha256 .*, got .*; rebuild it"),
    "no manifest": (lambda k: (k / "manifest.json").unlink(), "kernels", r"expected the kernels' manifest at .*; build the kernels"),
    "no records": (lambda k: (k / "gpu_checks.json").unlink(), "unverified", r"expected a record in .*; convert.cubin, .* have none"),
    "damaged records": (lambda k: (k / "gpu_checks.json").write_text("{"), "kernels", r"expected GPU check records at .*; reinstall"),
    "failed check": (
        lambda k: edit(k / "gpu_checks.json", lambda data: next(iter(data["cubins"].values())).update(passed=False)),
        "unverified",
        r"expected a record in .*gpu_checks.json of a passed GPU check .*\(scripts/check_gpu.py, .*\); \w+.cubin have none",
    ),
}


@pytest.mark.parametrize(("spoil", "kind", "message"), SPOILT.values(), ids=SPOILT)
def test_unfit_kernels_may_not(checkout, spoil, kind, message):
    spoil(checkout / "kernels")
    git(checkout, "add", "-A")
    git(checkout, "commit", "-q", "-m", "spoilt")
    found = complaints(checkout, checkout / "kernels")
    assert list(found) == [kind]
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(found[kind])


def test_a_changed_tree_may_not(checkout):
    (checkout / "file").write_text("2")
    found = complaints(checkout, checkout / "kernels")
    assert found == {"origin": f"expected {checkout} as of commit {git(checkout, 'rev-parse', 'HEAD')[:12]}, it has changed or untracked "
                               "files; commit or stash them"}  # fmt: skip


def test_a_tree_of_an_unknown_commit_may_not(tree):
    assert list(complaints(tree, tree / "kernels")) == ["origin"]


# ---- stage -------------------------------------------------------------------------------------------------------


def test_the_files_of_the_kernels_with_their_origin(checkout, tmp_path):
    kernels, found = checkout / "kernels", {"commit": "c", "dirty": False, "source_date_epoch": 1}
    (kernels / "cubins" / "stale.cubin").touch()
    (tmp_path / "out").mkdir()
    manifest, files = stage(kernels, found, tmp_path / "out")
    assert manifest.provenance == found
    assert Manifest.load(tmp_path / "out" / "manifest.json") == Manifest(
        tuple(sorted(manifest.kernels, key=lambda k: k.name)), found, manifest.keys
    )
    cubins = {str(kernels / "cubins" / k.cubin): f"cubins/{k.cubin}" for k in manifest.kernels}
    assert files == cubins | {str(tmp_path / "out" / "manifest.json"): "manifest.json", str(kernels / "gpu_checks.json"): "gpu_checks.json"}


def test_a_cubin_of_other_bytes_is_not_staged(checkout, tmp_path):
    cubin(checkout / "kernels").write_bytes(b"other")
    with pytest.raises(InstallationError, match=r"with sha256 .*, got .*; rebuild it"):
        stage(checkout / "kernels", {}, tmp_path)


def test_unverified_names_cubins_and_hashes(checkout):
    kernels = checkout / "kernels"
    assert unverified(kernels) == {}
    (kernels / "gpu_checks.json").unlink()
    assert unverified(kernels) == {k.cubin: k.sha256 for k in Manifest.load(kernels / "manifest.json").kernels}
