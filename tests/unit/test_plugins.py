"""Operators of installed packages: found without an import, loaded by name; a clash of names is an error that names both packages."""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import cutlass_ops
from cutlass_ops import InstallationError, ops, plugins


def test_packages_are_found_without_an_import_and_loaded_by_the_operators_name(site):
    site.add("plug_one", "plug_one_op")
    site.add("plug_two", "plug_two_op", version="2.1")
    found = plugins.installed()
    assert {name: (point.value, point.dist.name, point.dist.version) for name, point in found.items() if name.startswith("plug_")} == {
        "plug_one_op": ("plug_one:plug_one_op", "plug_one", "1.0"),
        "plug_two_op": ("plug_two:plug_two_op", "plug_two", "2.1"),
    }
    assert not {"plug_one", "plug_two"} & set(sys.modules)
    op = plugins.load("plug_two_op")
    assert "plug_one" not in sys.modules
    assert op is sys.modules["plug_two"].plug_two_op
    x, weight = torch.rand(1, 2, 5, 5), torch.rand(3, 2, 3, 3)
    expected = torch.nn.functional.conv2d(x, weight)
    assert torch.equal(op(x, weight), expected)
    assert torch.equal(torch.ops.cutlass_ops.plug_two_op(x, weight, None, [1, 1], [0, 0], [1, 1], None), expected)
    assert plugins.load("plug_one_op") is sys.modules["plug_one"].plug_one_op


def test_a_pickled_operator_of_an_installed_package_is_loaded_in_a_fresh_process(site):
    site.add("plug_saved", "plug_saved_op")
    pickled = pickle.dumps(plugins.load("plug_saved_op"))
    code = f"import pickle; print(pickle.loads({pickled!r}))"
    paths = os.pathsep.join([str(Path(cutlass_ops.__file__).parents[1]), str(site.folder)])
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("<cutlass_ops operator plug_saved_op("), done.stderr


def test_a_pickled_operator_that_nobody_has_is_refused():
    with pytest.raises(ValueError, match="expected an operator plug_lost_op in this process, found none; create it before"):
        ops._registered("plug_lost_op")


def test_a_shipped_operator_is_loaded_by_its_name():
    assert plugins.load("conv2d_min_add_mul") is cutlass_ops.conv2d_min_add_mul


def test_an_unknown_name_is_refused_with_those_that_there_are(site):
    site.add("plug_three", "plug_three_op")
    with pytest.raises(ValueError, match=r"expected an operator among conv2d, .*plug_three_op.*, got 'plug_tree_op'"):
        plugins.load("plug_tree_op")


def test_two_packages_with_one_name_are_refused_and_both_named(site):
    site.add("plug_left", "plug_same", version="1.2")
    site.add("plug_right", "plug_same", version="3.4")
    with pytest.raises(
        InstallationError, match=r"got 'plug_same' in plug_(left 1\.2|right 3\.4) and in plug_(left 1\.2|right 3\.4); unins"
    ) as error:
        plugins.installed()
    assert "plug_left 1.2" in str(error.value)
    assert "plug_right 3.4" in str(error.value)


def test_a_package_with_the_name_of_a_shipped_operator_is_refused_and_both_named(site):
    site.add("plug_shipped", "conv2d")
    message = rf"got 'conv2d' in cutlass_ops {cutlass_ops.__version__} and in plug_shipped 1\.0; uninstall one of them"
    with pytest.raises(InstallationError, match=message):
        plugins.installed()


def test_importing_two_packages_with_one_name_is_refused_and_both_named(site):
    site.add("plug_first", "plug_twice")
    site.add("plug_second", "plug_twice", version="2.0")
    importlib.import_module("plug_first")
    message = (
        r"got 'plug_twice' of plug_second 2\.0 \(.*plug_second\.py\), which is registered already, by plug_first 1\.0 \(.*plug_first\.py\)"
    )
    with pytest.raises(ValueError, match=message):
        importlib.import_module("plug_second")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import nothing_of_this_name", r"got ModuleNotFoundError: No module named 'nothing_of_this_name'; mend or uninstall"),
        ("", r"got AttributeError: .*plug_broken_op"),
        ("{operator} = 3", r"expected the cutlass_ops\.Operator plug_broken_op at .* of plug_broken 1\.0, got 3; correct"),
        (
            "from cutlass_ops import conv2d as {operator}",
            r"expected the cutlass_ops\.Operator plug_broken_op at .*, got <cutlass_ops operator conv2d",
        ),
    ],
)
def test_a_package_that_does_not_keep_its_word_is_named(site, source, message):
    site.add("plug_broken", "plug_broken_op", source)
    with pytest.raises(InstallationError, match=message):
        plugins.load("plug_broken_op")


def test_the_owner_of_a_spec_without_a_package_is_its_file(import_source):
    spec = import_source("@operator()\ndef plug_loose(accum):\n    return accum + 1\n").plug_loose
    assert plugins.owner(spec) == spec.chain.__code__.co_filename
