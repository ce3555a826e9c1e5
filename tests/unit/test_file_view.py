"""The copy-on-write view of a script's folder: real mounts, processes and kills."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from synthetic_job import job_spec

from autotune.cli import main
from autotune.errors import InvalidInput, LaunchError
from autotune.jobs.files import protected_folders, refuse_lost_checkpoints, with_agreed_writes
from autotune.jobs.places import Where
from autotune.jobs.settings import Settings, read_settings
from autotune.jobs.workspace import Workspace
from autotune.records import Accelerators, Conditions, Network
from runtime_rewriter.world.script_command import ScriptCommand
from runtime_rewriter.world.views import HeldView, Protected, refusal_reason

INSIDE = """
import os
from runtime_rewriter.file_view import requested_view
requested_view().enter()
"""
WITHOUT_MOUNT_RIGHTS = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin"]

possible = pytest.mark.skipif(
    bool(refusal_reason(Protected.of([Path(__file__).parent]))), reason="no views on this machine"
)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a checkpoint, jobs, and characters that mount options treat specially."""
    project = tmp_path / "my, project:1"
    (project / "runs" / "old").mkdir(parents=True)
    (project / "autotune-jobs").mkdir()
    (project / "best.pt").write_bytes(b"weights of weeks")
    (project / "runs" / "old" / "step-1.pt").write_bytes(b"first")
    return project


@pytest.fixture
def held(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldView]:
    """Its copies are where no other process removes abandoned ones."""
    (tmp_path / "copies").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "copies"))
    held = HeldView(Protected.of([project], [project / "autotune-jobs"]))
    yield held
    held.end()


def contents(folder: Path) -> dict[str, bytes]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def inside(held: HeldView, folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", INSIDE + code],
        cwd=folder,
        env={**os.environ, **held.view.environment, "REAL": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
    )


WRITES = """
import pathlib, shutil
real = pathlib.Path(os.environ["REAL"])
assert pathlib.Path.cwd() == real
pathlib.Path("best.pt").write_bytes(b"worthless")
(real / "runs" / "step-2.pt").write_bytes(b"second")
shutil.rmtree(real / "runs" / "old")
os.mkdir("runs/old")
pathlib.Path("autotune-jobs/log").write_text("real")
"""
READS = """
assert open(os.environ["REAL"] + "/best.pt").read() == "worthless"
assert sorted(os.listdir("runs")) == ["old", "step-2.pt"] and os.listdir("runs/old") == []
"""


@possible
def test_every_process_inside_sees_what_was_written_and_the_real_files_stay(held, project) -> None:
    before = contents(project)
    for code in (WRITES, READS):
        done = inside(held, project, code)
        assert done.returncode == 0, done.stderr
    assert contents(project) == before | {"autotune-jobs/log": b"real"}
    assert held.scratch.is_dir()
    held.end()
    assert not held.scratch.exists()


@possible
@pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("setpriv") is None, reason="other users have no such rights"
)
def test_a_user_without_the_right_to_mount_gets_a_view(project) -> None:
    code = f"""
import subprocess, sys
from pathlib import Path
from test_file_view import READS, WRITES, contents, inside
from runtime_rewriter.world.views import HeldView, Protected
project = Path({str(project)!r})
held = HeldView(Protected.of([project]))
before = contents(project)
for code in (WRITES, READS):
    done = inside(held, project, code)
    assert done.returncode == 0, done.stderr
assert contents(project) == before
assert held.scratch.exists()
held.end()
assert not held.scratch.exists()
"""
    words = [*WITHOUT_MOUNT_RIGHTS, sys.executable, "-c", code]
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        words, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


