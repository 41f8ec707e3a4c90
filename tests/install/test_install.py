"""The plugin as a user installs and names it: wheel, `--user-dir` in every spelling, registration, settings."""

import argparse
import ast
import configparser
import email
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from fairseq import options
from fairseq.criterions import CRITERION_REGISTRY
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models import MODEL_DATACLASS_REGISTRY, MODEL_REGISTRY
from fairseq.tasks import TASK_REGISTRY

import fairseq_ms
from fairseq_ms.commands.prepare import datasets
from tests.helpers.cli import ROOT, USER_DIR, run_cli

REGISTRIES = {
    "register_model": MODEL_REGISTRY,
    "register_task": TASK_REGISTRY,
    "register_criterion": CRITERION_REGISTRY,
}


def registrations() -> list[tuple[str, str, str]]:
    """(decorator, name, module) of everything that our source files ask fairseq to register."""
    found = []
    for path in sorted(USER_DIR.rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args):
                continue
            if node.func.id in REGISTRIES and isinstance(node.args[0], ast.Constant):
                found.append((node.func.id, str(node.args[0].value), module))
    return found


@pytest.mark.parametrize(("decorator", "name", "module"), registrations())
def test_every_registered_name_belongs_to_our_class(decorator, name, module):
    # fairseq silently keeps the older class when a model's name is taken.
    assert REGISTRIES[decorator][name].__module__ == module


@pytest.mark.parametrize("name", [name for kind, name, _ in registrations() if kind == "register_model"])
def test_every_setting_of_a_model_is_a_flag_that_starts_at_its_default(name):
    config = MODEL_DATACLASS_REGISTRY[name]()
    parser = argparse.ArgumentParser(argument_default=None)
    gen_parser_from_dataclass(parser, config)
    for action in parser._actions:
        # A bool that starts at True would become a flag that switches it off under the name of switching it on.
        assert not (isinstance(action, argparse._StoreFalseAction)), action.option_strings
        if action.dest != "help":
            assert action.help, f"{action.option_strings} has no help"


def test_a_link_under_another_name_gets_one_sentence(tmp_path):
    (tmp_path / "my_plugin").symlink_to(USER_DIR, target_is_directory=True)
    done = run_cli("fairseq-train", "--user-dir", tmp_path / "my_plugin", "--help", check=False)
    assert done.returncode != 0
    assert "must be called fairseq_ms" in done.stderr.splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel built from a copy of the sources, so that nothing is left behind in them."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    for name in ("fairseq_ms", "tests", "preprocess", "user_dir_examples"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    build = [sys.executable, "-m", "pip", "wheel", "-qq", "--no-deps", "--no-build-isolation", "-w", "dist", "."]
    subprocess.run(build, cwd=folder, check=True, timeout=300)
    (built,) = (folder / "dist").glob("*.whl")
    return built


