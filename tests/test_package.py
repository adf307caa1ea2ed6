"""What the package is from outside: imports, names, signatures, sizes of files, and what a wheel holds."""

import ast
import importlib.metadata
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile

import pytest
from helpers import ROOT, python

import rlhf_losses

KERNEL_FILES = sorted((ROOT / "kernels").glob("*.py"))
PACKAGE_FILES = sorted((ROOT / "rlhf_losses").rglob("*.py"))
BENCHMARK_FILES = sorted((ROOT / "benchmarks").glob("*.py"))


def imported(path):
    """Every module that the file imports, also inside of functions."""
    return {name for node in ast.walk(ast.parse(path.read_text())) for name in imported_by(node)}


def imported_by(node):
    """What this statement itself imports."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"line {node.lineno}: imports are absolute"
        return {f"{node.module}.{alias.name}" for alias in node.names}
    return set()


def within(name, package):
    return name == package or name.startswith(package + ".")


def is_ours(name):
    return within(name, "rlhf_losses")


def test_files_are_found():
    assert len(KERNEL_FILES) >= 10
    assert len(PACKAGE_FILES) >= 3
    assert len(BENCHMARK_FILES) >= 7


@pytest.mark.parametrize("path", KERNEL_FILES, ids=lambda path: path.name)
def test_kernels_import_only_kernels_torch_and_triton(path):
    for name in imported(path):
        assert not is_ours(name) or within(name, "rlhf_losses.kernels"), name
        top = name.partition(".")[0]
        assert top in {"torch", "triton", "rlhf_losses"} | set(sys.stdlib_module_names), name


@pytest.mark.parametrize("path", PACKAGE_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_package_imports_no_integration(path):
    for name in imported(path):
        assert not within(name, "rlhf_losses.integrations"), name
        assert not within(name, "integrations"), name
        assert not within(name, "kernels"), f"{name}: the folder is imported as rlhf_losses.kernels"
        assert path.name == "cli.py" or not within(name, "rlhf_losses.benchmarks"), name


@pytest.mark.parametrize("path", sorted((ROOT / "integrations").rglob("*.py")), ids=lambda path: path.name)
def test_integrations_import_no_benchmark(path):
    assert not [name for name in imported(path) if within(name, "rlhf_losses.benchmarks")]


@pytest.mark.parametrize("path", BENCHMARK_FILES, ids=lambda path: path.name)
def test_benchmarks_import_what_they_compare_only_when_they_call_it(path):
    if path.name.startswith("verl_"):
        pytest.skip("runs in verl")
    for node in ast.parse(path.read_text()).body:
        for name in imported_by(node):
            assert name.partition(".")[0] in {"torch", "rlhf_losses"} | set(sys.stdlib_module_names), name


@pytest.mark.parametrize("path", KERNEL_FILES, ids=lambda path: path.name)
def test_kernel_file_has_at_most_300_lines(path):
    assert len(path.read_text().splitlines()) <= 300


def test_kernels_folder_is_no_package_of_its_own():
    # A top-level ``kernels`` with an __init__.py would shadow the one that transformers imports.
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not (ROOT / "benchmarks" / "__init__.py").exists()
    found = python("import importlib.util as u; s = u.find_spec('kernels'); print(s is None or s.origin is None)")
    assert found.strip() == "True"
    # pytest's own: verl installs a top-level ``tests``.
    assert not (ROOT / "tests" / "__init__.py").exists()


def test_import_is_light():
    # Best of three processes: bytecode and folders are read once, as they would be in a program's second start.
    starts = [
        json.loads(
            python(
                """
