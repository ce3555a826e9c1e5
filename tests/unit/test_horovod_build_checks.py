"""What `make horovod` checks before it compiles, what it keeps, and what it says when it fails."""

from __future__ import annotations

import dataclasses
import io
import os
import shutil
import subprocess
import tarfile
import time
from pathlib import Path

import pytest

from third_party.horovod import build as horovod
from third_party.horovod.build import CannotBuild, Recipe

RECIPE = Recipe({"sources.txt": "a"}, {"HOROVOD_WITH_GLOO": "1"}, {"torch": "2.13.0"})


def put_wheel(folder: Path) -> None:
    (folder / "horovod-0.28.1-any.whl").touch()


@pytest.fixture
def other_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Offer pip an archive that is not Horovod's; return the file that it writes if it runs."""
    ran = tmp_path / "ran"
    text = f"open({str(ran)!r}, 'w')".encode()
    offered = tmp_path / "offered"
    offered.mkdir()
    with tarfile.open(offered / "horovod-0.28.1.tar.gz", "w:gz") as archive:
        entry = tarfile.TarInfo("horovod-0.28.1/setup.py")
        entry.size = len(text)
        archive.addfile(entry, io.BytesIO(text))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(offered))
    return ran


def test_sources_with_another_checksum_never_run(tmp_path, other_sources):
    cache, log = tmp_path / "cache", tmp_path / "log"
    with pytest.raises(CannotBuild) as refusal:
        horovod.cached_wheel(
            cache, "key", lambda folder: horovod.build_wheel(folder, log, horovod.find_compiler())
        )
    assert "DO NOT MATCH THE HASHES" in str(refusal.value) and str(log) in str(refusal.value)
    assert not other_sources.exists()
    assert [path.name for path in cache.iterdir()] == ["key.lock"]


def test_a_missing_compiler_is_named(monkeypatch):
    monkeypatch.setenv("CXX", "/usr/bin/no-compiler")
    with pytest.raises(CannotBuild, match=r"'/usr/bin/no-compiler' is none .*install one .*CXX"):
        horovod.find_compiler()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(CannotBuild, match=r"'c\+\+' is none on the PATH"):
        horovod.find_compiler()


def test_a_program_that_is_no_compiler_is_refused():
    with pytest.raises(CannotBuild, match=r"false --version` must print .* with status 1: set CXX"):
        horovod.compiler_version(Path("/bin/false"))


def test_a_cache_that_cannot_be_created_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CannotBuild, match=r"kept in .*/file/cache.*set XDG_CACHE_HOME"):
        horovod.cached_wheel(tmp_path / "file/cache", "key", put_wheel)


def test_a_compiler_that_is_too_old_is_refused_with_its_message(tmp_path):
    old = tmp_path / "c++"
    old.write_text("#!/bin/sh\necho 'unrecognized option -std=c++17' >&2\nexit 1\n")
    old.chmod(0o755)
    with pytest.raises(CannotBuild, match=r"(?s)cannot compile C\+\+17.*unrecognized option"):
        horovod.check_compiler(old)
    horovod.check_compiler(horovod.find_compiler())


def test_a_missing_framework_is_named():
    with pytest.raises(CannotBuild, match=r"installed no-framework.*make horovod"):
        horovod.framework_version("no-framework")


def test_a_kept_wheel_is_not_built_again(tmp_path):
    built = [horovod.cached_wheel(tmp_path, "key", put_wheel)]
    built.append(horovod.cached_wheel(tmp_path, "key", lambda _: pytest.fail("built again")))
    assert built == [tmp_path / "key/horovod-0.28.1-any.whl"] * 2