def test_the_wheel_holds_the_package_and_its_pipeline_and_nothing_else(wheel):
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    sources = {
        path.relative_to(folder.parent).as_posix()
        for folder in (USER_DIR, ROOT / "preprocess" / "fairseq_ms_pipeline")
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert inside == sources


def test_data_sets_are_prepared_from_anywhere_with_the_installed_plugin(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    script = ROOT / "preprocess" / "images" / "prepare.py"
    for program in ([str(script)], ["-m", "fairseq_ms", "prepare", "images"]):
        done = subprocess.run(
            [sys.executable, *program, "--help"],
            cwd=tmp_path,
            env={"PYTHONPATH": str(tmp_path / "site")},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "--out" in done.stdout


def test_every_data_set_has_a_script_of_its_own_that_is_one_call():
    scripts = sorted((ROOT / "preprocess").glob("*/prepare.py"))
    assert [script.parent.name for script in scripts] == datasets()
    first = scripts[0].read_text(encoding="utf-8")
    for script in scripts:
        assert script.read_text(encoding="utf-8") == first.replace(scripts[0].parent.name, script.parent.name)


def test_the_wheel_has_the_command_and_leaves_the_installed_fairseq_alone(wheel):
    archive = zipfile.ZipFile(wheel)
    (entry_points,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
    parser = configparser.ConfigParser()
    parser.read_string(archive.read(entry_points).decode())
    assert dict(parser["console_scripts"]) == {"fairseq-ms": "fairseq_ms.cli:main"}
    (metadata,) = (name for name in archive.namelist() if name.endswith("METADATA"))
    fields = email.message_from_bytes(archive.read(metadata))
    assert fields["Version"] == fairseq_ms.__version__
    assert set(fields["Requires-Python"].split(",")) == {">=3.10", "<3.14"}
    assert set(fields.get_all("Provides-Extra", [])) >= {"fairseq", "analysis", "dev"}
    always = [requirement for requirement in fields.get_all("Requires-Dist", []) if "extra ==" not in requirement]
    assert any(requirement.startswith("torch>=2.6") for requirement in always)
    assert not any("fairseq" in requirement for requirement in always)


def test_an_installed_copy_is_a_user_dir_from_anywhere(wheel, tmp_path):
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    zipfile.ZipFile(wheel).extractall(site)
    path = {"PYTHONPATH": str(site)}
    user_dir = run_cli("fairseq-ms", "user-dir", cwd=elsewhere, env=path).stdout.strip()
    assert user_dir == str(site / "fairseq_ms")
    assert "such as retina_lm" in complaint(user_dir, elsewhere, path)


def complaint(user_dir: str, folder: Path, env: dict[str, str]) -> str:
    """What fairseq-train says of an architecture that does not exist: the nearest that is known."""
    train = ("fairseq-train", "--user-dir", user_dir, "--arch", "retina_ml")
    done = run_cli(*train, cwd=folder, env=env, check=False)
    assert done.returncode == 2, done.stderr
    return done.stderr


@pytest.mark.slow
def test_its_name_is_enough_in_every_folder_where_it_lies_beside_fairseq(wheel, tmp_path):
    elsewhere, copied, linked = (tmp_path / name for name in ("elsewhere", "copied", "linked"))
    elsewhere.mkdir()
    zipfile.ZipFile(wheel).extractall(copied)
    (linked / "fairseq_ms-1.dist-info").mkdir(parents=True)
    (linked / "fairseq_ms-1.dist-info" / "RECORD").touch()
    (linked / "python").write_text(f"#!/bin/sh\necho {linked}\n")
    (linked / "python").chmod(0o755)
    link = [ROOT / "requirements" / "link_plugin.sh", linked / "python", USER_DIR]
    for _ in range(2):
        subprocess.run(link, check=True)
        assert (linked / "fairseq_ms").resolve() == USER_DIR
    # pip removes what is listed, links as such.
    assert set((linked / "fairseq_ms-1.dist-info" / "RECORD").read_text().split()) == {"fairseq_ms,,"}
    for site in (copied, linked):
        (site / "fairseq").mkdir()
        for file in Path(str(options.__file__)).parent.iterdir():
            (site / "fairseq" / file.name).symlink_to(file)
        assert "such as retina_lm" in complaint("fairseq_ms", elsewhere, {"PYTHONPATH": str(site)})
    # By the path that `fairseq-ms user-dir` prints, in a program that has it already from the link.
    program = "import argparse, fairseq_ms; from fairseq import utils; assert '/linked/' in fairseq_ms.__file__; "
    program += f"utils.import_user_module(argparse.Namespace(user_dir={str(USER_DIR)!r}))"
    run_cli("python", "-P", "-c", program, cwd=elsewhere, env={"PYTHONPATH": str(linked)})


needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="needs make, with which the Makefile is run")


@pytest.fixture
def clone(tmp_path) -> Path:
    """The Makefile and what it reads, in a folder of their own."""
    for name in ("Makefile", "pyproject.toml", "fairseq_ms/version.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    return tmp_path


def make(clone, *arguments, **variables):
    """One call of make, which must not take itself for a part of the `make test` that these tests may run in."""
    outer = {"MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES"}
    # What was given on its command line is in the environment, too.
    outer |= {word.partition("=")[0] for word in os.environ.get("MAKEFLAGS", "").split() if "=" in word}
    return subprocess.run(
        ["make", *arguments],
        cwd=clone,
        env={**{name: value for name, value in os.environ.items() if name not in outer}, **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@needs_make
@pytest.mark.parametrize("target", ["env", "test", "lint", "demo-haed"])
def test_every_target_of_the_makefile_sets_the_environment_up_by_itself(target, clone):
    done = make(clone, target, f"PYTHON={clone}/absent/python3")
    assert done.returncode != 0
    assert done.stdout == ""
    sentence, *make_itself = done.stderr.splitlines()
    assert sentence.startswith(f"fairseq_ms: PYTHON={clone}/absent/python3 must be a Python 3.10-3.13")
    assert len(make_itself) == 1
    assert not (clone / ".venv").exists()


# Stands for the script that builds the environment: notes that it was called, and fails or succeeds.
FAKE_SETUP = """#!/bin/sh
echo built >> calls
rm -rf "$1"
[ -z "$FAIL" ] || exit 1
mkdir -p "$1/bin"
printf '#!/bin/sh\\n[ "$1" = -m ] && echo plugin >> calls || dirname "$0"\\n' > "$1/bin/python"
chmod +x "$1/bin/python"
"""


@needs_make
def test_where_the_caller_s_pip_and_python_install_and_look_does_not_leak_into_the_environment(clone):
    script = clone / "requirements" / "make_env.sh"
    script.write_text("#!/bin/sh\nenv > seen\nexit 1\n", encoding="utf-8")
    places = ("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PYTHONPATH", "PYTHONHOME")
    make(clone, "env", **dict.fromkeys(places, "elsewhere"), PIP_USER="1")
    seen = dict(line.partition("=")[::2] for line in (clone / "seen").read_text(encoding="utf-8").splitlines())
    assert not set(places) & set(seen)
    assert seen["PIP_USER"] == "0"


@needs_make
def test_the_environment_is_built_again_only_after_a_failure_or_a_change_of_the_pins(clone):
    script = clone / "requirements" / "make_env.sh"
    script.write_text(FAKE_SETUP, encoding="utf-8")

    def calls(**variables):
        """What one `make env` calls."""
        (clone / "calls").write_text("", encoding="utf-8")
        failed = make(clone, "env", **variables).returncode != 0
        return ["failed"] * failed + (clone / "calls").read_text(encoding="utf-8").split()

    def change(path):
        """Make everything older than the file at this path."""
        for other in [*clone.rglob("*.txt"), *clone.rglob("*.py"), *(clone / ".venv").glob(".*-installed")]:
            os.utime(other, (time.time() - 60, time.time() - 60))
        os.utime(path)

    assert calls(FAIL="1") == ["failed", "built"]
    assert calls() == ["built", "plugin"]
    assert calls() == []
    change(clone / "pyproject.toml")
    assert calls() == ["plugin"]
    # Other requirements are of libraries beside the environment.
    for name in ("build", "fairseq", "libraries"):
        change(clone / "requirements" / f"{name}.txt")
        assert calls(FAIL="1") == ["failed", "built"]
        assert calls() == ["built", "plugin"]
        assert calls() == []


@needs_make
@pytest.mark.parametrize("remover", ["make_env.sh", "clean"])
def test_a_foreign_environment_is_never_removed(remover, clone):
    (clone / ".venv").mkdir()
    (clone / ".venv" / "precious").write_text("mine", encoding="utf-8")
    done = make(clone, "clean" if remover == "clean" else "env", f"PYTHON={sys.executable}")
    if remover == "make_env.sh":
        assert done.returncode != 0
        assert "was not made by this Makefile" in done.stderr
    assert (clone / ".venv" / "precious").read_text(encoding="utf-8") == "mine"


@needs_make
def test_a_new_environment_is_not_built_with_the_python_of_the_one_that_it_replaces(clone, tmp_path, monkeypatch):
    """Also within ``make test PYTHON=...``."""
    monkeypatch.setenv("MAKEFLAGS", f" --jobs=2 -- PYTHON={sys.executable}")
    monkeypatch.setenv("PYTHON", sys.executable)
    # The Makefile puts the environment's commands first on PATH, and so does an activated environment.
    for place, command in (
        (clone / ".venv" / "bin", "exit 1"),
        (tmp_path / "system", f"echo $3 > {tmp_path}/venv; exit 1"),
    ):
        place.mkdir(parents=True)
        python = place / "python3.11"
        python.write_text(
            f'#!/bin/sh\n[ "$1" != -m ] || {{ {command}; }}\nexec {sys.executable} "$@"\n', encoding="utf-8"
        )
        python.chmod(0o755)
    (clone / ".venv" / "made-by-fairseq-ms").touch()
    make(clone, "env", PATH=f"{tmp_path / 'system'}{os.pathsep}{os.environ['PATH']}")
    assert (tmp_path / "venv").read_text(encoding="utf-8").strip() == ".venv"