import json, sys, time
import torch
before = set(sys.modules)
start = time.perf_counter()
import rlhf_losses
seconds = time.perf_counter() - start
new = sorted(name for name in set(sys.modules) - before)
print(json.dumps({"seconds": seconds, "new": new, "cuda": torch.cuda.is_initialized()}))
"""
            )
        )
        for _ in range(3)
    ]
    for seen in starts:
        assert not [name for name in seen["new"] if name.partition(".")[0] == "triton"]
        assert not [name for name in seen["new"] if within(name, "rlhf_losses.integrations")]
        assert not seen["cuda"]
    assert min(seen["seconds"] for seen in starts) < 0.05


def test_a_call_on_cpu_tensors_imports_no_triton():
    python(
        """
import sys, torch
from rlhf_losses import linear_log_probs
linear_log_probs(torch.ones(2, 8), torch.ones(5, 8), torch.zeros(2, dtype=torch.int64))
assert "triton" not in sys.modules
""",
        TRITON_INTERPRET="0",
    )


def test_public_names_are_pinned():
    # A new name is a decision: it goes here, into the docs and into the changelog.
    assert sorted(rlhf_losses.__all__) == [
        "BackendChoice",
        "CrossEntropyLoss",
        "CrossEntropyOutput",
        "LinearCrossEntropyLoss",
        "LogitTransform",
        "LossOutput",
        "PolicyBatch",
        "PolicyLossConfig",
        "TokenStats",
        "backend_for",
        "check",
        "cross_entropy",
        "linear_cross_entropy",
        "linear_log_probs",
        "linear_policy_loss",
        "log_probs_from_logits",
        "policy_loss",
    ]
    assert all(hasattr(rlhf_losses, name) for name in rlhf_losses.__all__)


COMMON = {
    "temperature": 1.0,
    "softcap": None,
    "logit_scale": None,
    "ignore_index": -100,
    "backend": "auto",
    "workspace_bytes": None,
    "validate": "async",
}
TOKENS = {"mask": None, "outputs": ("log_probs", "entropy")}
HEAD = COMMON | {"bias": None, "cache_bytes": 0}
LOSS = {
    "mask": None,
    "outputs": ("entropy", "token_accuracy"),
    "reduction": "mean",
    "label_smoothing": 0.0,
    "z_loss": 0.0,
    "class_weight": None,
}
SIGNATURES = {
    "linear_log_probs": (["hidden_states", "weight", "labels"], HEAD | TOKENS),
    "linear_policy_loss": (["hidden_states", "weight", "labels", "batch", "config"], HEAD),
    "log_probs_from_logits": (["logits", "labels"], COMMON | TOKENS | {"inplace_backward": False}),
    "linear_cross_entropy": (["hidden_states", "weight", "labels"], HEAD | LOSS),
    "cross_entropy": (["logits", "labels"], COMMON | LOSS | {"inplace_backward": False}),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature_is_pinned(name):
    # Tensors by position, everything else by keyword: a new option is a decision, too.
    positional, keywords = SIGNATURES[name]
    parameters = inspect.signature(getattr(rlhf_losses, name)).parameters.values()
    assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == positional
    assert all(p.default is p.empty for p in parameters if p.name in positional)
    assert {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY} == keywords
    assert len(parameters) == len(positional) + len(keywords)


def test_other_signatures_are_pinned():
    assert str(inspect.signature(rlhf_losses.backend_for)).startswith("(tensor: torch.Tensor, backend: str = 'auto')")
    assert list(inspect.signature(rlhf_losses.check).parameters) == []
    assert rlhf_losses.TokenStats._fields == ("log_probs", "entropy", "logsumexp", "sum_p_squared", "argmax")
    assert rlhf_losses.CrossEntropyOutput._fields == ("loss", "z_loss", "entropy", "token_accuracy")
    for module in (rlhf_losses.CrossEntropyLoss, rlhf_losses.LinearCrossEntropyLoss):
        parameters = inspect.signature(module).parameters
        assert all(p.kind is p.KEYWORD_ONLY for p in parameters.values())
        assert {*parameters} == {*COMMON, *LOSS} - {"mask", "outputs", "workspace_bytes", "validate"}
    assert rlhf_losses.BackendChoice._fields == ("name", "reason")
    assert list(rlhf_losses.LogitTransform.__dataclass_fields__) == ["bias", "scale", "softcap", "temperature"]


def test_public_functions_are_documented():
    for name in rlhf_losses.__all__:
        assert inspect.getdoc(getattr(rlhf_losses, name)), name
    documented = "".join(inspect.getdoc(getattr(rlhf_losses, name)) for name in SIGNATURES)
    for positional, keywords in SIGNATURES.values():
        for parameter in (*positional, *keywords):
            assert parameter in documented, parameter


def test_version_is_the_projects():
    declared = [line for line in (ROOT / "pyproject.toml").read_text().splitlines() if line.startswith("version = ")]
    assert declared == [f'version = "{rlhf_losses.__version__}"']


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built from a copy of the checkout, so that nothing is left in it."""
    # "license" as a string, as pyproject.toml has it, came with setuptools 77.
    if int(importlib.metadata.version("setuptools").partition(".")[0]) < 77:
        pytest.skip("building needs setuptools 77 or newer")
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(
        ROOT,
        folder / "source",
        ignore=shutil.ignore_patterns(".git", ".*", "__pycache__", "*.egg-info", "build", "dist"),
    )
    command = ["pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir"]
    built = subprocess.run(
        [sys.executable, "-m", *command, str(folder), str(folder / "source")],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = folder.glob("*.whl")
    return path


def test_wheel_holds_one_top_level_name(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"rlhf_losses"}
    (record,) = [name for name in names if name.endswith("top_level.txt")]
    assert zipfile.ZipFile(wheel).read(record).decode().split() == ["rlhf_losses"]


def test_wheel_holds_every_source_file(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for path in KERNEL_FILES:
        assert f"rlhf_losses/kernels/{path.name}" in names
    for path in PACKAGE_FILES:
        assert str(path.relative_to(ROOT)) in names
    for path in BENCHMARK_FILES:
        assert f"rlhf_losses/benchmarks/{path.name}" in names
    assert not [name for name in names if "results" in name]
    assert "rlhf_losses/py.typed" in names
    assert not [name for name in names if "test" in name.lower()]


def test_readme_shows_the_error_that_comes():
    text = (ROOT / "README.md").read_text()
    (example,) = re.findall(r"```python\n(import torch\nfrom rlhf_losses .*?)```", text, re.DOTALL)
    call, shown = re.search(r"```python\n(linear_log_probs\(.*?\))\n# ValueError: (.*?)\n```", text, re.DOTALL).groups()
    names = {}
    exec(example, names)
    with pytest.raises(ValueError, match="labels: expected") as raised:
        exec(call, names)
    # Which label it is changes from run to run.
    label = r"got \d{4} at"
    assert re.sub(label, "", shown.replace("\n#", "")) == re.sub(label, "", str(raised.value))


def test_installed_wheel_works_from_another_folder(wheel, tmp_path):
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    command = ["pip", "install", "--quiet", "--no-deps", "--no-index", "--target"]
    subprocess.run([sys.executable, "-m", *command, str(site), str(wheel)], check=True, timeout=240)
    code = """
import torch, rlhf_losses
from rlhf_losses.kernels import chunked
stats = rlhf_losses.linear_log_probs(torch.ones(2, 8), torch.ones(5, 8), torch.zeros(2, dtype=torch.int64))
assert (stats.log_probs + torch.tensor(5.0).log()).abs().max() < 1e-6
print(rlhf_losses.__file__, chunked.__file__)
"""
    for path in python(code, cwd=elsewhere, PYTHONPATH=str(site)).split():
        assert path.startswith(str(site))
    command = [str(site / "bin" / "rlhf-losses"), "bench", "--size", "tiny", "--device", "cpu", "--turns", "1"]
    options = ["--tasks", "forward", "--tokens", "128", "--out", "result"]
    done = subprocess.run(
        command + options,
        cwd=elsewhere,
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((elsewhere / "result.json").read_text())["commit"] is None
