"""The GPU check's count of tests: nothing may fail or be skipped, but for what the GPU has no memory for."""

from __future__ import annotations

import pytest

from cutlass_ops import verification

PASSES = "def test_passes(): pass\n"
TOO_LARGE = "@pytest.mark.large\ndef test_large(): pytest.skip('needs a GPU with 100 GB of memory, found 85 GB')\n"
SKIPS = "def test_skips(): pytest.skip('why not')\n"
FAILS = "def test_fails(): assert False\n"


@pytest.mark.parametrize(
    ("tests", "counts", "passed"),
    [
        (PASSES, {"passed": 1, "failed": 0, "skipped": 0}, True),
        (PASSES + TOO_LARGE, {"passed": 1, "failed": 0, "skipped": 0, "too large": 1}, True),
        (PASSES + SKIPS, {"passed": 1, "failed": 0, "skipped": 1}, False),
        (PASSES + FAILS, {"passed": 1, "failed": 1, "skipped": 0}, False),
        (TOO_LARGE, {"passed": 0, "failed": 0, "skipped": 0, "too large": 1}, False),
    ],
)
def test_only_tests_too_large_for_the_gpu_may_be_skipped(tmp_path, tests, counts, passed):
    file = tmp_path / f"test_{tmp_path.name}.py"  # a name that no other test has imported
    file.write_text("import pytest\n" + tests)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = large\n")
    assert verification.run_tests([file], tmp_path) == (counts, passed)