IN_A_FILE_VIEW = """
with open("rw.yaml", "r+") as file:
    assert file.read() == "of the host"
    file.write(", changed")
assert open("rw.yaml").read() == "of the host, changed"
assert os.stat("rw.yaml").st_mode & 0o777 == 0o640
assert open("ro.yaml").read() == "fixed"
try:
    open("ro.yaml", "w")
except OSError:
    pass
else:
    raise AssertionError("a read-only file was opened to be written")
assert open("zero", "rb").read(2) == bytes(2)
"""
MOUNTED_FILES = """
import subprocess, sys
from pathlib import Path
from test_file_view import IN_A_FILE_VIEW, contents, inside
from runtime_rewriter.world.views import HeldView, Protected
project, outside = map(Path, sys.argv[1:])
for name, options in (("rw.yaml", "bind"), ("ro.yaml", "bind,ro"), ("zero", "bind")):
    (project / name).touch()
    source = Path("/dev/zero") if name == "zero" else outside / name
    subprocess.run(["mount", "-o", options, source, project / name], check=True)
before = contents(outside)
for _ in range(2):
    held = HeldView(Protected.of([project]))
    done = inside(held, project, IN_A_FILE_VIEW)
    assert done.returncode == 0, done.stderr
    held.end()
    assert contents(outside) == before and not held.scratch.exists()
"""