def test_an_interrupted_build_leaves_no_wheel(tmp_path):
    def interrupted(folder: Path) -> None:
        put_wheel(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        horovod.cached_wheel(tmp_path, "key", interrupted)
    assert not list(tmp_path.rglob("*.whl"))
    (tmp_path / "key.unfinished").mkdir()  # of a build that was killed
    (tmp_path / "key.unfinished/half.whl").touch()
    (tmp_path / "key").mkdir()  # whose wheel somebody deleted
    assert horovod.cached_wheel(tmp_path, "key", put_wheel).name != "half.whl"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["key", "key.lock"]
    assert len(list(tmp_path.rglob("*.whl"))) == 1


def test_two_builds_do_not_run_at_once(tmp_path):
    with (
        horovod.locked(tmp_path / "lock"),
        pytest.raises(CannotBuild, match=r"another build has held .*lock for 0 s"),
        horovod.locked(tmp_path / "lock", deadline_s=0.0),
    ):
        pass
    with horovod.locked(tmp_path / "lock", deadline_s=0.0):
        pass


@pytest.mark.parametrize("field", ["files", "settings", "versions"])
def test_every_input_of_the_build_changes_the_key(field):
    other = dataclasses.replace(RECIPE, **{field: {"other": "text"}})
    assert RECIPE.key() != other.key() and RECIPE.key() == dataclasses.replace(RECIPE).key()


def test_the_recipe_names_sources_wrapper_flags_versions_and_compiler(monkeypatch):
    monkeypatch.setenv("CXXFLAGS", "-O1")
    recipe = horovod.recipe(horovod.find_compiler())
    assert set(recipe.files) == {"sources.txt", "cmake.txt", "compiler"}
    assert recipe.settings["CXXFLAGS"] == "-O1" and recipe.settings["HOROVOD_WITH_GLOO"] == "1"
    assert recipe.versions["torch"].startswith("2.13.0") and recipe.versions["compiler"]
    assert recipe.versions.keys() == {"compiler", "processor", "python", "torch", "tensorflow-cpu"}


def test_a_failed_command_shows_its_error_its_last_lines_and_the_log(tmp_path):
    script = "echo 'x.cc:1: fatal error: no such header'; seq 40; exit 3"
    with (tmp_path / "log").open("w") as log, pytest.raises(CannotBuild) as failure:
        horovod.run(["sh", "-c", script], os.environ, log)
    lines = str(failure.value).splitlines()
    assert "failed with status 3" in lines[0] and str(tmp_path / "log") in lines[0]
    assert lines[1:] == ["x.cc:1: fatal error: no such header", *map(str, range(31, 41))]


def test_a_command_that_hangs_is_ended_with_what_it_started(tmp_path):
    child = tmp_path / "child"
    with (tmp_path / "log").open("w") as log, pytest.raises(CannotBuild, match="did not end"):
        script = f"sleep 1000 & echo $! > {child}; wait"
        horovod.run(["sh", "-c", script], os.environ, log, deadline_s=0.5)
    end = time.monotonic() + 30.0
    while runs(child.read_text().strip()):
        assert time.monotonic() < end
        time.sleep(0.01)


def runs(process: str) -> bool:
    """Check for a process that is not dead; nobody may have asked for its status yet."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize(
    "source, added", [("adapter.cc", []), ("xla_mpi_ops.cc", ["-UTENSORFLOW_VERSION"])]
)
def test_the_wrapper_adds_flags_after_those_of_horovod(source, added):
    words = [str(horovod.HERE / "compiler"), "-std=c++14", "-c", source]
    done = subprocess.run(
        words,
        env=os.environ | {"HOROVOD_COMPILER": "echo"},
        capture_output=True,
        text=True,
        check=True,
    )
    aligned = "-DEIGEN_MAX_ALIGN_BYTES=64"
    assert done.stdout.split() == [*words[1:], *added, aligned, "-std=c++17", "-g0"]


def compiled(folder: Path, source: str, *options: str) -> tuple[bytes, int]:
    """The object that the wrapper makes, and how often it has compiled in this folder so far."""
    counted = folder / "compiler"
    counted.write_text(f'#!/bin/sh\necho "$@" >> {folder}/calls\nexec c++ "$@"\n')
    counted.chmod(0o755)
    (folder / "objects").mkdir(exist_ok=True)
    to = folder / "new.o"
    named = ["-MF", f"{folder}/new.d", "-o", str(to), "-c", f"{folder}/{source}"]
    settings = {"HOROVOD_COMPILER": str(counted), "HOROVOD_OBJECTS": str(folder / "objects")}
    words = [str(horovod.HERE / "compiler"), *options, "-MD", *named]
    subprocess.run(words, env=os.environ | settings, check=True)
    calls = (folder / "calls").read_text().splitlines()
    return to.read_bytes(), len([call for call in calls if " -E " not in call])


@pytest.mark.skipif(shutil.which("c++") is None, reason="compiles with c++")
def test_files_that_both_frameworks_need_are_compiled_once(tmp_path):
    code = "#define TWO 1 + 1\nextern const char *where;\nconst char *where = __FILE__;\n"
    sources = [f"third_party/{name}/types.cc" for name in ("gloo", "compatible17_gloo")]
    for source in sources:
        (tmp_path / source).parent.mkdir(parents=True)
        (tmp_path / source).write_text(code + "int two() { return TWO; }\n")
    first, count = compiled(tmp_path, sources[0], "-O1", "-std=c++14", "-DUNUSED")
    assert count == 1 and b"third_party/gloo/types.cc" in first
    assert compiled(tmp_path, sources[1], "-std=c++17", "-O1") == (first, 1)
    assert "compatible17_gloo/types.cc" in (tmp_path / "new.d").read_text()
    assert compiled(tmp_path, sources[1], "-O0")[1] == 2
    (tmp_path / sources[1]).write_text(code + "int two() { return 1 + TWO; }\n")
    other, count = compiled(tmp_path, sources[1], "-O1")
    assert count == 3 and other != first
    (tmp_path / sources[1]).write_text("no C++")
    with pytest.raises(subprocess.CalledProcessError):
        compiled(tmp_path, sources[1], "-O1")


def test_the_build_ignores_the_users_own_settings_of_horovod(monkeypatch, tmp_path):
    monkeypatch.setenv("HOROVOD_GPU_OPERATIONS", "NCCL")
    settings = horovod.build_settings(tmp_path, Path("/usr/bin/c++"))
    assert "HOROVOD_GPU_OPERATIONS" not in settings
    assert settings["HOROVOD_WITHOUT_MPI"] == "1"
