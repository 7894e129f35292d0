"""The files that a project has besides its code exist, and agree with the code."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = [GITHUB / "ISSUE_TEMPLATE" / name for name in ("bug.yml", "idea.yml")]

FILES = (
    *("README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "CODE_OF_CONDUCT.md", "SECURITY.md"),
    *(".github/PULL_REQUEST_TEMPLATE.md", ".github/dependabot.yml", "CITATION.cff"),
)
PINNED = re.compile(r"uses: (\./\S+.*|\S+@[0-9a-f]{40} # v[\d.]+)$")
RELATIVE_LINK = re.compile(r"\]\((?!https?:|#)[^)\s]+\)")

CHECK = ("check-jsonschema", "--builtin-schema")
LINTERS = {
    "workflows": (*CHECK, "vendor.github-workflows", *WORKFLOWS),
    "forms": (*CHECK, "vendor.github-issue-forms", *FORMS),
    "links of the forms": (*CHECK, "vendor.github-issue-config", GITHUB / "ISSUE_TEMPLATE/config.yml"),
    "updates": (*CHECK, "vendor.dependabot", GITHUB / "dependabot.yml"),
    "citation": (*CHECK, "vendor.citation-file-format", ROOT / "CITATION.cff"),
    "what workflows do": ("actionlint", *WORKFLOWS),
    "what workflows may do": ("zizmor", "--offline", "--quiet", GITHUB),
}


def text(file):
    return (ROOT / file).read_text(encoding="utf-8")


def loaded(file):
    return yaml.safe_load(text(file))


PROJECT = tomllib.loads(text("pyproject.toml"))
METADATA = PROJECT["project"]


@pytest.mark.parametrize("name", FILES)
def test_file_exists(name):
    assert text(name).strip()


def test_package_is_typed():
    assert (ROOT / "trahiv_cli/py.typed").is_file()


def test_version_license_and_repository_agree():
    repository = METADATA["urls"]["Repository"]
    named = {"version": METADATA["version"], "license": METADATA["license"], "repository-code": repository}
    citation = loaded("CITATION.cff")
    assert citation == citation | named
    assert f"{repository}/security/advisories/new" in text("SECURITY.md")


def test_security_policy_has_required_sections():
    for what in ("Report a vulnerability", "docs/security.md", "Supported versions", "days"):
        assert what in text("SECURITY.md")


def test_bug_form_requires_diagnostics():
    required = [
        field["attributes"]["label"]
        for field in loaded(GITHUB / "ISSUE_TEMPLATE/bug.yml")["body"]
        if field.get("validations", {}).get("required")
    ]
    for what in ("What happened", "What you expected", "trahiv report", "trahiv doctor"):
        assert any(what in label for label in required), what


def test_issue_forms_link_security_policy():
    links = loaded(GITHUB / "ISSUE_TEMPLATE/config.yml")["contact_links"]
    assert any(link["url"].endswith("/SECURITY.md") for link in links)


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_workflow_has_permissions_timeouts_and_pins(file):
    workflow = loaded(file)
    assert workflow["permissions"] == {}
    # A workflow that is called would end its caller if both were of one group.
    assert workflow["concurrency"]["group"].startswith(f"{file.stem}-")
    for name, job in workflow["jobs"].items():
        assert "permissions" in job, name
        assert "uses" in job or job["timeout-minutes"] <= 120, name
    lines = text(file).splitlines()
    assert [line for line in lines if "uses: " in line and not PINNED.search(line)] == []
    checkouts = [line for line in lines if "actions/checkout@" in line]
    assert len(checkouts) == sum("persist-credentials: false" in line for line in lines)


def test_ci_matrix_matches_supported_pythons():
    matrix = loaded(".github/workflows/tests.yml")["jobs"]["tests"]["strategy"]["matrix"]
    named = [entry.rpartition(" ")[2] for entry in METADATA["classifiers"] if re.search(r":: 3\.\d+$", entry)]
    assert matrix["python"] == named
    assert METADATA["requires-python"].startswith(f">={named[0]},")
    assert all((ROOT / "scripts" / script).is_file() for script in matrix["script"])


def test_pyproject_metadata_is_complete():
    assert METADATA["authors"] == [{"name": "trahiv contributors"}]
    assert METADATA["keywords"]
    assert "Typing :: Typed" in METADATA["classifiers"]
    assert {"Homepage", "Documentation", "Repository", "Changelog", "Issues"} <= set(METADATA["urls"])


def test_readme_links_are_absolute_on_pypi():
    readme = text("README.md")
    for each in PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        readme = re.sub(each["pattern"], each["replacement"], readme)
    assert RELATIVE_LINK.findall(readme) == []
    assert f"]({METADATA['urls']['Repository']}/blob/v$HFPR_VERSION/docs/security.md)" in readme


@pytest.mark.parametrize("what", LINTERS)
def test_linter_finds_nothing(what):
    name, *arguments = LINTERS[what]
    linter = shutil.which(name, path=Path(sys.executable).parent)
    if not linter:
        pytest.skip(f"{name} is not installed in this environment; pip installs it")
    found = subprocess.run([linter, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stdout + found.stderr