@possible
@pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("unshare") is None, reason="mounts, which root may do"
)
def test_a_file_that_is_mounted_into_the_folder_is_copied(project, tmp_path) -> None:
    """As by `docker run -v rw.yaml:/workspace/rw.yaml`."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "rw.yaml").write_text("of the host")
    (outside / "rw.yaml").chmod(0o640)
    (outside / "ro.yaml").write_text("fixed")
    words = ["unshare", "--mount", sys.executable, "-c", MOUNTED_FILES, str(project), str(outside)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


IN_MEMORY = """
import json, subprocess, sys
from runtime_rewriter.world import view_holder
words = [sys.executable, "-I", "-S", view_holder.__file__]
holder = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
parent = os.environ["REAL"]  # an overlay, which can hold no copies of another one
request = {"folders": [os.environ["ELSEWHERE"]], "kept": [], "parents": [parent]}
holder.stdin.write(json.dumps(request) + "\\n")
holder.stdin.flush()
answer = json.loads(holder.stdout.readline())
mounts = open(f"/proc/{answer['holder']}/mountinfo").read()
kinds = {line.split()[4]: line.split(" - ")[1].split()[0] for line in mounts.splitlines()}
scratch = answer["scratch"].replace(" ", "\\\\040")
assert kinds[scratch] == "tmpfs" and kinds[os.environ["ELSEWHERE"]] == "overlay", kinds
holder.stdin.close()
holder.stdout.read()
assert not os.path.exists(answer["scratch"])
"""


@possible
@pytest.mark.skipif(os.getuid() != 0, reason="mounts in the view, which root may do")
def test_copies_that_no_folder_can_hold_lie_in_memory(held, project, tmp_path, monkeypatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setenv("ELSEWHERE", str(tmp_path / "elsewhere"))
    done = inside(held, project, IN_MEMORY)
    assert done.returncode == 0, done.stderr


def is_running(process: int) -> bool:
    with suppress(OSError):
        return "State:\tZ" not in Path(f"/proc/{process}/status").read_text()
    return False


@possible
def test_a_holder_that_does_not_end_in_time_is_killed_and_the_next_one_removes_its_copies(
    held: HeldView, project: Path
) -> None:
    os.kill(held.view.holder, signal.SIGSTOP)
    held.end(0.1)
    deadline_s = time.monotonic() + 60
    while is_running(held.view.holder):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    HeldView(Protected.of([project])).end()
    assert not held.scratch.exists()


@possible
def test_a_view_whose_holder_was_killed_is_not_entered_and_the_next_one_removes_its_copies(
    held, project
) -> None:
    os.kill(held.view.holder, signal.SIGKILL)
    refused = inside(held, project, "open('best.pt', 'w')")
    assert "the view of the script's files cannot be entered" in refused.stderr
    assert (project / "best.pt").read_bytes() == b"weights of weeks"
    assert held.scratch.exists()
    HeldView(Protected.of([project])).end()
    assert not held.scratch.exists()


@possible
def test_a_view_of_another_namespace_is_not_entered(held, project) -> None:
    held.view = replace(held.view, holder=os.getpid())  # as if its id belonged to another process
    refused = inside(held, project, "open('best.pt', 'w')")
    assert "its holder has ended" in refused.stderr


def test_the_root_folder_cannot_be_covered_so_the_job_is_refused(
    capsys, monkeypatch, tmp_path, project
) -> None:
    script = project / "train.py"
    script.touch()
    monkeypatch.chdir("/")
    words = ["tune", "--directory", str(tmp_path / "jobs"), "--", "torchrun"]
    assert main([*words, "--nproc-per-node", "2", str(script)]) == 2
    error = capsys.readouterr().err
    assert "trials must not change the files in /, but this machine" in error
    assert "--writes-are-fine" in error and "autotune docs troubleshooting#no-view" in error
    assert not (tmp_path / "jobs").exists()


def settings_of(project: Path, **fields: object) -> Settings:
    script = ScriptCommand(str(project / "train.py"), (), False, 2)
    return Settings(job_spec(**fields), script)


def no_view(_: Protected) -> str:
    return "overlay at /home/u: Operation not permitted"


def test_without_a_view_a_user_is_asked_once_and_a_script_is_refused(project) -> None:
    workspace, settings = Workspace(project / "autotune-jobs"), settings_of(project)
    questions: list[str] = []

    def yes(question: str) -> bool:
        questions.append(question)
        return True

    agreed = with_agreed_writes(settings, workspace, yes, no_view)
    assert agreed.spec.writes_are_fine and agreed.spec.files == "real files (writes_are_fine)"
    assert str(project) in questions[0] and "Operation not permitted" in questions[0]
    assert with_agreed_writes(agreed, workspace, None, no_view) == agreed
    for ask in (None, lambda _: False):
        with pytest.raises(InvalidInput, match=r"Operation not permitted.*--writes-are-fine"):
            with_agreed_writes(settings, workspace, ask, no_view)
    assert with_agreed_writes(settings, workspace, None, lambda _: "") == settings


def test_the_working_folder_the_scripts_and_named_ones_are_protected(
    project, tmp_path, monkeypatch
) -> None:
    elsewhere, link = tmp_path / "elsewhere", tmp_path / "link"
    for folder in (elsewhere, link):
        folder.mkdir()
    (link / "train.py").symlink_to(project / "train.py")
    monkeypatch.chdir(project / "runs")
    settings = settings_of(link, protect=(str(elsewhere),))
    jobs = Workspace(project / "autotune-jobs")
    protected = protected_folders(settings.spec, settings.script, jobs, "job")
    assert protected == Protected(
        tuple(map(str, (elsewhere, link, project))),
        (str(jobs.directory), str(jobs.directory / "job")),
    )
    fine = replace(settings.spec, writes_are_fine=True)
    assert protected_folders(fine, settings.script, jobs) is None


def test_paths_of_a_job_file_are_relative_to_it_and_must_be_folders(project, monkeypatch) -> None:
    (project / "train.py").touch()
    job = project / "job.yaml"
    job.write_text("command: torchrun --nproc-per-node 2 train.py\nprotect: [runs]\n")
    monkeypatch.chdir(project)
    assert read_settings([], {}, job, None).spec.protect == (str(project / "runs"),)
    with pytest.raises(InvalidInput, match="but there is no folder 'no'"):
        read_settings([], {"protect": ("no",)}, job, None)


def test_a_reason_is_given_for_a_folder_that_cannot_be_covered() -> None:
    with pytest.raises(LaunchError, match="proc"):
        HeldView(Protected.of([Path("/proc")]))


def test_a_kept_training_has_its_real_files_and_refuses_what_would_change_it(project) -> None:
    settings = settings_of(project, continue_training=True)
    jobs = Workspace(project / "autotune-jobs")
    assert protected_folders(settings.spec, settings.script, jobs) is None
    assert settings.spec.files == "real files (continue_training)"
    emulated = Conditions(Network.EMULATED, Accelerators.EMULATED, 4.0)
    with pytest.raises(InvalidInput, match=r"--accelerators emulated, --byte-scale would change"):
        replace(settings.spec, conditions=emulated)
    with pytest.raises(InvalidInput, match="but --lossy would change them"):
        replace(settings.spec, lossy=True)
    with pytest.raises(InvalidInput, match="add --shared-directory"):
        refuse_lost_checkpoints(settings.spec, Where("auto", False, (0, 0)))
    refuse_lost_checkpoints(settings.spec, Where("auto", True, (0, 0)))


def test_continue_is_short_for_the_setting(project, capsys) -> None:
    (project / "train.py").touch()
    command = ["--", "torchrun", "--nproc-per-node", "2", str(project / "train.py")]
    assert main(["tune", "--continue", "--lossy", *command]) == 2
    assert "--continue keeps the training" in capsys.readouterr().err
